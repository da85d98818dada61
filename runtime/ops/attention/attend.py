"""Causal attention over a cache in torch on the CPU: scores, softmax, sums of values.

Letters: T tokens, C cached tokens, H heads, K key-value heads, W head width, G heads that share a
key head."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from hotsplit.model.spec import Attention as AttentionSpec
from hotsplit.runtime.kernels.stored import NO_VECTORS, Vectors

MOST_SCORES = 1 << 20  # computed together with a cap or sinks, unless a token has more


def stores_scores(spec: AttentionSpec) -> bool:
    """True if several tokens attend by scores in memory, because torch's attention lacks caps and
    sinks."""
    return spec.score_cap is not None or spec.head_sinks is not None


def in_window(rows: Tensor, num_tokens: int, window: int | None) -> Tensor:
    """The keys or values [C, ...] without those before the windows of the last `num_tokens`
    positions."""
    return rows if window is None else rows[max(0, len(rows) - num_tokens + 1 - window) :]


def attend(
    query_THW: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    spec: AttentionSpec,
    vectors: Vectors = NO_VECTORS,
) -> Tensor:
    """Causal grouped-query attention of the last T of C positions, with the scale and cap of scores
    and the window of `spec`: f32 [T, H * W]. `vectors`: see `spec.vectors`."""
    num_tokens, window = len(query_THW), spec.window
    key_CKW, value_CKW = (in_window(rows, num_tokens, window) for rows in (key_CKW, value_CKW))
    num_cached = len(key_CKW)
    if num_tokens == 1 and not spec.head_sinks:
        return attend_one(query_THW[0], key_CKW, value_CKW, spec)
    mask, before = None, num_cached - num_tokens
    if before or (window or num_cached) < num_cached or stores_scores(spec):
        mask = torch.ones(num_tokens, num_cached, dtype=torch.bool, device=query_THW.device)
        mask = mask.tril(before).triu(before + 1 - (window or num_cached))
    if mask is not None and stores_scores(spec):
        return _attend_by_scores(query_THW, key_CKW, value_CKW, mask, spec, vectors)
    out_HTW = F.scaled_dot_product_attention(
        query_THW.transpose(0, 1)[None],
        key_CKW.transpose(0, 1)[None],
        value_CKW.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=spec.score_scale,
        enable_gqa=query_THW.shape[1] != key_CKW.shape[1],
    )[0]
    return out_HTW.transpose(0, 1).flatten(1)


def _attend_by_scores(
    query_THW: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    is_seen_TC: Tensor,
    spec: AttentionSpec,
    vectors: Vectors,
) -> Tensor:
    """Computes `attend`, if it stores scores, some tokens at a time."""
    num_kv = key_CKW.shape[1]
    pieces, at_once = [], max(1, MOST_SCORES // (query_THW.shape[1] * len(key_CKW)))
    for own_THW, seen_TC in zip(query_THW.split(at_once), is_seen_TC.split(at_once), strict=True):
        query_TKGW = own_THW.unflatten(1, (num_kv, -1))
        score_KGTC = torch.einsum("tkgw,ckw->kgtc", query_TKGW, key_CKW) * spec.score_scale
        score_KGTC = capped(score_KGTC, spec.score_cap)
        score_KGTC.masked_fill_(~seen_TC, -math.inf)
        if spec.head_sinks:
            sink_KGT1 = vectors["head_sinks"].view(num_kv, -1, 1, 1).expand(-1, -1, len(own_THW), 1)
            score_KGTC = torch.cat([score_KGTC, sink_KGT1], dim=-1)
        share_KGTC = score_KGTC.softmax(dim=-1)[..., : len(key_CKW)]
        pieces.append(torch.einsum("kgtc,ckw->tkgw", share_KGTC, value_CKW).flatten(1))
    return torch.cat(pieces)


def capped(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), in place; x itself without a cap."""
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)


def attend_one(query_HW: Tensor, key_CKW: Tensor, value_CKW: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of the last position, f32 [1, H * W], by small products, which have less overhead
    than torch's attention."""
    grouped_KGW = query_HW.reshape(key_CKW.shape[1], -1, query_HW.shape[-1])
    scores_KGC = scored(grouped_KGW @ key_CKW.permute(1, 2, 0), spec)
    return (scores_KGC.softmax(dim=-1) @ value_CKW.transpose(0, 1)).reshape(1, -1)


def scored(dot: Tensor, spec: AttentionSpec) -> Tensor:
    """The scores of products of a query with keys, scaled and capped. Dividing by the root of the head
    width, as here, rounds differently from multiplying by its inverse."""
    return capped(dot / (1 / spec.score_scale), spec.score_cap)
