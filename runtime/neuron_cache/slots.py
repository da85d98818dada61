"""The slots of a neuron cache. Both kinds have the methods

    start     Starts copying the incoming units to staging in the background; returns their bytes.
              Slots and tables stay as they are. Called when no copies are under way.
    finish    Waits for the copies, moves the units to their slots and changes the tables. Called
              between steps; when it returns, all of that is done.

JoinedSlots are beside the full weights, as rows of one block (`weights.neuron_block.joined`), if
the CPU computes all neurons. Logits are bit-identical to those without a cache.

GpuSlots are on a GPU, with all units of their layers in main memory. A unit is a neuron, whose
carrier is `neuron_rows.NeuronRows`, or an expert of a mixture (`expert_parts.ExpertParts`):

    start    copier   the carrier copies the units to staging                     beside a step
    finish   main     wait for the copier | the carrier moves them to the slots   between steps

The move also changes the GPU's tables, on the stream of the decode steps but outside their graphs,
whose addresses do not change; the CPU's tables are updated in place at the same time. `finish` waits
for the move, since prompts read the slots on another stream, and the next `start` overwrites staging.

Letters: L layers, F neurons of a layer, S swaps, M tensors of a block."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.neuron_cache.residency import Residency
from hotsplit.runtime.neuron_cache.row_copies import Copier, RowCopies, RowTable
from hotsplit.runtime.weights.neuron_block import NeuronBlock

Take = Callable[[tuple[int, ...], torch.dtype], Tensor]


class Carrier(Protocol):
    """Brings units of one kind to the slots of a GPU. At most as many are swapped at a time as its
    staging holds."""

    def stage(self, swaps_S: np.ndarray, copier: Stream) -> int:
        """Copies the incoming units to staging on this stream; returns their bytes."""

    def move(self, swaps_S: np.ndarray, main: Stream) -> None:
        """Moves the staged units to their slots and changes the tables on this stream; the
        residency has been changed before."""

    def check(self) -> None:
        """Raises AssertionError unless tables and slots agree with the residency."""


class GpuSlots:
    """The slots of a GPU with these two streams."""

    def __init__(
        self, carrier: Carrier, residency: Residency, main: Stream, copier: Stream
    ) -> None:
        self.carrier, self._residency = carrier, residency
        self._main, self._copier = main, copier
        self._pending: tuple[np.ndarray, Any] | None = None

    def start(self, swaps_S: np.ndarray) -> int:
        assert self._pending is None
        self._copier.follow()
        num_bytes = self.carrier.stage(swaps_S, self._copier)
        self._pending = swaps_S.copy(), self._copier.record()
        return num_bytes

    def finish(self) -> None:
        assert self._pending is not None
        (swaps_S, arrived), self._pending = self._pending, None
        self._residency.swap(swaps_S)
        self._main.follow()  # a prompt may still read what leaves
        self._main.wait(arrived)
        self.carrier.move(swaps_S, self._main)
        self._main.finish()

    def check(self) -> None:
        """Raises AssertionError unless all tables agree. All streams must have finished."""
        self._residency.check()
        self.carrier.check()


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
        self._table = RowTable.of([blocks[i].tensors if i in blocks else [] for i in layers])
        self._table_L = np.zeros(len(layers), np.int64)  # address of each layer's `row_N`
        for layer, row_F in self._row_LF.items():
            self._table_L[layer] = row_F.ctypes.data
        self._staging = np.zeros(0, np.uint8)
        self._copier = Copier(copy_bytes_per_s)
        self._pending: tuple[np.ndarray, RowCopies] | None = None

    def start(self, swaps_S: np.ndarray) -> int:
        assert self._pending is None
        swaps_S, table, num_slots_L = swaps_S.copy(), self._table, self.residency.num_slots_L
        needed = len(swaps_S) * table.neuron_bytes
        if len(self._staging) < needed:
            self._staging = np.zeros(needed, np.uint8)
        layer_S, first = swaps_S["layer"], self._staging.ctypes.data
        place_S1 = np.arange(first, first + needed, table.neuron_bytes)[:, None]
        staged_SM, size_SM = place_S1 + table.offset_LM[layer_S], table.size_LM[layer_S]
        main_SM = table.addresses(layer_S, num_slots_L[layer_S] + swaps_S["in"])
        slot_SM = table.addresses(layer_S, swaps_S["slot"])
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
