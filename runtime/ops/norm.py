"""The norm of a block's input: in torch, as a struct for C++, and as a GPU's kernel, which adds the
terms of a sum first.

Letters: T tokens, D model width, P summands."""

from ctypes import Structure, c_float, c_int32, c_void_p
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from hotsplit.model.blocks import PLAIN_SUM, SumFactors
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.structs import Structs


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A layer norm if there is a bias (Ba et al. 2016): (x - mean) / sqrt(variance + epsilon) *
    weight + bias; else an RMS norm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + epsilon) *
    weight. Norms of heads may have weights [H, D], and a bias [D]."""

    weight_D: Tensor
    bias_D: Tensor | None
    epsilon: float

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
    """x_out = the sum, with these factors, of x and of the others, the rows of sum and term; out =
    copy = the norm of that. All outputs are optional. `term_D` and `copy_D` are in pinned
    memory."""
    weight_D, bias_D = (norm.weight_D, norm.bias_D) if norm else (None, None)
    epsilon = norm.epsilon if norm else 0.0
    weights, outputs = (weight_D, bias_D, epsilon), (out_D, x_out_D)
    on.run(on.kernels.add_norm, x_D, sum_PD, *weights, *outputs, term_D, copy_D, factors)
