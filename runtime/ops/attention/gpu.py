"""The attention block as a GPU's kernels.

Letters: T rows, D model width, H heads, K key-value heads, W head width, S sequences, N blocks of
each. For one row there is no T axis, except in `position_T` and `sequence_T`."""

from math import prod

from torch import Tensor

from hotsplit.runtime.ops.attention.block import Attention
from hotsplit.runtime.ops.device import Launcher
from hotsplit.runtime.ops.norm import Norm, launch_add_norm


def launch_attend(
    on: Launcher,
    attention: Attention,
    qkv: Tensor,
    position_T: Tensor,
    sequence_T: Tensor | None,
    table_SN: Tensor | None,
    scratch: Tensor,
    heads: Tensor,
    *,
    is_pass: bool = False,
) -> Tensor:
    """Norms and rotates queries and keys, appends to the cache, and attends; returns the heads'
    output [T, H W]. `sequence_T` and `table_SN` only with several sequences. In a pass, the output
    has the type of the cache, at the beginning of `heads`, and queries are in `scratch`; else
    queries are rotated in place."""
    for norm, of_heads in norms_of_all(attention, qkv):
        launch_add_norm(on, of_heads, None, norm, of_heads, None)
    keys, values = attention.cache.for_kernels
    spec, weights, query = attention.spec, turned_by(attention), None
    if spec.value_width is not None:
        values = keys[..., -spec.value_width :]
    if is_pass:
        shapes = ((len(qkv), spec.num_heads, width) for width in (spec.head_dim, spec.value_dim))
        query, heads = (
            room.flatten().view(keys.dtype)[: prod(shape)].view(shape)
            for shape, room in zip(shapes, (scratch, heads), strict=True)
        )
    paging, vectors = (sequence_T, table_SN), attention.vectors
    appended = qkv, *weights, position_T, keys, values, spec
    on.run(on.kernels.rotate_append, *appended, *paging, query)
    seen, gated_TQ = (keys, values, position_T, spec), qkv if spec.gate_size else None
    if query is None:
        on.run(on.kernels.attend, qkv, *seen, scratch, heads, *paging, vectors=vectors)
        return heads
    attend_tokens = on.kernels.attend_tokens
    on.run(attend_tokens, query, *seen, heads, *paging, vectors=vectors, gated_TQ=gated_TQ)
    return heads.flatten(1)


def turned_by(heads: Attention) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What the rotating kernel reads: frequencies, and the weights of the norms of each query and
    of each key."""
    norms = (None, None) if heads.spec.norms_all_heads else (heads.query_norm, heads.key_norm)
    query_W, key_W = (norm.weight_D if norm else None for norm in norms)
    return heads.rotary.frequency_W if heads.rotary else None, query_W, key_W


def norms_of_all(heads: Attention, qkv: Tensor) -> list[tuple[Norm, Tensor]]:
    """The norms of all queries and of all keys together, with these parts of `qkv` [..., Q]."""
    if not heads.spec.norms_all_heads:
        return []
    assert heads.query_norm and not heads.spec.is_gated, heads
    size, found = len(heads.query_norm.weight_D), [(heads.query_norm, qkv)]
    if heads.key_norm:
        found.append((heads.key_norm, qkv[..., size:]))
    return [(norm, part[..., : len(norm.weight_D)]) for norm, part in found]
