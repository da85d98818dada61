"""Embeddings of n-grams: loaded, and as structs for C++ (kernels/cpu/ngrams.cpp); model/ngrams.py
has the formulas.

Letters: N the longest n-gram, G rows of a token for each length, E values of all, S streams, D
hidden size, X = S D, J taps."""

from collections.abc import Iterator, Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.model import ngrams as blocks_of
from hotsplit.runtime.ops.loaded_op import StatefulOp, in_layer
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.ops.structs import MatrixStruct, Structs, members
from hotsplit.runtime.weights.matrix import Linear, Matrix, matrix_of


class NgramRowsStruct(Structure):
    _fields_ = [
        ("table", MatrixStruct),
        *members(c_void_p, "multiplier size offset state kept"),
        *members(c_int64, "length per_length end_token num_slots num_kept"),
    ]


class NgramInputsStruct(Structure):
    _fields_ = [
        *members(MatrixStruct, "key value"),
        *members(c_void_p, "key_norm query_norm conv_norm conv state kept"),
        *members(c_int64, "num_streams num_taps distance num_slots num_kept"),
        ("epsilon", c_float),
        ("unused", c_int32),
    ]


@dataclass(frozen=True, kw_only=True)
class NgramRowsOp(StatefulOp):
    """A token's rows, on the host."""

    block: blocks_of.NgramRows
    table: Matrix

    def struct(self, structs: Structs) -> NgramRowsStruct:
        block, (state,) = self.block, self.state.tensors

        def integers(values: Sequence[int]) -> int:
            return structs.pointer(torch.tensor(values, dtype=torch.int64), torch.int64)

        return NgramRowsStruct(
            table=structs.matrix(self.table),
            multiplier=integers(block.multipliers),
            size=integers(block.sizes),
            offset=integers(block.offsets),
            state=structs.pointer(state, torch.float32),
            kept=structs.pointer(self.state.kept_RX, torch.float32),
            length=block.length,
            per_length=block.per_length,
            end_token=block.end_token,
            num_slots=len(state),
            num_kept=len(self.state.kept_RX),
        )


@dataclass(frozen=True, kw_only=True)
class NgramInputsOp(StatefulOp):
    block: blocks_of.NgramInputs
    key: Linear  # [X, E]
    value: Linear  # [D, E]
    norms_X: tuple[Tensor, ...]  # of keys, of queries, of what the convolution reads
    conv_XJ: Tensor

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.key, self.value

    def struct(self, structs: Structs) -> NgramInputsStruct:
        """Has a copy of the convolution's weights, tap by tap."""
        block, (state,) = self.block, self.state.tensors
        of_key, of_query, of_conv = (structs.vector(each, block.size) for each in self.norms_X)
        return NgramInputsStruct(
            key=structs.linear(self.key),
            value=structs.linear(self.value),
            key_norm=of_key,
            query_norm=of_query,
            conv_norm=of_conv,
            conv=structs.vector(self.conv_XJ.t().contiguous(), block.num_taps, block.size),
            state=structs.pointer(state, torch.float32),
            kept=structs.pointer(self.state.kept_RX, torch.float32),
            num_streams=block.num_streams,
            num_taps=block.num_taps,
            distance=block.distance,
            num_slots=len(state),
            num_kept=len(self.state.kept_RX),
            epsilon=block.epsilon,
        )


def load(
    load: Reader,
    blocks: Sequence[blocks_of.NgramRows | blocks_of.NgramInputs],
    layer: int | None,
    device: torch.device,
) -> Iterator[StatefulOp]:
    """The table stays in the file: a token reads a few rows of it."""
    for block in blocks:
        state = load.state(block, device)
        if isinstance(block, blocks_of.NgramRows):
            table = matrix_of(load.model.tensors[f"{blocks_of.TABLE}.weight"], device)
            yield NgramRowsOp(block=block, table=table, state=state)
            continue
        yield NgramInputsOp(
            block=block,
            key=load.linear(in_layer(layer, blocks_of.KEY), device),
            value=load.linear(in_layer(layer, blocks_of.VALUE), device),
            norms_X=tuple(
                load.own_vector(in_layer(layer, f"{name}.weight"), device)
                for name in blocks_of.NORMS
            ),
            conv_XJ=load.own_vector(in_layer(layer, f"{blocks_of.CONV}.weight"), device),
            state=state,
        )
