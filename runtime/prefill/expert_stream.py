"""Streams cold experts to a GPU during a prefill pass: pieces of whole experts through two buffers,
as cold_stream does with neurons. Which experts are streamed is known when a layer's router has
chosen; the CPU computes those that have few tokens at the same time.

    seconds of the CPU     bytes of the expert * (cpu_s + token_s * tokens)
    seconds of the link    bytes of the expert * link_s, or staged_s without pinned memory

by the rates of a plan. The CPU takes the experts with the fewest tokens, as many as make the longer
of the two sides shortest. Without pinned memory, the thread that computes copies as well, so an
expert is streamed if that takes less time than computing it.

Letters: A experts, T tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hotsplit.options.prompt_rates import PromptRates
from hotsplit.runtime.prefill.cold_experts import ColdExperts
from hotsplit.runtime.prefill.cold_stream import Slot, WeightStream
from hotsplit.runtime.weights.expert_block import ExpertBlock


@dataclass(kw_only=True, eq=False)
class ExpertStream(WeightStream):
    """The stream of one device; `blocks`: the cold experts of the layers with that home, in order.
    Without `rates`, all experts that have a token are streamed."""

    blocks: dict[int, ColdExperts]
    rates: PromptRates | None

    @property
    def most_experts(self) -> int:
        return min(block.most_experts(self.piece_bytes) for block in self.blocks.values())

    def chosen(self, expert_A: np.ndarray, count_A: np.ndarray) -> np.ndarray:
        """Those of a layer's cold experts that are streamed, given how many rows each has."""
        if self.rates is None:
            return expert_A
        is_streamed_A = streamed(self.rates, count_A, is_in_turn=self.staging is not None)
        return expert_A[is_streamed_A]

    def run(
        self, layer: int, parts: Sequence[np.ndarray], add: Callable[[int, ExpertBlock], None]
    ) -> None:
        cold, pieces = self.blocks[layer], [self.blocks[layer].block.places[part] for part in parts]
        if parts:
            self._open()
        for number in range(min(2, len(parts))):
            self._send(self._slots[number], cold, pieces[number])
        for number, place_A in enumerate(pieces):
            slot = self._slots[number % 2]
            self._arrive(slot)
            block = cold.on_device(slot.buffer, len(place_A))
            add(number, block)
            slot.free = self.compute.record()
            if number + 2 < len(pieces):
                self._send(slot, cold, pieces[number + 2])
        if layer == max(self.blocks):
            self._end()

    def _send(self, slot: Slot, cold: ColdExperts, place_A: np.ndarray) -> None:
        self._start_copy(
            slot,
            cold.layout_bytes(len(place_A)),
            lambda stream, buffer: cold.copy(stream, buffer, place_A),
            lambda host: cold.fill(host, place_A),
        )


def streamed(rates: PromptRates, count_A: np.ndarray, *, is_in_turn: bool) -> np.ndarray:
    """Which experts of a layer, with so many tokens, are streamed; bool [A]. `is_in_turn`: the CPU
    computes none while others are copied."""
    cpu_A, link = rates.cpu_s + rates.token_s * count_A, rates.link_s
    if is_in_turn:
        return cpu_A > rates.staged_s
    order_A = np.argsort(count_A, kind="stable")
    both = np.concatenate([[0.0], np.cumsum(cpu_A[order_A])])
    longer = np.maximum(both, link * np.arange(len(count_A), -1, -1))
    is_streamed_A = np.ones(len(count_A), bool)
    is_streamed_A[order_A[: int(longer.argmin())]] = False
    return is_streamed_A
