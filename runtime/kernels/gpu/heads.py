"""What becomes of queries, keys and values between their projection and attention: norms, rotation
and growth of heads, and their append to the cache.

Each row has programs of its own, with the same instructions as in a step of one row. A row reads
the keys and values of its sequence's earlier rows from the KV cache, where `rotate_append` has
written them.

Letters: T rows of a step, H heads, K key-value heads, W head width, C positions of the cache, S
sequences, N blocks of a sequence."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hotsplit.model.spec import Attention, Norm, Rotary
from hotsplit.runtime.kernels.gpu.cache import Cache
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import overlap_options, power_of_2
from hotsplit.runtime.kernels.gpu.overlap import admit_next, await_last
from hotsplit.runtime.kernels.gpu.reference import rms_norm


@gpu_kernel(
    reads=("qkv", "position_1", "sequence_1", "table_SN"),
    writes=("qkv", "key_CKW", "value_CKW", "query_THW"),
    shared=("key_CKW", "value_CKW", "table_SN"),
)
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
) -> Versions:
    """What `spec` does with q, k and v before attention. The norm of each head of q and k has
    weights [W], or [H, W] and [K, W]; the first pairs of a head, as many as there are f64
    frequencies, rotate; both optional. `qkv` is f32 [(H + 2 K) W]: q is updated in place, k and v
    are written to the cache, f32 or f16, at `position_1` (int64 on the device) of `sequence_1`
    (int32). If `spec` is gated, W gates of its output are behind each head of q, [(2 H + 2 K) W];
    if values are keys, it is [(H + K) W], and values that are a part of the keys as stored are not
    written; gates of a matrix of their own are behind all that. A prompt's pass has any number T of
    rows. `query_THW`, if given, takes q times the scale of scores, and `qkv` stays."""

    def reference() -> None:
        num_kv, width = key_CKW.shape[-2:]
        of_heads, norm = spec.num_heads * (1 + spec.is_gated), spec.head_norm
        query, *own = (
            qkv[: width * sum((of_heads, *spec.projected[1:]))]
            .double()
            .unflatten(0, (-1, width))
            .split([of_heads, *spec.projected[1:]], dim=0)
        )
        query, keys = query[:: 1 + spec.is_gated], own[:1]
        values = own[-1:] if spec.stores_values else []
        if norm and spec.norms_values:
            values = [rms_norm(v, torch.ones(width, device=v.device), norm.epsilon) for v in values]
        for prepares in ("turn", "norm") if spec.norms_rotated else ("norm", "turn"):
            if prepares == "norm" and norm and query_weight_W is not None:
                query = rms_norm(_centred(query, norm), query_weight_W, norm.epsilon)
            if prepares == "norm" and norm and key_weight_W is not None:
                keys = [rms_norm(_centred(key, norm), key_weight_W, norm.epsilon) for key in keys]
            if prepares == "turn" and spec.rotary and frequency_W2 is not None:
                angle_W2 = position_1 * frequency_W2.double()
                query, *keys = (
                    _turned_ref(heads, angle_W2, spec.rotary) for heads in (query, *keys)
                )
        if spec.growth and spec.growth_length:
            steps = int(position_1) // spec.growth_length
            query = query * (1.0 + spec.growth * math.log(1 + steps))
        if query_THW is None:
            qkv[: of_heads * width].view(-1, width)[:: 1 + spec.is_gated] = query.to(qkv.dtype)
        else:
            query_THW.copy_(query * spec.score_scale)
        for cache, row in zip((key_CKW, value_CKW), (*keys, *values), strict=False):
            place = int(position_1)
            if table_SN is not None and sequence_1 is not None:
                block, place = divmod(place, cache.shape[1])
                cache = cache[int(table_SN[int(sequence_1), block])]
            cache[place] = row.to(cache.dtype)

    def launch() -> None:
        cache = Cache(key_CKW, value_CKW, sequence_1, table_SN, spec)
        num_rows, width = 1 if qkv.dim() == 1 else len(qkv), spec.head_dim
        num_heads, num_kv, size = spec.num_heads, spec.num_kv_heads, spec.qkv_size + spec.gate_size
        norm, rotary = spec.head_norm, spec.rotary
        assert qkv.shape[-1] == size, (qkv.shape, spec)
        assert qkv.is_contiguous() and len(position_1) == num_rows, (qkv.stride(), position_1.shape)
        assert query_THW is None or query_THW.is_contiguous(), query_THW.stride()
        heads = num_heads
        if spec.num_kv_projections:
            heads += num_kv * (1 + spec.stores_values)
        grid = (heads,) if num_rows == 1 else (heads, num_rows)
        _rotate_append[grid](
            qkv,
            frequency_W2,
            query_weight_W,
            key_weight_W,
            norm.epsilon if norm else 0.0,
            position_1,
            cache.arguments,
            query_THW,
            spec.score_scale,
            NUM_HEADS=num_heads,
            NUM_KV=num_kv,
            WIDTH=width,
            QUERY_STRIDE=width * (1 + spec.is_gated),
            ROW_STRIDE=size,
            NORMS_VALUES=spec.norms_values,
            NORMS_ROTATED=spec.norms_rotated,
            VALUES_ARE_KEYS=spec.num_kv_projections == 1,
            ROTATED=width if frequency_W2 is None else 2 * len(frequency_W2),
            HALF=power_of_2(width // 2),
            IS_ADJACENT=bool(rotary and rotary.pairing == "adjacent"),
            HAS_ROWS=num_rows > 1,
            BLOCK_LENGTH=cache.block_length,
            MAGNITUDE=rotary.scaling.magnitude if rotary else 1.0,
            CENTRES=bool(norm and norm.kind != "rms"),
            NORM_STRIDE=width if query_weight_W is not None and query_weight_W.dim() == 2 else 0,
            GROWTH=spec.growth or 0.0,
            GROWTH_LENGTH=spec.growth_length or 0,
            **overlap_options(),
            num_warps=1,
        )

    return reference, launch


class GatePlace(NamedTuple):
    """Where the gate of a value of a head's output is in the projections of a row."""

    first: Tensor
    row_stride: int
    head_stride: int
    stride: int  # 0: a head has one


def gate_place(qkv: Tensor, spec: Attention) -> GatePlace | None:
    """The place of the gates in `qkv`, one row or [T, Q]; None if there are none."""
    width, row = spec.head_dim, qkv.shape[-1]
    if spec.is_gated:
        return GatePlace(qkv.flatten()[width:], row, 2 * width, 1)
    if spec.gate_width:
        own = qkv.flatten()[spec.qkv_size :]
        return GatePlace(own, row, spec.gate_width, int(spec.gate_width > 1))
    return None


def gates_of(qkv: Tensor, spec: Attention) -> Tensor | None:
    """The gates of rows [..., H, W], or [..., H, 1] of whole heads; None if there are none."""
    if spec.is_gated:
        return qkv[..., : 2 * spec.query_size].unflatten(-1, (-1, 2, spec.head_dim))[..., 1, :]
    if spec.gate_width:
        return qkv[..., spec.qkv_size :].unflatten(-1, (-1, spec.gate_width))
    return None


@triton.jit
def gated(values, gate, row, head, column, mask):
    """Values of heads' outputs times the sigmoids of their gates, at a `GatePlace`."""
    own = gate.first + row * gate.row_stride + head * gate.head_stride + column * gate.stride
    return values / (1.0 + tl.exp(-tl.load(own, mask=mask, other=0.0)))


def _turned_ref(x_HW: Tensor, angle_W2: Tensor, rotary: Rotary) -> Tensor:
    """Rotates each pair of the first values, adjacent or half of these apart, as a complex number
    times magnitude e^(i angle)."""
    x_HW, rest_HW = x_HW.tensor_split([2 * len(angle_W2)], dim=-1)
    is_adjacent, magnitude = rotary.pairing == "adjacent", rotary.scaling.magnitude
    pairs = x_HW.unflatten(-1, (-1, 2) if is_adjacent else (2, -1))
    first, second = pairs.unbind(-1 if is_adjacent else -2)
    turned = torch.complex(first, second) * torch.polar(magnitude + 0 * angle_W2, angle_W2)
    turned_HW = torch.stack([turned.real, turned.imag], -1 if is_adjacent else -2).flatten(-2)
    return torch.cat([turned_HW, rest_HW], dim=-1)


def _centred(x_HW: Tensor, norm: Norm) -> Tensor:
    return x_HW if norm.kind == "rms" else x_HW - x_HW.mean(dim=-1, keepdim=True)


@triton.jit
def _rotate_append(
    qkv,
    frequency,
    query_weight,
    key_weight,
    epsilon,
    position,
    cache,
    query,
    query_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    NORMS_ROTATED: tl.constexpr,
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
        if cache.table is not None:
            before = tl.load(cache.sequence + row - 1, mask=row > 0, other=-1)
            is_new = is_new | (before != tl.load(cache.sequence + row))
        is_kept = in_head & is_new
    key, value, place = cache.key, cache.value, at
    if cache.table is not None:
        own = tl.load(cache.sequence + (row if HAS_ROWS else 0)).to(tl.int64)
        entry = cache.table + own * cache.table_stride + at // BLOCK_LENGTH
        block = tl.load(entry).to(tl.int64)
        key += block * cache.key_block_stride
        value += block * cache.value_block_stride
        place = at % BLOCK_LENGTH
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
        target = value + place * cache.value_stride + kv_head * cache.value_head_stride
        tl.store(target + first_at, first.to(value.dtype.element_ty), mask=is_kept)
        tl.store(target + second_at, second.to(value.dtype.element_ty), mask=is_kept)
    else:
        if NORMS_ROTATED and frequency is not None:
            first, second = _turn(first, second, frequency, pair, at, ROTATED, MAGNITUDE)
        if head < NUM_HEADS:
            if query_weight is not None:
                weight = query_weight + head * NORM_STRIDE
                first, second = _head_norm(
                    first, second, weight, first_at, second_at, in_head, epsilon, WIDTH, CENTRES
                )
        else:
            if key_weight is not None:
                weight = key_weight + kv_head * NORM_STRIDE
                first, second = _head_norm(
                    first, second, weight, first_at, second_at, in_head, epsilon, WIDTH, CENTRES
                )
        if frequency is not None and not NORMS_ROTATED:
            first, second = _turn(first, second, frequency, pair, at, ROTATED, MAGNITUDE)
        if head < NUM_HEADS:
            if GROWTH_LENGTH:
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
            target = key + place * cache.key_stride + kv_head * cache.key_head_stride
            tl.store(target + first_at, first.to(key.dtype.element_ty), mask=is_kept)
            tl.store(target + second_at, second.to(key.dtype.element_ty), mask=is_kept)


@triton.jit
def _head_norm(
    first,
    second,
    weight,
    first_at,
    second_at,
    in_head,
    epsilon,
    WIDTH: tl.constexpr,
    CENTRES: tl.constexpr,
):
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
    """Rotates the first pairs by position times frequency, and multiplies them by the magnitude.
    The angle is computed in f64, because it may be 100,000 turns of which only the fraction counts;
    its cosine and sine are f32, because f64 would cost a laptop's GPU some microseconds per
    layer."""
    is_turned = pair < ROTATED // 2
    turns = position.to(tl.float64) * tl.load(frequency + pair, mask=is_turned, other=0.0)
    turns = turns * 0.15915494309189535
    turns -= tl.floor(turns + 0.5)
    angle = (turns * 6.283185307179586).to(tl.float32)
    cos, sin = tl.cos(angle), tl.sin(angle)
    if MAGNITUDE != 1.0:
        cos, sin = tl.where(is_turned, cos * MAGNITUDE, 1.0), sin * MAGNITUDE
    return first * cos - second * sin, first * sin + second * cos
