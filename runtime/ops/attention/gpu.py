"""The attention block as a GPU's kernels.

Letters: T rows, D model width, H heads, K key-value heads, W head width, S sequences, N blocks of
each. For one row there is no T axis, except in `position_T` and `sequence_T`."""

from dataclasses import dataclass

from torch import Tensor

from hotsplit.runtime.ops.attention.block import Attention
from hotsplit.runtime.ops.attention.gpu_pass import norms_of_all, turned_by
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
    (keys, values), spec, weights = (
        attention.cache.for_kernels,
        attention.spec,
        turned_by(attention),
    )
    on.launch(
        lambda: on.kernels.rotate_append(
            qkv, *weights, at.position_T, keys, values, spec, at.sequence_T, at.table_SN
        ),
        [qkv, *weights, *at.tensors],
        [qkv, keys, values],
    )
    on.launch(
        lambda: on.kernels.attend(
            qkv,
            keys,
            values,
            at.position_T,
            spec,
            scratch,
            heads,
            at.sequence_T,
            at.table_SN,
            vectors=attention.vectors,
        ),
        [qkv, keys, values, *attention.vectors.values(), *at.tensors],
        [scratch, heads],
    )
