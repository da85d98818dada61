"""Attention of a prompt's tokens on a GPU: one kernel norms and rotates heads and appends keys and
values to the cache, and another attends.

Letters: T tokens, H heads, K key-value heads, W head width, Q values of queries, keys and values
together."""

from typing import Protocol

import torch
from torch import Tensor

from hotsplit.model.rope import QueryGrowth
from hotsplit.runtime.cache.kv_cache import LayerCache
from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.ops.attention.rotary import Places, Rotary, Turns
from hotsplit.runtime.ops.norm import Norm
from hotsplit.runtime.weights import gpu_products


class Heads(Protocol):
    """An attention block without its projections: see block.Attention."""

    @property
    def cache(self) -> LayerCache: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def rotary(self) -> Rotary | None: ...
    @property
    def query_norm(self) -> Norm | None: ...
    @property
    def key_norm(self) -> Norm | None: ...
    @property
    def growth(self) -> QueryGrowth | None: ...
    @property
    def norms_all_heads(self) -> bool: ...
    @property
    def value_norm(self) -> Norm | None: ...
    @property
    def score_scale(self) -> float: ...
    @property
    def score_cap(self) -> float | None: ...
    @property
    def is_gated(self) -> bool: ...
    @property
    def values_are_keys(self) -> bool: ...
    @property
    def window(self) -> int | None: ...
    @property
    def sink_H(self) -> Tensor | None: ...


def attend_tokens(
    heads: Heads, joined_TQ: Tensor, sequence: int, start: int, turns: Turns
) -> Tensor:
    """The heads' output [T, H * W] in the type of the cache, that of a single token in f32, for
    queries, keys and values [T, Q]; appends to the cache."""
    (keys, values), device = heads.cache.for_kernels, joined_TQ.device
    shape = len(joined_TQ), heads.num_heads, heads.cache.head_width
    query_THW = torch.empty(shape, dtype=keys.dtype, device=device)
    out_THW = torch.empty_like(query_THW)
    places, kernels = turns.places(heads.cache.table, sequence, device), gpu_products.kernels()
    with gpu_products.made_current(device):
        append(kernels, heads, joined_TQ, places, query_THW)
        kernels.attend_tokens(
            query_THW, keys, values, places.position_T, out_THW, places.sequence_T,
            places.table_SN, window=heads.window, cap=heads.score_cap, sink_H=heads.sink_H,
            gated_TQ=joined_TQ if heads.is_gated else None,
        )  # fmt: skip
    heads_TH = out_THW.flatten(1)
    return heads_TH if len(heads_TH) > 1 else heads_TH.float()


def append(
    kernels: Kernels,
    heads: Heads,
    joined_TQ: Tensor,
    places: Places,
    query_THW: Tensor,
) -> None:
    """Norms and rotates queries and keys, appends keys and values, and writes the queries, scaled
    and in the type of the keys. A norm of all heads overwrites theirs."""
    for norm, of_heads in norms_of_all(heads, joined_TQ):
        kernels.round_tokens(
            of_heads, None, norm.weight_D, norm.bias_D, norm.epsilon, of_heads, None, None
        )
    rotary, (query, key) = heads.rotary, norms_of_each(heads)
    (keys, values), growth = heads.cache.for_kernels, heads.growth
    kernels.rotate_append(
        joined_TQ, rotary.frequency_W if rotary else None, bool(rotary and rotary.is_adjacent),
        query.weight_D if query else None, key.weight_D if key else None,
        query.epsilon if query else 0.0, places.position_T, keys, values, heads.num_heads,
        places.sequence_T, places.table_SN, magnitude=rotary.magnitude if rotary else 1.0,
        query_THW=query_THW, query_scale=heads.score_scale, is_gated=heads.is_gated,
        centres=bool(query and query.bias_D is not None),
        growth=(growth.factor, growth.length) if growth else None,
        norms_values=heads.value_norm is not None, values_are_keys=heads.values_are_keys,
    )  # fmt: skip


def norms_of_each(heads: Heads) -> tuple[Norm | None, Norm | None]:
    """The norms of each query and of each key, which the rotating kernel computes."""
    return (None, None) if heads.norms_all_heads else (heads.query_norm, heads.key_norm)


def norms_of_all(heads: Heads, qkv: Tensor) -> list[tuple[Norm, Tensor]]:
    """The norms of all queries and of all keys together, with these parts of `qkv` [..., Q]."""
    if not heads.norms_all_heads:
        return []
    assert heads.query_norm and heads.key_norm and not heads.is_gated, heads
    query_size, key_size = len(heads.query_norm.weight_D), len(heads.key_norm.weight_D)
    return [
        (heads.query_norm, qkv[..., :query_size]),
        (heads.key_norm, qkv[..., query_size : query_size + key_size]),
    ]
