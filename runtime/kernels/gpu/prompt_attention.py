"""Attention of a prompt's tokens over the cache, which already has their keys and values: softmax(q
k) v by tiles, without stored scores (Dao, "FlashAttention-2", arXiv 2307.08691).

A program has one head and the next tile of tokens, and walks over the keys up to its last token's
position. Positions are read from memory, and the grid follows from the number of tokens alone, so
a captured launch is right for every place in a text. Tiles of keys begin at multiples of their
size, and a tile that a token does not see changes none of its sums, so that a token's result
depends neither on the length of its pass nor on the other tokens.

Letters: T tokens, H heads, K key-value heads, W width of keys or values, C positions of the cache,
B its blocks, P positions of a tile or block, F first values of a key (see attention.py), S
sequences, N blocks of a sequence."""

import torch
from torch import Tensor

from hotsplit.model.spec import Attention
from hotsplit.runtime.kernels.gpu.cache import Cache
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.heads import gate_place, gated, gates_of
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import ceil_div, has_tensor_cores, power_of_2
from hotsplit.runtime.kernels.gpu.reference import positions_of, soft_capped
from hotsplit.runtime.kernels.gpu.scores import finished, finished_weight, scores_of
from hotsplit.runtime.kernels.stored import NO_VECTORS, Vectors

# (tokens and positions of a tile, warps, tiles of keys that are loaded ahead) for heads up to a
# width, multiplied by tensor cores: the sums of wider heads would not fit into registers.
_TILES = {128: (64, 32, 4, 2), 256: (64, 32, 8, 2), 512: (32, 16, 8, 2)}
# f32, and every type without tensor cores.
_EXACT_TILE, _EXACT_WIDE_TILE = (16, 16, 4, 1), (16, 16, 8, 1)


@gpu_kernel(
    reads=("query_THW", "key_CKW", "value_CKW", "position_T", "table_SN"),
    writes=("out_THW",),
    is_of_step=False,
)
def attend_tokens(
    query_THW: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    position_T: Tensor,
    spec: Attention,
    out_THW: Tensor,
    sequence_1: Tensor | None = None,
    table_SN: Tensor | None = None,
    *,
    vectors: Vectors = NO_VECTORS,
    gated_TQ: Tensor | None = None,
) -> Versions:
    """`attend` for the tokens of a prompt, of one sequence at ascending positions: `sequence_1`
    may have several values, which are equal. Queries are scaled and have the type of keys and
    values, to which shares are rounded, too; sums are f32. `gated_TQ`: `qkv` of rotate_append, if
    it has gates. A token's result has the same bits in every pass if values are finite: shares of
    later ones are 0, and 0 times infinity is NaN."""

    def reference() -> None:
        count, num_kv, window = int(position_T[-1]) + 1, key_CKW.shape[-2], spec.window
        seen = [key_CKW, value_CKW]
        if table_SN is not None and sequence_1 is not None:
            seen = [positions_of(each, table_SN[int(sequence_1[0])], count) for each in seen]
        first = 0 if window is None else max(0, int(position_T[0]) + 1 - window)
        keys, values = (each[first:count].double() for each in seen)
        query_TKGW = query_THW.double().unflatten(1, (num_kv, -1))
        score_KGTC = soft_capped(torch.einsum("tkgw,ckw->kgtc", query_TKGW, keys), spec.score_cap)
        at_C, at_T1 = torch.arange(first, count, device=position_T.device), position_T[:, None]
        is_unseen_TC = at_C > at_T1
        if window is not None:
            is_unseen_TC |= at_C <= at_T1 - window
        score_KGTC.masked_fill_(is_unseen_TC, -torch.inf)
        if spec.head_sinks:
            sink_KG11 = vectors["head_sinks"].double().view(num_kv, -1, 1, 1)
            sink_KGT1 = sink_KG11.expand(*score_KGTC.shape[:3], 1)
            score_KGTC = torch.cat([score_KGTC, sink_KGT1], dim=-1)
        share_KGTC = score_KGTC.softmax(dim=-1)[..., : len(keys)]
        heads_THW = torch.einsum("kgtc,ckw->tkgw", share_KGTC, values).flatten(1, 2)
        gate_THW = None if gated_TQ is None else gates_of(gated_TQ, spec)
        if gate_THW is not None:
            heads_THW = heads_THW * gate_THW.double().sigmoid()
        out_THW.copy_(heads_THW)

    def launch() -> None:
        cache = Cache(key_CKW, value_CKW, sequence_1, table_SN, spec)
        num_tokens, num_heads, width = len(query_THW), spec.num_heads, spec.value_dim
        first = spec.head_dim - width
        assert query_THW.shape[1:] == (num_heads, spec.head_dim), (query_THW.shape, spec)
        assert out_THW.shape[1:] == (num_heads, width), (out_THW.shape, spec)
        assert query_THW.is_contiguous() and out_THW.is_contiguous(), query_THW.stride()
        assert query_THW.dtype == key_CKW.dtype == value_CKW.dtype, (query_THW.dtype, key_CKW.dtype)
        block = max(16, power_of_2(width))
        tokens, tile, warps, stages = _tile_of(query_THW, block)
        _attend_tokens[(ceil_div(num_tokens, tokens), num_heads)](
            query_THW,
            cache.arguments,
            position_T,
            out_THW,
            None if gated_TQ is None else gate_place(gated_TQ, spec),
            scores_of(spec, vectors),
            spec.window,
            num_tokens,
            NUM_HEADS=num_heads,
            GROUP=num_heads // spec.num_kv_heads,
            WIDTH=width,
            FIRST=first,
            FIRST_BLOCK=max(16, power_of_2(first)) if first else 1,
            BLOCK=block,
            TOKENS=tokens,
            TILE=tile,
            BLOCK_LENGTH=cache.block_length,
            num_warps=warps,
            num_stages=stages,
        )

    return reference, launch


@triton.jit(do_not_specialize=["num_tokens"])
def _attend_tokens(
    query,
    cache,
    position,
    out,
    gate,
    scores,
    window,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
):
    """The last tokens come first, because they see the most keys."""
    token_T = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    live_T = token_T < num_tokens
    at_T = tl.load(position + token_T, mask=live_T, other=-1).to(tl.int32)
    end = tl.max(at_T + 1, axis=0)
    begin = 0
    if window is not None:  # the tile of the first token's first key
        least_T = tl.maximum(tl.where(live_T, at_T, end) + 1 - window, 0)
        begin = tl.min(least_T // TILE * TILE, axis=0)
    if cache.table is not None:
        table = cache.table + tl.load(cache.sequence).to(tl.int64) * cache.table_stride
    column_W = tl.arange(0, BLOCK)
    in_head_W = column_W < WIDTH
    head_T1 = (token_T.to(tl.int64) * NUM_HEADS + head)[:, None]
    is_live_TW = live_T[:, None] & in_head_W[None, :]
    query += head_T1 * (FIRST + WIDTH)
    query_TW = tl.load(query + FIRST + column_W[None, :], mask=is_live_TW, other=0.0)
    if FIRST:
        first_F = tl.arange(0, FIRST_BLOCK)
        in_first_F = first_F < FIRST
        is_live_TF = live_T[:, None] & in_first_F[None, :]
        query_TF = tl.load(query + first_F[None, :], mask=is_live_TF, other=0.0)
    key = cache.key + (head // GROUP).to(tl.int64) * cache.key_head_stride
    value = cache.value + (head // GROUP).to(tl.int64) * cache.value_head_stride
    peak_T = tl.full([TOKENS], float("-inf"), tl.float32)
    weight_T = tl.zeros([TOKENS], tl.float32)
    sum_TW = tl.zeros([TOKENS, BLOCK], tl.float32)
    for first in tl.range(begin, end, TILE):
        at_P = first + tl.arange(0, TILE)
        row_P, own_key, own_value = at_P.to(tl.int64), key, value
        if cache.table is not None:  # a tile is within a block
            block = tl.load(table + first // BLOCK_LENGTH).to(tl.int64)
            row_P = (first % BLOCK_LENGTH + tl.arange(0, TILE)).to(tl.int64)
            own_key += block * cache.key_block_stride
            own_value += block * cache.value_block_stride
        is_read_P = at_P < end
        if FIRST:
            first_FP = own_key + row_P[None, :] * cache.key_stride + first_F[:, None]
            is_live_FP = is_read_P[None, :] & in_first_F[:, None]
            key_FP = tl.load(first_FP, mask=is_live_FP, other=0.0)
            own_value = own_key + row_P[:, None] * cache.key_stride + FIRST + column_W[None, :]
            value_PW = tl.load(own_value, mask=is_read_P[:, None] & in_head_W[None, :], other=0.0)
            score_TP = tl.dot(query_TF, key_FP, input_precision="ieee")
            score_TP = tl.dot(query_TW, value_PW.trans(), score_TP, input_precision="ieee")
        else:
            own_key += row_P[None, :] * cache.key_stride + column_W[:, None]
            own_value += row_P[:, None] * cache.value_stride + column_W[None, :]
            key_WP = tl.load(own_key, mask=is_read_P[None, :] & in_head_W[:, None], other=0.0)
            value_PW = tl.load(own_value, mask=is_read_P[:, None] & in_head_W[None, :], other=0.0)
            score_TP = tl.dot(query_TW, key_WP, input_precision="ieee")
        score_TP = finished(score_TP, scores)
        is_seen_TP = at_P[None, :] <= at_T[:, None]
        if window is not None:
            is_seen_TP = is_seen_TP & (at_P[None, :] > at_T[:, None] - window)
        score_TP = tl.where(is_seen_TP, score_TP, float("-inf"))
        new_T = tl.maximum(peak_T, tl.max(score_TP, axis=1))
        # If every score is -inf, score - peak would be NaN.
        base_T = tl.where(new_T == float("-inf"), 0.0, new_T)
        shrink_T = tl.exp(peak_T - base_T)
        share_TP = tl.exp(score_TP - base_T[:, None])
        weight_T = weight_T * shrink_T + tl.sum(share_TP, axis=1)
        share_TP = share_TP.to(value_PW.dtype)
        sum_TW = tl.dot(share_TP, value_PW, sum_TW * shrink_T[:, None], input_precision="ieee")
        peak_T = new_T
    weight_T = finished_weight(weight_T, peak_T, scores, head)
    result_TW = sum_TW / weight_T[:, None]
    if gate is not None:
        row_T1 = token_T.to(tl.int64)[:, None]
        result_TW = gated(result_TW, gate, row_T1, head, column_W[None, :], is_live_TW)
    tl.store(
        out + head_T1 * WIDTH + column_W[None, :],
        result_TW.to(out.dtype.element_ty),
        mask=is_live_TW,
    )


def _tile_of(query_THW: Tensor, block: int) -> tuple[int, int, int, int]:
    assert block <= max(_TILES), f"heads of {block} values, at most {max(_TILES)} are supported"
    if query_THW.dtype == torch.float32 or not has_tensor_cores(query_THW.device):
        return _EXACT_TILE if block <= 128 else _EXACT_WIDE_TILE
    return next(tile for width, tile in _TILES.items() if block <= width)
