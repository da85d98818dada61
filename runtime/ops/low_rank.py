"""A product of low rank: in torch, as a struct for C++, and as a GPU's kernels; model/low_rank.py
has the formula.

Letters: T tokens, D hidden size, R rank."""

from collections.abc import Iterator, Sequence
from ctypes import Structure
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.model.low_rank import LEFT, RIGHT
from hotsplit.model.low_rank import LowRank as Block
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.loaded_op import LoadedOp, carved, in_layer
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.ops.structs import MatrixStruct, Structs
from hotsplit.runtime.weights.matrix import Linear


class LowRankStruct(Structure):
    _fields_ = [("left", MatrixStruct), ("right", MatrixStruct)]


@dataclass(frozen=True, kw_only=True)
class LowRankOp(LoadedOp):
    block: Block
    left: Linear  # [R, D]
    right: Linear  # [D, R]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.left, self.right

    def struct(self, structs: Structs) -> LowRankStruct:
        return LowRankStruct(left=structs.linear(self.left), right=structs.linear(self.right))

    def launch(
        self, on: Launcher, read: Sequence[Tensor], written: Sequence[Tensor], scratch: Tensor
    ) -> None:
        ((x_D,), (y_D,)) = read, written
        inner_R = carved(scratch, x_D, self.block.rank)
        on.dot(self.left, x_D, inner_R)
        on.dot(self.right, inner_R, y_D)


def load(
    load: Reader, blocks: Sequence[Block], layer: int | None, device: torch.device
) -> Iterator[LowRankOp]:
    for block in blocks:
        left, right = (load.linear(in_layer(layer, name), device) for name in (LEFT, RIGHT))
        yield LowRankOp(block=block, left=left, right=right)
