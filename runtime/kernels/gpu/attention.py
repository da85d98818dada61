"""Attention of one token: rotation, cache append, and softmax(q k) v split over the context.

Letters: H heads, K key-value heads, W head width, C positions of the cache, P positions of a tile,
G queries of a key-value head."""

import triton
import triton.language as tl
from torch import Tensor

from sparkinfer.runtime.kernels.gpu.launch import power_of_2
from sparkinfer.runtime.kernels.gpu.ranges import attend_parts, attend_scratch, attend_split

# Positions whose keys and values are in registers at once: 16 KiB of f16 at a width of 128.
_TILE = 64


@triton.jit
def _rotate_append(
    qkv,
    frequency,
    query_weight,
    key_weight,
    epsilon,
    position,
    key,
    value,
    key_stride,
    value_stride,
    key_head_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    IS_ADJACENT: tl.constexpr,
):
    """One program per head. Values are loaded in pairs, whether or not they are rotated."""
    head = tl.program_id(0)
    at = tl.load(position)
    pair = tl.arange(0, HALF)
    in_head = pair < WIDTH // 2
    if IS_ADJACENT:
        first_at, second_at = 2 * pair, 2 * pair + 1
    else:
        first_at, second_at = pair, pair + WIDTH // 2
    first = tl.load(qkv + head * WIDTH + first_at, mask=in_head, other=0.0)
    second = tl.load(qkv + head * WIDTH + second_at, mask=in_head, other=0.0)
    kv_head = ((head - NUM_HEADS) % NUM_KV).to(tl.int64)
    if head >= NUM_HEADS + NUM_KV:
        target = value + at * value_stride + kv_head * value_head_stride
        tl.store(target + first_at, first.to(value.dtype.element_ty), mask=in_head)
        tl.store(target + second_at, second.to(value.dtype.element_ty), mask=in_head)
    else:
        if head < NUM_HEADS:
            if query_weight is not None:
                first, second = _head_norm(
                    first, second, query_weight, first_at, second_at, in_head, epsilon, WIDTH
                )
        else:
            if key_weight is not None:
                first, second = _head_norm(
                    first, second, key_weight, first_at, second_at, in_head, epsilon, WIDTH
                )
        if frequency is not None:
            first, second = _turn(first, second, frequency, pair, in_head, at)
        if head < NUM_HEADS:
            tl.debug_barrier()  # in place: a thread may store where another one has loaded
            tl.store(qkv + head * WIDTH + first_at, first, mask=in_head)
            tl.store(qkv + head * WIDTH + second_at, second, mask=in_head)
        else:
            target = key + at * key_stride + kv_head * key_head_stride
            tl.store(target + first_at, first.to(key.dtype.element_ty), mask=in_head)
            tl.store(target + second_at, second.to(key.dtype.element_ty), mask=in_head)


@triton.jit
def _head_norm(first, second, weight, first_at, second_at, in_head, epsilon, WIDTH: tl.constexpr):
    mean_square = tl.sum(first * first + second * second, axis=0) / WIDTH
    scale = tl.rsqrt(mean_square + epsilon)
    first = first * scale * tl.load(weight + first_at, mask=in_head, other=0.0)
    second = second * scale * tl.load(weight + second_at, mask=in_head, other=0.0)
    return first, second


@triton.jit
def _turn(first, second, frequency, pair, in_head, position):
    """Rotates by position times frequency. The angle is in f64, as it may be 100,000 turns of which
    only the fraction counts; cosine and sine of that fraction are in f32, as f64 ones cost a
    laptop's GPU some microseconds a layer."""
    turns = position.to(tl.float64) * tl.load(frequency + pair, mask=in_head, other=0.0)
    turns = turns * 0.15915494309189535
    turns -= tl.floor(turns + 0.5)
    angle = (turns * 6.283185307179586).to(tl.float32)
    cos, sin = tl.cos(angle), tl.sin(angle)
    return first * cos - second * sin, first * sin + second * cos


@triton.jit
def _attend_part(
    qkv,
    key,
    value,
    key_stride,
    value_stride,
    key_head_stride,
    value_head_stride,
    position,
    sums,
    peaks,
    weights,
    scale,
    num_heads,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """One key-value head and one part of the context: for each of the head's queries the maximum
    score, the sum of e^(score - maximum), and the sum of values with these weights."""
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    last = tl.load(position)
    begin = part * SPLIT
    if begin <= last:
        column_W = tl.arange(0, BLOCK)
        in_head_W = column_W < WIDTH
        group_G = tl.arange(0, GROUP_BLOCK)
        peak_G = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        weight_G = tl.zeros([GROUP_BLOCK], tl.float32)
        sum_GW = tl.zeros([GROUP_BLOCK, BLOCK], tl.float32)
        end = tl.minimum(begin + SPLIT, last + 1)
        head_key = key + kv_head.to(tl.int64) * key_head_stride
        head_value = value + kv_head.to(tl.int64) * value_head_stride
        first = begin
        while first < end:
            at_P = first + tl.arange(0, TILE)
            is_live = (at_P < end)[:, None] & in_head_W[None, :]
            row_P = at_P.to(tl.int64)[:, None]
            column = column_W[None, :]
            key_PW = tl.load(head_key + (row_P * key_stride + column), mask=is_live, other=0.0)
            value_PW = tl.load(
                head_value + (row_P * value_stride + column), mask=is_live, other=0.0
            )
            key_PW, value_PW = key_PW.to(tl.float32), value_PW.to(tl.float32)
            # One query at a time against the tile in registers: a product of all at once would be
            # GROUP times as large, and tensor cores would round the queries.
            score_GP = tl.full([GROUP_BLOCK, TILE], float("-inf"), tl.float32)
            for number in tl.static_range(GROUP):
                query = qkv + (kv_head * GROUP + number) * WIDTH
                query_W = tl.load(query + column_W, mask=in_head_W, other=0.0)
                score_P = tl.sum(key_PW * query_W[None, :], axis=1) * scale
                score_P = tl.where(at_P < end, score_P, float("-inf"))
                score_GP = tl.where((group_G == number)[:, None], score_P[None, :], score_GP)
            new_G = tl.maximum(peak_G, tl.max(score_GP, axis=1))
            new_G = tl.where(group_G < GROUP, new_G, 0.0)
            # If every score is minus infinity, their difference is undefined.
            base_G = tl.where(new_G == float("-inf"), 0.0, new_G)
            shrink_G = tl.exp(peak_G - base_G)
            share_GP = tl.exp(score_GP - base_G[:, None])
            weight_G = weight_G * shrink_G + tl.sum(share_GP, axis=1)
            sum_GW *= shrink_G[:, None]
            for number in tl.static_range(GROUP):
                is_it_G = group_G == number
                share_P = tl.sum(tl.where(is_it_G[:, None], share_GP, 0.0), axis=0)
                added_W = tl.sum(value_PW * share_P[:, None], axis=0)
                sum_GW += tl.where(is_it_G[:, None], added_W[None, :], 0.0)
            peak_G = new_G
            first += TILE
        head_G = part * num_heads + kv_head * GROUP + group_G
        is_query_G = group_G < GROUP
        tl.store(peaks + head_G, peak_G, mask=is_query_G)
        tl.store(weights + head_G, weight_G, mask=is_query_G)
        target = sums + head_G[:, None] * WIDTH + column_W[None, :]
        tl.store(target, sum_GW, mask=is_query_G[:, None] & in_head_W[None, :])


@triton.jit
def _attend_join(
    sums,
    peaks,
    weights,
    position,
    out,
    num_heads,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):
    """One head: joins its parts, up to the one with the position, under a common maximum score."""
    head = tl.program_id(0)
    part_S = tl.arange(0, PARTS_BLOCK)
    is_live_S = part_S <= tl.load(position) // SPLIT
    at_S = part_S * num_heads + head
    column_W = tl.arange(0, BLOCK)
    in_head_W = column_W < WIDTH
    peak_S = tl.load(peaks + at_S, mask=is_live_S, other=float("-inf"))
    share_S = tl.exp(peak_S - tl.max(peak_S, axis=0))
    weight_S = tl.load(weights + at_S, mask=is_live_S, other=0.0)
    sum_SW = tl.load(
        sums + at_S[:, None] * WIDTH + column_W[None, :],
        mask=is_live_S[:, None] & in_head_W[None, :],
        other=0.0,
    )
    sum_W = tl.sum(sum_SW * share_S[:, None], axis=0)
    tl.store(
        out + head * WIDTH + column_W, sum_W / tl.sum(weight_S * share_S, axis=0), mask=in_head_W
    )


def rotate_append(
    qkv: Tensor,
    frequency_W2: Tensor | None,
    is_adjacent: bool,
    query_weight_W: Tensor | None,
    key_weight_W: Tensor | None,
    epsilon: float,
    position_1: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    num_heads: int,
) -> None:
    _, num_kv, width = key_CKW.shape
    _check_cache(key_CKW, value_CKW)
    assert len(qkv) == (num_heads + 2 * num_kv) * width, (qkv.shape, num_heads, key_CKW.shape)
    _rotate_append[(num_heads + 2 * num_kv,)](
        qkv,
        frequency_W2,
        query_weight_W,
        key_weight_W,
        float(epsilon),
        position_1,
        key_CKW,
        value_CKW,
        key_CKW.stride(0),
        value_CKW.stride(0),
        key_CKW.stride(1),
        value_CKW.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV=num_kv,
        WIDTH=width,
        HALF=power_of_2(width // 2),
        IS_ADJACENT=is_adjacent,
        num_warps=1,
    )


def attend(
    qkv: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    position_1: Tensor,
    num_heads: int,
    scratch: Tensor,
    out_HW: Tensor,
) -> None:
    context, num_kv, width = key_CKW.shape
    _check_cache(key_CKW, value_CKW)
    num_parts, split = attend_parts(context), attend_split(context)
    assert len(scratch) >= attend_scratch(context, num_heads, width), scratch.shape
    group = num_heads // num_kv
    num_sums = num_parts * num_heads * width
    sums, peaks = scratch[:num_sums], scratch[num_sums:]
    weights = peaks[num_parts * num_heads :]
    block = max(16, power_of_2(width))
    _attend_part[(num_kv, num_parts)](
        qkv,
        key_CKW,
        value_CKW,
        key_CKW.stride(0),
        value_CKW.stride(0),
        key_CKW.stride(1),
        value_CKW.stride(1),
        position_1,
        sums,
        peaks,
        weights,
        width**-0.5,
        num_heads,
        WIDTH=width,
        BLOCK=block,
        GROUP=group,
        GROUP_BLOCK=power_of_2(group),
        SPLIT=split,
        TILE=_TILE,
        num_warps=4,
    )
    _attend_join[(num_heads,)](
        sums,
        peaks,
        weights,
        position_1,
        out_HW,
        num_heads,
        WIDTH=width,
        BLOCK=block,
        SPLIT=split,
        PARTS_BLOCK=power_of_2(num_parts),
        num_warps=4,
    )


def _check_cache(key_CKW: Tensor, value_CKW: Tensor) -> None:
    """Positions and heads may be strided, in any order; the values of a head are contiguous."""
    for cache in (key_CKW, value_CKW):
        assert cache.stride(2) == 1, cache.stride()
