"""Streams cold experts to a GPU during a prefill pass: pieces of whole experts through two buffers,
as cold_stream does with neurons. Which experts are streamed is known when a layer's router has
chosen; the CPU computes those that have few tokens at the same time.

    seconds of the CPU     bytes of the expert * (cpu_s + token_s * tokens)
    seconds of the link    bytes of the expert * link_s, or staged_s without pinned memory

by the rates of a plan. The CPU takes the experts with the fewest tokens, as many as make the longer
of the two sides shortest. Without pinned memory, the thread that computes copies as well, so an
expert is streamed if that takes less time than computing it.

The experts of a block in host memory are spans. An expert is one row of a span; matrices whose rows
are interleaved (runtime.weights.resident) share one.

Letters: P experts of the block, A chosen ones, N rows of an expert's matrix, S bytes of an expert
in a span, T tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hotsplit.options.prompt_rates import PromptRates
from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.prefill.cold_spans import ALIGNMENT, Span, Spans, bytes_of, interleaved
from hotsplit.runtime.prefill.cold_stream import Slot, WeightStream
from hotsplit.runtime.weights.expert_block import ExpertBlock, ExpertMatrices


@dataclass(frozen=True, kw_only=True)
class _ExpertPlace:
    """The place of a tensor: the span, and the first byte of its rows within those of the span,
    which are `stride` bytes apart."""

    span: int
    start: int
    stride: int


@dataclass(frozen=True, kw_only=True)
class ColdExperts(Spans):
    """The experts of a block as spans, and their layout in a buffer on a device."""

    block: ExpertBlock
    places: tuple[_ExpertPlace, ...]  # of the matrices, and then of their biases, if any

    @classmethod
    def of(cls, block: ExpertBlock) -> "ColdExperts":
        tensors = [matrix.data for matrix in block.matrices]
        tensors += [m.bias_PN[..., None] for m in block.matrices if m.bias_PN is not None]
        spans: list[Span] = []
        places: dict[int, _ExpertPlace] = {}
        for group in interleaved(tensors):
            first = tensors[group[0]]
            stride = first.stride(1) * first.element_size()
            for number in group:
                start = tensors[number].data_ptr() - first.data_ptr()
                places[number] = _ExpertPlace(span=len(spans), start=start, stride=stride)
            last = tensors[group[-1]]
            width = places[group[-1]].start + last.shape[2] * last.element_size()
            assert width == stride, (width, stride)  # no gaps between the rows of an expert
            spans.append(Span(host_NS=bytes_of(first, first.shape[1] * stride), row_N=None))
        in_order = tuple(places[number] for number in range(len(tensors)))
        return cls(block=block, spans=tuple(spans), places=in_order)

    @property
    def number(self) -> int:
        """Experts of the block."""
        return int((self.block.places >= 0).sum())

    @property
    def least_piece_bytes(self) -> int:
        """The fewest bytes of a buffer."""
        return self.layout_bytes(1)

    def most_experts(self, piece_bytes: int) -> int:
        """Experts that a buffer of so many bytes has room for."""
        return (piece_bytes - ALIGNMENT * len(self.spans)) // self.unit_bytes or 1

    def copy(self, stream: Stream, buffer: Tensor, place_A: np.ndarray) -> None:
        for span, target_AS in zip(self.spans, self.targets(buffer, len(place_A)), strict=True):
            for start, stop in _runs(place_A):
                first = int(place_A[start])
                stream.copy(target_AS[start:stop], span.host_NS[first : first + stop - start])

    def fill(self, buffer: Tensor, place_A: np.ndarray) -> None:
        index_A = torch.from_numpy(place_A.astype(np.int64))
        for span, target_AS in zip(self.spans, self.targets(buffer, len(place_A)), strict=True):
            torch.index_select(span.host_NS, 0, index_A, out=target_AS)

    def on_device(self, buffer: Tensor, count: int) -> ExpertBlock:
        """The experts that `copy` or `fill` has written, in that order."""
        targets, numbers = self.targets(buffer, count), iter(range(len(self.block.matrices), 99))

        def at(number: int, like: Tensor) -> Tensor:
            place, size = self.places[number], like.element_size()
            base = targets[place.span].view(-1).view(like.dtype)
            row, expert = place.stride // size, targets[place.span].stride(0) // size
            return base.as_strided(
                (count, *like.shape[1:]),
                (expert, row, 1),
                base.storage_offset() + place.start // size,
            )

        made: list[ExpertMatrices] = []
        for number, old in enumerate(self.block.matrices):
            bias_PN = None
            if old.bias_PN is not None:
                bias_PN = at(next(numbers), old.bias_PN[..., None])[..., 0]
            made.append(replace(old, data=at(number, old.data), bias_PN=bias_PN))
        gate, *up, down = made
        return replace(self.block, gate=gate, up=up[0] if up else None, down=down, place_E=None)


def _runs(place_A: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive places."""
    ends = np.flatnonzero(np.diff(place_A) != 1) + 1
    yield from zip([0, *ends.tolist()], [*ends.tolist(), len(place_A)], strict=True)


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
