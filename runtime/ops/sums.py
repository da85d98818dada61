"""Sums of hidden states: in torch, and as fields of a struct for C++."""

from ctypes import c_float

from hotsplit.model.blocks import SumFactors

STRUCT_FIELDS = [("factor", c_float), ("scale", c_float)]  # of HsOp in step.h


def struct_fields(factors: SumFactors) -> tuple[float, float]:
    return factors.factor, factors.times
