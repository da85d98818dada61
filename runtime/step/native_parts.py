"""The host's parts of a hybrid decode step, each a C function that a stream or a CUDA graph calls:
consecutive operations of the step program in one call, the cold units of a divided layer in
another.

They share a few buffers (`HostBuffers`), whose reads and writes the step program orders.

Letters: T rows of a step, F neurons of a layer, W words of F bits, S sequences, N blocks of one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import POINTER, Array, Structure, addressof, c_int64, c_void_p, pointer
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from hotsplit.model.spec import ModelSpec
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.device.streams import HostNode
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.ops.structs import MAX_ROWS, members
from hotsplit.runtime.step.native_step import (
    OpStruct,
    RowStruct,
    StepBuilder,
    StepStruct,
    overwritten,
)
from hotsplit.runtime.step.program import Op, name_of


class PartStruct(Structure):
    _fields_ = [
        ("step", POINTER(StepStruct)),
        *members(c_void_p, "row num_rows named logits"),
        *members(c_int64, "begin end"),
    ]


@dataclass(frozen=True, kw_only=True)
class StepBuffers:
    """The buffers of a step on one device, by the names of the program's values. A step of T rows
    uses the beginning of each: buffers["x"] is [T, size], or [size] for one row. `inputs` always
    have the axis T: tokens and positions, int64, sequences, int32, and of recurrent states runs of
    rows and the slots that take the states after a row, int32 (kernels.gpu.delta)."""

    num_rows: int
    inputs: Mapping[str, Tensor]  # "token", "position", "sequence", "runs", "writes"
    tables: Mapping[BlockTable, Tensor]  # int32 [S, N], those of a cache in blocks on a GPU
    values: Mapping[str, Tensor]  # [most rows, size], f32 but for "named", int32

    def __getitem__(self, name: str) -> Tensor:
        if name in self.inputs:
            return self.inputs[name][: self.num_rows]
        values = self.values[name]
        if len(values) < self.num_rows:  # logits, of fewer rows than a pass has
            return values
        return self.first(name, values.shape[-1])

    def first(self, name: str, size: int) -> Tensor:
        """A value with rows of this size, of a layer that has fewer values than others."""
        return beginning(self.values[name], self.num_rows, size)

    def rows(self, num_rows: int) -> Self:
        """The same memory for steps of this many rows."""
        return replace(self, num_rows=num_rows)


def beginning(values: Tensor, num_rows: int, size: int) -> Tensor:
    """The beginning of a buffer's memory as [T, size], or [size] for a single row."""
    flat = values.flatten()[: num_rows * size]
    return flat if num_rows == 1 else flat.view(num_rows, size)


def inputs_of(
    spec: ModelSpec, num_rows: int, num_runs: int, take: Callable[..., Tensor]
) -> dict[str, Tensor]:
    return {
        "token": take((num_rows,), torch.int64),
        "position": take((num_rows,), torch.int64),
        "sequence": take((num_rows,), torch.int32),
        "runs": take((num_runs, 3 * spec.has_states), torch.int32),
        "writes": take((num_rows * spec.has_states,), torch.int32),
    }


@dataclass(frozen=True, kw_only=True)
class HostBuffers(StepBuffers):
    """The step program's values on the host, pinned if there is a GPU. `structs` and `count` pass
    the rows to the host functions. "routed" has a router's result; "qkv"
    and "heads" are empty unless a GPU projects and the host attends."""

    structs: Array[RowStruct] = field(repr=False)
    count: c_int64 = field(repr=False)

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        *,
        is_pinned: bool,
        max_rows: int = 1,
        tables: Iterable[BlockTable] = (),
        attends: bool = False,
        most_logits: int | None = None,
    ) -> "HostBuffers":
        """Allocates the buffers. `tables`: the block tables of a cache on GPUs; `attends`: the host
        does, for a GPU."""

        def zeros(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=is_pinned)

        width = spec.hidden_size
        alike = ("ffn_in.0", "ffn_in.1", "ffn_out", "hot_out", "cold_out")
        sizes = {"x": width, **spec.value_sizes, **dict.fromkeys(alike, width)}
        sizes |= {
            "routed": 2 * spec.most_used,
            "qkv": attends * spec.most_qkv_size,
            "heads": attends * spec.most_heads_size,
        }
        values = {name: zeros((max_rows, size)) for name, size in sizes.items()}
        values["named"] = zeros((max_rows, -(-spec.most_named // 32)), torch.int32)
        values["logits"] = zeros((min(max_rows, most_logits or max_rows), spec.vocab_size))
        none = dict.fromkeys(("source", "reads", "writes", "begins", "keeps"), -1)
        row = RowStruct(has_logits=True, **none)
        return cls(
            num_rows=max_rows,
            inputs=inputs_of(spec, max_rows, max_rows, zeros),
            tables={
                table: zeros(tuple(table.block_SN.shape), torch.int32)
                for table in tables
                if not table.is_whole
            },
            values=values,
            structs=(RowStruct * max_rows)(*[row] * max_rows),
            count=c_int64(1),
        )

    def shared(self, name: str) -> Tensor | None:
        """A value that devices exchange; None for others, and for one whose place depends on the
        layer."""
        is_there = name in self.inputs or (name in self.values and name != "named")
        return self[name] if is_there else None


@dataclass(frozen=True, kw_only=True)
class NativeParts:
    """The CPU's parts of a step."""

    step: StepStruct
    host: HostBuffers
    ranges: dict[Op, tuple[int, int]]  # of native operations in `step`, by operation
    kept: tuple[object, ...]

    @classmethod
    def of(
        cls, weights: Weights, programs: Sequence[Sequence[Op]], host: HostBuffers
    ) -> list["NativeParts"]:
        """Builds the parts of several programs, given the operations of each in order; they share
        one workspace. Raises NotNative if the CPU kernels do not support the model."""
        builder = StepBuilder(weights.spec.value_sizes)
        ops = [op for program in programs for op in program]
        with_neurons = {op.layer for op in ops if op.kind == "neurons"}
        projected = {op.layer for op in ops if op.kind == "attend"}  # by a GPU
        indices = sorted({op.layer for op in ops if op.layer is not None})
        layers = [
            builder.attending(layer)
            if index in projected
            else builder.layer(layer, has_neurons=index in with_neurons)
            for index, layer in ((index, weights.layers[index]) for index in indices)
        ]
        step = builder.frame(weights, layers)
        step.max_rows = min(MAX_ROWS, len(host.structs))
        kinds = {op.kind for op in ops}
        if "embed" in kinds:
            step.embedding = builder.matrix(weights.embedding)
        if "head" in kinds:
            step.head = builder.linear(weights.head)
            step.output_norm = builder.output_norm(weights)
        for number, name in enumerate(builder.values.names):
            shared = host.shared(name)
            step.vector[number] = None if shared is None else shared.data_ptr()
        structs: list[OpStruct] = []
        of_step = {index: weights.layers[index] for index in indices}
        found = list[dict[Op, tuple[int, int]]]()
        for program in programs:
            found.append({})
            own = builder.lowered(program, of_step, weights.outer)
            for op, lowered in zip(program, own, strict=True):
                found[-1][op] = (len(structs), len(structs) + len(lowered))
                structs += lowered
        builder.ops(step, structs)
        step.workspace = builder.workspace(library.step_bytes(step))
        kept = (*builder.kept, host)
        return [cls(step=step, host=host, ranges=ranges, kept=kept) for ranges in found]

    def node(self, ops: Sequence[Op], named_TW: Tensor | None = None) -> HostNode:
        """The node for consecutive operations. With `named_TW`, predicted neurons are written there
        for other nodes."""
        host = self.host

        def shared(values: Iterable[str]) -> tuple[Tensor, ...]:
            names = dict.fromkeys(map(name_of, values))
            found = [named_TW if name == "named" else host.shared(name) for name in names]
            return tuple(tensor for tensor in found if tensor is not None)

        struct = PartStruct(
            step=pointer(self.step),
            row=addressof(host.structs),
            num_rows=addressof(host.count),
            named=None if named_TW is None else named_TW.data_ptr(),
            logits=host.values["logits"].data_ptr(),
            begin=self.ranges[ops[0]][0],
            end=self.ranges[ops[-1]][1],
        )
        return HostNode(
            function=library.address_of("hs_part"),
            argument=addressof(struct),
            reads=shared(value for op in ops for value in op.reads),
            writes=shared(value for op in ops for value in (*op.writes, *overwritten(op))),
            kept=(struct, self) if named_TW is None else (struct, self, named_TW),
        )
