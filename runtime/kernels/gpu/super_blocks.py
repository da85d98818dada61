"""Triton: units of the super-blocks of K-quants, iq4_xs and table types; blocks.py defines units.

The layouts: dequantize_row_q2_K to _q6_K and _iq4_xs in ggml-quants.c."""

from hotsplit.model.weight_types import WeightType
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.small_blocks import TYPE_OF, float_of, half_at, level_of


@triton.constexpr_function
def layout_of(kind: str, types: dict[str, WeightType] = TYPE_OF) -> str:
    return types[kind].layout


@triton.constexpr_function
def unit_of(kind: str, types: dict[str, WeightType] = TYPE_OF) -> float:
    """What the f16 number of a block is multiplied by."""
    return types[kind].unit


@triton.constexpr_function
def block_bytes(kind: str, types: dict[str, WeightType] = TYPE_OF) -> int:
    return types[kind].block_bytes


@triton.constexpr_function
def is_planar(kind: str) -> bool:
    return kind.endswith("_planar")


@triton.constexpr_function
def has_minima(kind: str, types: dict[str, WeightType] = TYPE_OF) -> bool:
    """True for super-blocks whose parts have a minimum each."""
    return types[kind].name in ("q4_k", "q5_k", "q2_k")


@triton.jit
def super_quants(row, unit, lane, is_live, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """See blocks.quants."""
    if KIND == "q4_k":
        both = tl.load(row + (unit // 8 * 144 + 16 + unit % 8 * 16 + lane), mask=is_live, other=0)
        low = float_of(both & 15, 0.0)
        high = float_of(both >> 4, 0.0)
    elif KIND == "q5_k":
        both = tl.load(row + (unit // 8 * 176 + 48 + unit % 8 * 16 + lane), mask=is_live, other=0)
        fifth = tl.load(row + (unit // 8 * 176 + 16 + unit % 2 * 16 + lane), mask=is_live, other=0)
        fifth = fifth >> (unit % 8 // 2 * 2).to(tl.uint8)
        low = float_of((both & 15) | ((fifth & 1) << 4), 0.0)
        high = float_of((both >> 4) | ((fifth & 2) << 3), 0.0)
    elif layout_of(KIND) == "iq4_xs":
        at = unit // 8 * 136 + 8 + unit % 8 * 16
        if is_planar(KIND):
            at = unit * 16
        both = tl.load(row + (at + lane), mask=is_live, other=0)
        low = level_of(both & 15, KIND)
        high = level_of(both >> 4, KIND)
    elif layout_of(KIND) == "q2_k":
        at = unit // 8 * 84 + 16 + unit % 8 // 4 * 32 + unit % 2 * 16
        if is_planar(KIND):
            at = unit // 4 * 32 + unit % 2 * 16
        low, high = two_bits(tl.load(row + (at + lane), mask=is_live, other=0), unit)
        low = float_of(low, 0.0)
        high = float_of(high, 0.0)
    elif layout_of(KIND) == "tq2_0":
        at = unit // 8 * 66 + unit % 8 // 4 * 32 + unit % 2 * 16
        if is_planar(KIND):
            at = unit // 4 * 32 + unit % 2 * 16
        low, high = two_bits(tl.load(row + (at + lane), mask=is_live, other=0), unit)
        low = level_of(low, KIND)
        high = level_of(high, KIND)
    elif layout_of(KIND) == "q3_k":
        at = unit // 8 * 110 + 32 + unit % 8 // 4 * 32 + unit % 2 * 16
        third_at = unit // 8 * 110 + unit % 2 * 16
        if is_planar(KIND):
            at = unit // 4 * 32 + unit % 2 * 16
            third_at = WIDTH // 256 * 64 + unit // 8 * 32 + unit % 2 * 16
        both = tl.load(row + (at + lane), mask=is_live, other=0)
        third = tl.load(row + (third_at + lane), mask=is_live, other=0)
        low, high = three_bits(both, third, unit)
        low = level_of(low, KIND)
        high = level_of(high, KIND)
    else:
        tl.static_assert(layout_of(KIND) == "q6_k", "an unknown kind")
        at = unit // 8 * 210 + unit % 8 * 16
        upper_at = unit // 8 * 210 + 128 + unit % 8 // 4 * 32 + unit % 2 * 16
        if is_planar(KIND):
            at = unit * 16
            upper_at = WIDTH // 256 * 128 + unit // 4 * 32 + unit % 2 * 16
        both = tl.load(row + (at + lane), mask=is_live, other=0)
        upper = tl.load(row + (upper_at + lane), mask=is_live, other=0)
        upper = upper >> (unit // 2 % 2 * 2).to(tl.uint8)
        low = float_of((both & 15) | ((upper & 3) << 4), 32.0)
        high = float_of((both >> 4) | (upper & 48), 32.0)
    return low, high


@triton.jit
def two_bits(byte, unit):
    """Numbers of two bits of both parts of a unit, from the bytes that hold them."""
    byte = byte >> (unit // 2 % 2 * 2).to(tl.uint8)
    return byte & 3, (byte >> 4) & 3


@triton.jit
def three_bits(byte, third, unit):
    """Likewise of three bits, the third of which is a bit of another byte."""
    low, high = two_bits(byte, unit)
    third = third >> (unit % 8 // 4 * 4 + unit // 2 % 2).to(tl.uint8)
    return low | ((third & 1) << 2), high | (third & 4)


@triton.jit
def super_scales(row, unit, is_live, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """See blocks.scales."""
    if layout_of(KIND) == "q6_k":
        at = unit // 8 * 210 + 192
        factor_at = unit // 8 * 210 + 208
        if is_planar(KIND):
            at = WIDTH // 256 * 192 + unit // 8 * 16
            factor_at = WIDTH // 256 * 208 + unit // 8 * 2
        at += unit % 8 // 4 * 8 + unit % 4
        factor = half_at(row + factor_at, is_live)
        scale = tl.load(row + at, mask=is_live, other=0)
        low = factor * scale.to(tl.int8, bitcast=True).to(tl.float32)
        scale = tl.load(row + (at + 4), mask=is_live, other=0)
        high = factor * scale.to(tl.int8, bitcast=True).to(tl.float32)
    elif layout_of(KIND) == "iq4_xs":
        at = unit // 8 * 136
        if is_planar(KIND):
            at = WIDTH // 256 * 128 + unit // 8 * 8
        upper = tl.load(row + (at + 2 + unit % 8 // 4), mask=is_live, other=0)
        nibbles = tl.load(row + (at + 4 + unit % 8 // 2), mask=is_live, other=0)
        factor = half_at(row + at, is_live) * unit_of(KIND)
        low = factor * scale_of_iq4_xs(upper, nibbles, unit)
        high = low
    elif layout_of(KIND) == "tq2_0":
        at = unit // 8 * 66 + 64
        if is_planar(KIND):
            at = WIDTH // 256 * 64 + unit // 8 * 2
        low = half_at(row + at, is_live)
        high = low
    else:
        tl.static_assert(layout_of(KIND) == "q3_k", "an unknown kind")
        at = unit // 8 * 110 + 96
        factor_at = unit // 8 * 110 + 108
        if is_planar(KIND):
            at = WIDTH // 256 * 96 + unit // 8 * 12
            factor_at = WIDTH // 256 * 108 + unit // 8 * 2
        factor = half_at(row + factor_at, is_live) * unit_of(KIND)
        first = tl.load(row + (at + unit % 4), mask=is_live, other=0)
        second = tl.load(row + (at + unit % 4 + 4), mask=is_live, other=0)
        third = tl.load(row + (at + unit % 4 + 8), mask=is_live, other=0)
        low, high = scales_of_q3_k(first, second, third, unit)
        low = factor * low
        high = factor * high
    return low, high


@triton.jit
def scale_of_iq4_xs(upper, nibbles, unit):
    """f32, from the bytes with the unit's upper two bits and with its lower four."""
    upper = (upper >> (unit % 4 * 2).to(tl.uint8)) & 3
    lower = (nibbles >> (unit % 2 * 4).to(tl.uint8)) & 15
    return (lower | (upper << 4)).to(tl.float32) - 32.0


@triton.jit
def scales_of_q3_k(first, second, third, unit):
    """f32 of each part: from the two bytes with their low four bits, in the nibble of their half of
    the super-block, and the byte with their upper two."""
    shift = (unit % 8 // 4 * 4).to(tl.uint8)
    first = first >> shift
    second = second >> shift
    third = third >> shift
    low = ((first & 15) | ((third & 3) << 4)).to(tl.float32) - 32.0
    high = ((second & 15) | ((third & 12) << 2)).to(tl.float32) - 32.0
    return low, high


@triton.jit
def scales_and_minima(row_R, live_R, in_row_U, unit_U, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """f32 [R, U] of kinds with minima: both parts' scales, then both parts' minima.

    A super-block of q4_k or q5_k begins with four words: two f16 factors, and 12 bytes of 6-bit
    numbers; numbers 4 to 7 have their upper two bits at the top of numbers 0 to 3. One of q2_k has
    a byte for each scale and minimum."""
    unit = unit_U[None, :]
    row = row_R[:, None]
    is_live = live_R[:, None] & in_row_U[None, :]
    if layout_of(KIND) == "q2_k":
        at = unit // 8 * 84
        factor_at = unit // 8 * 84 + 80
        if is_planar(KIND):
            at = WIDTH // 256 * 64 + unit // 8 * 16
            factor_at = WIDTH // 256 * 80 + unit // 8 * 4
        at += unit % 8 // 4 * 8 + unit % 4
        factor = half_at(row + factor_at, is_live)
        least = half_at(row + (factor_at + 2), is_live)
        first = tl.load(row + at, mask=is_live, other=0)
        second = tl.load(row + (at + 4), mask=is_live, other=0)
        scale_low = (first & 15).to(tl.float32)
        scale_high = (second & 15).to(tl.float32)
        minimum_low = (first >> 4).to(tl.float32)
        minimum_high = (second >> 4).to(tl.float32)
    else:
        BLOCK_BYTES: tl.constexpr = 144 if KIND == "q4_k" else 176
        word = (row + unit // 8 * BLOCK_BYTES).to(tl.pointer_type(tl.int32))
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
