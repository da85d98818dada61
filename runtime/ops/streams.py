"""Operations on the streams of a hidden state: loaded, and as structs for C++
(kernels/cpu/streams.cpp); model/streams.py has the formulas.

Letters: S streams, D hidden size, X = S D, R rank."""

from collections.abc import Iterator, Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.model import streams as blocks_of
from hotsplit.runtime.ops.loaded_op import LoadedOp, in_layer
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.ops.structs import MatrixStruct, Structs
from hotsplit.runtime.weights.matrix import Linear


class StreamCountStruct(Structure):
    _fields_ = [("num_streams", c_int64)]


class MeanOfStreamsStruct(Structure):
    _fields_ = [
        ("input", MatrixStruct * 2),
        ("up", MatrixStruct),
        ("norm", c_void_p),
        ("num_streams", c_int64),
        ("epsilon", c_float),
        ("unused", c_int32),
    ]


@dataclass(frozen=True, kw_only=True)
class CopiesOrSums(LoadedOp):
    """Streams from an embedding, or with a block's output."""

    block: blocks_of.BeginStreams | blocks_of.ToStreams

    def struct(self, structs: Structs) -> StreamCountStruct:
        return StreamCountStruct(num_streams=self.block.num_streams)


@dataclass(frozen=True, kw_only=True)
class MeanOfStreamsOp(LoadedOp):
    block: blocks_of.MeanOfStreams
    norm_X: Tensor
    down: Linear  # [R, X]
    up: Linear  # [X, R]
    inject: Linear | None  # [S, X]

    @property
    def linears(self) -> tuple[Linear, ...]:
        own = () if self.inject is None else (self.inject,)
        return self.down, *own, self.up

    def struct(self, structs: Structs) -> MeanOfStreamsStruct:
        inject = MatrixStruct() if self.inject is None else structs.linear(self.inject)
        return MeanOfStreamsStruct(
            input=(MatrixStruct * 2)(structs.linear(self.down), inject),
            up=structs.linear(self.up),
            norm=structs.vector(self.norm_X, self.up.num_outputs),
            num_streams=self.block.num_streams,
            epsilon=self.block.epsilon,
        )


def load(
    load: Reader, blocks: Sequence[blocks_of.OfStreams], layer: int | None, device: torch.device
) -> Iterator[LoadedOp]:
    for block in blocks:
        if not isinstance(block, blocks_of.MeanOfStreams):
            assert isinstance(block, blocks_of.BeginStreams | blocks_of.ToStreams), block
            yield CopiesOrSums(block=block)
            continue
        stem = in_layer(layer, block.stem)
        yield MeanOfStreamsOp(
            block=block,
            norm_X=load.own_vector(f"{stem}_norm.weight", device),
            down=load.linear(f"{stem}_down", device),
            up=load.linear(f"{stem}_up", device),
            inject=load.linear(f"{stem}_inject", device) if block.injects else None,
        )
