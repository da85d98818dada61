"""A hidden state of several planes, of which a layer computes one and estimates the others (AltUp,
Baykal et al. 2023, arXiv 2301.13310; transformers, modeling_gemma3n.py).

Value `x` of such a model has all planes of a token, [P D], the active one first; `active` is the
one that the blocks of a layer read and write. A router reads it: r_P = tanh(W_PD norm(active) / D).
The hidden state begins as the embedding e and W_i e for i = 1 .. P - 1, each with the magnitude of
e, and ends as the mean of x_0 and V_i x_i, each with that of x_0.

Letters: P planes, D hidden size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hotsplit.model.blocks import Norm, Shapes
from hotsplit.model.operations import PositionWise

# llama.cpp's names, of a layer and of the model.
ROUTER, PREDICT, CORRECT = "altup_router", "altup_predict_coef", "altup_correct_coef"
SCALE = "altup_correct_scale"
BEGIN, END = "altup_proj", "altup_unembd_proj"
LEAST_SQUARE = 1e-5  # the least mean square that a plane's magnitude is divided by
MOST_PLANES = 8


@dataclass(frozen=True, kw_only=True)
class OfPlanes(PositionWise):
    """What operations on planes share: `x` and `active`."""

    room: ClassVar[str] = "planes"
    num_planes: int
    outputs: ClassVar[tuple[str, ...]] = ("active", "x")

    def values(self, hidden_size: int) -> Mapping[str, int]:
        return {"active": hidden_size, "x": self.num_planes * hidden_size}


@dataclass(frozen=True, kw_only=True)
class PredictPlanes(OfPlanes):
    """x_i += sum over j of (C r)_ij x_j, with C [P P, P]; writes the first to `active` too."""

    kind: ClassVar[str] = "predict planes"
    num_kernels: ClassVar[int] = 3  # the router's norm and product, the planes
    norm: Norm  # of the router
    inputs: ClassVar[tuple[str, ...]] = ("x",)

    def shapes(self, hidden_size: int) -> Shapes:
        return {
            f"{self.norm.name}.{self.norm.part}": (self.norm.size,),
            f"{ROUTER}.weight": (self.num_planes, hidden_size),
            f"{PREDICT}.weight": (self.num_planes**2, self.num_planes),
        }

    def scratch(self, hidden_size: int) -> int:
        """The router's input, and its choice."""
        return hidden_size + self.num_planes


@dataclass(frozen=True, kw_only=True)
class CorrectPlanes(OfPlanes):
    """x_i = x_i + (1 + (C r)_i) (active - x_0), with C [P, P] and the router's choice by `active`,
    which then becomes x_0 * s, with s [D]. The router is that of PredictPlanes."""

    kind: ClassVar[str] = "correct planes"
    num_kernels: ClassVar[int] = 3
    inputs: ClassVar[tuple[str, ...]] = ("active", "x")

    def shapes(self, hidden_size: int) -> Shapes:
        return {
            f"{CORRECT}.weight": (self.num_planes, self.num_planes),
            f"{SCALE}.weight": (hidden_size,),
        }

    def scratch(self, hidden_size: int) -> int:
        return hidden_size + self.num_planes


@dataclass(frozen=True, kw_only=True)
class AddToPlanes(OfPlanes):
    """Adds a value to all planes but the first."""

    kind: ClassVar[str] = "add to planes"
    num_kernels: ClassVar[int] = 1
    reads: str
    outputs: ClassVar[tuple[str, ...]] = ("x",)

    @property
    def inputs(self) -> tuple[str, ...]:
        return "x", self.reads

    def values(self, hidden_size: int) -> Mapping[str, int]:
        return {"x": self.num_planes * hidden_size}


@dataclass(frozen=True, kw_only=True)
class BeginPlanes(OfPlanes):
    """All planes from the embedding, with a matrix [D, D] for each but the first."""

    kind: ClassVar[str] = "begin planes"
    inputs: ClassVar[tuple[str, ...]] = ("active",)
    outputs: ClassVar[tuple[str, ...]] = ("x",)

    def shapes(self, hidden_size: int) -> Shapes:
        return _squares(BEGIN, self.num_planes, hidden_size)

    def values(self, hidden_size: int) -> Mapping[str, int]:
        return {"x": self.num_planes * hidden_size}


@dataclass(frozen=True, kw_only=True)
class EndPlanes(OfPlanes):
    """One hidden state from all planes, with a matrix [D, D] for each but the first."""

    kind: ClassVar[str] = "end planes"
    inputs: ClassVar[tuple[str, ...]] = ("x",)
    outputs: ClassVar[tuple[str, ...]] = ("active",)

    def shapes(self, hidden_size: int) -> Shapes:
        return _squares(END, self.num_planes, hidden_size)

    def values(self, hidden_size: int) -> Mapping[str, int]:
        return {"active": hidden_size}


def _squares(name: str, num_planes: int, hidden_size: int) -> Shapes:
    return {f"{name}.{plane}.weight": (hidden_size, hidden_size) for plane in range(num_planes - 1)}
