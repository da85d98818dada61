"""The slots of experts on a GPU. An expert is a few large pieces of pinned memory, so nothing is
gathered:

    start    copier   copy the experts to staging                               beside a step
    finish   main     wait for the copier | move them to the slots | tables     between steps

A step's kernels, the CPU's functions and prompts read where an expert is from tables, so a captured
step stays valid. Main memory has all experts of these layers; those in slots are marked there, and
not computed twice. The methods are those of slots.py.

Letters: L layers, E experts of a layer, N slots of a layer, S swaps, B bytes of staging."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotsplit.costs.part_bytes import staged
from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.neuron_cache.residency import Residency
from hotsplit.runtime.neuron_cache.slots import Take
from hotsplit.runtime.weights.expert_block import ExpertBlock


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """A layer whose experts have slots: `hot` has those, `cold` all experts, in order."""

    hot: ExpertBlock
    cold: ExpertBlock

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(slots, all experts) of each matrix, and then of each bias."""
        both = list(zip(self.hot.matrices, self.cold.matrices, strict=True))
        found = [(hot.data, cold.data) for hot, cold in both]
        biases = [(hot.bias_PN, cold.bias_PN) for hot, cold in both]
        return found + [(hot, cold) for hot, cold in biases if hot is not None and cold is not None]

    @property
    def can_be_copied(self) -> bool:
        """True if each expert is contiguous and pinned, so that copies run beside a step."""
        return all(cold[0].is_contiguous() and cold.is_pinned() for _, cold in self.pairs)


class ExpertSlots:
    """The slots of the layers in `layers`, all on the GPU of the two streams. At most `most_rows`
    experts are swapped at a time."""

    def __init__(
        self,
        layers: Mapping[int, ExpertLayer],
        residency: Residency,
        main: Stream,
        copier: Stream,
        take: Take,
        *,
        most_rows: int,
        is_pinned: bool,
    ) -> None:
        self.layers, self._residency = layers, residency
        self._main, self._copier = main, copier
        self._expert_bytes = max(
            sum(staged(slots[0].nbytes) for slots, _ in own.pairs) for own in layers.values()
        )
        self._staging_B = take((most_rows * self._expert_bytes,), torch.uint8)
        # What the GPU's tables become: the slot of each expert.
        shape = residency.slot_LF.shape
        self._place_LE = torch.zeros(shape, dtype=torch.int32, pin_memory=is_pinned)
        self._pending: tuple[np.ndarray, Any] | None = None

    def start(self, swaps_S: np.ndarray) -> int:
        assert self._pending is None
        self._copier.follow()
        num_bytes = 0
        for number, swap in enumerate(swaps_S):
            for staging, _, expert in self._parts(number, swap):
                self._copier.copy(staging, expert)
                num_bytes += expert.nbytes
        self._pending = swaps_S.copy(), self._copier.record()
        return num_bytes

    def _parts(self, number: int, swap: np.void) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each matrix and bias of an expert: its place in staging, its slot, and where it is in
        main memory."""
        first = number * self._expert_bytes
        for slots, every in self.layers[int(swap["layer"])].pairs:
            slot = slots[int(swap["slot"])]
            staging_B = self._staging_B[first : first + slot.nbytes]
            yield staging_B.view(slot.dtype).view(slot.shape), slot, every[int(swap["in"])]
            first += staged(slot.nbytes)

    def finish(self) -> None:
        """Moves the experts to their slots and changes the tables; between steps."""
        assert self._pending is not None
        (swaps_S, arrived), self._pending = self._pending, None
        self._residency.swap(swaps_S)
        self._main.follow()  # a prompt may still read what leaves
        self._main.wait(arrived)
        for number, swap in enumerate(swaps_S):
            for staging, slot, _ in self._parts(number, swap):
                self._main.copy(slot, staging)
        for layer in np.unique(swaps_S["layer"]).tolist():
            self._change_tables(layer)
        self._main.finish()  # prompts read the slots on another stream

    def _change_tables(self, layer: int) -> None:
        hot, cold, place_E = self.layers[layer].hot, self.layers[layer].cold, self._place_LE[layer]
        assert hot.place_E is not None and cold.place_E is not None
        place_E.numpy()[:] = slot_E = self._residency.slot_LF[layer]
        self._main.copy(hot.place_E, place_E)
        hot.places[:] = slot_E
        cold.places[:] = np.where(slot_E < 0, np.arange(len(slot_E)), -1)
        cold.place_E.numpy()[:] = cold.places

    def check(self) -> None:
        """Raises AssertionError unless all tables agree and slots have their experts' bytes. All
        streams must have finished."""
        self._residency.check()
        for layer, own in self.layers.items():
            slot_E, id_N = self._residency.slot_LF[layer], self._residency.id_N(layer)
            assert own.hot.place_E is not None and own.cold.place_E is not None
            assert (own.hot.place_E.cpu().numpy() == slot_E).all()
            assert (own.hot.places == slot_E).all()
            assert ((own.cold.place_E.numpy() < 0) == (slot_E >= 0)).all()
            assert (own.cold.places == own.cold.place_E.numpy()).all()
            for slots, every in own.pairs:
                assert torch.equal(slots.cpu(), every[torch.from_numpy(id_N).long()])
