"""Operations on the planes of a hidden state: in torch, as structs for C++, and as a GPU's kernels;
model/planes.py has the formulas.

Letters: T tokens, P planes, D hidden size, X = P D."""

from collections.abc import Iterator, Sequence
from ctypes import POINTER, Structure, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.model import planes as blocks_of
from hotsplit.model.planes import LEAST_SQUARE
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.loaded_op import LoadedOp, carved, in_layer
from hotsplit.runtime.ops.norm import Norm, NormStruct, launch_add_norm, norm_struct
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.ops.structs import MatrixStruct, Structs
from hotsplit.runtime.weights.matrix import Linear


class PlaneRouterStruct(Structure):
    _fields_ = [("norm", NormStruct), ("matrix", MatrixStruct)]


class PredictPlanesStruct(Structure):
    _fields_ = [("router", PlaneRouterStruct), ("mix", c_void_p)]


class CorrectPlanesStruct(Structure):
    _fields_ = [("router", PlaneRouterStruct), ("mix", c_void_p), ("scale", c_void_p)]


class AddToPlanesStruct(Structure):
    _fields_ = [("num_planes", c_int64)]


class PlaneEndsStruct(Structure):
    _fields_ = [("other", POINTER(MatrixStruct)), ("num_planes", c_int64)]


@dataclass(frozen=True, kw_only=True)
class PlaneRouter:
    """Chooses shares of planes, for both operations of a layer."""

    norm: Norm
    # Whose results are the matrix's inputs; made at load, which streams wait for.
    input_norm: Norm
    matrix: Linear  # [P, D]

    def struct(self, structs: Structs) -> PlaneRouterStruct:
        norm = norm_struct(structs, self.norm, self.matrix.weight.width)
        return PlaneRouterStruct(norm=norm, matrix=structs.linear(self.matrix))

    def launch(self, on: Launcher, x_D: Tensor, scratch: Tensor) -> Tensor:
        """What it chooses, in `scratch`."""
        normed_D = carved(scratch, x_D, x_D.shape[-1])
        choice_P = carved(scratch[normed_D.numel() :], x_D, self.matrix.num_outputs)
        launch_add_norm(on, x_D, None, self.input_norm, normed_D, None)
        on.dot(self.matrix, normed_D, choice_P, cap=1.0)
        return choice_P


@dataclass(frozen=True, kw_only=True)
class PlanesOp(LoadedOp):
    block: blocks_of.OfPlanes


@dataclass(frozen=True, kw_only=True)
class PredictPlanesOp(PlanesOp):
    router: PlaneRouter
    mix_QP: Tensor  # Q = P P

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.router.matrix,)

    def struct(self, structs: Structs) -> PredictPlanesStruct:
        planes = self.block.num_planes
        mix = structs.vector(self.mix_QP, planes * planes, planes)
        return PredictPlanesStruct(router=self.router.struct(structs), mix=mix)

    def launch(
        self, on: Launcher, read: Sequence[Tensor], written: Sequence[Tensor], scratch: Tensor
    ) -> None:
        active_D, x_X = written
        choice_P = self.router.launch(on, x_X[..., : active_D.shape[-1]], scratch)
        on.run(on.kernels.predict_planes, choice_P, self.mix_QP, x_X, active_D)


@dataclass(frozen=True, kw_only=True)
class CorrectPlanesOp(PlanesOp):
    router: PlaneRouter
    mix_PP: Tensor
    scale_D: Tensor

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.router.matrix,)

    def struct(self, structs: Structs) -> CorrectPlanesStruct:
        planes = self.block.num_planes
        return CorrectPlanesStruct(
            router=self.router.struct(structs),
            mix=structs.vector(self.mix_PP, planes, planes),
            scale=structs.vector(self.scale_D, self.router.matrix.weight.width),
        )

    def launch(
        self, on: Launcher, read: Sequence[Tensor], written: Sequence[Tensor], scratch: Tensor
    ) -> None:
        active_D, x_X = written
        choice_P = self.router.launch(on, active_D, scratch)
        on.run(on.kernels.correct_planes, choice_P, self.mix_PP, self.scale_D, x_X, active_D)


@dataclass(frozen=True, kw_only=True)
class AddToPlanesOp(PlanesOp):
    def struct(self, structs: Structs) -> AddToPlanesStruct:
        return AddToPlanesStruct(num_planes=self.block.num_planes)

    def launch(
        self, on: Launcher, read: Sequence[Tensor], written: Sequence[Tensor], scratch: Tensor
    ) -> None:
        on.run(on.kernels.add_to_planes, *read)


@dataclass(frozen=True, kw_only=True)
class PlaneEnds(PlanesOp):
    matrices: tuple[Linear, ...]  # [D, D] each, of all planes but the first

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.matrices

    def struct(self, structs: Structs) -> PlaneEndsStruct:
        other = structs.array(MatrixStruct, map(structs.linear, self.matrices))
        return PlaneEndsStruct(other=other, num_planes=self.block.num_planes)


class BeginPlanesOp(PlaneEnds):
    pass


class EndPlanesOp(PlaneEnds):
    pass


def like(of_TD: Tensor, x_TD: Tensor) -> Tensor:
    """Rows of `x_TD` with the magnitudes of those of `of_TD`."""
    own_T1 = x_TD.square().mean(1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
    return x_TD * of_TD.square().mean(1, keepdim=True).sqrt() / own_T1


def load(
    load: Reader, blocks: Sequence[blocks_of.OfPlanes], layer: int | None, device: torch.device
) -> Iterator[PlanesOp]:
    router: PlaneRouter | None = None

    def vector(name: str) -> Tensor:
        return load.own_vector(in_layer(layer, f"{name}.weight"), device)

    for block in blocks:
        match block:
            case blocks_of.PredictPlanes():
                norm = load.norm(block.norm, in_layer(layer, block.norm.name), device)
                router = PlaneRouter(
                    norm=norm,
                    input_norm=norm.times(1 / len(norm.weight_D)),
                    matrix=load.linear(in_layer(layer, blocks_of.ROUTER), device),
                )
                yield PredictPlanesOp(block=block, router=router, mix_QP=vector(blocks_of.PREDICT))
            case blocks_of.CorrectPlanes():
                assert router is not None, "planes are corrected before they are predicted"
                mix_PP, scale_D = vector(blocks_of.CORRECT), vector(blocks_of.SCALE)
                yield CorrectPlanesOp(block=block, router=router, mix_PP=mix_PP, scale_D=scale_D)
            case blocks_of.AddToPlanes():
                yield AddToPlanesOp(block=block)
            case _:
                names = [name.removesuffix(".weight") for name in block.shapes(1)]
                matrices = tuple(load.linear(in_layer(layer, name), device) for name in names)
                is_first = isinstance(block, blocks_of.BeginPlanes)
                yield (BeginPlanesOp if is_first else EndPlanesOp)(block=block, matrices=matrices)
