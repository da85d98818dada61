"""The input of a draft block's layer, as a struct for C++; model/draft_block.py has the formula."""

from collections.abc import Iterator, Sequence
from ctypes import Structure
from dataclasses import dataclass, replace

import torch

from hotsplit.model.draft_block import JOIN, OF_EMBEDDING, OF_HIDDEN
from hotsplit.model.draft_block import DraftInput as Block
from hotsplit.runtime.ops.loaded_op import LoadedOp, in_layer
from hotsplit.runtime.ops.norm import Norm, NormStruct, norm_struct
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.ops.structs import MatrixStruct, Structs
from hotsplit.runtime.weights.matrix import Linear


class DraftInputStruct(Structure):
    _fields_ = [
        ("join", MatrixStruct),
        ("norm_of_embedding", NormStruct),
        ("norm_of_hidden", NormStruct),
    ]


@dataclass(frozen=True, kw_only=True)
class DraftInputOp(LoadedOp):
    block: Block
    join: Linear  # [D, 2 D]
    norm_of_embedding: Norm
    norm_of_hidden: Norm

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.join,)

    def struct(self, structs: Structs) -> DraftInputStruct:
        size = self.block.norm.size
        return DraftInputStruct(
            join=structs.linear(self.join),
            norm_of_embedding=norm_struct(structs, self.norm_of_embedding, size),
            norm_of_hidden=norm_struct(structs, self.norm_of_hidden, size),
        )


def load(
    load: Reader, blocks: Sequence[Block], layer: int | None, device: torch.device
) -> Iterator[DraftInputOp]:
    for block in blocks:
        of_embedding, of_hidden = (
            load.norm(block.norm, in_layer(layer, name), device)
            for name in (OF_EMBEDDING, OF_HIDDEN)
        )
        epsilon = of_hidden.epsilon * block.times**2  # the norm of h from that of times * h
        of_hidden = replace(of_hidden, epsilon=epsilon)
        join = load.linear(in_layer(layer, JOIN), device)
        yield DraftInputOp(
            block=block, join=join, norm_of_embedding=of_embedding, norm_of_hidden=of_hidden
        )
