"""The slots of a neuron cache on a GPU, with all units of their layers in main memory. A unit is a
neuron, whose carrier is `neuron_rows.NeuronRows`, or an expert of a mixture (`expert_parts.ExpertParts`):

    start    copier   the carrier copies the units to staging                     beside a step
    finish   main     wait for the copier | the carrier moves them to the slots   between steps

The move also changes the GPU's tables, on the stream of the decode steps but outside their graphs,
whose addresses do not change; the CPU's tables are updated in place at the same time. `finish` waits
for the move, since prompts read the slots on another stream, and the next `start` overwrites staging.

Letters: S swaps."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.neuron_cache.residency import Residency

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
        """Starts copying the incoming units to staging in the background; returns their bytes. Slots
        and tables stay as they are. Called when no copies are under way."""
        assert self._pending is None
        self._copier.follow()
        num_bytes = self.carrier.stage(swaps_S, self._copier)
        self._pending = swaps_S.copy(), self._copier.record()
        return num_bytes

    def finish(self) -> None:
        """Waits for the copies, moves the units to their slots and changes the tables. Called between
        steps; when it returns, all of that is done."""
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
