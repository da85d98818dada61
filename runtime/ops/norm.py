"""The norm of a block's input: in torch, as a struct for C++, and as a GPU's kernel, which adds the
terms of a sum first.

Letters: T tokens, D model width, P summands."""

import math
from ctypes import Structure, c_float, c_int32, c_void_p
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from hotsplit.model.blocks import PLAIN_SUM, SumFactors
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.structs import Structs
from hotsplit.runtime.weights import gpu_products

LEAST_WEIGHT = 2.0**-6  # the largest weight of a norm whose outputs are rounded to f16 as they are


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A layer norm if there is a bias (Ba et al. 2016): (x - mean) / sqrt(variance + epsilon) *
    weight + bias; else an RMS norm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + epsilon) *
    weight. Norms of heads may have weights [H, D], and a bias [D]."""

    weight_D: Tensor
    bias_D: Tensor | None
    epsilon: float

    @cached_property
    def fits_f16(self) -> bool:
        """True if f16 takes the outputs as they are: none exceeds MOST_SMALL, because none exceeds
        sqrt(D) times the largest weight plus the largest bias, and the weights are not so small that
        whole rows would be subnormal. False with NaN."""
        largest = float(self.weight_D.abs().max())
        most = math.sqrt(len(self.weight_D)) * largest
        most += 0.0 if self.bias_D is None else float(self.bias_D.abs().max())
        return largest >= LEAST_WEIGHT and most <= gpu_products.MOST_SMALL

    def times(self, scale: float) -> "Norm":
        """The norm whose results are multiplied by a scale."""
        bias_D = None if self.bias_D is None else self.bias_D * scale
        return replace(self, weight_D=self.weight_D * scale, bias_D=bias_D)

    @property
    def is_by_head(self) -> bool:
        return self.weight_D.dim() == 2

    def apply(self, x_TD: Tensor) -> Tensor:
        if self.is_by_head:
            one = replace(self, weight_D=torch.ones_like(self.weight_D[0]))
            return one.apply(x_TD) * self.weight_D
        if self.bias_D is None:
            return F.rms_norm(x_TD, self.weight_D.shape, self.weight_D, self.epsilon)
        return F.layer_norm(x_TD, self.weight_D.shape, self.weight_D, self.bias_D, self.epsilon)


class HiddenState:
    """The hidden state [T, D] of a pass on a GPU, as a sum of one or two tensors: the next norm adds
    them as it reads them."""

    def __init__(self, x_TD: Tensor, added_TD: Tensor | None = None) -> None:
        self._x_TD, self._added_TD = x_TD, added_TD

    def __add__(self, y_TD: Tensor) -> "HiddenState":
        return HiddenState(self.values(), y_TD)

    @property
    def shape(self) -> torch.Size:
        return self._x_TD.shape

    @property
    def device(self) -> torch.device:
        return self._x_TD.device

    def values(self) -> Tensor:
        if self._added_TD is not None:
            self._x_TD, self._added_TD = self._x_TD + self._added_TD, None
        return self._x_TD

    def write_norm(self, norm: Norm, out_TD: Tensor, power_T: Tensor | None) -> None:
        """The norm in the type of `out_TD`; see kernels.gpu.tokens.round_tokens."""
        x_TD, added_TD = self._x_TD, self._added_TD
        sum_TD = None if added_TD is None else torch.empty_like(x_TD)
        with gpu_products.made_current(x_TD.device):
            gpu_products.kernels().round_tokens(
                x_TD, added_TD, norm.weight_D, norm.bias_D, norm.epsilon, out_TD, power_T, sum_TD
            )
        if sum_TD is not None:
            self._x_TD, self._added_TD = sum_TD, None


class Normed(gpu_products.Factor):
    """The norm of a hidden state as a factor: one launch for each type that it is multiplied in."""

    def __init__(self, norm: Norm, state: HiddenState) -> None:
        self._norm, self._state = norm, state
        self._rounded: dict[torch.dtype, tuple[Tensor, Tensor | None]] = {}

    def __len__(self) -> int:
        return self._state.shape[0]

    @property
    def device(self) -> torch.device:
        return self._state.device

    def values(self) -> Tensor:
        return self.rounded(torch.float32)[0]

    def _round(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        is_small = dtype != torch.float16 or self._norm.fits_f16
        power_T = None if is_small else torch.empty(len(self), device=self.device)
        out_TD = torch.empty(self._state.shape, dtype=dtype, device=self.device)
        self._state.write_norm(self._norm, out_TD, power_T)
        return out_TD, power_T


class NormStruct(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_float), ("unused", c_int32)]


def norm_struct(structs: Structs, norm: Norm | None, *shape: int) -> NormStruct:
    """`shape`: that of the weights which C++ reads."""
    if norm is None:
        return NormStruct()
    weight = structs.vector(norm.weight_D, *shape)
    bias = structs.vector(norm.bias_D, *shape[-1:])
    return NormStruct(weight=weight, bias=bias, epsilon=norm.epsilon)


def launch_add_norm(
    on: Launcher,
    x_D: Tensor,
    sum_PD: Tensor | None,
    norm: Norm | None,
    out_D: Tensor | None,
    x_out_D: Tensor | None,
    term_D: Tensor | None = None,
    copy_D: Tensor | None = None,
    factors: SumFactors = PLAIN_SUM,
) -> None:
    """x_out = the sum, with these factors, of x and of the others, the rows of sum and term; out = copy = the
    norm of that. All outputs are optional. `term_D` and `copy_D` are in pinned memory."""
    weight_D, bias_D = (norm.weight_D, norm.bias_D) if norm else (None, None)
    epsilon = norm.epsilon if norm else 0.0
    on.launch(
        lambda: on.kernels.add_norm(
            x_D, sum_PD, weight_D, bias_D, epsilon, out_D, x_out_D, term_D, copy_D, factors
        ),
        [x_D, sum_PD, weight_D, bias_D, term_D],
        [out_D, x_out_D, copy_D],
    )
