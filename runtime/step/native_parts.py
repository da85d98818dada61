"""The host's parts of a hybrid decode step, each a C function that a stream or a CUDA graph calls:
consecutive operations of the step program in one call, the cold neurons or experts of a divided
layer in another.

They share a few buffers (`HostBuffers`), whose reads and writes the step program orders.

Letters: T rows of a step, D model width, F neurons of a layer, W words of F bits, V vocabulary, S
sequences, N blocks of one, Q queries, keys and values of all heads, H queries' values alone, R
values of a router's result."""

from collections.abc import Iterable, Mapping, Sequence
from ctypes import POINTER, Array, Structure, addressof, c_int64, c_void_p, pointer
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

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
class HostBuffers:
    """The step program's values on the host, pinned if there is a GPU. `rows(1)` has no T axis,
    except for tokens, positions and sequences. `structs` and `count` pass the rows to the host
    functions."""

    token_T: Tensor  # int64
    position_T: Tensor  # int64
    sequence_T: Tensor  # int32
    run_T3: Tensor  # int32, runs of rows and the slots of their states: see DeviceBuffers
    writes_T: Tensor  # int32
    tables: Mapping[BlockTable, Tensor]  # int32 [S, N], those that a GPU reads
    x_TD: Tensor  # with as many values as the hidden state has
    own: Mapping[str, Tensor]  # the values of position-wise operations, by name
    ffn_in_2TD: Tensor
    named_TW: Tensor  # int32
    ffn_out_TD: Tensor
    hot_out_TD: Tensor
    cold_out_TD: Tensor
    logits_TV: Tensor
    # A layer with fewer values or neurons than another uses the beginning of these three and of
    # `named_TW`, with rows of its own length. The last two are empty unless a GPU projects and the
    # host attends.
    routed_TR: Tensor  # numbers of experts, and their weights
    qkv_TQ: Tensor
    heads_TH: Tensor
    structs: Array[RowStruct] = field(repr=False)
    count: c_int64 = field(repr=False)

    @classmethod
    def of(
        cls,
        width: int,
        num_neurons: int,
        vocab_size: int,
        *,
        is_pinned: bool,
        max_rows: int = 1,
        tables: Iterable[BlockTable] = (),
        attended: tuple[int, int] = (0, 0),
        num_used: int = 0,
        has_states: bool = False,
        value_sizes: Mapping[str, int] | None = None,
        most_logits: int | None = None,
    ) -> "HostBuffers":
        """Allocates the buffers. `num_used`: the most experts of a token; `value_sizes`: those of
        the model's spec. `tables`: the block tables of a cache on GPUs; `attended`: Q and H, if the
        host attends for a GPU."""

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, pin_memory=is_pinned)

        rows, sizes = max_rows, value_sizes or {}
        structs = (RowStruct * rows)(
            *[RowStruct(has_logits=True, source=-1, reads=-1, writes=-1) for _ in range(rows)]
        )
        return cls(
            token_T=zeros(rows, dtype=torch.int64),
            position_T=zeros(rows, dtype=torch.int64),
            sequence_T=zeros(rows, dtype=torch.int32),
            run_T3=zeros(rows, 3 * has_states, dtype=torch.int32),
            writes_T=zeros(rows * has_states, dtype=torch.int32),
            tables={
                table: zeros(*table.block_SN.shape, dtype=torch.int32)
                for table in tables
                if not table.is_whole
            },
            x_TD=zeros(rows, sizes.get("x", width)),
            own={name: zeros(rows, size) for name, size in sizes.items() if name != "x"},
            ffn_in_2TD=zeros(2, rows, width),
            named_TW=zeros(rows, -(-num_neurons // 32), dtype=torch.int32),
            ffn_out_TD=zeros(rows, width),
            hot_out_TD=zeros(rows, width),
            cold_out_TD=zeros(rows, width),
            logits_TV=zeros(min(rows, most_logits or rows), vocab_size),
            routed_TR=zeros(rows, 2 * num_used),
            qkv_TQ=zeros(rows, attended[0]),
            heads_TH=zeros(rows, attended[1]),
            structs=structs,
            count=c_int64(1),
        )

    @property
    def max_rows(self) -> int:
        return len(self.structs)

    def rows(self, num_rows: int) -> "HostBuffers":
        """The same memory with shapes for steps of `num_rows` rows."""
        changes: dict[str, Any] = {name: getattr(self, name)[:num_rows] for name in _OF_STEP}
        changes |= {
            name: first(getattr(self, name), num_rows)
            for name in _OF_ROWS
            if num_rows <= len(getattr(self, name))
        }
        changes["ffn_in_2TD"] = first(self.ffn_in_2TD, num_rows, axis=1)
        changes["own"] = {name: first(values, num_rows) for name, values in self.own.items()}
        return replace(self, **changes)

    def value(self, name: str) -> Tensor | None:
        """The buffer of a value in the program; None if no device shares it, or if its place
        depends on the layer."""
        base, _, number = name.partition(".")
        if base == "ffn_in":
            return self.ffn_in_2TD[int(number)]
        if name in self.own:
            return self.own[name]
        found: Tensor | None = next(
            (getattr(self, each) for each in _SHARED if each.rpartition("_")[0] == base), None
        )
        return found


_OF_STEP = ("token_T", "position_T", "sequence_T", "run_T3", "writes_T")
_OF_ROWS = (
    "x_TD",
    "named_TW",
    "ffn_out_TD",
    "hot_out_TD",
    "cold_out_TD",
    "logits_TV",
    "routed_TR",
    "qkv_TQ",
    "heads_TH",
)
_SHARED = ("token_T", "position_T", *(name for name in _OF_ROWS if name != "named_TW"))


def first(values: Tensor, num_rows: int, axis: int = 0) -> Tensor:
    """The values of the first rows; for a single row, without the axis."""
    if num_rows == 1:
        return values.select(axis, 0)
    return values.narrow(axis, 0, num_rows)


def beginning(values: Tensor, num_rows: int, size: int) -> Tensor:
    """The beginning of a buffer's memory as [T, size], or [size] for a single row."""
    flat = values.flatten()[: num_rows * size]
    return flat if num_rows == 1 else flat.view(num_rows, size)


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
        step.max_rows = min(MAX_ROWS, host.max_rows)
        kinds = {op.kind for op in ops}
        if "embed" in kinds:
            step.embedding = builder.matrix(weights.embedding)
        if "head" in kinds:
            step.head = builder.linear(weights.head)
            step.output_norm = builder.output_norm(weights)
        for number, name in enumerate(builder.values.names):
            shared = host.value(name)
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
            found = [named_TW if name == "named" else host.value(name) for name in names]
            return tuple(tensor for tensor in found if tensor is not None)

        struct = PartStruct(
            step=pointer(self.step),
            row=addressof(host.structs),
            num_rows=addressof(host.count),
            named=None if named_TW is None else named_TW.data_ptr(),
            logits=host.logits_TV.data_ptr(),
            begin=self.ranges[ops[0]][0],
            end=self.ranges[ops[-1]][1],
        )
        return HostNode(
            function=library.part_function(),
            argument=addressof(struct),
            reads=shared(value for op in ops for value in op.reads),
            writes=shared(value for op in ops for value in (*op.writes, *overwritten(op))),
            kept=(struct, self) if named_TW is None else (struct, self, named_TW),
        )
