"""Attention of a step's rows: rotation, append to the cache, and softmax(q k) v split over the
context.

Each row has programs of its own, with the same instructions as in a step of one row. A row reads
the keys and values of its sequence's earlier rows from the KV cache, where `rotate_append` has
written them.

Letters: T rows of a step, H heads, K key-value heads, W head width, C positions of the cache, B its
blocks, P positions of a tile or block, G queries of a key-value head, S sequences (in
`_attend_join`, parts), N blocks of a sequence."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from hotsplit.model.spec import Attention
from hotsplit.runtime.kernels.gpu.activation import capped
from hotsplit.runtime.kernels.gpu.launch import overlap_options, power_of_2, step_rows
from hotsplit.runtime.kernels.gpu.overlap import admit_next, await_last
from hotsplit.runtime.kernels.gpu.ranges import attend_parts, attend_scratch, attend_split

# Positions of a tile, whose keys and values are in registers: 32 KiB of f32 each at a width of 128;
# half as many at one of 512.
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
    key_block_stride,
    value_block_stride,
    sequence,
    table,
    table_stride,
    query,
    query_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    IS_ADJACENT: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    CENTRES: tl.constexpr,
    NORM_STRIDE: tl.constexpr,
    GROWTH: tl.constexpr,
    GROWTH_LENGTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per head and row. Values are loaded in pairs even if they are not rotated: of a
    head's first ROTATED values, then of the others. A row that repeats the previous one appends
    nothing."""
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    head = tl.program_id(0)
    if HAS_ROWS:
        row = tl.program_id(1)
        qkv += row * ROW_STRIDE
        position += row
        if query is not None:
            query += row * (NUM_HEADS * WIDTH)
    at = tl.load(position)
    pair = tl.arange(0, HALF)
    in_head = pair < WIDTH // 2
    is_kept = in_head
    if HAS_ROWS:
        is_new = (row == 0) | (tl.load(position - 1, mask=row > 0, other=-1) != at)
        if table is not None:
            before = tl.load(sequence + row - 1, mask=row > 0, other=-1)
            is_new = is_new | (before != tl.load(sequence + row))
        is_kept = in_head & is_new
    if table is not None:
        own = tl.load(sequence + (row if HAS_ROWS else 0)).to(tl.int64)
        block = tl.load(table + own * table_stride + at // BLOCK_LENGTH).to(tl.int64)
        key += block * key_block_stride
        value += block * value_block_stride
    place = at if table is None else at % BLOCK_LENGTH
    if IS_ADJACENT:
        first_at, second_at = 2 * pair, 2 * pair + 1
    else:
        is_turned = pair < ROTATED // 2
        first_at = tl.where(is_turned, pair, pair + ROTATED // 2)
        second_at = pair + tl.where(is_turned, ROTATED // 2, WIDTH // 2)
    if head < NUM_HEADS:
        qkv += head * QUERY_STRIDE
    elif VALUES_ARE_KEYS:
        qkv += NUM_HEADS * QUERY_STRIDE + (head - NUM_HEADS) % NUM_KV * WIDTH
    else:
        qkv += NUM_HEADS * QUERY_STRIDE + (head - NUM_HEADS) * WIDTH
    first = tl.load(qkv + first_at, mask=in_head, other=0.0)
    second = tl.load(qkv + second_at, mask=in_head, other=0.0)
    kv_head = ((head - NUM_HEADS) % NUM_KV).to(tl.int64)
    if head >= NUM_HEADS + NUM_KV:
        if NORMS_VALUES:
            first, second = _head_norm(
                first, second, None, first_at, second_at, in_head, epsilon, WIDTH, False
            )
        target = value + place * value_stride + kv_head * value_head_stride
        tl.store(target + first_at, first.to(value.dtype.element_ty), mask=is_kept)
        tl.store(target + second_at, second.to(value.dtype.element_ty), mask=is_kept)
    else:
        if head < NUM_HEADS:
            if query_weight is not None:
                first, second = _head_norm(
                    first, second, query_weight + head * NORM_STRIDE, first_at, second_at, in_head,
                    epsilon, WIDTH, CENTRES,
                )  # fmt: skip
        else:
            if key_weight is not None:
                first, second = _head_norm(
                    first, second, key_weight + kv_head * NORM_STRIDE, first_at, second_at, in_head,
                    epsilon, WIDTH, CENTRES,
                )  # fmt: skip
        if frequency is not None:
            first, second = _turn(first, second, frequency, pair, at, ROTATED, MAGNITUDE)
        if head < NUM_HEADS:
            if GROWTH != 0.0:
                factor = 1.0 + GROWTH * tl.log(1.0 + (at // GROWTH_LENGTH).to(tl.float32))
                first, second = first * factor, second * factor
            if query is not None:
                target = query + head * WIDTH
                first, second = first * query_scale, second * query_scale
                tl.store(target + first_at, first.to(query.dtype.element_ty), mask=in_head)
                tl.store(target + second_at, second.to(query.dtype.element_ty), mask=in_head)
            else:
                tl.debug_barrier()  # in place: all threads must have loaded before any stores
                tl.store(qkv + first_at, first, mask=in_head)
                tl.store(qkv + second_at, second, mask=in_head)
        else:
            target = key + place * key_stride + kv_head * key_head_stride
            tl.store(target + first_at, first.to(key.dtype.element_ty), mask=is_kept)
            tl.store(target + second_at, second.to(key.dtype.element_ty), mask=is_kept)


@triton.jit
def _head_norm(
    first, second, weight, first_at, second_at, in_head, epsilon, WIDTH: tl.constexpr,
    CENTRES: tl.constexpr,
):  # fmt: skip
    if CENTRES:
        mean = tl.sum(first + second, axis=0) / WIDTH
        first = tl.where(in_head, first - mean, 0.0)
        second = tl.where(in_head, second - mean, 0.0)
    mean_square = tl.sum(first * first + second * second, axis=0) / WIDTH
    scale = tl.rsqrt(mean_square + epsilon)
    first, second = first * scale, second * scale
    if weight is not None:
        first = first * tl.load(weight + first_at, mask=in_head, other=0.0)
        second = second * tl.load(weight + second_at, mask=in_head, other=0.0)
    return first, second


@triton.jit
def _turn(first, second, frequency, pair, position, ROTATED: tl.constexpr, MAGNITUDE: tl.constexpr):
    """Rotates the first pairs by position times frequency, and multiplies them by the magnitude. The
    angle is computed in f64, because it may be 100,000 turns of which only the fraction counts; its
    cosine and sine are f32, because f64 would cost a laptop's GPU some microseconds per layer."""
    is_turned = pair < ROTATED // 2
    turns = position.to(tl.float64) * tl.load(frequency + pair, mask=is_turned, other=0.0)
    turns = turns * 0.15915494309189535
    turns -= tl.floor(turns + 0.5)
    angle = (turns * 6.283185307179586).to(tl.float32)
    cos, sin = tl.cos(angle), tl.sin(angle)
    if MAGNITUDE != 1.0:
        cos, sin = tl.where(is_turned, cos * MAGNITUDE, 1.0), sin * MAGNITUDE
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
    cap,
    window,
    num_heads,
    key_block_stride,
    value_block_stride,
    sequence,
    table,
    table_stride,
    WIDTH: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_KV: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per key-value head, part of the context and row. For each of the head's queries
    it computes the maximum score, the sum of e^(score - maximum), and the sum of the values
    weighted by e^(score - maximum). Tiles before the row's window are not read."""
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    to = part
    if NUM_ROWS > 1:
        row = tl.program_id(2)
        qkv += row * ROW_STRIDE
        position += row
        to = row * tl.num_programs(1) + part
    if table is not None:
        own = tl.load(sequence + (row if NUM_ROWS > 1 else 0)).to(tl.int64)
        table += own * table_stride
    last = tl.load(position)
    begin = part * SPLIT
    end = tl.minimum(begin + SPLIT, last + 1)
    if window is not None:
        least = last + 1 - window  # the first position of the window, if there are as many
        begin += tl.maximum(least - begin, 0) // TILE * TILE
    if begin < end:
        column_W = tl.arange(0, BLOCK)
        in_head_W = column_W < WIDTH
        group_G = tl.arange(0, GROUP_BLOCK)
        peak_G = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        weight_G = tl.zeros([GROUP_BLOCK], tl.float32)
        sum_GW = tl.zeros([GROUP_BLOCK, BLOCK], tl.float32)
        head_key = key + kv_head.to(tl.int64) * key_head_stride
        head_value = value + kv_head.to(tl.int64) * value_head_stride
        first = begin
        while first < end:
            at_P = first + tl.arange(0, TILE)
            is_read_P = at_P < end
            if window is not None:
                is_read_P = is_read_P & (at_P >= least)
            is_live = is_read_P[:, None] & in_head_W[None, :]
            row_P = at_P.to(tl.int64)[:, None]
            column = column_W[None, :]
            if table is not None:  # a tile is within a block
                block = tl.load(table + first // BLOCK_LENGTH).to(tl.int64)
                row_P = (first % BLOCK_LENGTH + tl.arange(0, TILE)).to(tl.int64)[:, None]
                head_key = key + kv_head.to(tl.int64) * key_head_stride + block * key_block_stride
                head_value = (
                    value + kv_head.to(tl.int64) * value_head_stride + block * value_block_stride
                )
            key_PW = tl.load(head_key + (row_P * key_stride + column), mask=is_live, other=0.0)
            value_PW = tl.load(
                head_value + (row_P * value_stride + column), mask=is_live, other=0.0
            )
            key_PW, value_PW = key_PW.to(tl.float32), value_PW.to(tl.float32)
            # One query at a time against the tile in registers: a product with all queries would
            # take GROUP times the registers, and tensor cores would round the queries.
            score_GP = tl.full([GROUP_BLOCK, TILE], float("-inf"), tl.float32)
            for number in tl.static_range(GROUP):
                query = qkv + (kv_head * GROUP + number) * QUERY_STRIDE
                query_W = tl.load(query + column_W, mask=in_head_W, other=0.0)
                score_P = tl.sum(key_PW * query_W[None, :], axis=1) * scale
                if cap is not None:
                    score_P = capped(score_P, cap)
                score_P = tl.where(is_read_P, score_P, float("-inf"))
                score_GP = tl.where((group_G == number)[:, None], score_P[None, :], score_GP)
            new_G = tl.maximum(peak_G, tl.max(score_GP, axis=1))
            new_G = tl.where(group_G < GROUP, new_G, 0.0)
            # If every score is -inf, score - peak would be NaN.
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
        head_G = to * num_heads + kv_head * GROUP + group_G
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
    gate,
    gate_stride,
    out,
    sink,
    window,
    num_heads,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per head and row: combines the parts, from the one where the row's window begins
    to the one with the row's position, under a common maximum score. `gate` are the queries, behind
    each of which is the gate of its head's output."""
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    head = tl.program_id(0)
    part_S = tl.arange(0, PARTS_BLOCK)
    first = 0
    if NUM_ROWS > 1:
        first = tl.program_id(1) * NUM_PARTS
        position += tl.program_id(1)
        out += tl.program_id(1) * num_heads * WIDTH
        if gate is not None:
            gate += tl.program_id(1) * gate_stride
    last = tl.load(position)
    is_live_S = part_S <= last // SPLIT
    if window is not None:
        is_live_S = is_live_S & (part_S >= tl.maximum(last + 1 - window, 0) // SPLIT)
    at_S = (first + part_S) * num_heads + head
    column_W = tl.arange(0, BLOCK)
    in_head_W = column_W < WIDTH
    peak_S = tl.load(peaks + at_S, mask=is_live_S, other=float("-inf"))
    peak = tl.max(peak_S, axis=0)
    if sink is not None:
        peak = tl.maximum(peak, tl.load(sink + head))
    share_S = tl.exp(peak_S - peak)
    weight_S = tl.load(weights + at_S, mask=is_live_S, other=0.0)
    sum_SW = tl.load(
        sums + at_S[:, None] * WIDTH + column_W[None, :],
        mask=is_live_S[:, None] & in_head_W[None, :],
        other=0.0,
    )
    sum_W = tl.sum(sum_SW * share_S[:, None], axis=0)
    weight = tl.sum(weight_S * share_S, axis=0)
    if sink is not None:  # a score of no key
        weight += tl.exp(tl.load(sink + head) - peak)
    sum_W = sum_W / weight
    if gate is not None:
        gate_W = tl.load(gate + (2 * head + 1) * WIDTH + column_W, mask=in_head_W, other=0.0)
        sum_W = sum_W / (1.0 + tl.exp(-gate_W))
    tl.store(out + head * WIDTH + column_W, sum_W, mask=in_head_W)


def rotate_append(
    qkv: Tensor,
    frequency_W2: Tensor | None,
    query_weight_W: Tensor | None,
    key_weight_W: Tensor | None,
    position_1: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    spec: Attention,
    sequence_1: Tensor | None = None,
    table_SN: Tensor | None = None,
    query_THW: Tensor | None = None,
) -> None:
    cache = Cache(key_CKW, value_CKW, sequence_1, table_SN, spec)
    num_rows, width = 1 if qkv.dim() == 1 else len(qkv), spec.head_dim
    num_heads, num_kv, size = spec.num_heads, spec.num_kv_heads, spec.qkv_size + spec.gate_size
    norm, rotary, growth = spec.head_norm, spec.rotary, spec.growth
    assert qkv.shape[-1] == size, (qkv.shape, spec)
    assert qkv.is_contiguous() and len(position_1) == num_rows, (qkv.stride(), position_1.shape)
    assert query_THW is None or query_THW.is_contiguous(), query_THW.stride()
    heads = num_heads + (2 * num_kv if spec.num_own else 0)
    grid = (heads,) if num_rows == 1 else (heads, num_rows)
    _rotate_append[grid](
        qkv,
        frequency_W2,
        query_weight_W,
        key_weight_W,
        norm.epsilon if norm else 0.0,
        position_1,
        key_CKW,
        value_CKW,
        *cache.strides,
        *cache.paging,
        query_THW,
        spec.score_scale,
        NUM_HEADS=num_heads,
        NUM_KV=num_kv,
        WIDTH=width,
        QUERY_STRIDE=width * (1 + spec.is_gated),
        ROW_STRIDE=size,
        NORMS_VALUES=spec.norms_values,
        VALUES_ARE_KEYS=spec.num_own == 1,
        ROTATED=width if frequency_W2 is None else 2 * len(frequency_W2),
        HALF=power_of_2(width // 2),
        IS_ADJACENT=bool(rotary and rotary.pairing == "adjacent"),
        HAS_ROWS=num_rows > 1,
        BLOCK_LENGTH=cache.block_length,
        MAGNITUDE=rotary.scaling.magnitude if rotary else 1.0,
        CENTRES=bool(norm and norm.kind != "rms"),
        NORM_STRIDE=width if query_weight_W is not None and query_weight_W.dim() == 2 else 0,
        GROWTH=growth.factor if growth else 0.0,
        GROWTH_LENGTH=growth.length if growth else 1,
        **overlap_options(),
        num_warps=1,
    )


def attend(
    qkv: Tensor,
    key_CKW: Tensor,
    value_CKW: Tensor,
    position_1: Tensor,
    spec: Attention,
    scratch: Tensor,
    out_HW: Tensor,
    sequence_1: Tensor | None = None,
    table_SN: Tensor | None = None,
    *,
    sink_H: Tensor | None = None,
) -> None:
    cache = Cache(key_CKW, value_CKW, sequence_1, table_SN, spec)
    num_rows, num_heads, num_kv = step_rows(qkv), spec.num_heads, spec.num_kv_heads
    width, context = spec.head_dim, cache.context_length
    assert qkv.is_contiguous() and out_HW.is_contiguous(), (qkv.stride(), out_HW.stride())
    num_parts, split = attend_parts(context), attend_split(context)
    assert scratch.numel() >= num_rows * attend_scratch(context, num_heads, width), scratch.shape
    group = num_heads // num_kv
    all_parts = num_rows * num_parts
    num_sums = all_parts * num_heads * width
    sums, peaks = scratch[:num_sums], scratch[num_sums:]
    weights = peaks[all_parts * num_heads :]
    block = max(16, power_of_2(width))
    rows = () if num_rows == 1 else (num_rows,)
    _attend_part[(num_kv, num_parts, *rows)](
        qkv,
        key_CKW,
        value_CKW,
        *cache.strides,
        position_1,
        sums,
        peaks,
        weights,
        spec.score_scale,
        spec.score_cap,
        spec.window,
        num_heads,
        *cache.paging,
        WIDTH=width,
        QUERY_STRIDE=width * (1 + spec.is_gated),
        ROW_STRIDE=qkv.shape[-1],
        BLOCK=block,
        GROUP=group,
        GROUP_BLOCK=power_of_2(group),
        SPLIT=split,
        TILE=min(_TILE, _TILE * 256 // block),
        NUM_ROWS=num_rows,
        NUM_KV=num_kv,
        BLOCK_LENGTH=cache.block_length,
        **overlap_options(),
        num_warps=max(4, block // 64),
    )
    _attend_join[(num_heads, *rows)](
        sums,
        peaks,
        weights,
        position_1,
        qkv if spec.is_gated else None,
        qkv.shape[-1],
        out_HW,
        sink_H,
        spec.window,
        num_heads,
        WIDTH=width,
        BLOCK=block,
        SPLIT=split,
        PARTS_BLOCK=power_of_2(num_parts),
        NUM_ROWS=num_rows,
        NUM_PARTS=num_parts,
        **overlap_options(),
        num_warps=4,
    )


@dataclass(frozen=True)
class Cache:
    """A cache [C, K, W] of one sequence, or in blocks [B, P, K, W] that a table assigns. Positions,
    heads and blocks may be strided, in any order; the values of a head are contiguous."""

    key: Tensor
    value: Tensor
    sequence_1: Tensor | None
    table_SN: Tensor | None
    spec: Attention

    def __post_init__(self) -> None:
        heads, window = (self.spec.num_kv_heads, self.spec.head_dim), self.spec.window
        for cache in (self.key, self.value):
            assert cache.stride(-1) == 1 and cache.shape[-2:] == heads, (cache.shape, self.spec)
        assert window is None or window > 0, window
        is_paged = self.table_SN is not None
        assert self.key.dim() == self.value.dim() == 3 + is_paged, self.key.shape
        assert (self.sequence_1 is not None) == is_paged
        assert not is_paged or self.block_length % _TILE == 0, self.block_length

    @property
    def block_length(self) -> int:
        """Positions of a block; 1 if there are no blocks, so that this constant of the kernels does
        not depend on the context."""
        return 1 if self.table_SN is None else self.key.shape[1]

    @property
    def context_length(self) -> int:
        if self.table_SN is None:
            return self.key.shape[0]
        return self.table_SN.shape[1] * self.block_length

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of positions (keys, values) and of heads (keys, values)."""
        return tuple(cache.stride(axis) for axis in (-3, -2) for cache in (self.key, self.value))

    @property
    def paging(self) -> tuple[int | Tensor | None, ...]:
        """The strides of blocks, the rows' sequences, the table and its stride."""
        if self.table_SN is None:
            return (None,) * 5
        strides = self.key.stride(0), self.value.stride(0)
        return (*strides, self.sequence_1, self.table_SN, self.table_SN.stride(0))
