"""Triton: units of blocks of 64 or 128 values; blocks.py defines units.

The 16 bytes of a block of q2_0 or q1_0 hold values of two bits or one, neighbours in one byte: each
unit has two of the values of every byte, one a part, so that a part's columns lie apart. A unit of
nvfp4 has two groups of sixteen values, one a part, of eight bytes and a scale each; the row's f32
factor is behind its planes, so that these are aligned."""

from typing import NamedTuple

from hotsplit.model.weight_types import WeightType
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.small_blocks import TYPE_OF, half_at, level_of


class GroupBlock(NamedTuple):
    """A kind with blocks of 64 or 128 values: its bytes, those of its scales, its units, the bits
    of a value, the bytes of a row's factor, and whether it is planar."""

    size: int
    head: int
    units: int
    bits: int
    row_head: int
    is_planar: bool


@triton.constexpr_function
def is_group(kind: str, types: dict[str, WeightType] = TYPE_OF) -> bool:
    return types[kind].shares_heads


@triton.constexpr_function
def group_block(kind: str, types: dict[str, WeightType] = TYPE_OF) -> GroupBlock:
    each = types[kind]
    return GroupBlock(
        each.block_bytes,
        each.head_bytes,
        each.block_values // 32,
        8 * (each.block_bytes - each.head_bytes) // each.block_values,
        each.row_head,
        kind.endswith("_planar"),
    )


@triton.jit
def group_columns(unit_U, KIND: tl.constexpr, PART: tl.constexpr):
    """See blocks.columns."""
    GROUP: tl.constexpr = group_block(KIND)
    lane = tl.arange(0, 16)[None, :]
    if GROUP.bits == 4:
        column = (unit_U * 32 + 16 * PART)[:, None] + lane
    else:
        first = unit_U // GROUP.units * (32 * GROUP.units) + unit_U % GROUP.units * 2 + PART
        column = first[:, None] + lane * (2 * GROUP.units)
    return column


@triton.jit
def group_codes(byte, unit, lane, KIND: tl.constexpr, PART: tl.constexpr):
    """The codes of a part, from its bytes."""
    GROUP: tl.constexpr = group_block(KIND)
    if GROUP.bits == 4:
        code = (byte >> (lane // 8 * 4).to(tl.uint8)) & 15
    else:
        shift = (unit % GROUP.units * 2 + PART) * GROUP.bits
        code = (byte >> shift.to(tl.uint8)) & ((1 << GROUP.bits) - 1)
    return code


@triton.jit
def first_byte(unit, lane, KIND: tl.constexpr):
    """The places in a block's quants of the bytes of part 0. Those of part 1 are the same ones, or,
    with four bits a value, the eight bytes behind."""
    at = lane
    if group_block(KIND).bits == 4:
        at = unit % 2 * 16 + lane % 8
    return at


@triton.jit
def group_quants(row, unit, lane, is_live, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """See blocks.quants."""
    GROUP: tl.constexpr = group_block(KIND)
    quants = row + GROUP.row_head + unit // GROUP.units * GROUP.size + GROUP.head
    if GROUP.is_planar:
        quants = row + unit // GROUP.units * (GROUP.size - GROUP.head)
    quants += first_byte(unit, lane, KIND)
    byte = tl.load(quants, mask=is_live, other=0)
    low = level_of(group_codes(byte, unit, lane, KIND, 0), KIND)
    if GROUP.bits == 4:
        byte = tl.load(quants + 8, mask=is_live, other=0)
    high = level_of(group_codes(byte, unit, lane, KIND, 1), KIND)
    return low, high


@triton.jit
def group_scales(row, unit, is_live, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """See blocks.scales."""
    GROUP: tl.constexpr = group_block(KIND)
    NUM_BLOCKS: tl.constexpr = WIDTH // (32 * GROUP.units)
    at = row + GROUP.row_head + unit // GROUP.units * GROUP.size
    factor_at = row
    if GROUP.is_planar:
        at = row + NUM_BLOCKS * (GROUP.size - GROUP.head) + unit // GROUP.units * GROUP.head
        factor_at = row + NUM_BLOCKS * GROUP.size
    if GROUP.row_head:
        factor = float_at(factor_at, is_live)
        low = factor * ue4m3_at(at + unit % 2 * 2, is_live)
        high = factor * ue4m3_at(at + (unit % 2 * 2 + 1), is_live)
    else:
        low = half_at(at, is_live)
        high = low
    return low, high


@triton.jit
def float_at(pointer, is_live):
    """The f32 number at a pointer to bytes; rows are multiples of four bytes."""
    return tl.load(pointer.to(tl.pointer_type(tl.float32)), mask=is_live, other=0.0)


@triton.jit
def ue4m3_at(pointer, is_live):
    """Half of the number without a sign, of four bits of exponent and three of mantissa, at a
    pointer, as f32; 127 is 0."""
    number = tl.load(pointer, mask=is_live, other=0).to(tl.int32)
    bits = tl.where(number == 127, 0, number & 127) << 20
    return bits.to(tl.float32, bitcast=True) * 6.64613997892458e35  # 2^119
