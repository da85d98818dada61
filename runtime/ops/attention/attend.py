"""Causal attention over a cache in torch, on the CPU and on a GPU: scores, softmax, sums of values.

Letters: T tokens, C cached tokens, H heads, K key-value heads, W head width, G heads that share a
key head, S tokens at a time."""

import math

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional as F

from hotsplit.runtime.ops.attention.flash_parts import multiprocessors, sum_bytes

# Bytes of attention scores on a GPU at a time; they exist twice.
SCORE_BYTES = 4 << 20
# Bytes of flash attention's sums, if it divides the keys; tokens whose sums take more are divided.
FLASH_SUM_BYTES = 8 << 20
# Head widths that flash attention takes: up to this, and multiples of 8, because others are padded.
MOST_FLASH_WIDTH = 256


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


def takes_flash(head_width: int) -> bool:
    """True if flash attention takes heads of this width without copies of the cache."""
    return head_width <= MOST_FLASH_WIDTH and head_width % 8 == 0


def has_flash(device: torch.device) -> bool:
    """True if torch has flash attention for a device: from compute capability 8.0 on."""
    is_built = device.type == "cuda" and torch.backends.cuda.is_flash_attention_available()
    return is_built and torch.cuda.get_device_properties(device).major >= 8


def supports_flash(query_THW: Tensor, key_CKW: Tensor) -> bool:
    """True if torch has flash attention (Dao, arXiv 2307.08691) for these queries and keys, and
    values like the keys. It stores no scores, and takes one launch instead of nine for each
    key-value head."""
    if key_CKW.dtype != torch.float16 or not takes_flash(query_THW.shape[-1]):
        return False
    query, key = (x.transpose(0, 1)[None] for x in (query_THW, key_CKW))
    is_grouped, is_square = query.shape[1] != key.shape[1], query.shape[2] == key.shape[2]
    params = SDPAParams(query, key, key, None, 0.0, is_square, is_grouped)
    return bool(can_use_flash_attention(params))


def attend_with_flash(query_THW: Tensor, key_CKW: Tensor, value_CKW: Tensor) -> Tensor:
    """Computes `attend` for scaled queries in the type of the keys; the result for several tokens
    has it, too. Tokens whose sums take more than FLASH_SUM_BYTES are attended to in pieces."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query_THW, key_CKW, value_CKW))
    pieces = [
        flash_attention(query[:, :, start:stop], key[:, :, :end], value[:, :, :end])[0]
        for start, stop, end in _flash_pieces(query.shape, key.shape[2], query.device)
    ]
    pieces_THW = [piece.transpose(0, 1) for piece in pieces]
    heads_THW = pieces_THW[0] if len(pieces) == 1 else torch.cat(pieces_THW)
    heads_TH = heads_THW.flatten(1)
    return heads_TH if len(heads_TH) > 1 else heads_TH.float()


def _flash_pieces(
    query_shape: torch.Size, num_positions: int, device: torch.device
) -> list[tuple[int, int, int]]:
    """(first token, one after the last, positions that the last one sees) of pieces whose sums take at
    most FLASH_SUM_BYTES each."""
    _, heads, tokens, width = query_shape
    size, before = tokens, num_positions - tokens
    while size > 1 and any(
        sum_bytes(heads, stop - start, before + stop, width, multiprocessors(device))
        > FLASH_SUM_BYTES
        for start, stop in _ranges(tokens, size)
    ):
        size = -(-size // 2)
    return [(start, stop, before + stop) for start, stop in _ranges(tokens, size)]


def _ranges(count: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention [1, H, T, W] of the last T of C positions, for scaled queries [1, H, T, W] and keys
    and values [1, K, C, W] on a CUDA device.

    scaled_dot_product_attention would prefer cuDNN's attention on some cards, which plans anew for
    each length. Here, as in torch.nn.attention.bias, is_causal aligns the last positions."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, is_causal=True, scale=1.0
    )
    return found[0]


def attend_by_heads(
    query_THW: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Computes `attend` on a GPU, one key-value head and SCORE_BYTES of scores at a time. Keys and
    values may be of any float type.

    torch's f32 kernels for grouped heads would copy the keys for each query head and hold all
    scores at once."""
    num_tokens, num_heads, width = query_THW.shape
    num_cached, num_kv, _ = key_CKW.shape
    group = num_heads // num_kv
    out_THW = torch.empty_like(query_THW)
    step = max(1, SCORE_BYTES // (4 * group * num_cached))
    for head in range(num_kv):
        own = slice(head * group, (head + 1) * group)
        _attend_head(
            query_THW[:, own], key_CKW[:, head], value_CKW[:, head], out_THW[:, own], step,
            scale=scale, window=window,
        )  # fmt: skip
    return out_THW.flatten(1)


def _attend_head(
    query_TGW: Tensor, key_CW: Tensor, value_CW: Tensor, out_TGW: Tensor, step: int, *,
    scale: float, window: int | None,
) -> None:  # fmt: skip
    """Causal attention of the heads that share a key head, `step` tokens at a time, into
    `out_TGW`."""
    num_tokens, group, _ = query_TGW.shape
    key_WC, value_CW = key_CW.float().T, value_CW.float()
    position_C = torch.arange(len(value_CW), device=query_TGW.device)
    for start in range(0, num_tokens, step):
        query_SGW = query_TGW[start : start + step] / (1 / scale)
        last_S = position_C[start - num_tokens :][: len(query_SGW)]
        is_out_SC = position_C > last_S[:, None]
        if window is not None:
            is_out_SC |= position_C <= last_S[:, None] - window
        share_SGC = (query_SGW.flatten(0, 1) @ key_WC).unflatten(0, (-1, group))
        share_SGC = share_SGC.masked_fill_(is_out_SC[:, None], -math.inf).softmax(dim=-1)
        out_TGW[start : start + step] = (share_SGC.flatten(0, 1) @ value_CW).view_as(query_SGW)
        del share_SGC  # before the next one is allocated


def attend_one(query_HW: Tensor, key_CKW: Tensor, value_CKW: Tensor, scale: float) -> Tensor:
    """Attention of the last position, f32 [1, H * W], by small products, which have less overhead
    than torch's attention. Dividing by the root of the head width, as here and in `_attend_head`,
    rounds differently from multiplying by its inverse."""
    grouped_KGW = query_HW.reshape(key_CKW.shape[1], -1, query_HW.shape[-1])
    scores_KGC = grouped_KGW @ key_CKW.permute(1, 2, 0) / (1 / scale)
    return (scores_KGC.softmax(dim=-1) @ value_CKW.transpose(0, 1)).reshape(1, -1)
