"""A hidden state of several planes, of which a layer computes one and estimates the others (AltUp, Baykal et al.
2023, arXiv 2301.13310; transformers, modeling_gemma3n.py), and a residual sum with a product of low rank
(LAuReL, arXiv 2411.07501).

Value `x` of such a model has all planes of a token, [P D], the active one first; `active` is the one that the
blocks of a layer read and write. A router reads it: r_P = tanh(W_PD norm(active) / D).

Letters: P planes, D hidden size, R rank."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotsplit.model.spec import Norm

# llama.cpp's names, of a layer and of the model.
ROUTER, PREDICT, CORRECT = "altup_router", "altup_predict_coef", "altup_correct_coef"
SCALE, LEFT, RIGHT = "altup_correct_scale", "laurel_l", "laurel_r"
BEGIN, END = "altup_proj", "altup_unembd_proj"
ENDS = (f"{BEGIN}.", f"{END}.")
LEAST_SQUARE = 1e-5  # the least mean square that a plane's magnitude is divided by
MOST_PLANES = 8


@dataclass(frozen=True, kw_only=True)
class PredictPlanes:
    """x_i = x_i + the sum over j of (C r)_ij x_j, with C [P P, P]; writes the first to `active`, too."""

    num_planes: int
    norm: "Norm"  # of the router
    reads: str = "x"
    writes: str = "active"


@dataclass(frozen=True, kw_only=True)
class CorrectPlanes:
    """x_i = x_i + (1 + (C r)_i) (active - x_0), with C [P, P] and the router's choice by `active`, which then
    becomes x_0 * s, with s [D]."""

    num_planes: int
    norm: "Norm"  # of the router, which is that of PredictPlanes
    reads: str = "active"
    writes: str = "active"


@dataclass(frozen=True, kw_only=True)
class AddToPlanes:
    """Adds a value to all planes but the first."""

    reads: str
    writes: str = "x"


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """y = W_DR W_RD x."""

    rank: int
    reads: str = "attn_in"
    writes: str = "laurel_out"
