"""How many blocks of positions the KV cache of a layer has: the one definition that both the plans
and the runtime's block tables use.

A layer without a window keeps the positions of the whole context. Of a layer with one, a sequence
keeps only the blocks that a token can still see: a ring, in which the oldest blocks make room for
the next."""

from dataclasses import dataclass

from hotsplit.costs.pass_length import PREFILL_CHUNK

BLOCK_LENGTH = 64  # positions of a block, unless one block has the whole context


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The blocks of the layers with the same window. `blocks`: of the whole context; `most_held`:
    that a sequence keeps at a time; `num_blocks`: allocated for all sequences. `window`: None if no
    block is ever dropped."""

    block_length: int
    blocks: int
    most_held: int
    num_blocks: int
    window: int | None

    @property
    def num_positions(self) -> int:
        """Positions that are allocated."""
        return self.num_blocks * self.block_length


def cache_layout(context_length: int, num_sequences: int, window: int | None = None) -> CacheLayout:
    """The blocks of layers with this window, if any: a ring if it is below the context."""
    blocks = -(-context_length // BLOCK_LENGTH)
    if window is not None:
        # Saved: one window of each sequence that is kept to be continued from its end.
        held, saved = ring_blocks(window), -(-window // BLOCK_LENGTH) + 1
        if held + saved < blocks:
            return CacheLayout(
                block_length=BLOCK_LENGTH,
                blocks=blocks,
                most_held=held,
                num_blocks=num_sequences * (held + saved),
                window=window,
            )
    length = context_length if num_sequences == 1 else BLOCK_LENGTH
    blocks = -(-context_length // length)
    return CacheLayout(
        block_length=length,
        blocks=blocks,
        most_held=blocks,
        num_blocks=num_sequences * blocks,
        window=None,
    )


def ring_blocks(window: int) -> int:
    """The most blocks that the tokens of a pass see and write; they may begin within a block."""
    return -(-(window + PREFILL_CHUNK) // BLOCK_LENGTH) + 1


def kv_positions(context_length: int, num_sequences: int, window: int | None = None) -> int:
    """Positions of all sequences that the cache of a layer has room for."""
    return cache_layout(context_length, num_sequences, window).num_positions
