"""The KV cache: keys and values of computed tokens, per layer, in blocks.

Letters: B blocks, K key-value heads, P positions of a block, C positions of a sequence, W head
width, X width of a row as stored (see stored_rows), T tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.options.cache_types import CacheType, CacheTypes
from hotsplit.runtime.cache.block_table import BlockChange, BlockTable
from hotsplit.runtime.cache.key_tables import KeyTables
from hotsplit.runtime.cache.stored_rows import decode, dtype_of, kept_width

# Allocates zeros of a shape and type; on a GPU, from reserved memory.
Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]


SUMMARISED = 8192  # positions whose keys are unpacked at a time for summaries


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """The cache of one layer. Within a block, the positions of a head are contiguous, so a step
    reads them as one run; with interleaved heads, it would touch a page for every few positions."""

    key_BKPX: Tensor
    value_BKPX: Tensor
    table: BlockTable
    types: CacheTypes
    tables: KeyTables | None = None  # if tokens read only selected keys

    @classmethod
    def of(
        cls,
        table: BlockTable,
        num_kv_heads: int,
        width: int,
        types: CacheTypes,
        zeros: Zeros,
        *,
        stores_values: bool = True,
    ) -> "LayerCache":
        """Values that are a part of the keys are not stored, as rows of no width."""

        def empty(kind: CacheType) -> Tensor:
            own = kept_width(kind, width)
            return zeros((table.num_blocks, num_kv_heads, table.block_length, own), dtype_of(kind))

        tables = None
        if types.selection is not None:
            is_rotated = types.key.is_rotated
            tables = KeyTables.of(types.selection, table, num_kv_heads, width, is_rotated, zeros)
        keys = empty(types.key)
        return cls(
            key_BKPX=keys,
            value_BKPX=empty(types.value) if stores_values else keys[..., :0],
            table=table,
            types=types,
            tables=tables,
        )

    @property
    def key_CKW(self) -> Tensor:
        """The keys of the only sequence; not for quantised types."""
        assert self.table.is_whole and not self.types.key.is_blocks
        return self.key_BKPX[0].transpose(0, 1)

    @property
    def value_CKW(self) -> Tensor:
        assert self.table.is_whole and not self.types.value.is_blocks
        return self.value_BKPX[0].transpose(0, 1)

    @property
    def for_kernels(self) -> tuple[Tensor, Tensor]:
        """Keys and values in the shape of a GPU's kernels: [C, K, W], or blocks [B, P, K, W]."""
        if self.table.is_whole:
            return self.key_CKW, self.value_CKW
        assert not self.types.key.is_blocks and not self.types.value.is_blocks
        return self.key_BKPX.transpose(1, 2), self.value_BKPX.transpose(1, 2)

    @property
    def num_kv_heads(self) -> int:
        return self.key_BKPX.shape[1]

    @property
    def device(self) -> torch.device:
        return self.key_BKPX.device

    @property
    def _kept(self) -> tuple[tuple[Tensor, CacheType], tuple[Tensor, CacheType]]:
        return (self.key_BKPX, self.types.key), (self.value_BKPX, self.types.value)

    def _summarise(self, sequence: int, start: int, end: int) -> None:
        """Adds the key blocks that are completed by positions start .. end-1 to the tables."""
        if self.tables is None:
            return
        size = self.tables.rule.block
        for begin in range(start // size * size, end // size * size, SUMMARISED):
            block_T, place_T = self._places(
                sequence, begin, min(begin + SUMMARISED, end // size * size)
            )
            kept_TKX = self.key_BKPX[block_T, :, place_T]
            self.tables.summarise(sequence, begin, decode(kept_TKX, self.types.key).float())

    def _places(self, sequence: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """(block of each position, position within it), on the cache's device."""
        position_T, device = torch.arange(start, end), self.device
        length = self.table.block_length
        block_T = self.table.blocks(sequence, end)[position_T // length]
        return block_T.to(device), (position_T % length).to(device)

    def read(self, sequence: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values [T, K, X] at positions start .. end-1, as stored; bf16 as
        int16, because numpy lacks bf16."""
        block_T, place_T = self._places(sequence, start, end)
        keys, values = (_bits(kept)[block_T, :, place_T] for kept, _ in self._kept)
        return keys, values

    def write(self, sequence: int, start: int, key_TKX: Tensor, value_TKX: Tensor) -> None:
        """Stores keys and values that `read` returned."""
        key_TKX, value_TKX = (rows.to(self.key_BKPX.device) for rows in (key_TKX, value_TKX))
        block_T, place_T = self._places(sequence, start, start + len(key_TKX))
        _bits(self.key_BKPX)[block_T, :, place_T] = key_TKX
        _bits(self.value_BKPX)[block_T, :, place_T] = value_TKX
        self._summarise(sequence, start, start + len(key_TKX))

    def takes(self, count: int, key_TKX: Tensor, value_TKX: Tensor) -> bool:
        """True if `write` accepts these tensors as `count` rows."""
        pairs = zip(self._kept, (key_TKX, value_TKX), strict=True)
        return all(
            rows.shape == (count, self.num_kv_heads, cache.shape[3])
            and rows.dtype == _bits(cache).dtype
            for (cache, _), rows in pairs
        )

    def copy(self, changes: Sequence[BlockChange]) -> None:
        for change in changes:
            if change.source is None:
                continue
            tables = () if self.tables is None else self.tables.tensors
            for kept in (self.key_BKPX, self.value_BKPX, *tables):
                kept[change.block] = kept[change.source]


def _bits(kept: Tensor) -> Tensor:
    return kept.view(torch.int16) if kept.dtype == torch.bfloat16 else kept


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """The cache of all layers. Those that keep the same positions share a block table. `beside`:
    that of a draft block, which shares one, too (DraftStep saves it)."""

    layers: tuple[LayerCache, ...]
    beside: tuple[LayerCache, ...] = ()

    @cached_property
    def tables(self) -> tuple[BlockTable, ...]:
        return tuple(dict.fromkeys(layer.table for layer in self.layers))

    @property
    def num_sequences(self) -> int:
        return self.tables[0].num_sequences

    @property
    def context_length(self) -> int:
        return self.tables[0].context_length

    @cached_property
    def has_rings(self) -> bool:
        """True if a text can be continued at some of its positions only."""
        return any(table.is_ring for table in self.tables)

    @property
    def types(self) -> CacheTypes:
        """The storage types, which all layers share."""
        (types,) = {layer.types for layer in self.layers}
        return types

    def reserve(self, sequence: int, start: int, stop: int) -> None:
        """Makes positions start .. stop-1 of a sequence writable, copying shared blocks; of a ring
        the last of them that it can hold."""
        for table in self.tables:
            self._reserve(table, sequence, start, stop)

    def restore(self, sequence: int, length: int, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Gives an empty sequence the keys and values [T, K, X] of each layer that were read from
        one of `length` tokens: of rings the last ones.

        Raises HotsplitError if they are not of this model's shapes and types, or too few."""
        starts = [
            layer.table.taken_from(length, len(keys))
            for layer, (keys, _) in zip(self.layers, rows, strict=False)
        ]
        of_tables = dict(zip((layer.table for layer in self.layers), starts, strict=False))
        fit = len(rows) == len(self.layers) and all(
            layer.takes(len(keys), keys, values)
            for layer, (keys, values) in zip(self.layers, rows, strict=True)
        )
        if fit and None in starts and len({len(keys) for keys, _ in rows}) > 1:
            raise HotsplitError(
                "keys and values of layers with windows are those of the last tokens alone, because"
                " they were saved with a longer context; load with that context"
            )
        if not fit or starts != [of_tables[layer.table] for layer in self.layers] or None in starts:
            raise HotsplitError("keys and values are not of this model's shape and type")
        for table, start in of_tables.items():
            assert start is not None
            self._reserve(table, sequence, start, length)
        for layer, start, pair in zip(self.layers, starts, rows, strict=True):
            assert start is not None
            layer.write(sequence, start, *(kept[start - length :] for kept in pair))

    def _reserve(self, table: BlockTable, sequence: int, start: int, stop: int) -> None:
        if table.is_whole:
            return
        changes = table.plan(sequence, start, stop)
        for layer in (*self.layers, *self.beside) if changes else ():
            if layer.table is table:
                layer.copy(changes)
        table.commit(sequence, changes)

    def nearest(self, sequence: int, length: int) -> int:
        """The latest position among the first `length` from which all layers can continue a
        sequence."""
        while length > (found := min(t.nearest(sequence, length) for t in self.tables)):
            length = found
        return length

    def rollback(self, sequence: int, length: int, position: int) -> None:
        """Drops what comes after the first `length` tokens, in rings after an earlier position that
        `nearest` has returned."""
        for table in self.tables:
            table.rollback(sequence, position if table.is_ring else length)

    def release(self, sequence: int) -> None:
        self.rollback(sequence, 0, 0)

    def share(self, source: int, target: int, length: int) -> None:
        """Shares the first `length` positions of `source` with `target`, which must be empty."""
        for table in self.tables:
            table.share(source, target, length)

    def save(self, sequence: int, position: int) -> None:
        """Lets a sequence be continued after its first `position` tokens, if blocks last."""
        for table in self.tables:
            table.save(sequence, position)
