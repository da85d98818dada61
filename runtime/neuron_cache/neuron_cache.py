"""The cycle of the neuron cache: one decode step's bits decide which neurons are copied during the
next step.

    after step t      the policy observes the step's bits and decides on swaps; gathering of the
                      incoming neurons' rows from main memory into staging begins
    during t + 1      the rows arrive in staging; each slot still holds its old neuron
    after step t + 1  staged rows are moved to their slots, and the tables of hot and cold neurons
                      change; step t + 2 is the first that uses them

Experts of a mixture are swapped in the same way, but not gathered (expert_parts.py). Below, a
neuron may be an expert.

Nothing is written back: main memory holds every row of a layer that has slots. Results do not
depend on timing: slots and tables change only between steps, each time by the swaps decided one
step earlier, and the caller waits if their copies took longer than a step. The policy decides on
swaps; its slots move rows.

Letters: L layers, W words of 32 bits, S swaps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.runtime.neuron_cache.cache_slots import GpuSlots, Residency
from hotsplit.runtime.neuron_cache.policy import CachePolicy
from hotsplit.system.sizes import format_bytes


class NeuronCache:
    """The cache of a running model; `use` sets its slots."""

    def __init__(self, policy: CachePolicy, residency: Residency, most_rows: int) -> None:
        self.policy, self.residency = policy, residency
        self.most_rows = most_rows  # most swaps of a decision
        self.slots: GpuSlots | None = None
        self.num_swaps = 0  # done so far
        self.num_bytes = 0  # of the rows copied so far
        self._num_pending = 0  # swaps whose rows are being copied
        self._is_changing = False  # stays True after an exception in the middle of a change

    @property
    def line(self) -> str:
        """A line of statistics for people."""
        return f"{self.policy.report().line}; {format_bytes(self.num_bytes)} copied"

    @property
    def facts(self) -> dict[str, float]:
        """The statistics for programs."""
        return {**asdict(self.policy.report()), "num_bytes": self.num_bytes}

    def use(self, slots: GpuSlots) -> None:
        """Moves neurons with these slots from now on."""
        self.complete()  # what the previous slots have started
        self.slots = slots

    def complete(self) -> None:
        """Makes the swaps whose copies are under way. Must not be called during a step. Raises
        HotsplitError as `before_step` does."""
        self.before_step()
        if not self._num_pending:
            return
        assert self.slots is not None
        with self._change():
            self.slots.finish()
            self.num_swaps += self._num_pending
            self._num_pending = 0

    def before_step(self) -> None:
        """Raises HotsplitError if an interrupt or an error has left slots, tables or the policy
        half-changed. Copies that are under way need not be done: the step does not read them."""
        if self._is_changing:
            raise HotsplitError(
                "the neuron cache was interrupted while it moved neurons; load the model again"
            )

    def after_step(self, bits_1LW: np.ndarray) -> None:
        """Makes the swaps whose copies ran during the step, passes the bits of the step's token to
        the policy and starts the copies of the swaps that it decides on."""
        self.complete()
        with self._change():
            swaps_S = self.policy.step(bits_1LW)
            if len(swaps_S):
                assert self.slots is not None
                self.num_bytes += self.slots.start(swaps_S)
                self._num_pending = len(swaps_S)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Marks a change of slots, tables and policy, which must agree."""
        self._is_changing = True
        yield
        self._is_changing = False
