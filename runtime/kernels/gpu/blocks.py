"""Triton: reads weights of every kind in units of 16 bytes of quants, or of 16 float values.

One thread loads a whole unit. In kinds with nibbles it holds 32 values in two parts, the low
nibbles and the high ones; in others 16 values in one part. A tile is [rows, units, 16]. A value is
scale times quant minus minimum, with scales and minima [rows, units], so a product multiplies by
the scale once for 16 values. Sums over the last axis stay within a thread.

The kinds are the names of hotsplit.model.weight_types, in the layouts of files, and those of types
with planes also with "_planar" behind. The layouts: hotsplit.runtime.kernels.planar, and for
K-quants dequantize_row_q4_K, _q5_K and _q6_K in ggml-quants.c. What distinguishes types of small
blocks is in the table of weight types (`small_block`).

Letters: R rows, U units."""

# Kernels build tuples of tensors in loops.
# mypy: disable-error-code="assignment, var-annotated"

from typing import NamedTuple

import triton
import triton.language as tl

from hotsplit.model.weight_types import BY_NAME, WeightType
from hotsplit.runtime.kernels.gpu.overlap import await_last


@triton.jit
def rows_at(data, row_R, stride, ALIGN: tl.constexpr):
    """Pointers [R] to rows; `stride` is the row stride in units of ALIGN. Row stride and `data` are
    multiples of ALIGN, which the compiler must know to emit wide loads."""
    return data + row_R.to(tl.int64) * stride * ALIGN


_TYPES = {f"{name}{end}": each for name, each in BY_NAME.items() for end in ("", "_planar")}


class SmallBlock(NamedTuple):
    """A kind with blocks of 32 values: its bytes, those before the fifth bits and before the quants,
    and whether it is planar. `least`: the value of code 0 if those of the others follow it, one by
    one. Otherwise the values plus `bias` are the bytes of two words of 64 bits."""

    size: int
    head: int
    quants_at: int
    is_planar: bool
    has_nibbles: bool
    is_affine: bool
    least: float
    bias: float
    first_word: int
    second_word: int


# A function that kernels call may use no other one. A global table would be compared with its earlier
# value at every launch, a default is not.
@triton.constexpr_function
def is_small(kind: str, types: dict[str, WeightType] = _TYPES) -> bool:
    return types[kind].has_small_blocks


@triton.constexpr_function
def small_block(kind: str, types: dict[str, WeightType] = _TYPES) -> SmallBlock:
    each = types[kind]
    levels, bias = each.levels, -min(each.levels, default=0)
    is_affine = all(level == levels[0] + i for i, level in enumerate(levels))
    words = [0, 0]
    if not is_affine:
        words = [
            int.from_bytes(bytes(level + bias for level in half), "little", signed=True)
            for half in (levels[:8], levels[8:])
        ]
    return SmallBlock(
        each.block_bytes, each.head_bytes, each.planes[-1][0], kind.endswith("_planar"),
        each.has_nibbles, is_affine, float(min(levels, default=0)), float(bias), *words,
    )  # fmt: skip


@triton.jit
def columns(unit_U, KIND: tl.constexpr, PART: tl.constexpr):
    """Column indices [U, 16] of one part of the units."""
    first = unit_U * 16
    if is_small(KIND):
        SMALL: tl.constexpr = small_block(KIND)
        if SMALL.has_nibbles:
            first = unit_U * 32 + 16 * PART
    elif KIND == "q4_k" or KIND == "q5_k":
        first = unit_U // 2 * 64 + unit_U % 2 * 16 + 32 * PART
    elif KIND == "q6_k" or KIND == "q6_k_planar":
        first = unit_U // 4 * 128 + unit_U % 4 * 16 + 64 * PART
    return first[:, None] + tl.arange(0, 16)[None, :]


@triton.jit
def in_row(
    unit_U, KIND: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):
    """Mask of the `columns` that exist. Rows of blocks have whole units, rows of floats any
    width."""
    if WIDTH % 16 == 0:
        is_there = (unit_U < WIDTH // (16 * PARTS))[:, None]
    else:
        is_there = columns(unit_U, KIND, PART) < WIDTH
    return is_there


@triton.jit
def quants(row_R, live_R, in_row_U, unit_U, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """f32 [R, U, 16] of each part; kinds with one part return it twice. Masked-out units are not
    read: they give the quants of zero bytes, -8 in q4_0 and -32 in q6_k, and their scales and minima
    are 0."""
    lane = tl.arange(0, 16)[None, None, :]
    row = row_R[:, None, None]
    unit = unit_U[None, :, None]
    is_live = live_R[:, None, None] & in_row_U[None, :, None]
    if KIND == "f32" or KIND == "f16" or KIND == "bf16":
        if WIDTH % 16 != 0:
            is_live = is_live & (unit * 16 + lane < WIDTH)
        low = tl.load(row + (unit * 16 + lane), mask=is_live, other=0).to(tl.float32)
        high = low
    elif is_small(KIND):
        low, high = _small_quants(row, unit, lane, is_live, KIND, WIDTH)
    elif KIND == "q4_k":
        both = tl.load(row + (unit // 8 * 144 + 16 + unit % 8 * 16 + lane), mask=is_live, other=0)
        low = _float_of(both & 15, 0.0)
        high = _float_of(both >> 4, 0.0)
    elif KIND == "q5_k":
        both = tl.load(row + (unit // 8 * 176 + 48 + unit % 8 * 16 + lane), mask=is_live, other=0)
        fifth = tl.load(row + (unit // 8 * 176 + 16 + unit % 2 * 16 + lane), mask=is_live, other=0)
        fifth = fifth >> (unit % 8 // 2 * 2).to(tl.uint8)
        low = _float_of((both & 15) | ((fifth & 1) << 4), 0.0)
        high = _float_of((both >> 4) | ((fifth & 2) << 3), 0.0)
    else:
        tl.static_assert(KIND == "q6_k" or KIND == "q6_k_planar", "an unknown kind")
        at = unit // 8 * 210 + unit % 8 * 16
        upper_at = unit // 8 * 210 + 128 + unit % 8 // 4 * 32 + unit % 2 * 16
        if KIND == "q6_k_planar":
            at = unit * 16
            upper_at = WIDTH // 256 * 128 + unit // 4 * 32 + unit % 2 * 16
        both = tl.load(row + (at + lane), mask=is_live, other=0)
        upper = tl.load(row + (upper_at + lane), mask=is_live, other=0)
        upper = upper >> (unit // 2 % 2 * 2).to(tl.uint8)
        low = _float_of((both & 15) | ((upper & 3) << 4), 32.0)
        high = _float_of((both >> 4) | (upper & 48), 32.0)
    return low, high


@triton.jit
def _small_quants(row, unit, lane, is_live, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """`quants` of small blocks."""
    SMALL: tl.constexpr = small_block(KIND)
    UNITS_OF_BLOCK: tl.constexpr = 1 if SMALL.has_nibbles else 2
    block = unit // UNITS_OF_BLOCK
    at = block * SMALL.size + SMALL.quants_at + unit % UNITS_OF_BLOCK * 16
    if SMALL.is_planar:
        at = unit * 16 + WIDTH // 32 * SMALL.quants_at
    both = tl.load(row + (at + lane), mask=is_live, other=0)
    if SMALL.has_nibbles:
        low = both & 15
        high = both >> 4
        if SMALL.quants_at > SMALL.head:
            at = block * SMALL.size + SMALL.head
            if SMALL.is_planar:
                at = unit * 4 + WIDTH // 32 * SMALL.head
            fifth = tl.load(row + (at + lane // 8), mask=is_live, other=0) >> (lane % 8).to(
                tl.uint8
            )
            low |= (fifth & 1) << 4
            fifth = tl.load(row + (at + 2 + lane // 8), mask=is_live, other=0)
            fifth = fifth >> (lane % 8).to(tl.uint8)
            high |= (fifth & 1) << 4
        low = level_of(low, KIND)
        high = level_of(high, KIND)
    else:
        low = both.to(tl.int8, bitcast=True).to(tl.float32)
        high = low
    return low, high


@triton.jit
def level_of(code, KIND: tl.constexpr):
    """What the codes of a small block, bytes, stand for, in units of its scale."""
    SMALL: tl.constexpr = small_block(KIND)
    if SMALL.is_affine:
        level = _float_of(code, -SMALL.least)
    else:
        first = tl.full([1, 1, 1], SMALL.first_word, tl.int64)
        second = tl.full([1, 1, 1], SMALL.second_word, tl.int64)
        byte = tl.where(code < 8, first, second) >> ((code & 7) * 8).to(tl.int64)
        level = _float_of(byte.to(tl.int32) & 255, SMALL.bias)
    return level


@triton.jit
def exponent_at(pointer, is_live):
    """2^(e - 128) for the byte e at a pointer, as f32; 0 where masked out. The two smallest are
    subnormal."""
    e = tl.load(pointer, mask=is_live, other=0).to(tl.int32)
    bits = tl.where(e < 2, (e + 1) << 21, (e - 1) << 23)
    return tl.where(is_live, bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def _float_of(byte, LESS: tl.constexpr):
    """A byte minus LESS as f32, exactly: the byte becomes the low bits of the mantissa of 2^23. A
    conversion (I2F) has a lower throughput on a multiprocessor; the gain is not measured."""
    return (byte.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LESS)


@triton.jit
def scales(row_R, live_R, in_row_U, unit_U, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """f32 [R, U]: the scales of both parts, and what small blocks with a minimum add to both; not for
    kinds without blocks, nor for q4_k and q5_k."""
    row = row_R[:, None]
    unit = unit_U[None, :]
    is_live = live_R[:, None] & in_row_U[None, :]
    if KIND == "q6_k" or KIND == "q6_k_planar":
        at = unit // 8 * 210 + 192
        factor_at = unit // 8 * 210 + 208
        if KIND == "q6_k_planar":
            at = WIDTH // 256 * 192 + unit // 8 * 16
            factor_at = WIDTH // 256 * 208 + unit // 8 * 2
        at += unit % 8 // 4 * 8 + unit % 4
        factor = _half_at(row + factor_at, is_live)
        scale = tl.load(row + at, mask=is_live, other=0)
        low = factor * scale.to(tl.int8, bitcast=True).to(tl.float32)
        scale = tl.load(row + (at + 4), mask=is_live, other=0)
        high = factor * scale.to(tl.int8, bitcast=True).to(tl.float32)
        minimum = low
    else:
        SMALL: tl.constexpr = small_block(KIND)
        UNITS_OF_BLOCK: tl.constexpr = 1 if SMALL.has_nibbles else 2
        STEP: tl.constexpr = SMALL.head if SMALL.is_planar else SMALL.size
        at = unit // UNITS_OF_BLOCK * STEP
        if SMALL.head == 1:  # noqa: SIM108  # Triton compiles one branch only
            low = exponent_at(row + at, is_live)
        else:
            low = _half_at(row + at, is_live)
        high = low
        minimum = low
        if has_minimum(KIND):
            minimum = _half_at(row + (at + 2), is_live)
    return low, high, minimum


@triton.constexpr_function
def has_minimum(kind: str, types: dict[str, WeightType] = _TYPES) -> bool:
    """True for small blocks whose scale is followed by a minimum."""
    each = types[kind]
    return each.has_small_blocks and each.head_bytes == 4


@triton.jit
def scales_and_minima(row_R, live_R, in_row_U, unit_U, BLOCK_BYTES: tl.constexpr):
    """f32 [R, U] of q4_k and q5_k: both parts' scales, then both parts' minima.

    A super-block begins with four words: two f16 factors, and 12 bytes of 6-bit numbers; numbers 4
    to 7 have their upper two bits at the top of numbers 0 to 3."""
    unit = unit_U[None, :]
    word = (row_R[:, None] + unit // 8 * BLOCK_BYTES).to(tl.pointer_type(tl.int32))
    is_live = live_R[:, None] & in_row_U[None, :]
    factors = tl.load(word, mask=is_live, other=0)
    first = tl.load(word + 1, mask=is_live, other=0)
    second = tl.load(word + 2, mask=is_live, other=0)
    third = tl.load(word + 3, mask=is_live, other=0)
    factor = (factors & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    least = (factors >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    part = unit % 8 // 2 * 2
    scale_low, minimum_low = _six_bits(first, second, third, part)
    scale_high, minimum_high = _six_bits(first, second, third, part + 1)
    return factor * scale_low, factor * scale_high, least * minimum_low, least * minimum_high


@triton.jit
def _six_bits(first, second, third, part):
    """Scale and minimum of part 0 to 7 of a super-block, from its three words of 6-bit numbers."""
    shift = part % 4 * 8
    return six_bit_numbers(
        (first >> shift) & 255, (second >> shift) & 255, (third >> shift) & 255, part
    )


@triton.jit
def six_bit_numbers(low, middle, high, part):
    """Scale and minimum of part 0 to 7, from its byte of each of the three words, as int32."""
    scale = tl.where(part < 4, low & 63, (high & 15) | (low >> 6 << 4))
    minimum = tl.where(part < 4, middle & 63, (high >> 4) | (middle >> 6 << 4))
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _half_at(pointer, is_live):
    """The f16 number at a pointer to bytes, as f32."""
    return tl.load(pointer.to(tl.pointer_type(tl.float16)), mask=is_live, other=0).to(tl.float32)


@triton.jit
def values(row_R, live_R, in_row_U, unit_U, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """f32 [R, U, 16] of each part, scaled; see `quants`."""
    # Scales are loaded first: the compiler keeps the order of loads, and if they came after the
    # quants, their latencies would add up.
    if KIND == "q4_k" or KIND == "q5_k":
        BLOCK_BYTES: tl.constexpr = 144 if KIND == "q4_k" else 176
        scale_low, scale_high, minimum_low, minimum_high = scales_and_minima(
            row_R, live_R, in_row_U, unit_U, BLOCK_BYTES
        )
        low, high = quants(row_R, live_R, in_row_U, unit_U, KIND, WIDTH)
        low = low * scale_low[:, :, None] - minimum_low[:, :, None]
        high = high * scale_high[:, :, None] - minimum_high[:, :, None]
    elif KIND != "f32" and KIND != "f16" and KIND != "bf16":
        scale_low, scale_high, minimum = scales(row_R, live_R, in_row_U, unit_U, KIND, WIDTH)
        low, high = quants(row_R, live_R, in_row_U, unit_U, KIND, WIDTH)
        low = low * scale_low[:, :, None]
        high = high * scale_high[:, :, None]
        if has_minimum(KIND):
            low += minimum[:, :, None]
            high += minimum[:, :, None]
    else:
        low, high = quants(row_R, live_R, in_row_U, unit_U, KIND, WIDTH)
    return low, high


@triton.jit
def dot_rows(
    row_R,
    live_R,
    x,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A tuple of f32 [R], the products of rows with each of GROUP contiguous vectors. Masked-out
    rows are not read and give 0. With OVERLAPS, waits for the kernel before between the first loads
    of weights and those of vectors."""
    NUM_UNITS: tl.constexpr = (WIDTH + 16 * PARTS - 1) // (16 * PARTS)
    HAS_BLOCKS: tl.constexpr = KIND != "f32" and KIND != "f16" and KIND != "bf16"
    totals = ()
    for _ in tl.static_range(GROUP):
        total = tl.zeros([ROWS, UNITS] if HAS_BLOCKS else [ROWS, UNITS, 16], tl.float32)
        totals = totals + (total,)
    for start in range(0, NUM_UNITS, UNITS):
        unit_U = start + tl.arange(0, UNITS)
        if NUM_UNITS % UNITS == 0:  # noqa: SIM108  # Triton compiles one branch only
            in_row_U = unit_U >= 0
        else:
            in_row_U = unit_U < NUM_UNITS
        if KIND == "q4_k" or KIND == "q5_k":
            BLOCK_BYTES: tl.constexpr = 144 if KIND == "q4_k" else 176
            scale_low, scale_high, minimum_low, minimum_high = scales_and_minima(
                row_R, live_R, in_row_U, unit_U, BLOCK_BYTES
            )
        elif HAS_BLOCKS:
            scale_low, scale_high, minimum = scales(row_R, live_R, in_row_U, unit_U, KIND, WIDTH)
        low, high = quants(row_R, live_R, in_row_U, unit_U, KIND, WIDTH)
        if OVERLAPS:  # noqa: SIM102  # else compiled to nothing
            if start == 0:
                await_last(OVERLAPS)
        is_there = in_row(unit_U, KIND, WIDTH, 0, PARTS)
        sums = ()
        for t in tl.static_range(GROUP):
            total = totals[t]
            own_x = x + t * WIDTH
            x_low = tl.load(own_x + columns(unit_U, KIND, 0), mask=is_there, other=0.0)
            if HAS_BLOCKS:
                total += tl.sum(low * x_low[None, :, :], axis=2) * scale_low
            else:
                total += low * x_low[None, :, :]
            if PARTS == 2:
                x_high = tl.load(own_x + columns(unit_U, KIND, 1), mask=is_there, other=0.0)
                total += tl.sum(high * x_high[None, :, :], axis=2) * scale_high
            if KIND == "q4_k" or KIND == "q5_k":
                total -= minimum_low * tl.sum(x_low, axis=1)[None, :]
                total -= minimum_high * tl.sum(x_high, axis=1)[None, :]
            if has_minimum(KIND):
                total += minimum * (tl.sum(x_low, axis=1) + tl.sum(x_high, axis=1))[None, :]
            sums = sums + (total,)
        totals = sums
    results = ()
    for t in tl.static_range(GROUP):
        total = totals[t]
        if not HAS_BLOCKS:
            total = tl.sum(total, axis=2)
        results = results + (tl.sum(total, axis=1),)
    return results
