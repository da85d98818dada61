"""Attention on the host for prefill passes with projections on a GPU: queries, keys and values are
copied to the host, and the heads' outputs back.

Each row is bit-identical to that of a native step's attention, for any number of rows.

Letters: T tokens, Q values of all queries, keys and values, H values of all heads' outputs, N the
most values of a layer's MAX_ROWS rows."""

from ctypes import addressof, c_int64, pointer
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.runtime.device.streams import HostNode
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.ops.structs import MAX_ROWS, NotNative
from hotsplit.runtime.step.native_ops import VALUES, attend_op
from hotsplit.runtime.step.native_parts import PartStruct
from hotsplit.runtime.step.native_step import RowStruct, StepBuilder


@dataclass(frozen=True, kw_only=True)
class HostAttention:
    """Attention over a cache in main memory, up to MAX_ROWS rows at a time."""

    qkv_N: Tensor
    heads_N: Tensor
    widths: dict[int, tuple[int, int]]  # Q and H of each layer that attends
    part: PartStruct
    rows: object  # an array of RowStruct, MAX_ROWS of them
    num_rows: c_int64
    kept: tuple[object, ...]

    @classmethod
    def of(cls, weights: Weights) -> "HostAttention | str":
        """Attention for all layers, or the reason why the kernels do not support it."""
        if not library.is_available():
            return "the C++ kernels are not built"
        builder = StepBuilder()
        try:
            step = builder.frame(weights, [builder.heads(layer) for layer in weights.attending])
            builder.ops(step, [attend_op(number) for number in range(len(weights.attending))])
            step.max_rows = MAX_ROWS
            widths = {
                index: layer.attention.widths
                for index, layer in enumerate(weights.layers)
                if layer.delta is None
            }
            most = zip(*widths.values(), strict=True)
            buffers = [torch.zeros(MAX_ROWS * max(sizes)) for sizes in most]
            for name, buffer in zip(("qkv", "heads"), buffers, strict=True):
                step.vector[VALUES.index(name)] = buffer.data_ptr()
            step.workspace = builder.workspace(library.step_bytes(step))
        except NotNative as reason:
            return str(reason)
        rows, num_rows = (RowStruct * MAX_ROWS)(), c_int64()
        part = PartStruct(step=pointer(step), row=addressof(rows), num_rows=addressof(num_rows))
        return cls(
            qkv_N=buffers[0], heads_N=buffers[1], widths=widths, part=part, rows=rows,
            num_rows=num_rows, kept=(step, *builder.kept),
        )  # fmt: skip

    def attend(self, layer: int, qkv_TQ: Tensor, sequence: int, start: int) -> Tensor:
        """Appends the keys and values of T tokens of a sequence at positions from `start`, and
        returns the outputs of a layer's heads, f32 [T, H]. The cache must have room."""
        found, number = [], list(self.widths).index(layer)
        for piece_TQ in qkv_TQ.split(MAX_ROWS):
            count = len(piece_TQ)
            self.num_rows.value = count
            for place in range(count):
                row = self.rows[place]  # type: ignore[index]
                row.position, row.sequence, row.source = start + place, sequence, -1
            _, heads_size = self.widths[layer]
            self.qkv_N[: piece_TQ.numel()] = piece_TQ.flatten()
            self.part.begin, self.part.end = number, number + 1
            HostNode(
                function=library.part_function(), argument=addressof(self.part), reads=(), writes=()
            ).run()
            found.append(self.heads_N[: count * heads_size].view(count, -1).clone())
            start += count
        return torch.cat(found)
