"""The products around experts that read a latent: in torch, as structs for C++, and as a GPU's
kernels; model/latent_experts.py has the formulas."""

from collections.abc import Iterator, Sequence
from ctypes import Structure
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.model.latent_experts import FROM_LATENT, TO_LATENT, FromLatent, ToLatent
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.loaded_op import LoadedOp, in_layer
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.ops.structs import MatrixStruct, Structs
from hotsplit.runtime.weights.matrix import Linear


class LatentProductStruct(Structure):
    _fields_ = [("matrix", MatrixStruct)]


@dataclass(frozen=True, kw_only=True)
class LatentProduct(LoadedOp):
    block: ToLatent | FromLatent
    linear: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.linear,)

    def struct(self, structs: Structs) -> LatentProductStruct:
        return LatentProductStruct(matrix=structs.linear(self.linear))

    def launch(
        self, on: Launcher, read: Sequence[Tensor], written: Sequence[Tensor], scratch: Tensor
    ) -> None:
        on.dot(self.linear, read[0], written[0])


def load(
    load: Reader, blocks: Sequence[ToLatent | FromLatent], layer: int | None, device: torch.device
) -> Iterator[LatentProduct]:
    for block in blocks:
        name = TO_LATENT if isinstance(block, ToLatent) else FROM_LATENT
        yield LatentProduct(block=block, linear=load.linear(in_layer(layer, name), device))
