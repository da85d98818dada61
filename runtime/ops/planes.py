"""The planes of a hidden state: in torch, as structs for C++, and as a GPU's kernels; the formulas are in
model/planes.py.

Letters: T tokens, P planes, D hidden size, X = P D, R rank."""

from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hotsplit.model.planes import LEAST_SQUARE
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.norm import Norm, NormStruct, launch_add_norm, norm_struct
from hotsplit.runtime.ops.structs import MatrixStruct, Structs
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.matrix import Linear


@dataclass(frozen=True, kw_only=True)
class Planes:
    """What a layer has for its planes."""

    norm: Norm
    router: Linear  # [P, D]
    predict_QP: Tensor  # Q = P P
    correct_PP: Tensor
    scale_D: Tensor
    on_bytes: Callable[[int], None]  # receives weight bytes read by the CPU

    @property
    def num_planes(self) -> int:
        return len(self.correct_PP)

    @cached_property
    def router_norm(self) -> Norm:
        """The norm whose results are the router's inputs."""
        return self.norm.times(1 / len(self.norm.weight_D))

    def run(self, kind: str, read: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The values that an operation of planes writes, from those that it reads."""
        if kind == "add to planes":
            return (self.add(*read),)
        x_TX, active_TD = self.predict(*read) if kind == "predict planes" else self.correct(*read)
        return active_TD, x_TX

    def predict(self, x_TX: Tensor) -> tuple[Tensor, Tensor]:
        """The planes' estimates [T, X], and the active one [T, D]."""
        x_TPD = self._apart(x_TX)
        mix_TPP = (self._choice(x_TPD[:, 0]) @ self.predict_QP.T).unflatten(
            1, (self.num_planes, -1)
        )
        found_TPD = x_TPD + mix_TPP @ x_TPD
        return found_TPD.flatten(1), found_TPD[:, 0].contiguous()

    def correct(self, active_TD: Tensor, x_TX: Tensor) -> tuple[Tensor, Tensor]:
        """The planes [T, X] corrected by what the layer made of the active one, and this one times the
        scale."""
        x_TPD = self._apart(x_TX)
        share_TP = 1.0 + self._choice(active_TD) @ self.correct_PP.T
        found_TPD = x_TPD + share_TP[:, :, None] * (active_TD - x_TPD[:, 0])[:, None]
        return found_TPD.flatten(1), found_TPD[:, 0] * self.scale_D

    def add(self, x_TX: Tensor, more_TD: Tensor) -> Tensor:
        """The planes, with `more_TD` added to all but the first."""
        x_TPD = self._apart(x_TX)
        return torch.cat([x_TPD[:, :1], x_TPD[:, 1:] + more_TD[:, None]], dim=1).flatten(1)

    def _choice(self, x_TD: Tensor) -> Tensor:
        if not gpu_products.is_gpu(x_TD.device):
            self.on_bytes(self.router.num_bytes)
        return torch.tanh(self.router.apply(self.norm.apply(x_TD) / x_TD.shape[1]))

    def _apart(self, x_TX: Tensor) -> Tensor:
        return x_TX.unflatten(1, (self.num_planes, -1))


@dataclass(frozen=True, kw_only=True)
class PlaneEnds:
    """How planes begin, from the embedding, and become one hidden state, for the head: a matrix for each
    plane but the first."""

    begin: tuple[Linear, ...]  # [D, D] each
    end: tuple[Linear, ...]

    def planes_of(self, x_TD: Tensor) -> Tensor:
        others = [like(x_TD, matrix.apply(x_TD)) for matrix in self.begin]
        return torch.cat([x_TD, *others], dim=1)

    def joined(self, x_TX: Tensor) -> Tensor:
        """The hidden state [T, D], on the CPU."""
        first_TD, *others = x_TX.cpu().chunk(len(self.end) + 1, dim=1)
        found = [
            like(first_TD, matrix.apply(x_TD.contiguous()))
            for matrix, x_TD in zip(self.end, others, strict=True)
        ]
        return torch.stack([first_TD, *found]).mean(dim=0)


def like(of_TD: Tensor, x_TD: Tensor) -> Tensor:
    """Rows of `x_TD` with the magnitudes of those of `of_TD`."""
    own_T1 = x_TD.square().mean(1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
    return x_TD * of_TD.square().mean(1, keepdim=True).sqrt() / own_T1


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A product of two matrices."""

    left: Linear  # [R, D]
    right: Linear  # [D, R]
    on_bytes: Callable[[int], None]

    def forward(self, x_TD: Tensor | gpu_products.Factor) -> Tensor:
        if not gpu_products.is_gpu(x_TD.device):
            self.on_bytes(self.left.num_bytes + self.right.num_bytes)
        return self.right.apply(self.left.apply(x_TD))


def launch_planes(
    on: Launcher, planes: Planes, kind: str, x_X: Tensor, active_D: Tensor, more_D: Tensor,
    normed_D: Tensor, choice_P: Tensor,
) -> None:  # fmt: skip
    """Predicts the planes, corrects them, or adds `more_D` to them. `normed_D`, `choice_P`: memory for the
    router's input and what it chooses."""
    if kind == "add to planes":
        on.launch(lambda: on.kernels.add_to_planes(x_X, more_D), [x_X, more_D], [x_X])
        return
    is_predicted = kind == "predict planes"
    read_D = x_X[..., : active_D.shape[-1]] if is_predicted else active_D
    launch_add_norm(on, read_D, None, planes.router_norm, normed_D, None)
    on.dot(planes.router, normed_D, choice_P, cap=1.0)
    mix, scale_D = planes.predict_QP if is_predicted else planes.correct_PP, planes.scale_D
    if is_predicted:
        on.launch(
            lambda: on.kernels.predict_planes(choice_P, mix, x_X, active_D),
            [choice_P, mix, x_X], [x_X, active_D],
        )  # fmt: skip
        return
    on.launch(
        lambda: on.kernels.correct_planes(choice_P, mix, scale_D, x_X, active_D),
        [choice_P, mix, scale_D, x_X, active_D], [x_X, active_D],
    )  # fmt: skip


def launch_low_rank(
    on: Launcher, low_rank: LowRank, x_D: Tensor, inner_R: Tensor, y_D: Tensor
) -> None:
    on.dot(low_rank.left, x_D, inner_R)
    on.dot(low_rank.right, inner_R, y_D)


class PlanesStruct(Structure):
    _fields_ = [("norm", NormStruct), ("router", MatrixStruct), ("predict", c_void_p),
                ("correct", c_void_p), ("scale", c_void_p)]  # fmt: skip


class LowRankStruct(Structure):
    _fields_ = [("left", MatrixStruct), ("right", MatrixStruct)]


class PlaneEndsStruct(Structure):
    _fields_ = [("begin", POINTER(MatrixStruct)), ("end", POINTER(MatrixStruct)),
                ("num_planes", c_int64)]  # fmt: skip


def planes_struct(structs: Structs, planes: Planes | None) -> PlanesStruct:
    if planes is None:
        return PlanesStruct()
    return PlanesStruct(
        norm=norm_struct(structs, planes.norm),
        router=structs.linear(planes.router),
        predict=structs.vector(planes.predict_QP),
        correct=structs.vector(planes.correct_PP),
        scale=structs.vector(planes.scale_D),
    )


def low_rank_struct(structs: Structs, low_rank: LowRank | None) -> LowRankStruct:
    if low_rank is None:
        return LowRankStruct()
    return LowRankStruct(left=structs.linear(low_rank.left), right=structs.linear(low_rank.right))


def ends_struct(structs: Structs, ends: PlaneEnds | None) -> PlaneEndsStruct:
    if ends is None:
        return PlaneEndsStruct(num_planes=1)
    begin, end = (
        structs.array(MatrixStruct, map(structs.linear, each)) for each in (ends.begin, ends.end)
    )
    return PlaneEndsStruct(begin=begin, end=end, num_planes=len(ends.end) + 1)
