"""Sums of hidden states: in torch, and as fields of a struct for C++."""

from collections.abc import Callable
from ctypes import c_float
from typing import Any

from torch import Tensor

from hotsplit.model.blocks import SumFactors

STRUCT_FIELDS = [("factor", c_float), ("scale", c_float)]  # of HsOp in step.h


def struct_fields(factors: SumFactors) -> tuple[float, float]:
    return factors.factor, factors.times


def summed(
    factors: SumFactors, first: Any, others: Tensor, as_tensor: Callable[[Any], Tensor]
) -> Any:
    """times * (first + factor * others). `first` may be one of several forms of a hidden state, to which a tensor
    can be added; `as_tensor` makes a tensor of it."""
    total = first + (others if factors.factor == 1.0 else factors.factor * others)
    return total if factors.times == 1.0 else as_tensor(total).mul_(factors.times)
