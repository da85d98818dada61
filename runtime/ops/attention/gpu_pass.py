"""Attention of a prompt's tokens on a GPU: one kernel norms and rotates heads and appends keys and
values to the cache, and another attends.

Letters: T tokens, H heads, K key-value heads, W head width, Q values of queries, keys and values
together."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hotsplit.runtime.ops.attention.rotary import PassPlaces, Places
from hotsplit.runtime.ops.norm import Norm
from hotsplit.runtime.weights import gpu_products

if TYPE_CHECKING:
    from hotsplit.runtime.kernels.gpu.kernels import Kernels
    from hotsplit.runtime.ops.attention.block import Attention


def attend_tokens(
    heads: "Attention", joined_TQ: Tensor, sequence: int, places: PassPlaces
) -> Tensor:
    """The heads' output [T, H * W] in the type of the cache, that of a single token in f32, for
    queries, keys and values [T, Q]; appends to the cache."""
    device = joined_TQ.device
    own, kernels = places.of(heads.cache.table, sequence, device), gpu_products.kernels()
    with gpu_products.made_current(device):
        heads_TH = run_kernels(kernels, heads, joined_TQ, own).flatten(1)
    return heads_TH if len(heads_TH) > 1 else heads_TH.float()


def run_kernels(
    kernels: "Kernels", heads: "Attention", joined_TQ: Tensor, places: Places
) -> Tensor:
    """The heads' output [T, H, W], by way of queries that are scaled and in the type of the keys. A norm
    of all heads overwrites theirs."""
    (keys, values), spec = heads.cache.for_kernels, heads.spec
    query_THW = keys.new_empty(len(joined_TQ), spec.num_heads, spec.head_dim)
    out_THW = torch.empty_like(query_THW)
    for norm, of_heads in norms_of_all(heads, joined_TQ):
        kernels.round_tokens(
            of_heads, None, norm.weight_D, norm.bias_D, norm.epsilon, of_heads, None, None
        )
    kernels.rotate_append(
        joined_TQ,
        *turned_by(heads),
        places.position_T,
        keys,
        values,
        spec,
        places.sequence_T,
        places.table_SN,
        query_THW,
    )
    kernels.attend_tokens(
        query_THW,
        keys,
        values,
        places.position_T,
        spec,
        out_THW,
        places.sequence_T,
        places.table_SN,
        vectors=heads.vectors,
        gated_TQ=joined_TQ if spec.is_gated else None,
    )
    return out_THW


def turned_by(heads: "Attention") -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What the rotating kernel reads: frequencies, and the weights of the norms of each query and of
    each key."""
    norms = (None, None) if heads.spec.norms_all_heads else (heads.query_norm, heads.key_norm)
    query_W, key_W = (norm.weight_D if norm else None for norm in norms)
    return heads.rotary.frequency_W if heads.rotary else None, query_W, key_W


def norms_of_all(heads: "Attention", qkv: Tensor) -> list[tuple[Norm, Tensor]]:
    """The norms of all queries and of all keys together, with these parts of `qkv` [..., Q]."""
    if not heads.spec.norms_all_heads:
        return []
    assert heads.query_norm and not heads.spec.is_gated, heads
    size, found = len(heads.query_norm.weight_D), [(heads.query_norm, qkv)]
    if heads.key_norm:
        found.append((heads.key_norm, qkv[..., size:]))
    return [(norm, part[..., : len(norm.weight_D)]) for norm, part in found]
