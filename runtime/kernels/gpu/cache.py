"""The KV cache as the kernels of attention take it.

Letters: C positions of the cache, B its blocks, P positions of a tile or block, K key-value heads,
W head width, S sequences, N blocks of a sequence."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hotsplit.model.spec import Attention

# Positions of a tile, whose keys and values are in registers: 32 KiB of f32 each at a width of 128;
# half as many at one of 512.
TILE = 64


@dataclass(frozen=True)
class Cache:
    """A cache [C, K, W] of one sequence, or in blocks [B, P, K, W] that a table assigns. Positions,
    heads and blocks may be strided, in any order; the values of a head are contiguous."""

    key: Tensor
    value: Tensor
    sequence_1: Tensor | None
    table_SN: Tensor | None
    spec: Attention

    def __post_init__(self) -> None:
        num_kv, window = self.spec.num_kv_heads, self.spec.window
        for cache, width in ((self.key, self.spec.head_dim), (self.value, self.spec.value_dim)):
            assert cache.stride(-1) == 1, cache.stride()
            assert cache.shape[-2:] == (num_kv, width), (cache.shape, self.spec)
        assert window is None or window > 0, window
        is_paged = self.table_SN is not None
        assert self.key.dim() == self.value.dim() == 3 + is_paged, self.key.shape
        assert (self.sequence_1 is not None) == is_paged
        assert not is_paged or self.block_length % TILE == 0, self.block_length

    @property
    def block_length(self) -> int:
        """Positions of a block; 1 if there are no blocks, so that this constant of the kernels does
        not depend on the context."""
        return 1 if self.table_SN is None else self.key.shape[1]

    @property
    def context_length(self) -> int:
        if self.table_SN is None:
            return self.key.shape[0]
        return self.table_SN.shape[1] * self.block_length

    @property
    def arguments(self) -> "CacheArguments":
        key, value, table_SN = self.key, self.value, self.table_SN
        strides = key.stride(-3), value.stride(-3), key.stride(-2), value.stride(-2)
        if table_SN is None:
            return CacheArguments(key, value, *strides)
        blocks = key.stride(0), value.stride(0)
        return CacheArguments(
            key, value, *strides, *blocks, self.sequence_1, table_SN, table_SN.stride(0)
        )


class CacheArguments(NamedTuple):
    """A cache as an argument of a kernel, which is compiled without what is None."""

    key: Tensor
    value: Tensor
    key_stride: int  # of positions
    value_stride: int
    key_head_stride: int
    value_head_stride: int
    key_block_stride: int | None = None
    value_block_stride: int | None = None
    sequence: Tensor | None = None  # of each row
    table: Tensor | None = None
    table_stride: int | None = None
