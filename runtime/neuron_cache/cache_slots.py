"""The slots of a neuron cache on a GPU, with all units of their layers in main memory. A unit is a
neuron, whose carrier is `neuron_rows.NeuronRows`, or an expert of a mixture
(`expert_parts.ExpertParts`):

    start    copier   the carrier copies the units to staging                     beside a step
    finish   main     wait for the copier | the carrier moves them to the slots   between steps

The move also changes the GPU's tables, on the stream of the decode steps but outside their graphs,
whose addresses do not change; the CPU's tables are updated in place at the same time. `finish`
waits for the move, since prompts read the slots on another stream, and the next `start` overwrites
staging.

Letters: L layers, F units of a layer, N slots of a layer, S swaps."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hotsplit.runtime.device.streams import Stream

Take = Callable[[tuple[int, ...], torch.dtype], Tensor]


class Residency:
    """The slots of all layers; some layers may have none.

    `slot_LF`, int32: the slot of each neuron, or -1. `id_N` of a layer: the neuron in each slot."""

    def __init__(self, resident_LN: Sequence[np.ndarray], num_neurons: int) -> None:
        self.num_slots_L = np.array([len(ids) for ids in resident_LN], np.int64)
        self.first_L = self.num_slots_L.cumsum() - self.num_slots_L
        self.id = np.concatenate([*resident_LN, np.zeros(0)]).astype(np.int32)  # of all slots
        self.slot_LF = np.full((len(resident_LN), num_neurons), -1, np.int32)
        for layer, ids in enumerate(resident_LN):
            self.slot_LF[layer, ids] = np.arange(len(ids))
        self.check()

    def id_N(self, layer: int) -> np.ndarray:
        first = self.first_L[layer]
        return self.id[first : first + self.num_slots_L[layer]]

    def swap(self, swaps_S: np.ndarray) -> None:
        """Makes swaps (native.library.SWAP). Raises AssertionError, before anything changes, if
        they do not fit the tables."""
        layer_S, slot_S, in_S, out_S = (swaps_S[name] for name in ("layer", "slot", "in", "out"))
        assert (slot_S >= 0).all() and (slot_S < self.num_slots_L[layer_S]).all(), slot_S
        place_S = self.first_L[layer_S] + slot_S
        assert (self.id[place_S] == out_S).all(), "a neuron leaves a slot that it is not in"
        assert (self.slot_LF[layer_S, in_S] < 0).all(), "an incoming neuron already has a slot"
        coming_S = layer_S.astype(np.int64) * self.slot_LF.shape[1] + in_S
        assert len(set(place_S.tolist())) == len(place_S), "a slot is in two swaps"
        assert len(set(coming_S.tolist())) == len(coming_S), "a neuron is in two swaps"
        self.id[place_S] = in_S
        self.slot_LF[layer_S, out_S] = -1
        self.slot_LF[layer_S, in_S] = slot_S

    def cold(self, layer: int) -> np.ndarray:
        """Ids of the neurons without a slot, int32, ascending."""
        return np.flatnonzero(self.slot_LF[layer] < 0).astype(np.int32)

    def check(self) -> None:
        """Raises AssertionError unless slots and their neurons are a bijection."""
        for layer, num_slots in enumerate(self.num_slots_L):
            id_N = self.id_N(layer)
            assert len(np.unique(id_N)) == num_slots
            slot_F = self.slot_LF[layer]
            has_slot_F = slot_F >= 0
            assert has_slot_F.sum() == num_slots, f"layer {layer}: {has_slot_F.sum()} neurons"
            assert (id_N[slot_F[has_slot_F]] == np.flatnonzero(has_slot_F)).all()


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
        """Starts copying the incoming units to staging in the background; returns their bytes.
        Slots and tables stay as they are. Called when no copies are under way."""
        assert self._pending is None
        self._copier.follow()
        num_bytes = self.carrier.stage(swaps_S, self._copier)
        self._pending = swaps_S.copy(), self._copier.record()
        return num_bytes

    def finish(self) -> None:
        """Waits for the copies, moves the units to their slots and changes the tables. Called
        between steps; when it returns, all of that is done."""
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
