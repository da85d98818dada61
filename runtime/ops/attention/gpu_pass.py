"""Attention of a prompt's tokens on a GPU: a kernel norms and rotates heads and appends keys and
values to the cache, and torch attends.

Letters: T tokens, H heads, K key-value heads, W head width, Q values of queries, keys and values
together."""

from typing import Protocol

import torch
from torch import Tensor

from hotsplit.runtime.cache.kv_cache import LayerCache
from hotsplit.runtime.kernels.gpu.kernels import Kernels
from hotsplit.runtime.ops.attention.attend import (
    attend_by_heads,
    attend_with_flash,
    in_window,
    supports_flash,
)
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
    def score_scale(self) -> float: ...
    @property
    def window(self) -> int | None: ...


def attend_tokens(
    heads: Heads, joined_TQ: Tensor, sequence: int, start: int, turns: Turns
) -> Tensor:
    """The heads' output [T, H * W], for queries, keys and values [T, Q], whose queries may be
    overwritten; appends to the cache.

    With flash attention, if it supports the heads and the card and no window ends between the keys:
    queries are then rounded to the type of the keys. Else by `attend_by_heads`."""
    cache, scale, window = heads.cache, heads.score_scale, heads.window
    stop, queries = start + len(joined_TQ), heads.num_heads * cache.head_width
    query_THW = joined_TQ[:, :queries].unflatten(1, (heads.num_heads, -1))
    rounded_THW = None
    if window is None or window >= stop:
        like_CKW = cache.key_BKPX[0, :, :1].transpose(0, 1).expand(stop, -1, -1)
        rounded_THW = torch.empty(query_THW.shape, dtype=like_CKW.dtype, device=like_CKW.device)
        rounded_THW = rounded_THW if supports_flash(rounded_THW, like_CKW) else None
    places = turns.places(cache.table, sequence, joined_TQ.device)
    with gpu_products.made_current(joined_TQ.device):
        append(gpu_products.kernels(), heads, joined_TQ, places, rounded_THW)
    keys, values = cache.up_to(places.block_N, stop)
    if rounded_THW is not None:
        return attend_with_flash(rounded_THW, keys, values)
    keys, values = (in_window(rows, len(joined_TQ), window) for rows in (keys, values))
    return attend_by_heads(query_THW, keys, values, scale=scale, window=window)


def append(
    kernels: Kernels,
    heads: Heads,
    joined_TQ: Tensor,
    places: Places,
    rounded_THW: Tensor | None,
) -> None:
    """Norms and rotates queries and keys, and appends keys and values. Queries are scaled and
    rounded, or stay in place."""
    rotary, query, key = heads.rotary, heads.query_norm, heads.key_norm
    keys, values = heads.cache.for_kernels
    kernels.rotate_append(
        joined_TQ, rotary.frequency_W if rotary else None, bool(rotary and rotary.is_adjacent),
        query.weight_D if query else None, key.weight_D if key else None,
        query.epsilon if query else 0.0, places.position_T, keys, values, heads.num_heads,
        places.sequence_T, places.table_SN, magnitude=rotary.magnitude if rotary else 1.0,
        query_THW=rounded_THW, query_scale=heads.score_scale,
    )  # fmt: skip
