"""The input and the output of an assistant, as structs for C++; model/assistant.py has the
formulas."""

from collections.abc import Iterator, Sequence
from ctypes import Structure
from dataclasses import dataclass

import torch

from hotsplit.model.assistant import POST, PRE, AssistantInput, AssistantOutput
from hotsplit.runtime.ops.loaded_op import LoadedOp, in_layer
from hotsplit.runtime.ops.norm import Norm, NormStruct, norm_struct
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.ops.structs import MatrixStruct, Structs
from hotsplit.runtime.weights.matrix import Linear


class AssistantInputStruct(Structure):
    _fields_ = [("projection", MatrixStruct)]


class AssistantOutputStruct(Structure):
    _fields_ = [("projection", MatrixStruct), ("norm", NormStruct)]


@dataclass(frozen=True, kw_only=True)
class AssistantInputOp(LoadedOp):
    block: AssistantInput
    projection: Linear  # [D, 2 M]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.projection,)

    def struct(self, structs: Structs) -> AssistantInputStruct:
        return AssistantInputStruct(projection=structs.linear(self.projection))


@dataclass(frozen=True, kw_only=True)
class AssistantOutputOp(LoadedOp):
    block: AssistantOutput
    projection: Linear  # [M, D]
    norm: Norm

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.projection,)

    def struct(self, structs: Structs) -> AssistantOutputStruct:
        return AssistantOutputStruct(
            projection=structs.linear(self.projection),
            norm=norm_struct(structs, self.norm, self.block.norm.size),
        )


def load(
    load: Reader,
    blocks: Sequence[AssistantInput | AssistantOutput],
    layer: int | None,
    device: torch.device,
) -> Iterator[LoadedOp]:
    for block in blocks:
        name = PRE if isinstance(block, AssistantInput) else POST
        projection = load.linear(in_layer(layer, name), device)
        if isinstance(block, AssistantInput):
            yield AssistantInputOp(block=block, projection=projection)
        else:
            norm = load.norm(block.norm, in_layer(layer, block.norm.name), device)
            yield AssistantOutputOp(block=block, projection=projection, norm=norm)
