"""Keys and values of the tokens that were computed, layer by layer, in blocks.

What this module does not know: attention. Letters: B blocks, K key-value heads, P positions of a
block, C positions of a sequence, W head width, T tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkinfer.runtime.cache.block_table import BlockTable, Change

# Zeros of a shape; on a GPU out of a memory that was set aside.
Zeros = Callable[[tuple[int, ...]], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """The cache of one layer. Within a block the positions of a head are contiguous, so that a step
    reads them as one run; interleaved by heads, each position would be on another page."""

    key_BKPW: Tensor
    value_BKPW: Tensor
    table: BlockTable

    @classmethod
    def of(cls, table: BlockTable, num_kv_heads: int, width: int, zeros: Zeros) -> "LayerCache":
        shape = (table.num_blocks, num_kv_heads, table.block_length, width)
        return cls(key_BKPW=zeros(shape), value_BKPW=zeros(shape), table=table)

    @property
    def key_CKW(self) -> Tensor:
        """The keys of the only sequence."""
        assert self.table.is_whole
        return self.key_BKPW[0].transpose(0, 1)

    @property
    def value_CKW(self) -> Tensor:
        assert self.table.is_whole
        return self.value_BKPW[0].transpose(0, 1)

    @property
    def num_kv_heads(self) -> int:
        return self.key_BKPW.shape[1]

    @property
    def head_width(self) -> int:
        return self.key_BKPW.shape[3]

    def append(
        self, sequence: int, start: int, key_TKW: Tensor, value_TKW: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stores T tokens at `start`; returns all keys and values [C, K, W] of the sequence up to
        them, as they are kept."""
        end = start + len(key_TKW)
        pairs = ((self.key_BKPW, key_TKW), (self.value_BKPW, value_TKW))
        if self.table.is_whole:
            for cache_BKPW, new_TKW in pairs:
                cache_BKPW[0, :, start:end] = new_TKW.transpose(0, 1)
            return self.key_CKW[:end], self.value_CKW[:end]
        block_T, place_T = self._places(sequence, start, end)
        blocks = self.table.blocks(sequence, end)
        for cache_BKPW, new_TKW in pairs:
            cache_BKPW[block_T, :, place_T] = new_TKW.to(cache_BKPW.dtype)
        key_CKW, value_CKW = (
            cache_BKPW[blocks].transpose(1, 2).flatten(0, 1)[:end] for cache_BKPW, _ in pairs
        )
        return key_CKW, value_CKW

    def _places(self, sequence: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """(block, position within it) of each position."""
        position_T = torch.arange(start, end)
        length = self.table.block_length
        return self.table.blocks(sequence, end)[position_T // length], position_T % length

    def read(self, sequence: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of keys and values [T, K, W] at some positions."""
        block_T, place_T = self._places(sequence, start, end)
        return self.key_BKPW[block_T, :, place_T], self.value_BKPW[block_T, :, place_T]

    def write(self, sequence: int, start: int, key_TKW: Tensor, value_TKW: Tensor) -> None:
        """The other way round."""
        block_T, place_T = self._places(sequence, start, start + len(key_TKW))
        self.key_BKPW[block_T, :, place_T] = key_TKW
        self.value_BKPW[block_T, :, place_T] = value_TKW

    def copy(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.source is None:
                continue
            for cache_BKPW in (self.key_BKPW, self.value_BKPW):
                cache_BKPW[change.block] = cache_BKPW[change.source]


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """All layers', with one table."""

    table: BlockTable
    layers: tuple[LayerCache, ...]

    def reserve(self, sequence: int, start: int, stop: int) -> None:
        """Makes positions start .. stop-1 of a sequence its own, to be written."""
        changes = self.table.plan(sequence, start, stop)
        for layer in self.layers:
            layer.copy(changes)
        self.table.commit(sequence, changes)
