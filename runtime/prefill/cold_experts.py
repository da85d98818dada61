"""The experts of a block in host memory as spans, and their layout in a buffer on a device. An
expert is one row of a span; matrices whose rows are interleaved (runtime.weights.resident) share
one.

Letters: P experts of the block, A chosen ones, N rows of an expert's matrix, S bytes of an expert
in a span."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.prefill.cold_spans import ALIGNMENT, Span, Spans, bytes_of, interleaved
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
