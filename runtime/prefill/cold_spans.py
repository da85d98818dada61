"""The neurons of a block as spans of host memory, and their layout in a buffer on a device.

Interleaved matrices (runtime.weights.resident) form one span, in which a range of neurons is
contiguous; other matrices are a span each. Matrices in tiles or groups are divided at whole ones.

Letters: N neurons of the block, S bytes of a neuron in a span."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.kernels.stored import rows_together
from hotsplit.runtime.weights.matrix import Linear
from hotsplit.runtime.weights.neuron_block import NeuronBlock

ALIGNMENT = 256


@dataclass(frozen=True, kw_only=True)
class Span:
    """Rows of one or more matrices: `host_NS` uint8, or its rows at `row_N`."""

    host_NS: Tensor
    row_N: Tensor | None

    @property
    def row_bytes(self) -> int:
        return self.host_NS.shape[1]

    @property
    def can_be_copied(self) -> bool:
        """True if rows are contiguous and pinned, so that they can be copied without staging."""
        return self.row_N is None and self.host_NS.is_contiguous() and self.host_NS.is_pinned()

    def fill(self, target: Tensor, start: int, stop: int) -> None:
        if self.row_N is None:
            target.copy_(self.host_NS[start:stop])
        else:
            torch.index_select(self.host_NS, 0, self.row_N[start:stop], out=target)


@dataclass(frozen=True, kw_only=True)
class _NeuronPlace:
    """The place of a tensor's rows: bytes `start` to `stop` of the rows of a span."""

    span: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Spans:
    """The spans of a block, and where they are in a buffer."""

    spans: tuple[Span, ...]

    @property
    def unit_bytes(self) -> int:
        """Bytes of a neuron or an expert."""
        return sum(span.row_bytes for span in self.spans)

    @property
    def can_be_copied(self) -> bool:
        """True if the units are contiguous and pinned, so that they can be copied without
        staging."""
        return all(span.can_be_copied for span in self.spans)

    def layout_bytes(self, count: int) -> int:
        """Bytes of a buffer for so many units."""
        return sum(aligned(count * span.row_bytes) for span in self.spans)

    def targets(self, buffer: Tensor, count: int) -> list[Tensor]:
        """Views of the spans in a buffer, uint8 [count, S]."""
        found, start = [], 0
        for span in self.spans:
            size = count * span.row_bytes
            found.append(buffer[start : start + size].view(count, span.row_bytes))
            start += aligned(size)
        return found


@dataclass(frozen=True, kw_only=True)
class ColdBlock(Spans):
    block: NeuronBlock
    places: tuple[_NeuronPlace, ...]  # of the matrices, the biases and the ids

    @classmethod
    def of(cls, block: NeuronBlock) -> "ColdBlock":
        tensors = [*block.tensors, block.id_N]
        num_matrices = len(block.matrices)
        spans: list[Span] = []
        places: dict[int, _NeuronPlace] = {}
        for group in interleaved(tensors[:num_matrices]):
            first = tensors[group[0]]
            begin = first.data_ptr()
            for number in group:
                start = tensors[number].data_ptr() - begin
                size = tensors[number].shape[1] * tensors[number].element_size()
                places[number] = _NeuronPlace(span=len(spans), start=start, stop=start + size)
            width = max(places[number].stop for number in group)
            spans.append(Span(host_NS=bytes_of(first, width), row_N=block.row_N))
        for number in range(num_matrices, len(tensors)):
            # Ids have one entry per neuron of the block, biases one per row of the matrices.
            is_id = number == len(tensors) - 1
            size = tensors[number].element_size()
            places[number] = _NeuronPlace(span=len(spans), start=0, stop=size)
            rows = None if is_id else block.row_N
            spans.append(Span(host_NS=bytes_of(tensors[number][:, None], size), row_N=rows))
        in_order = tuple(places[number] for number in range(len(tensors)))
        return cls(block=block, spans=tuple(spans), places=in_order)

    @property
    def number(self) -> int:
        """Neurons of the block."""
        return len(self.block.id_N)

    @property
    def together(self) -> int:
        """Neurons that a piece has a multiple of: a power of two."""
        return max(rows_together(matrix.kind) for matrix in self.block.matrices)

    @property
    def least_piece_bytes(self) -> int:
        """The smallest `piece_bytes` that `pieces` accepts."""
        return self.together * self.unit_bytes + ALIGNMENT * len(self.spans)

    def pieces(self, piece_bytes: int) -> Iterator[tuple[int, int]]:
        """Divides the block into about equal pieces of at most `piece_bytes`; yields the range of
        neurons (first, one after the last) of each."""
        together = self.together
        most = (piece_bytes - ALIGNMENT * len(self.spans)) // self.unit_bytes // together
        assert most >= 1, (piece_bytes, self.unit_bytes, together)
        units = -(-self.number // together)
        size = -(-units // -(-units // most)) * together
        for start in range(0, self.number, size):
            yield start, min(start + size, self.number)

    def copy(self, stream: Stream, buffer: Tensor, start: int, stop: int) -> None:
        for span, target_NS in zip(self.spans, self.targets(buffer, stop - start), strict=True):
            stream.copy(target_NS, span.host_NS[start:stop])

    def fill(self, buffer: Tensor, start: int, stop: int) -> None:
        for span, target_NS in zip(self.spans, self.targets(buffer, stop - start), strict=True):
            span.fill(target_NS, start, stop)

    def on_device(self, buffer: Tensor, start: int, stop: int) -> NeuronBlock:
        """The neurons of a piece, in a buffer that `copy` or `fill` has written."""
        block, count = self.block, stop - start
        targets = self.targets(buffer, count)

        def at(number: int, like: Tensor) -> Tensor:
            place = self.places[number]
            return targets[place.span][:, place.start : place.stop].view(like.dtype)

        def linear(number: int, old: Linear, bias: int) -> Linear:
            weight = replace(old.weight, data=at(number, old.weight.data))
            if old.bias_N is None:
                return Linear(weight=weight)
            return Linear(weight=weight, bias_N=at(bias, old.bias_N).flatten())

        bias = len(block.matrices)
        down = replace(block.down, data=at(bias - 1, block.down.data))
        return NeuronBlock(
            role=block.role,
            gate=linear(0, block.gate, bias),
            up=linear(1, block.up, bias + (block.gate.bias_N is not None)) if block.up else None,
            down=down,
            id_N=at(len(self.places) - 1, block.id_N).flatten(),
            row_N=None,
        )


def interleaved(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Groups of indices of tensors [..., N, X] whose rows are interleaved, in the order of their
    rows."""
    groups: list[list[int]] = []
    for number in sorted(range(len(tensors)), key=lambda number: tensors[number].data_ptr()):
        tensor = tensors[number]
        first = tensors[groups[-1][0]] if groups else tensor
        is_same = (
            first.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            and first.dtype == tensor.dtype
            and first.stride() == tensor.stride()
        )
        begins = tensor.data_ptr() - first.data_ptr()
        if groups and is_same and begins < first.stride(-2) * first.element_size():
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def bytes_of(first: Tensor, width_bytes: int) -> Tensor:
    """uint8 [N, width]: a view of a tensor's rows and of the bytes that follow each of them."""
    storage = first.untyped_storage()
    offset = first.data_ptr() - storage.data_ptr()
    stride = first.stride(0) * first.element_size()
    shape = (first.shape[0], width_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, shape, (stride, 1))


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
