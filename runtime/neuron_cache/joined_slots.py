"""Slots beside the full weights, as rows of one block (`weights.slot_rows`), if the CPU computes
all neurons. Logits are bit-identical to those without a cache.

Letters: F neurons of a layer, N slots, L layers, S swaps, M tensors of a block."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hotsplit.runtime.neuron_cache.residency import Residency
from hotsplit.runtime.neuron_cache.row_copies import Copier, RowCopies, RowTable
from hotsplit.runtime.weights.neuron_block import NeuronBlock
from hotsplit.runtime.weights.slot_rows import tensors_of


class JoinedSlots:
    """The slots of the layers in `blocks`, by layer."""

    def __init__(
        self,
        blocks: Mapping[int, NeuronBlock],
        residency: Residency,
        copy_bytes_per_s: float | None = None,
    ) -> None:
        self.residency = residency
        self._row_LF = {layer: _shared(block.row_N) for layer, block in blocks.items()}
        layers = range(len(residency.num_slots_L))
        self._table = RowTable.of([tensors_of(blocks[i]) if i in blocks else [] for i in layers])
        # For each layer's tensors, [L, 5, M]: addresses of row 0 of all neurons and of the slots,
        # row stride, bytes of a row, and its offset in staging.
        table = self._table
        rows_LM = table.base_LM + residency.num_slots_L[:, None] * table.stride_LM
        places = rows_LM, table.base_LM, table.stride_LM, table.size_LM, table.offset_LM
        self._place_L5M = np.stack(places, axis=1)
        self._table_L = np.zeros(len(layers), np.int64)  # address of each layer's `row_N`
        for layer, row_F in self._row_LF.items():
            self._table_L[layer] = row_F.ctypes.data
        self._neuron_bytes = table.neuron_bytes
        self._staging = np.zeros(0, np.uint8)
        self._copier = Copier(copy_bytes_per_s)
        self._pending: tuple[np.ndarray, RowCopies] | None = None

    def start(self, swaps_S: np.ndarray) -> int:
        assert self._pending is None
        swaps_S = swaps_S.copy()
        needed = len(swaps_S) * self._neuron_bytes
        if len(self._staging) < needed:
            self._staging = np.zeros(needed, np.uint8)
        places = self._place_L5M[swaps_S["layer"]].swapaxes(0, 1)
        main_SM, slot_SM, stride_SM, size_SM, staged_SM = places
        first = self._staging.ctypes.data
        staged_SM += np.arange(first, first + needed, self._neuron_bytes)[:, None]
        main_SM += swaps_S["in"][:, None] * stride_SM
        slot_SM += swaps_S["slot"][:, None] * stride_SM
        to_slots = self._to_slots(swaps_S, staged_SM, slot_SM, size_SM)
        gathered = RowCopies(main_SM, staged_SM, size_SM, (self._staging, self._table))
        self._copier.start(gathered)
        self._pending = swaps_S, to_slots
        return gathered.num_bytes

    def _to_slots(
        self, swaps_S: np.ndarray, staged_SM: np.ndarray, slot_SM: np.ndarray, size_SM: np.ndarray
    ) -> RowCopies:
        """The copies from staging to the slots, and of the changed numbers to the tables."""
        layer_S, unit = swaps_S["layer"], 4
        number_S2 = np.empty((len(swaps_S), 2), np.int32)  # new rows of the neurons in and out
        number_S2[:, 0] = swaps_S["slot"]
        number_S2[:, 1] = swaps_S["out"] + self.residency.num_slots_L[layer_S]
        at_S2 = number_S2.ctypes.data + unit * np.arange(number_S2.size).reshape(-1, 2)
        neuron_S2 = np.stack([swaps_S["in"], swaps_S["out"]], axis=1)
        table_S2 = self._table_L[layer_S][:, None] + unit * neuron_S2.astype(np.int64)
        return RowCopies(
            np.concatenate([staged_SM, at_S2], axis=1),
            np.concatenate([slot_SM, table_S2], axis=1),
            np.concatenate([size_SM, np.full_like(table_S2, unit)], axis=1),
            (self._staging, number_S2, self._table, self._row_LF),
        )

    def finish(self) -> None:
        assert self._pending is not None
        self._copier.finish()
        (swaps_S, to_slots), self._pending = self._pending, None
        self.residency.swap(swaps_S)
        to_slots.run()

    def check(self) -> None:
        """Raises AssertionError unless all tables agree."""
        self.residency.check()
        for layer, row_F in self._row_LF.items():
            slot_F, num_slots = self.residency.slot_LF[layer], self.residency.num_slots_L[layer]
            assert (row_F == np.where(slot_F < 0, num_slots + np.arange(len(slot_F)), slot_F)).all()


def _shared(row_F: Tensor | None) -> np.ndarray:
    """An array that shares the tensor's memory."""
    assert row_F is not None and row_F.dtype == torch.int32
    return row_F.numpy()
