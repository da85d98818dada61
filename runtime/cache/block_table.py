"""The block table of the KV cache: maps the positions of each sequence to blocks.

A block holds `block_length` positions of every layer that shares the table. An engine for one
sequence has one block for the whole context. An engine for several has blocks of BLOCK_LENGTH,
enough for all sequences at full length; sequences with a common prefix share its blocks
copy-on-write (vLLM's paged attention, Kwon et al. 2023, arXiv 2309.06180).

Layers with a window have a table of their own if a ring of blocks is smaller than the context: a
sequence then holds at most `most_held` blocks, and the oldest make room for the next. Blocks keep
their numbers in the table, so kernels read a ring as they read any table; they read nothing before
a window.

What a ring has dropped cannot be read again, so a text can be continued where its window is still
held, or from a saved window, or from its beginning. A saved window is a list of blocks that are
shared with the sequence, copy-on-write; if blocks are short, the windows that have been unused for
longest are dropped. Tokens between the place found and the one asked for are computed again.

Letters: S sequences, N blocks per sequence."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from hotsplit.costs.cache_layout import cache_layout

NO_BLOCK = -1


@dataclass(frozen=True)
class BlockChange:
    """Replaces block `number` of a sequence with `block`. `source`, if given, is a block shared
    with other sequences, which is copied to `block` first."""

    number: int
    block: int
    source: int | None


@dataclass(frozen=True, eq=False)
class SavedWindow:
    """The blocks from number `first` on with which a sequence can be continued after its first
    `position` tokens."""

    sequence: int
    position: int
    first: int
    blocks: tuple[int, ...]


class BlockTable:
    """Assigns blocks to sequences and counts the users of each block."""

    def __init__(self, num_sequences: int, context_length: int, window: int | None = None) -> None:
        layout = cache_layout(context_length, num_sequences, window)
        self.context_length, self.block_length = context_length, layout.block_length
        self.window, self._most_held = layout.window, layout.most_held
        # Kernels read this tensor directly.
        self.block_SN = torch.full((num_sequences, layout.blocks), NO_BLOCK, dtype=torch.int32)
        self._num_users = [0] * layout.num_blocks  # sequences and saved windows
        self._free = list(reversed(range(layout.num_blocks)))
        # Of a ring: the number of the first block that a sequence holds, and how many positions are
        # kept from there on; the saved windows, the least recently used first.
        self._first, self._length = [0] * num_sequences, [0] * num_sequences
        # Of a ring: positions from its length up to here can be written without a change.
        self._ready = [0] * num_sequences
        self._saved: list[SavedWindow] = []
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
        return self.num_blocks == 1

    @property
    def is_ring(self) -> bool:
        return self.window is not None

    def begin_of(self, position: int) -> int:
        """The first position whose keys and values the table keeps for a token at `position`."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def held_from(self, sequence: int) -> int:
        """The first position that a sequence holds."""
        return self._first[sequence] * self.block_length

    def taken_from(self, length: int, num_last: int) -> int | None:
        """The first position that an empty sequence can hold of a text of `length` tokens, of which
        the last `num_last` positions are given; None if it could not be continued with those."""
        start, least = length - num_last, 0
        if self.is_ring:
            least = max(0, self._block_after(length) * self.block_length - self._most_positions)
        is_enough = 0 <= start <= (self.begin_of(length) if self.is_ring else 0)
        return max(start, least) if is_enough and start % self.block_length == 0 else None

    def reads(self, sequence: int, start: int, stop: int) -> bool:
        """True if all positions that tokens start .. stop-1 read have a block."""
        first, last = self.begin_of(start) // self.block_length, (stop - 1) // self.block_length
        is_within = 0 <= start < stop <= self.context_length
        return is_within and bool((self.block_SN[sequence, first : last + 1] >= 0).all())

    def plan(self, sequence: int, start: int, stop: int) -> list[BlockChange]:
        """The changes that a sequence needs before it writes to positions start .. stop-1, of a
        ring to the last of them that it can hold.

        No position that the tokens read changes until `commit`, so an interruption between the two
        leaves the table intact."""
        if self.is_ring:
            if start == self._length[sequence] and stop <= self._ready[sequence]:
                self._length[sequence] = stop
                return []
            start = max(start, self._block_after(stop) * self.block_length - self._most_positions)
            self._turn(sequence, start, stop)
        numbers = self._written(sequence, start, stop)
        while len(self._free) < len(numbers):
            self._drop(self._saved[0])  # without any, there are enough blocks for all sequences
            numbers = self._written(sequence, start, stop)
        changes = []
        for number, own in zip(numbers, reversed(self._free), strict=False):
            block = int(self.block_SN[sequence, number])
            changes.append(BlockChange(number, own, None if block == NO_BLOCK else block))
        return changes

    def commit(self, sequence: int, changes: list[BlockChange]) -> None:
        for change in changes:
            block = int(self.block_SN[sequence, change.number])
            self._free.remove(change.block)
            self._num_users[change.block] = 1
            self.block_SN[sequence, change.number] = change.block
            if block != NO_BLOCK:
                self._leave(block)
        if changes:
            self._ready[sequence] = (changes[-1].number + 1) * self.block_length

    def share(self, source: int, target: int, length: int) -> None:
        """Shares the first `length` positions of `source`, or those that it holds of them, with
        `target`, which must be empty."""
        length = min(length, self._length[source]) if self.is_ring else length
        self._ready[source] = 0
        self._take(target, self._first[source], self._held(source, length))
        self._length[target] = length
        for saved in [each for each in self._saved if each.sequence == source]:
            self._add(SavedWindow(target, saved.position, saved.first, saved.blocks))

    def shrink(self, sequence: int, length: int) -> None:
        """Frees the blocks after those of the first `length` positions, and the windows saved
        there; an only sequence keeps its block."""
        if self.is_whole:
            return
        self._ready[sequence] = 0
        first = max(self._first[sequence], self._block_after(length))
        for number in range(first, self.block_SN.shape[1]):
            block = int(self.block_SN[sequence, number])
            if block == NO_BLOCK:
                break
            self.block_SN[sequence, number] = NO_BLOCK
            self._leave(block)
        self._length[sequence] = min(self._length[sequence], length)
        if not length:
            self._first[sequence] = 0
        for saved in [s for s in self._saved if s.sequence == sequence and s.position > length]:
            self._drop(saved)

    def blocks(self, sequence: int, length: int) -> Tensor:
        """The blocks of the first `length` positions, int64 [N]; of a ring, NO_BLOCK for those
        dropped."""
        return self.block_SN[sequence, : self._block_after(length)].long()

    def nearest(self, sequence: int, length: int) -> int:
        """The latest position among the first `length` from which the sequence can be continued:
        all that its next token reads is held or saved."""
        if not self.is_ring or self._is_held(sequence, length):
            return length
        places = [s.position for s in self._saved if s.sequence == sequence]
        return max((place for place in places if place <= length), default=0)

    def rollback(self, sequence: int, position: int) -> None:
        """Drops what comes after a position that `nearest` has returned, to continue there."""
        if self.is_ring and position and self._length[sequence] == position:
            return
        if self.is_ring and position and not self._is_held(sequence, position):
            saved = self._saved_at(sequence, position)
            assert saved is not None, (sequence, position)
            self._leave_all(sequence)
            self._take(sequence, saved.first, saved.blocks)
            self._length[sequence] = position
            self._saved.remove(saved)
            self._saved.append(saved)
        self.shrink(sequence, position)

    def save(self, sequence: int, position: int) -> None:
        """Saves the window with which a sequence can be continued after its first `position`
        tokens, if the ring holds it."""
        if not self.is_ring or not position or self._saved_at(sequence, position):
            return
        if self._is_held(sequence, position):
            self._ready[sequence] = 0
            first = self.begin_of(position) // self.block_length
            held = self._held(sequence, position)[first - self._first[sequence] :]
            self._add(SavedWindow(sequence, position, first, held))

    def lend(self) -> bool:
        """Gives the first position of the first sequence a block until `take_back`, if it has none;
        true if it had none. No other method may be called between them."""
        if int(self.block_SN[0, 0]) != NO_BLOCK:
            return False
        while not self._free:
            self._drop(self._saved[0])
        self.block_SN[0, 0] = self._free[-1]
        return True

    def take_back(self) -> None:
        self.block_SN[0, 0] = NO_BLOCK

    @property
    def _most_positions(self) -> int:
        return self._most_held * self.block_length

    def _block_after(self, length: int) -> int:
        """The number of the block after those of the first `length` positions."""
        return -(-length // self.block_length)

    def _written(self, sequence: int, start: int, stop: int) -> list[int]:
        """The blocks of positions start .. stop-1 that are missing or shared."""
        end = min(self._block_after(stop), self.block_SN.shape[1])
        numbers = range(max(0, start // self.block_length), end)
        blocks_N = self.block_SN[sequence, numbers.start : numbers.stop].tolist()
        return [
            number
            for number, block in zip(numbers, blocks_N, strict=True)
            if block == NO_BLOCK or self._num_users[block] != 1
        ]

    def _turn(self, sequence: int, start: int, stop: int) -> None:
        """Drops the blocks that would be too many once positions start .. stop-1 are written; all
        if those do not continue what is held."""
        if start > self._length[sequence] or start < self.held_from(sequence):
            self._leave_all(sequence)
            self._first[sequence] = start // self.block_length
        for number in range(self._first[sequence], self._block_after(stop) - self._most_held):
            self._leave(int(self.block_SN[sequence, number]))
            self.block_SN[sequence, number] = NO_BLOCK
            self._first[sequence] = number + 1
        self._length[sequence] = stop

    def _is_held(self, sequence: int, length: int) -> bool:
        """True if a ring holds what the token after the first `length` reads."""
        is_seen = self.held_from(sequence) <= self.begin_of(length)
        return is_seen and length <= self._length[sequence]

    def _held(self, sequence: int, length: int) -> tuple[int, ...]:
        """The blocks that a sequence holds of its first `length` positions."""
        blocks = self.blocks(sequence, length)[self._first[sequence] :].tolist()
        return tuple(takewhile(lambda block: block != NO_BLOCK, blocks))

    def _take(self, sequence: int, first: int, blocks: tuple[int, ...]) -> None:
        """Gives an empty sequence these blocks from number `first` on."""
        self._first[sequence] = first
        for number, block in enumerate(blocks, first):
            self.block_SN[sequence, number] = block
            self._num_users[block] += 1

    def _leave(self, block: int) -> None:
        """Takes one user from a block."""
        self._num_users[block] -= 1
        if not self._num_users[block]:
            self._free.append(block)

    def _leave_all(self, sequence: int) -> None:
        """Frees the blocks of a sequence, but not the windows saved for it."""
        self._ready[sequence] = 0
        for block in self._held(sequence, self.context_length):
            self._leave(block)
        self.block_SN[sequence] = NO_BLOCK
        self._first[sequence] = self._length[sequence] = 0

    def _saved_at(self, sequence: int, position: int) -> SavedWindow | None:
        places = [s for s in self._saved if (s.sequence, s.position) == (sequence, position)]
        return places[0] if places else None

    def _add(self, saved: SavedWindow) -> None:
        self._saved.append(saved)
        for block in saved.blocks:
            self._num_users[block] += 1

    def _drop(self, saved: SavedWindow) -> None:
        self._saved.remove(saved)
        for block in saved.blocks:
            self._leave(block)


def block_tables(
    windows: Iterable[int | None], num_sequences: int, context_length: int
) -> dict[int | None, BlockTable]:
    """The tables of layers with these windows, by window. Layers that keep the same positions share
    one."""
    rings: dict[int | None, BlockTable] = {}
    found: dict[int | None, BlockTable] = {}
    for window in dict.fromkeys(windows):
        kept = cache_layout(context_length, num_sequences, window).window
        if kept not in rings:
            rings[kept] = BlockTable(num_sequences, context_length, window)
        found[window] = rings[kept]
    return found
