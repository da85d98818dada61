"""Causal attention over a cache in torch on the CPU: scores, softmax, sums of values.

Letters: T tokens, C cached tokens, H heads, K key-value heads, W head width, G heads that share a
key head."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

MOST_SCORES = 1 << 20  # computed together with a cap or sinks, unless a token has more


def in_window(rows: Tensor, num_tokens: int, window: int | None) -> Tensor:
    """The keys or values [C, ...] without those before the windows of the last `num_tokens`
    positions."""
    return rows if window is None else rows[max(0, len(rows) - num_tokens + 1 - window) :]


def attend(
    query_THW: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Causal grouped-query attention of the last T of C positions: f32 [T, H * W]. Scores are
    multiplied by `scale` and capped by `cap`, and each head may have one more of `sink_H`
    (model.spec.Attention); a token attends to the latest `window` positions."""
    num_tokens = len(query_THW)
    key_CKW, value_CKW = (in_window(rows, num_tokens, window) for rows in (key_CKW, value_CKW))
    num_cached = len(key_CKW)
    if num_tokens == 1 and sink_H is None:
        return attend_one(query_THW[0], key_CKW, value_CKW, scale, cap)
    mask, before = None, num_cached - num_tokens
    if before or (window or num_cached) < num_cached or cap is not None or sink_H is not None:
        mask = torch.ones(num_tokens, num_cached, dtype=torch.bool, device=query_THW.device)
        mask = mask.tril(before).triu(before + 1 - (window or num_cached))
    if mask is not None and (cap is not None or sink_H is not None):
        return _attend_by_scores(query_THW, key_CKW, value_CKW, mask, scale, cap, sink_H)
    out_HTW = F.scaled_dot_product_attention(
        query_THW.transpose(0, 1)[None],
        key_CKW.transpose(0, 1)[None],
        value_CKW.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query_THW.shape[1] != key_CKW.shape[1],
    )[0]
    return out_HTW.transpose(0, 1).flatten(1)


def _attend_by_scores(
    query_THW: Tensor, key_CKW: Tensor, value_CKW: Tensor, is_seen_TC: Tensor, scale: float,
    cap: float | None, sink_H: Tensor | None,
) -> Tensor:  # fmt: skip
    """Computes `attend` with a cap or sinks, which torch's attention lacks, some tokens at a time."""
    num_kv = key_CKW.shape[1]
    pieces, at_once = [], max(1, MOST_SCORES // (query_THW.shape[1] * len(key_CKW)))
    for own_THW, seen_TC in zip(query_THW.split(at_once), is_seen_TC.split(at_once), strict=True):
        query_TKGW = own_THW.unflatten(1, (num_kv, -1))
        score_KGTC = capped(torch.einsum("tkgw,ckw->kgtc", query_TKGW, key_CKW) * scale, cap)
        score_KGTC.masked_fill_(~seen_TC, -math.inf)
        if sink_H is not None:
            sink_KGT1 = sink_H.view(num_kv, -1, 1, 1).expand(-1, -1, len(own_THW), 1)
            score_KGTC = torch.cat([score_KGTC, sink_KGT1], dim=-1)
        share_KGTC = score_KGTC.softmax(dim=-1)[..., : len(key_CKW)]
        pieces.append(torch.einsum("kgtc,ckw->tkgw", share_KGTC, value_CKW).flatten(1))
    return torch.cat(pieces)


def capped(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), in place; x itself without a cap."""
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)


def attend_one(
    query_HW: Tensor, key_CKW: Tensor, value_CKW: Tensor, scale: float, cap: float | None
) -> Tensor:
    """Attention of the last position, f32 [1, H * W], by small products, which have less overhead
    than torch's attention. Dividing by the root of the head width, as here, rounds differently from
    multiplying by its inverse."""
    grouped_KGW = query_HW.reshape(key_CKW.shape[1], -1, query_HW.shape[-1])
    scores_KGC = capped(grouped_KGW @ key_CKW.permute(1, 2, 0) / (1 / scale), cap)
    return (scores_KGC.softmax(dim=-1) @ value_CKW.transpose(0, 1)).reshape(1, -1)
