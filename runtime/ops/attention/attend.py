"""Causal attention over a cache in torch on the CPU: scores, softmax, sums of values.

Letters: T tokens, C cached tokens, H heads, K key-value heads, W head width, G heads that share a
key head."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


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
) -> Tensor:
    """Causal grouped-query attention of the last T of C positions: f32 [T, H * W]. Scores are
    multiplied by `scale`; a token attends to the latest `window` positions."""
    num_tokens = len(query_THW)
    key_CKW, value_CKW = (in_window(rows, num_tokens, window) for rows in (key_CKW, value_CKW))
    num_cached = len(key_CKW)
    if num_tokens == 1:
        return attend_one(query_THW[0], key_CKW, value_CKW, scale)
    mask, before = None, num_cached - num_tokens
    if before or (window or num_cached) < num_cached:
        mask = torch.ones(num_tokens, num_cached, dtype=torch.bool, device=query_THW.device)
        mask = mask.tril(before).triu(before + 1 - (window or num_cached))
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


def attend_with_sinks(
    query_THW: Tensor, key_CKW: Tensor, value_CKW: Tensor, sink_H: Tensor, *, scale: float,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Computes `attend` with one more score for each head, whose share is dropped."""
    num_tokens, num_heads, _ = query_THW.shape
    num_cached, num_kv, _ = key_CKW.shape
    query_TKGW = query_THW.unflatten(1, (num_kv, -1))
    score_KGTC = torch.einsum("tkgw,ckw->kgtc", query_TKGW, key_CKW) * scale
    distance_TC = torch.arange(num_cached - num_tokens, num_cached)[:, None] - torch.arange(
        num_cached
    )
    is_out_TC = (distance_TC < 0) | (distance_TC >= (window or num_cached))
    score_KGTC = score_KGTC.masked_fill(is_out_TC, -math.inf)
    sink_KGT1 = sink_H.view(num_kv, -1, 1, 1).expand(-1, -1, num_tokens, 1)
    share_KGTC = torch.cat([score_KGTC, sink_KGT1], dim=-1).softmax(dim=-1)[..., :-1]
    out_TKGW = torch.einsum("kgtc,ckw->tkgw", share_KGTC, value_CKW)
    return out_TKGW.reshape(num_tokens, -1)


def attend_one(query_HW: Tensor, key_CKW: Tensor, value_CKW: Tensor, scale: float) -> Tensor:
    """Attention of the last position, f32 [1, H * W], by small products, which have less overhead
    than torch's attention. Dividing by the root of the head width, as here, rounds differently from
    multiplying by its inverse."""
    grouped_KGW = query_HW.reshape(key_CKW.shape[1], -1, query_HW.shape[-1])
    scores_KGC = grouped_KGW @ key_CKW.permute(1, 2, 0) / (1 / scale)
    return (scores_KGC.softmax(dim=-1) @ value_CKW.transpose(0, 1)).reshape(1, -1)
