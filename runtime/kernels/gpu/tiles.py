"""Unpacks the tiles and groups of rows that the CPU reads (runtime.kernels.tiled and grouped), of
cold weights streamed to a GPU for a prompt: both processors read one copy of them.

A program takes some units of a whole tile or group. A unit has 16 bytes of a block, as in
kernels.gpu.blocks, or 16 float values; here each byte has a place of its own, and all loads are of
one or two bytes. The link that brings the weights is slower by far.

Letters: R rows of a tile or group, U units."""

from torch import Tensor

from hotsplit.model.weight_types import file_kind
from hotsplit.runtime.kernels.gpu.blocks import columns
from hotsplit.runtime.kernels.gpu.group_blocks import (
    first_byte,
    float_at,
    group_block,
    group_codes,
    is_group,
    ue4m3_at,
)
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import NUM_WARPS, ceil_div
from hotsplit.runtime.kernels.gpu.small_blocks import (
    exponent_at,
    half_at,
    has_minimum,
    is_small,
    level_of,
    small_block,
)
from hotsplit.runtime.kernels.gpu.super_blocks import (
    block_bytes,
    layout_of,
    scale_of_iq4_xs,
    scales_of_q3_k,
    six_bit_numbers,
    three_bits,
    two_bits,
    unit_of,
)
from hotsplit.runtime.kernels.stored import FLOATS, StoredMatrix, rows_together

_UNITS_OF_ROWS = 256  # of a program: 16 units of a tile, 4 of a group


@triton.jit
def _fours(byte, row):
    """The place of a byte of a row in a tile that has four bytes of each of 16 rows in turn."""
    return byte // 4 * 64 + row * 4 + byte % 4


@triton.jit
def _small_tile(tile, row, unit, lane, is_live, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """(low, high, scales, minima) of small blocks: as many as have 64 bytes of numbers have these
    first."""
    SMALL: tl.constexpr = small_block(KIND)
    UNITS_OF_BLOCK: tl.constexpr = 1 if SMALL.has_nibbles else 2
    TOGETHER: tl.constexpr = 4 // SMALL.head
    block = unit // UNITS_OF_BLOCK
    first = block // TOGETHER * TOGETHER
    numbers = tile + first * (16 * SMALL.size) + (block - first) * (16 * SMALL.head)
    quants = tile + block * (16 * (SMALL.size - SMALL.head))
    quants += tl.minimum(first + TOGETHER, WIDTH // 32) * (16 * SMALL.head)
    at = _fours(SMALL.quants_at - SMALL.head + unit % UNITS_OF_BLOCK * 16 + lane, row)
    both = tl.load(quants + at, mask=is_live, other=0)
    if SMALL.head == 1:
        scale = exponent_at(numbers + row, is_live)
    else:
        scale = half_at(numbers + row * 2, is_live)
    minimum = scale
    if SMALL.head == 4:
        minimum = half_at(numbers + 32 + row * 2, is_live)
    low = both & 15
    high = both >> 4
    if SMALL.quants_at > SMALL.head:
        fifth = tl.load(quants + row * 4 + lane // 8, mask=is_live, other=0)
        low |= (fifth >> (lane % 8).to(tl.uint8) & 1) << 4
        fifth = tl.load(quants + row * 4 + lane // 8 + 2, mask=is_live, other=0)
        high |= (fifth >> (lane % 8).to(tl.uint8) & 1) << 4
    if not SMALL.has_nibbles:
        low = both
    return low, high, scale, minimum


@triton.jit
def _group_tile(tile, row, unit, lane, is_live, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """(low, high) values of blocks of 64 or 128 values: the factors of rows are before all blocks.
    Two blocks with f16 numbers have these first."""
    GROUP: tl.constexpr = group_block(KIND)
    TOGETHER: tl.constexpr = 4 // GROUP.head
    block = unit // GROUP.units
    first = block // TOGETHER * TOGETHER
    blocks = tile + 16 * GROUP.row_head
    numbers = blocks + first * (16 * GROUP.size) + (block - first) * (16 * GROUP.head)
    quants = blocks + block * (16 * (GROUP.size - GROUP.head))
    quants += tl.minimum(first + TOGETHER, WIDTH // (32 * GROUP.units)) * (16 * GROUP.head)
    if GROUP.row_head:
        factor = float_at(tile + row * 4, is_live)
        scale = numbers + (unit % 2 * 32 + row)
        scale_low = factor * ue4m3_at(scale, is_live)
        scale_high = factor * ue4m3_at(scale + 16, is_live)
    else:
        scale_low = half_at(numbers + row * 2, is_live)
        scale_high = scale_low
    at = first_byte(unit, lane, KIND)
    byte = tl.load(quants + _fours(at, row), mask=is_live, other=0)
    low = level_of(group_codes(byte, unit, lane, KIND, 0), KIND) * scale_low
    if GROUP.bits == 4:
        byte = tl.load(quants + _fours(at + 8, row), mask=is_live, other=0)
    high = level_of(group_codes(byte, unit, lane, KIND, 1), KIND) * scale_high
    return low, high


@triton.jit
def _small_group(group, row, unit, lane, is_live, KIND: tl.constexpr):
    """(low, high, scales) of small blocks: a block has its scales first, then each byte of four
    rows 16 apart."""
    SIZE: tl.constexpr = 32 if KIND == "q8_0" else 16
    block = group + unit // (SIZE // 16) * (64 * (2 + SIZE))
    at = 128 + row % 16 * (4 * SIZE) + (unit % (SIZE // 16) * 16 + lane) * 4 + row // 16
    both = tl.load(block + at, mask=is_live, other=0)
    low = both
    if KIND != "q8_0":
        low = both & 15
    return low, both >> 4, half_at(block + row * 2, is_live)


@triton.jit
def _minimum_tile(tile, row, unit, lane, is_live, KIND: tl.constexpr):
    """(low, high) values of q4_k and q5_k; see blocks.scales_and_minima."""
    SIZE: tl.constexpr = 144 if KIND == "q4_k" else 176
    block = tile + unit // 8 * (16 * SIZE)
    factor, least = half_at(block + row * 2, is_live), half_at(block + 32 + row * 2, is_live)
    quants = block + 256
    if KIND == "q5_k":
        fifth = tl.load(quants + _fours(unit % 2 * 16 + lane, row), mask=is_live, other=0)
        fifth = fifth >> (unit % 8 // 2 * 2).to(tl.uint8)
        quants += 512
    both = tl.load(quants + _fours(unit % 8 * 16 + lane, row), mask=is_live, other=0)
    low = both & 15
    high = both >> 4
    if KIND == "q5_k":
        low |= (fifth & 1) << 4
        high |= (fifth & 2) << 3
    part = unit % 8 // 2 * 2
    scale, minimum = _six_bits(block + 64 + row, part, is_live)
    low = low.to(tl.float32) * (factor * scale) - least * minimum
    scale, minimum = _six_bits(block + 64 + row, part + 1, is_live)
    high = high.to(tl.float32) * (factor * scale) - least * minimum
    return low, high


@triton.jit
def _six_bits(numbers, part, is_live):
    """Scale and minimum of part 0 to 7; the bytes of a row are 16 apart."""
    at = numbers + part % 4 * 16
    low = tl.load(at, mask=is_live, other=0).to(tl.int32)
    middle = tl.load(at + 64, mask=is_live, other=0).to(tl.int32)
    high = tl.load(at + 128, mask=is_live, other=0).to(tl.int32)
    return six_bit_numbers(low, middle, high, part)


@triton.jit
def _q2_k_tile(tile, row, unit, lane, is_live):
    """(low, high) values; see blocks.scales_and_minima."""
    block = tile + unit // 8 * (16 * 84)
    factor, least = half_at(block + row * 2, is_live), half_at(block + 32 + row * 2, is_live)
    numbers = block + 64 + (unit % 8 // 4 * 8 + unit % 4) * 16 + row
    first = tl.load(numbers, mask=is_live, other=0)
    second = tl.load(numbers + 64, mask=is_live, other=0)
    at = unit % 8 // 4 * 32 + unit % 2 * 16 + lane
    low, high = two_bits(tl.load(block + 320 + _fours(at, row), mask=is_live, other=0), unit)
    low = low.to(tl.float32) * (factor * (first & 15).to(tl.float32))
    high = high.to(tl.float32) * (factor * (second & 15).to(tl.float32))
    low -= least * (first >> 4).to(tl.float32)
    high -= least * (second >> 4).to(tl.float32)
    return low, high


@triton.jit
def _iq4_xs_tile(tile, row, unit, lane, is_live, KIND: tl.constexpr):
    """(low, high) values; the bits of scales are interleaved like f16 numbers."""
    block = tile + unit // 8 * (16 * 136)
    upper = tl.load(block + 32 + row * 2 + unit % 8 // 4, mask=is_live, other=0)
    nibbles_at = 64 + unit % 8 // 4 * 32 + row * 2 + unit % 4 // 2
    nibbles = tl.load(block + nibbles_at, mask=is_live, other=0)
    factor = half_at(block + row * 2, is_live) * unit_of(KIND)
    scale = factor * scale_of_iq4_xs(upper, nibbles, unit)
    both = tl.load(block + 128 + _fours(unit % 8 * 16 + lane, row), mask=is_live, other=0)
    return level_of(both & 15, KIND) * scale, level_of(both >> 4, KIND) * scale


@triton.jit
def _scaled_tile(tile, row, unit, lane, is_live, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """(low, high) values of q6_k, tq2_0 and q3_k's layout: two blocks have their f16 numbers first,
    a last one alone at its end."""
    SIZE: tl.constexpr = block_bytes(KIND)
    REST: tl.constexpr = 16 * (SIZE - 2)
    block = unit // 8
    is_second = block % 2
    is_pair = block - is_second + 1 < WIDTH // 256
    pair = tile + block // 2 * (32 * SIZE)
    factor = half_at(pair + tl.where(is_pair, is_second * 32, REST) + row * 2, is_live)
    factor *= unit_of(KIND)
    rest = pair + tl.where(is_pair, 64 + is_second * REST, 0)
    if KIND == "q6_k":
        upper_at = unit % 8 // 4 * 32 + unit % 2 * 16 + lane
        upper = tl.load(rest + 256 + _fours(upper_at, row), mask=is_live, other=0)
        upper = upper >> (unit // 2 % 2 * 2).to(tl.uint8)
        both = tl.load(rest + 1280 + _fours(unit % 8 * 16 + lane, row), mask=is_live, other=0)
        scale_at = rest + (unit % 8 // 4 * 8 + unit % 4) * 16 + row
        first = tl.load(scale_at, mask=is_live, other=0).to(tl.int8, bitcast=True)
        second = tl.load(scale_at + 64, mask=is_live, other=0).to(tl.int8, bitcast=True)
        scale_low, scale_high = first.to(tl.float32), second.to(tl.float32)
        low = ((both & 15) | ((upper & 3) << 4)).to(tl.float32) - 32.0
        high = ((both >> 4) | (upper & 48)).to(tl.float32) - 32.0
    elif KIND == "tq2_0":
        at = unit % 8 // 4 * 32 + unit % 2 * 16 + lane
        low, high = two_bits(tl.load(rest + _fours(at, row), mask=is_live, other=0), unit)
        low = level_of(low, KIND)
        high = level_of(high, KIND)
        scale_low = 1.0
        scale_high = 1.0
    else:
        numbers = rest + unit % 4 * 16 + row
        first = tl.load(numbers, mask=is_live, other=0)
        second = tl.load(numbers + 64, mask=is_live, other=0)
        third = tl.load(numbers + 128, mask=is_live, other=0)
        scale_low, scale_high = scales_of_q3_k(first, second, third, unit)
        bits = tl.load(rest + 192 + _fours(unit % 2 * 16 + lane, row), mask=is_live, other=0)
        at = unit % 8 // 4 * 32 + unit % 2 * 16 + lane
        both = tl.load(rest + 704 + _fours(at, row), mask=is_live, other=0)
        low, high = three_bits(both, bits, unit)
        low = level_of(low, KIND)
        high = level_of(high, KIND)
    return low * (factor * scale_low), high * (factor * scale_high)


@triton.jit
def tile_values(
    tile, row, unit, is_live, KIND: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr
):
    """f32 [R, U, 16] of each part of some units of rows that lie in tiles or groups of TOGETHER;
    kinds with one part return it twice. `tile`: where a row's tile begins."""
    lane = tl.arange(0, 16)[None, None, :]
    if KIND == "f16" or KIND == "bf16":
        TYPE: tl.constexpr = tl.float16 if KIND == "f16" else tl.bfloat16
        at = unit // 2 * 2048 + row * 32 + unit % 2 * 16 + lane
        low = tl.load(tile.to(tl.pointer_type(TYPE)) + at, mask=is_live, other=0).to(tl.float32)
        high = low
    elif KIND == "q4_k" or KIND == "q5_k":
        low, high = _minimum_tile(tile, row, unit, lane, is_live, KIND)
    elif KIND == "q2_k":
        low, high = _q2_k_tile(tile, row, unit, lane, is_live)
    elif layout_of(KIND) == "iq4_xs":
        low, high = _iq4_xs_tile(tile, row, unit, lane, is_live, KIND)
    elif is_group(KIND):
        low, high = _group_tile(tile, row, unit, lane, is_live, KIND, WIDTH)
    elif KIND == "q6_k" or KIND == "tq2_0" or layout_of(KIND) == "q3_k":
        low, high = _scaled_tile(tile, row, unit, lane, is_live, KIND, WIDTH)
    else:
        tl.static_assert(is_small(KIND), "an unknown kind")
        if TOGETHER == 16:
            low, high, scale, minimum = _small_tile(tile, row, unit, lane, is_live, KIND, WIDTH)
        else:
            low, high, scale = _small_group(tile, row, unit, lane, is_live, KIND)
        if KIND == "q8_0":
            low = low.to(tl.int8, bitcast=True).to(tl.float32) * scale
            high = low
        else:
            low = level_of(low, KIND) * scale
            high = level_of(high, KIND) * scale
        if has_minimum(KIND):
            low += minimum
            high += minimum
    return low, high


@triton.jit
def _unpack_tiles(
    data,
    out,
    out_stride,
    unit_bytes,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row_R = tl.arange(0, ROWS)
    unit_U = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    row, unit = row_R[:, None, None], unit_U[None, :, None]
    is_live = unit < WIDTH // (16 * PARTS)
    tile = data + number * unit_bytes
    low, high = tile_values(tile, row, unit, is_live, KIND, WIDTH, ROWS)
    target = out + (number * ROWS + row_R)[:, None, None] * out_stride
    for part in tl.static_range(PARTS):
        value = low if part == 0 else high
        tl.store(target + columns(unit_U, KIND, part)[None, :, :], value, mask=is_live)


def unpack_tiles(matrix: StoredMatrix, out_AD: Tensor) -> None:
    """Unpacks all rows of a contiguous matrix in tiles or groups to f32, f16 or bf16; output rows
    may be strided."""
    kind, rows = file_kind(matrix.kind), rows_together(matrix.kind)
    assert len(out_AD) == matrix.num_rows and matrix.num_rows % rows == 0, (out_AD.shape, rows)
    assert matrix.data.is_contiguous() and out_AD.stride(1) == 1, matrix.data.stride()
    parts = 1 if kind in FLOATS or kind == "q8_0" else 2
    units = _UNITS_OF_ROWS // rows
    num_units = matrix.width // (16 * parts)
    _unpack_tiles[(matrix.num_rows // rows, ceil_div(num_units, units))](
        matrix.data,
        out_AD,
        out_AD.stride(0),
        rows * matrix.row_bytes,
        KIND=kind,
        WIDTH=matrix.width,
        PARTS=parts,
        ROWS=rows,
        UNITS=units,
        num_warps=NUM_WARPS,
    )
