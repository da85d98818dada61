"""The norm of a block's input: in torch, as a struct for C++, and as a GPU's kernel, which adds the
terms of a sum first.

Letters: T tokens, D model width, P summands."""

import math
from ctypes import Structure, c_float, c_int32, c_void_p
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.nn import functional as F

from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.structs import Structs
from hotsplit.runtime.weights import gpu_products

LEAST_WEIGHT = 2.0**-6  # the largest weight of a norm whose outputs are rounded to f16 as they are


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A layer norm if there is a bias (Ba et al. 2016): (x - mean) / sqrt(variance + epsilon) *
    weight + bias; else an RMS norm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + epsilon) *
    weight."""

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

    def apply(self, x_TD: Tensor) -> Tensor:
        if self.bias_D is None:
            return F.rms_norm(x_TD, self.weight_D.shape, self.weight_D, self.epsilon)
        return F.layer_norm(x_TD, self.weight_D.shape, self.weight_D, self.bias_D, self.epsilon)


class NormStruct(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_float),
                ("unused", c_int32)]  # fmt: skip


def norm_struct(structs: Structs, norm: Norm | None) -> NormStruct:
    if norm is None:
        return NormStruct()
    weight, bias = structs.vector(norm.weight_D), structs.vector(norm.bias_D)
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
) -> None:
    """x_out = x + the sum of the rows of sum + term; out = copy = the norm of that. All outputs are
    optional. `term_D` and `copy_D` are in pinned memory."""
    weight_D, bias_D = (norm.weight_D, norm.bias_D) if norm else (None, None)
    epsilon = norm.epsilon if norm else 0.0
    on.launch(
        lambda: on.kernels.add_norm(
            x_D, sum_PD, weight_D, bias_D, epsilon, out_D, x_out_D, term_D, copy_D
        ),
        [x_D, sum_PD, weight_D, bias_D, term_D], [out_D, x_out_D, copy_D],
    )  # fmt: skip
