"""Runs a kernel for one row on each row of a step, which defines its results for several rows.

Letters: T rows of a step."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

Parameters = ParamSpec("Parameters")
# The arguments that have a row for each row of a step, by kernel, with the axis of T. Rows of delta
# nets depend on those before, so `by_rows` does not define them.
AXES: dict[str, dict[str, int]] = {
    "dot": {"x_D": 0, "out_N": 0},
    "embed": {"out_D": 0, "index_1": 0},
    "add_norm": {"x_D": 0, "parts_PD": 1, "out_D": 0, "x_out_D": 0, "term_D": 0, "copy_D": 0},
    "rotate_append": {"qkv": 0, "position_1": 0, "sequence_1": 0, "query_THW": 0},
    "attend": {"qkv": 0, "out_HW": 0, "position_1": 0, "sequence_1": 0},
    "predict": {"inner_R": 0, "named_B": 0, "copy_B": 0},
    "gate_up": {"x_D": 0, "named_B": 0, "hidden_N": 0},
    "down": {"hidden_N": 0, "parts_SD": 1},
    "choose_experts": {"routed_2K": 0, "logit_E": 0, "copy_2K": 0},
    "expert_gate_up": {"routed_2K": 0, "x_D": 0, "hidden_KF": 0},
    "expert_down": {"routed_2K": 0, "hidden_KF": 0, "parts_PD": 1},
    "convolve": {"projected_TW": 0, "writes_T": 0, "mixed_TX": 0},
    "delta_rule": {"mixed_TX": 0, "writes_T": 0, "out_TVM": 0},
    "gate_norm": {"projected_TW": 0, "out_TVM": 0},
}
# A kernel takes these as tensors of one element.
_LISTS = ("index_1", "position_1", "sequence_1")


def by_rows(kernel: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """`over_rows` of a kernel that AXES has."""
    return over_rows(kernel, AXES[kernel.__name__])


def over_rows(
    kernel: Callable[Parameters, None], axes: dict[str, int]
) -> Callable[Parameters, None]:
    """The kernel for several rows, whose vectors may be [T, D]; runs the rows one by one. `axes`: as in
    AXES."""
    first = next(iter(axes))
    signature = inspect.signature(kernel)

    @wraps(kernel)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
        given = signature.bind(*arguments, **options).arguments
        if given[first].dim() == 1:
            return kernel(*arguments, **options)
        # In reverse, so that a row overwrites what a repetition of it has appended to the cache.
        for row in reversed(range(len(given[first]))):
            own = {key: _row(given[key], key, axes[key], row) for key in axes if key in given}
            kernel(**{**given, **own})  # type: ignore[call-arg]
        return None

    return run


def _row(values: Tensor | None, name: str, axis: int, row: int) -> Tensor | None:
    if values is None:
        return None
    if name in _LISTS:
        return values[row : row + 1]
    return torch.select(values, axis, row)
