"""Tracks which neuron is in which slot, in tables that are changed in place.

Letters: L layers, F neurons of a layer, N slots of a layer, S swaps."""

from collections.abc import Sequence

import numpy as np


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
        """Makes swaps (native.library.SWAP). Raises AssertionError, before anything changes, if they do not
        fit the tables."""
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
