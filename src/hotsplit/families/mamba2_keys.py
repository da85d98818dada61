"""The numbers of Mamba-2, from a checkpoint's config or a GGUF's keys, and where a checkpoint has
its tensors."""

import math

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import NEGATED_EXP, SAME, ValueChange, suffixed
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.key_reader import KeyReader
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.mamba2 import GROUP_NORM, Mamba2

MOST_TAPS = 16
# Of steps, as transformers' classes have them, and in the files of others and its own.
NO_LIMITS = ((0, math.inf), [0, math.inf], [0, {"__float__": "Infinity"}])
KEYS = (
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.time_step_rank",
)
# Of values; the norm is no 1 + weight.
CHANGES: dict[str, ValueChange] = {f"{GROUP_NORM}.weight": SAME, ".ssm_a": NEGATED_EXP}
# llama.cpp's map of names knows the bias of the steps as that of a matrix.
with_step_bias = suffixed({".dt_bias": ".dt_proj.bias"})


def mamba2_keys(
    read: ConfigReader,
    *,
    heads: str = "mamba_n_heads",
    head_dim: str = "mamba_d_head",
    groups: str = "mamba_n_groups",
    state: str = "mamba_d_state",
    taps: str = "mamba_d_conv",
    activation: str = "hidden_act",
) -> dict[str, Value]:
    """The keys that `mamba2_of_keys` reads, by the config's keys of its numbers. The activation is
    of what the convolution writes."""
    read.refuse(activation, "silu", why="Mamba-2 has no other activation")
    _check_steps(read)
    count, width = read.count(heads), read.count(head_dim)
    num_groups, size = read.count(groups), read.count(state)
    read.check_size({"the channels of Mamba-2": count * width + 2 * num_groups * size})
    return {
        "ssm.conv_kernel": np.uint32(read.count(taps)),
        "ssm.state_size": np.uint32(size),
        "ssm.group_count": np.uint32(num_groups),
        "ssm.inner_size": np.uint32(count * width),
        "ssm.time_step_rank": np.uint32(count),
    }


def _check_steps(read: ConfigReader) -> None:
    """Raises HotsplitError for limits of the steps."""
    limits = read.values.get("time_step_limit")
    if limits not in (None, *NO_LIMITS):
        raise HotsplitError(
            f"{read.path}: time_step_limit is {shown(limits)}, wanted 0 and infinity: no key of a"
            " GGUF limits the steps of Mamba-2; this checkpoint is not supported"
        )


def mamba2_of_keys(read: KeyReader, *, epsilon: float | None) -> Mamba2:
    """`epsilon`: of the norm of its output; None: it has none."""
    inner, heads, groups, taps = (
        read.count(f"ssm.{key}")
        for key in ("inner_size", "time_step_rank", "group_count", "conv_kernel")
    )
    if inner % heads or heads % groups:
        raise HotsplitError(
            f"{read.path}: {read.graph.name}.ssm.inner_size is {inner}, ssm.time_step_rank {heads}"
            f" and ssm.group_count {groups}; wanted whole heads in groups of one size: no such"
            " model; get the model again"
        )
    if not 2 <= taps <= MOST_TAPS:
        raise HotsplitError(
            f"{read.path}: a convolution of {taps} taps, wanted 2 to {MOST_TAPS}: this model is not"
            " supported"
        )
    return Mamba2(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=groups,
        state_size=read.count("ssm.state_size"),
        num_taps=taps,
        epsilon=epsilon,
    )
