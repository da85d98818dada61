"""The host's parts of a hybrid decode step, each a C function that a CUDA graph calls: consecutive
operations of the step program in one call, the cold neurons of a divided layer in another.

All of them share a few vectors (`HostBuffers`), which is safe because the program orders whatever
reads and writes them.

Letters: D model width, F neurons of a layer, V vocabulary."""

from collections.abc import Iterable, Sequence
from ctypes import POINTER, Structure, addressof, c_int64, c_void_p, pointer
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkinfer.runtime.device.streams import HostNode
from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.model.layers import Weights
from sparkinfer.runtime.model.native_neurons import NativeNeurons
from sparkinfer.runtime.model.native_structs import NotNative
from sparkinfer.runtime.step.native_ops import VALUES, OpStruct, native_ops, overwritten
from sparkinfer.runtime.step.native_step import StepBuilder, StepStruct
from sparkinfer.runtime.step.program import Op, name_of


class PartStruct(Structure):
    _fields_ = [("step", POINTER(StepStruct)), ("token", c_void_p), ("position", c_void_p),
                ("named", c_void_p), ("logits", c_void_p),
                ("begin", c_int64), ("end", c_int64)]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HostBuffers:
    """Values of the program on the host, pinned if there is a GPU."""

    token_1: Tensor  # int64
    position_1: Tensor  # int64
    x_D: Tensor
    ffn_in_2D: Tensor
    named_W: Tensor  # int32 [F / 32 rounded up]
    ffn_out_D: Tensor
    hot_out_D: Tensor
    cold_out_D: Tensor
    logits_V: Tensor

    @classmethod
    def of(cls, width: int, num_neurons: int, vocab_size: int, *, is_pinned: bool) -> "HostBuffers":
        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, pin_memory=is_pinned)

        return cls(
            token_1=zeros(1, dtype=torch.int64),
            position_1=zeros(1, dtype=torch.int64),
            x_D=zeros(width),
            ffn_in_2D=zeros(2, width),
            named_W=zeros(-(-num_neurons // 32), dtype=torch.int32),
            ffn_out_D=zeros(width),
            hot_out_D=zeros(width),
            cold_out_D=zeros(width),
            logits_V=zeros(vocab_size),
        )

    def value(self, name: str) -> Tensor | None:
        """A value by its name in the program; None if no other device has it. Those whose place
        depends on the layer are not among them."""
        base, _, number = name.partition(".")
        if base == "ffn_in":
            return self.ffn_in_2D[int(number)]
        fields = (
            "token_1",
            "position_1",
            "x_D",
            "ffn_out_D",
            "hot_out_D",
            "cold_out_D",
            "logits_V",
        )
        found: Tensor | None = next(
            (getattr(self, field) for field in fields if field.rpartition("_")[0] == base), None
        )
        return found


@dataclass(frozen=True, kw_only=True)
class NativeParts:
    """The CPU's parts of a step."""

    step: StepStruct
    host: HostBuffers
    ranges: dict[Op, tuple[int, int]]  # of the operations of `step`
    kept: tuple[object, ...]

    @classmethod
    def of(cls, weights: Weights, ops: Sequence[Op], host: HostBuffers) -> "NativeParts":
        """Builds the parts for the operations that the host runs in line, in order. Raises NotNative
        for what the kernels do not cover."""
        if not library.is_available():
            raise NotNative("the C++ kernels are not built")
        builder = StepBuilder()
        with_neurons = {op.layer for op in ops if op.kind == "neurons"}
        indices = sorted({op.layer for op in ops if op.layer is not None})
        layers = [
            builder.layer(layer, layer.ffn.blocks if index in with_neurons else ())
            for index, layer in ((index, weights.layers[index]) for index in indices)
        ]
        step = builder.frame(weights, layers)
        kinds = {op.kind for op in ops}
        if "embed" in kinds:
            step.embedding = builder.matrix(weights.embedding)
        if "head" in kinds:
            step.head = builder.linear(weights.head)
            step.output_norm = builder.norm(weights.output_norm)
        for number, name in enumerate(VALUES):
            shared = host.value(name)
            step.vector[number] = None if shared is None else shared.data_ptr()
        ranges: dict[Op, tuple[int, int]] = {}
        structs: list[OpStruct] = []
        row_L = {index: row for row, index in enumerate(indices)}
        for op, lowered in zip(ops, native_ops(ops, row_L), strict=True):
            ranges[op] = (len(structs), len(structs) + len(lowered))
            structs += lowered
        builder.ops(step, structs)
        step.workspace = builder.workspace(library.step_bytes(step))
        return cls(step=step, host=host, ranges=ranges, kept=(*builder.kept, host))

    def node(self, ops: Sequence[Op], named_W: Tensor | None = None) -> HostNode:
        """The node for consecutive operations. Predicted neurons are written to `named_W`, for
        others to read."""
        host = self.host

        def shared(values: Iterable[str]) -> tuple[Tensor, ...]:
            names = dict.fromkeys(map(name_of, values))
            found = [named_W if name == "named" else host.value(name) for name in names]
            return tuple(tensor for tensor in found if tensor is not None)

        struct = PartStruct(
            step=pointer(self.step),
            token=host.token_1.data_ptr(),
            position=host.position_1.data_ptr(),
            named=None if named_W is None else named_W.data_ptr(),
            logits=host.logits_V.data_ptr(),
            begin=self.ranges[ops[0]][0],
            end=self.ranges[ops[-1]][1],
        )
        return HostNode(
            function=library.part_function(),
            argument=addressof(struct),
            reads=shared(value for op in ops for value in op.reads),
            writes=shared(value for op in ops for value in (*op.writes, *overwritten(op))),
            kept=(struct, self) if named_W is None else (struct, self, named_W),
        )


def neuron_node(neurons: NativeNeurons) -> HostNode:
    """The node for the cold neurons of a layer."""
    function, argument = neurons.node
    reads = (neurons.x_D,) if neurons.named_W is None else (neurons.x_D, neurons.named_W)
    writes = (neurons.y_D,) if neurons.fired_W is None else (neurons.y_D, neurons.fired_W)
    return HostNode(
        function=function, argument=argument, reads=reads, writes=writes, kept=(neurons,)
    )
