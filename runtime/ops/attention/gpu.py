"""The attention block as a GPU's kernels.

Letters: T rows, D model width, H heads, K key-value heads, W head width, S sequences, N blocks of
each. For one row there is no T axis, except in `position_T` and `sequence_T`."""

from dataclasses import dataclass

from torch import Tensor

from hotsplit.runtime.ops.attention.block import Attention
from hotsplit.runtime.ops.attention.gpu_pass import norms_of_all, norms_of_each
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.norm import launch_add_norm


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Where the rows of a step are in the cache; `sequence_T` and `table_SN` only with several
    sequences."""

    position_T: Tensor
    sequence_T: Tensor | None
    table_SN: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.position_T, self.sequence_T, self.table_SN


def launch_attend(
    on: Launcher, attention: Attention, qkv: Tensor, at: Positions, scratch: Tensor, heads: Tensor
) -> None:
    """Norms and rotates queries and keys in place, appends to the cache, and attends: heads
    [T, H W]."""
    for norm, of_heads in norms_of_all(attention, qkv):
        launch_add_norm(on, of_heads, None, norm, of_heads, None)
    rotary, (query, key) = attention.rotary, norms_of_each(attention)
    (keys, values), num_heads = attention.cache.for_kernels, attention.num_heads
    frequency_W = rotary.frequency_W if rotary else None
    query_W, key_W = query.weight_D if query else None, key.weight_D if key else None
    growth = attention.growth
    on.launch(
        lambda: on.kernels.rotate_append(
            qkv, frequency_W, bool(rotary and rotary.is_adjacent), query_W, key_W,
            query.epsilon if query else 0.0, at.position_T, keys, values, num_heads,
            at.sequence_T, at.table_SN, magnitude=rotary.magnitude if rotary else 1.0,
            is_gated=attention.is_gated, centres=bool(query and query.bias_D is not None),
            growth=(growth.factor, growth.length) if growth else None,
            norms_values=attention.value_norm is not None,
            values_are_keys=attention.values_are_keys,
        ),
        [qkv, frequency_W, query_W, key_W, *at.tensors],
        [qkv, keys, values],
    )  # fmt: skip
    on.launch(
        lambda: on.kernels.attend(
            qkv, keys, values, at.position_T, num_heads, scratch, heads, at.sequence_T,
            at.table_SN, scale=attention.score_scale, window=attention.window,
            cap=attention.score_cap, sink_H=attention.sink_H, is_gated=attention.is_gated,
        ),
        [qkv, keys, values, attention.sink_H, *at.tensors], [scratch, heads],
    )  # fmt: skip
