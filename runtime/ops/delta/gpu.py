"""The gated delta net as a GPU's kernels, for the rows of a step and for the tokens of a prompt.

Letters: T rows, R runs, W values of a row's projections, X of its inputs of the recurrence, V value
heads, M width of one. For one row there is no T axis, except in the rows' slots."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from hotsplit.runtime.ops.device import Launcher

if TYPE_CHECKING:
    from hotsplit.runtime.kernels.gpu.kernels import Kernels
    from hotsplit.runtime.ops.delta.block import DeltaNet

# The runs of a pass, int32 [R, 3], and the slots of its rows, int32 [T]: see kernels.gpu.delta.
Slots = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class KernelCall:
    """A kernel with what it reads and writes."""

    run: Callable[[], None]
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]


def calls(
    kernels: "Kernels",
    delta: "DeltaNet",
    projected: Tensor,
    slots: Slots,
    mixed: Tensor,
    heads: Tensor,
) -> tuple[KernelCall, ...]:
    """The kernels that turn projections [T, W] into the heads' gated outputs [T, V M], by way of
    `mixed` [T, X]."""
    spec, state, conv = delta.spec, delta.state.state_SVNM, delta.state.conv_SJC
    weights = delta.conv_CJ, delta.decay_bias_V, delta.decay_V
    out_TVM = heads.unflatten(-1, (spec.num_value_heads, spec.value_head_dim))
    weight_M, epsilon = delta.norm.weight_D, delta.norm.epsilon
    return (
        KernelCall(
            lambda: kernels.convolve(projected, *weights, conv, *slots, mixed, spec.num_key_heads),
            [projected, *weights, conv, *slots],
            [mixed, conv],
        ),
        KernelCall(
            lambda: kernels.delta_rule(
                mixed, state, *slots, out_TVM, spec.num_key_heads, is_grouped=spec.is_grouped
            ),
            [mixed, state, *slots],
            [heads, state],
        ),
        KernelCall(
            lambda: kernels.gate_norm(out_TVM, projected, weight_M, epsilon),
            [heads, projected, weight_M],
            [heads],
        ),
    )


def launch_delta(
    on: Launcher, delta: "DeltaNet", projected: Tensor, slots: Slots, mixed: Tensor, heads: Tensor
) -> None:
    for call in calls(on.kernels, delta, projected, slots, mixed, heads):
        on.launch(call.run, call.reads, call.writes)
