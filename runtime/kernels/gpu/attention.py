"""Attention of a step's rows: softmax(q k) v split over the context.

Each row has programs of its own, with the same instructions as in a step of one row. A row reads
the keys and values of its sequence's earlier rows from the KV cache, where `rotate_append` has
written them. If values are the last ones of keys (MLA), a key is in two parts, each loaded once:
its first values and those, 64 and 512 of DeepSeek's, which together are no power of two.

Letters: T rows of a step, H heads, K key-value heads, W width of keys or values, C positions of the
cache, B its blocks, P positions of a tile or block, G queries of a program, F first values of a
key, S sequences (in `_attend_join`, parts), N blocks of a sequence."""

import torch
from torch import Tensor

from hotsplit.model.spec import Attention
from hotsplit.runtime.kernels.gpu.cache import TILE, Cache
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.heads import gate_place, gated, gates_of
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import ceil_div, overlap_options, power_of_2, step_rows
from hotsplit.runtime.kernels.gpu.overlap import admit_next, await_last
from hotsplit.runtime.kernels.gpu.ranges import attend_parts, attend_scratch, attend_split
from hotsplit.runtime.kernels.gpu.reference import positions_of, soft_capped
from hotsplit.runtime.kernels.gpu.scores import finished, finished_peak, finished_weight, scores_of
from hotsplit.runtime.kernels.stored import NO_VECTORS, Vectors

# Sums of values of a program, in registers. More queries share keys among several programs.
_MOST_SUMS = 4096


@gpu_kernel(
    reads=("qkv", "key_CKW", "value_CKW", "position_1", "sequence_1", "table_SN"),
    writes=("out_HW", "scratch"),
    shared=("key_CKW", "value_CKW", "table_SN", "scratch"),
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
    vectors: Vectors = NO_VECTORS,
) -> Versions:
    """The attention of `spec` to the positions up to `position_1` inclusive, times the sigmoid of
    the gates, if any. `vectors`: those of the spec, f32, by its names. Triton reads no tile of 64
    keys before the window. `scratch` is f32 with at least `attend_scratch` values per row."""

    def reference() -> None:
        count, gates = int(position_1) + 1, spec.is_gated
        num_kv, width = key_CKW.shape[-2:]  # of keys
        seen = [key_CKW, value_CKW]
        if table_SN is not None and sequence_1 is not None:
            seen = [positions_of(cache, table_SN[int(sequence_1)], count) for cache in seen]
        read = slice(0 if spec.window is None else max(0, count - spec.window), count)
        head_HW = qkv[: spec.num_heads * width * (1 + gates)].double().view(-1, width)
        query_KGW = head_HW[:: 1 + gates].reshape(num_kv, -1, width)
        keys, values = (cache[read].double() for cache in seen)
        key_KWC = keys.permute(1, 2, 0)
        score_KGC = soft_capped(query_KGW @ key_KWC * spec.score_scale, spec.score_cap)
        if spec.head_sinks:
            sink_KG1 = vectors["head_sinks"].double().view(num_kv, -1, 1)
            score_KGC = torch.cat([score_KGC, sink_KG1], dim=-1)
        share_KGC = score_KGC.softmax(dim=-1)[..., : key_KWC.shape[-1]]
        heads_HW = (share_KGC @ values.transpose(0, 1)).flatten(0, 1)
        if (gate_H1 := gates_of(qkv, spec)) is not None:
            heads_HW = heads_HW * gate_H1.double().sigmoid()
        out_HW.copy_(heads_HW.view_as(out_HW))

    def launch() -> None:
        cache = Cache(key_CKW, value_CKW, sequence_1, table_SN, spec)
        num_rows, num_heads, num_kv = step_rows(qkv), spec.num_heads, spec.num_kv_heads
        width, context, first = spec.value_dim, cache.context_length, spec.head_dim - spec.value_dim
        assert qkv.is_contiguous() and out_HW.is_contiguous(), (qkv.stride(), out_HW.stride())
        num_parts, split = attend_parts(context), attend_split(context)
        least = num_rows * attend_scratch(context, num_heads, width)
        assert scratch.numel() >= least, scratch.shape
        queries, scores = num_heads // num_kv, scores_of(spec, vectors)
        all_parts = num_rows * num_parts
        num_sums = all_parts * num_heads * width
        sums, peaks = scratch[:num_sums], scratch[num_sums:]
        weights = peaks[all_parts * num_heads :]
        block = max(16, power_of_2(width))
        programs = ceil_div(queries, max(1, _MOST_SUMS // block))
        group = ceil_div(queries, programs)
        rows = () if num_rows == 1 else (num_rows,)
        _attend_part[(num_kv * programs, num_parts, *rows)](
            qkv,
            cache.arguments,
            position_1,
            sums,
            peaks,
            weights,
            scores,
            spec.window,
            num_heads,
            WIDTH=width,
            FIRST=first,
            FIRST_BLOCK=max(16, power_of_2(first)) if first else 1,
            QUERY_STRIDE=spec.head_dim * (1 + spec.is_gated),
            ROW_STRIDE=qkv.shape[-1],
            BLOCK=block,
            QUERIES=queries,
            PROGRAMS=programs,
            GROUP=group,
            GROUP_BLOCK=power_of_2(group),
            SPLIT=split,
            TILE=min(TILE, TILE * 256 // block),
            NUM_ROWS=num_rows,
            BLOCK_LENGTH=cache.block_length,
            **overlap_options(),
            num_warps=max(4, block // 64),
        )
        _attend_join[(num_heads, *rows)](
            sums,
            peaks,
            weights,
            position_1,
            gate_place(qkv, spec),
            out_HW,
            scores,
            spec.window,
            num_heads,
            WIDTH=width,
            BLOCK=block,
            SPLIT=split,
            PARTS_BLOCK=power_of_2(num_parts),
            NUM_ROWS=num_rows,
            NUM_PARTS=num_parts,
            **overlap_options(),
            num_warps=max(4, block // 64),
        )

    return reference, launch


@triton.jit
def _attend_part(
    qkv,
    cache,
    position,
    sums,
    peaks,
    weights,
    scores,
    window,
    num_heads,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per GROUP of a key-value head's QUERIES, part of the context and row. For each of
    its queries it computes the maximum score, the sum of e^(score - maximum), and the sum of the
    values weighted by e^(score - maximum). Tiles before the row's window are not read. FIRST: how
    many values of a key are none of its value."""
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    kv_head = tl.program_id(0) // PROGRAMS
    own_query = tl.program_id(0) % PROGRAMS * GROUP  # the first
    part = tl.program_id(1)
    to = part
    if NUM_ROWS > 1:
        row = tl.program_id(2)
        qkv += row * ROW_STRIDE
        position += row
        to = row * tl.num_programs(1) + part
    if cache.table is not None:
        own = tl.load(cache.sequence + (row if NUM_ROWS > 1 else 0)).to(tl.int64)
        table = cache.table + own * cache.table_stride
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
        is_query_G = (group_G < GROUP) & (own_query + group_G < QUERIES)
        head_G = kv_head * QUERIES + own_query + group_G
        peak_G = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        weight_G = tl.zeros([GROUP_BLOCK], tl.float32)
        sum_GW = tl.zeros([GROUP_BLOCK, BLOCK], tl.float32)
        head_key = cache.key + kv_head.to(tl.int64) * cache.key_head_stride
        head_value = cache.value + kv_head.to(tl.int64) * cache.value_head_stride
        first = begin
        while first < end:
            at_P = first + tl.arange(0, TILE)
            is_read_P = at_P < end
            if window is not None:
                is_read_P = is_read_P & (at_P >= least)
            is_live = is_read_P[:, None] & in_head_W[None, :]
            row_P = at_P.to(tl.int64)[:, None]
            column = column_W[None, :]
            own_key, own_value = head_key, head_value
            if cache.table is not None:  # a tile is within a block
                block = tl.load(table + first // BLOCK_LENGTH).to(tl.int64)
                row_P = (first % BLOCK_LENGTH + tl.arange(0, TILE)).to(tl.int64)[:, None]
                own_key += block * cache.key_block_stride
                own_value += block * cache.value_block_stride
            own_key += row_P * cache.key_stride
            own_value += row_P * cache.value_stride + column
            key_PW = tl.load(own_key + (FIRST + column), mask=is_live, other=0.0).to(tl.float32)
            if FIRST:
                value_PW = key_PW
                first_F = tl.arange(0, FIRST_BLOCK)
                in_first_F = first_F < FIRST
                is_live_PF = is_read_P[:, None] & in_first_F[None, :]
                key_PF = tl.load(own_key + first_F[None, :], mask=is_live_PF, other=0.0)
                key_PF = key_PF.to(tl.float32)
            else:
                value_PW = tl.load(own_value, mask=is_live, other=0.0).to(tl.float32)
            # One query at a time against the tile in registers: a product with all queries would
            # take GROUP times the registers, and tensor cores would round the queries.
            score_GP = tl.full([GROUP_BLOCK, TILE], float("-inf"), tl.float32)
            for number in tl.static_range(GROUP):
                query = qkv + (kv_head * QUERIES + own_query + number) * QUERY_STRIDE
                is_query = own_query + number < QUERIES
                query_W = tl.load(query + FIRST + column_W, mask=in_head_W & is_query, other=0.0)
                score_P = tl.sum(key_PW * query_W[None, :], axis=1)
                if FIRST:
                    query_F = tl.load(query + first_F, mask=in_first_F & is_query, other=0.0)
                    score_P += tl.sum(key_PF * query_F[None, :], axis=1)
                score_P = score_P * scores.scale
                score_P = finished(score_P, scores)
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
        at_G = to * num_heads + head_G
        tl.store(peaks + at_G, peak_G, mask=is_query_G)
        tl.store(weights + at_G, weight_G, mask=is_query_G)
        target = sums + at_G[:, None] * WIDTH + column_W[None, :]
        tl.store(target, sum_GW, mask=is_query_G[:, None] & in_head_W[None, :])


@triton.jit
def _attend_join(
    sums,
    peaks,
    weights,
    position,
    gate,
    out,
    scores,
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
    to the one with the row's position, under a common maximum score. `gate`: a `GatePlace`."""
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    head = tl.program_id(0)
    part_S = tl.arange(0, PARTS_BLOCK)
    first, row = 0, 0
    if NUM_ROWS > 1:
        row = tl.program_id(1)
        first = row * NUM_PARTS
        position += tl.program_id(1)
        out += tl.program_id(1) * num_heads * WIDTH
    last = tl.load(position)
    is_live_S = part_S <= last // SPLIT
    if window is not None:
        is_live_S = is_live_S & (part_S >= tl.maximum(last + 1 - window, 0) // SPLIT)
    at_S = (first + part_S) * num_heads + head
    column_W = tl.arange(0, BLOCK)
    in_head_W = column_W < WIDTH
    peak_S = tl.load(peaks + at_S, mask=is_live_S, other=float("-inf"))
    peak = finished_peak(tl.max(peak_S, axis=0), scores, head)
    share_S = tl.exp(peak_S - peak)
    weight_S = tl.load(weights + at_S, mask=is_live_S, other=0.0)
    is_live_SW = is_live_S[:, None] & in_head_W[None, :]
    sum_SW = tl.load(sums + at_S[:, None] * WIDTH + column_W[None, :], mask=is_live_SW, other=0.0)
    sum_W = tl.sum(sum_SW * share_S[:, None], axis=0)
    weight = finished_weight(tl.sum(weight_S * share_S, axis=0), peak, scores, head)
    sum_W = sum_W / weight
    if gate is not None:
        sum_W = gated(sum_W, gate, row, head, column_W, in_head_W)
    tl.store(out + head * WIDTH + column_W, sum_W, mask=in_head_W)
