"""Attention and delta nets on the host in prefill passes of models divided between a GPU and the CPU, in native
operations: of a layer on the host as a whole; of one whose keys and values alone are on the host without its
projections, which a GPU computes.

Each row is bit-identical to that of a native step, for any number of rows.

Letters: T tokens, N values of a token, M values of MAX_ROWS tokens in the layer with most."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, addressof, c_int64, pointer
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hotsplit.runtime.cache.state_slots import NO_SLOT, StateRun
from hotsplit.runtime.device.streams import HostNode
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.ops.structs import MAX_ROWS, Structs
from hotsplit.runtime.step.native_ops import VALUES, attend_op, mix_op
from hotsplit.runtime.step.native_parts import PartStruct
from hotsplit.runtime.step.native_step import RowStruct, StepBuilder, StepStruct
from hotsplit.runtime.weights import gpu_products

Way = Literal["whole", "attend"]


def host_ways(weights: Weights) -> dict[int, Way]:
    """What the host computes of each layer's attention or delta net, by layer."""
    ways: dict[int, Way] = {}
    for index, layer in enumerate(weights.layers):
        if not gpu_products.is_gpu(layer.device):
            ways[index] = "whole"
        elif layer.delta is None and not gpu_products.is_gpu(layer.attention.cache.device):
            ways[index] = "attend"
    return ways


@dataclass(frozen=True, kw_only=True)
class HostCall:
    """A layer's operation: its number in the step, and the buffers and numbers of values of its input and
    output."""

    number: int
    in_M: Tensor
    out_M: Tensor
    num_outputs: int
    layer: Layer
    is_whole: bool  # with its projections


@dataclass(frozen=True, kw_only=True)
class HostMixers:
    """The operations of layers with a way, up to MAX_ROWS rows at a time."""

    calls: Mapping[int, HostCall]  # by layer
    step: StepStruct
    num_bytes: int  # of its workspace, which each call allocates
    part: PartStruct
    rows: Array[RowStruct]  # MAX_ROWS of them
    num_rows: c_int64
    kept: tuple[object, ...]

    @classmethod
    def of(cls, weights: Weights, ways: Mapping[int, Way]) -> "HostMixers":
        """Raises NotNative if the kernels do not cover one of the operations."""
        builder = StepBuilder({})
        layers = {index: weights.layers[index] for index in ways}
        buffers: dict[str, Tensor] = {}
        values: dict[int, tuple[str, int, str, int]] = {}
        for index, layer in layers.items():
            width = layer.mixer.output.num_outputs
            values[index] = "attn_in", width, "attn_out", width
            if ways[index] == "attend":
                projected, heads = layer.mixer.widths
                values[index] = "qkv", projected, "heads", heads
        for in_name, in_size, out_name, out_size in values.values():
            for name, size in ((in_name, in_size), (out_name, out_size)):
                if name not in buffers or len(buffers[name]) < MAX_ROWS * size:
                    buffers[name] = torch.zeros(MAX_ROWS * size)
        step = builder.frame(
            weights, [builder.mixer(x, projects=ways[i] == "whole") for i, x in layers.items()]
        )
        builder.ops(
            step,
            [
                attend_op(n) if ways[i] == "attend" else mix_op(n, layers[i].delta is not None)
                for n, i in enumerate(layers)
            ],
        )
        step.max_rows, step.num_neurons = MAX_ROWS, 1
        for name, buffer in buffers.items():
            step.vector[VALUES.index(name)] = buffer.data_ptr()
        num_bytes = library.step_bytes(step)
        builder.workspace(min(num_bytes, 0))  # raises if sizes are inconsistent
        rows, num_rows = (RowStruct * MAX_ROWS)(), c_int64()
        part = PartStruct(step=pointer(step), row=addressof(rows), num_rows=addressof(num_rows))
        calls = {
            index: HostCall(
                number=number,
                in_M=buffers[values[index][0]],
                out_M=buffers[values[index][2]],
                num_outputs=values[index][3],
                layer=layer,
                is_whole=ways[index] == "whole",
            )
            for number, (index, layer) in enumerate(layers.items())
        }
        return cls(
            calls=calls,
            step=step,
            num_bytes=num_bytes,
            part=part,
            rows=rows,
            num_rows=num_rows,
            kept=tuple(builder.kept),
        )

    def run(
        self,
        index: int,
        x_TN: Tensor,
        *,
        sequence: int,
        start: int,
        slots: StateRun | None = None,
        on_heads: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """The output f32 [T, N] of a layer's operation for T tokens of a sequence at positions from `start`:
        of the normed input, or of queries, keys and values. Appends to the cache, which must have room, or
        moves the state from slot to slot. `on_heads` receives the outputs of the heads of a whole layer."""
        call, found, size = self.calls[index], [], self.calls[index].layer.mixer.widths[1]
        heads_TH = torch.empty(len(x_TN), size) if on_heads else None
        reads, writes_T = (
            (NO_SLOT, (NO_SLOT,) * len(x_TN)) if slots is None else (slots.reads, slots.writes)
        )
        assert slots is None or len(x_TN) <= MAX_ROWS, "a state would be needed between pieces"
        memory = Structs()
        self.step.workspace = memory.workspace(self.num_bytes)
        for first in range(0, len(x_TN), MAX_ROWS):
            piece_TN = x_TN[first : first + MAX_ROWS]
            self._set_rows(sequence, start + first, reads, writes_T[first : first + MAX_ROWS])
            call.in_M[: piece_TN.numel()] = piece_TN.flatten()
            self.part.begin, self.part.end = call.number, call.number + 1
            self.step.seen_heads = None if heads_TH is None else heads_TH[first:].data_ptr()
            HostNode(
                function=library.part_function(), argument=addressof(self.part), reads=(), writes=()
            ).run()
            size = len(piece_TN) * call.num_outputs
            found.append(call.out_M[:size].view(len(piece_TN), -1).clone())
        call.layer.mixer.on_bytes(self.step.attention_bytes)
        self.step.attention_bytes = 0
        if on_heads is not None and heads_TH is not None:
            on_heads(heads_TH)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _set_rows(self, sequence: int, start: int, reads: int, writes_T: Sequence[int]) -> None:
        self.num_rows.value = len(writes_T)
        for place, slot in enumerate(writes_T):
            row = self.rows[place]
            row.position, row.sequence, row.source = start + place, sequence, -1
            row.reads, row.writes = reads, slot
