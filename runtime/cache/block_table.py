"""The block table of the KV cache: maps the positions of each sequence to blocks.

A block holds `block_length` positions of every layer. An engine for one sequence has one block for
the whole context. An engine for several has blocks of BLOCK_LENGTH, enough for all sequences at
full length; sequences with a common prefix share its blocks copy-on-write (vLLM's paged attention,
Kwon et al. 2023, arXiv 2309.06180).

Letters: S sequences, N blocks per sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.costs.part_bytes import BLOCK_LENGTH

NO_BLOCK = -1


@dataclass(frozen=True)
class Change:
    """Replaces block `number` of a sequence with `block`. `source`, if given, is a block shared
    with other sequences, which is copied to `block` first."""

    number: int
    block: int
    source: int | None


class BlockTable:
    """Assigns blocks to sequences and counts the sequences that use each block."""

    def __init__(self, num_sequences: int, context_length: int) -> None:
        self.context_length = context_length
        self.block_length = context_length if num_sequences == 1 else BLOCK_LENGTH
        blocks = -(-context_length // self.block_length)
        # Kernels read this tensor directly.
        self.block_SN = torch.full((num_sequences, blocks), NO_BLOCK, dtype=torch.int32)
        self._num_users = [0] * (num_sequences * blocks)  # sequences per block
        self._free = list(reversed(range(num_sequences * blocks)))
        if self.is_whole:
            self.commit(0, self.plan(0, 0, context_length))

    @property
    def num_sequences(self) -> int:
        return self.block_SN.shape[0]

    @property
    def num_blocks(self) -> int:
        return len(self._num_users)

    @property
    def is_whole(self) -> bool:
        """True if there is a single sequence, with one block for the whole context."""
        return self.num_sequences == 1

    def plan(self, sequence: int, start: int, stop: int) -> list[Change]:
        """The changes that a sequence needs before it writes to positions start .. stop-1.

        Nothing changes until `commit`, so an interruption between the two leaves the table
        intact."""
        changes = []
        free = iter(reversed(self._free))
        for number in range(start // self.block_length, -(-stop // self.block_length)):
            block = int(self.block_SN[sequence, number])
            if block != NO_BLOCK and self._num_users[block] == 1:
                continue
            own = next(free)  # there are enough blocks for all sequences at full length
            is_copied = block != NO_BLOCK and number * self.block_length < start
            changes.append(Change(number, own, block if is_copied else None))
        return changes

    def commit(self, sequence: int, changes: list[Change]) -> None:
        for change in changes:
            block = int(self.block_SN[sequence, change.number])
            self._free.remove(change.block)
            self._num_users[change.block] = 1
            self.block_SN[sequence, change.number] = change.block
            if block != NO_BLOCK:
                self._num_users[block] -= 1

    def share(self, source: int, target: int, length: int) -> None:
        """Shares the first `length` positions of `source` with `target`, which must be empty."""
        for number in range(-(-length // self.block_length)):
            block = int(self.block_SN[source, number])
            self._num_users[block] += 1
            self.block_SN[target, number] = block

    def shrink(self, sequence: int, length: int) -> None:
        """Frees the blocks after those of the first `length` positions; an only sequence keeps its
        block."""
        if self.is_whole:
            return
        for number in range(-(-length // self.block_length), self.block_SN.shape[1]):
            block = int(self.block_SN[sequence, number])
            if block == NO_BLOCK:
                break
            self.block_SN[sequence, number] = NO_BLOCK
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._free.append(block)

    def blocks(self, sequence: int, length: int) -> Tensor:
        """The blocks of the first `length` positions, int64 [N]."""
        return self.block_SN[sequence, : -(-length // self.block_length)].long()
