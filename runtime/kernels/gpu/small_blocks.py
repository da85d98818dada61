"""Triton: units of blocks of 32 values; blocks.py defines units.

What distinguishes the types is in the table of weight types (`small_block`)."""

from typing import NamedTuple

from hotsplit.model.weight_types import BY_NAME, WeightType
from hotsplit.runtime.kernels.gpu.language import tl, triton

TYPE_OF = {f"{name}{end}": each for name, each in BY_NAME.items() for end in ("", "_planar")}


class SmallBlock(NamedTuple):
    """A kind with blocks of 32 values: its bytes, those before the fifth bits and before the
    quants, and whether it is planar."""

    size: int
    head: int
    quants_at: int
    is_planar: bool
    has_nibbles: bool


class Levels(NamedTuple):
    """What a kind's codes stand for: if they are affine, themselves minus `bias`. Otherwise the
    values plus `bias` are the bytes of two words of 64 bits, of one if there are up to eight."""

    is_affine: bool
    is_one_word: bool
    bias: float
    first_word: int
    second_word: int


# A function that kernels call may use no other one. A global table would be compared with its
# earlier value at every launch, a default is not.
@triton.constexpr_function
def is_small(kind: str, types: dict[str, WeightType] = TYPE_OF) -> bool:
    return types[kind].has_small_blocks


@triton.constexpr_function
def small_block(kind: str, types: dict[str, WeightType] = TYPE_OF) -> SmallBlock:
    each = types[kind]
    return SmallBlock(
        each.block_bytes,
        each.head_bytes,
        each.planes[-1][0],
        kind.endswith("_planar"),
        each.has_nibbles,
    )


@triton.constexpr_function
def levels_of(kind: str, types: dict[str, WeightType] = TYPE_OF) -> Levels:
    levels = types[kind].levels
    least = min(levels)
    is_affine = all(level == least + i for i, level in enumerate(levels))
    words = [0, 0]
    if not is_affine:
        words = [
            int.from_bytes(bytes(level - least for level in half), "little", signed=True)
            for half in (levels[:8], levels[8:])
        ]
    return Levels(is_affine, len(levels) <= 8, float(-least), *words)


@triton.jit
def small_quants(row, unit, lane, is_live, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """See blocks.quants."""
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
    """What codes, bytes, stand for, in units of their block's or part's scale."""
    LEVELS: tl.constexpr = levels_of(KIND)
    if LEVELS.is_affine:
        level = float_of(code, LEVELS.bias)
    else:
        word = tl.full([1, 1, 1], LEVELS.first_word, tl.int64)
        if not LEVELS.is_one_word:
            second = tl.full([1, 1, 1], LEVELS.second_word, tl.int64)
            word = tl.where(code < 8, word, second)
        byte = word >> ((code & 7) * 8).to(tl.int64)
        level = float_of(byte.to(tl.int32) & 255, LEVELS.bias)
    return level


@triton.jit
def exponent_at(pointer, is_live):
    """2^(e - 128) for the byte e at a pointer, as f32; 0 where masked out. The two smallest are
    subnormal."""
    e = tl.load(pointer, mask=is_live, other=0).to(tl.int32)
    bits = tl.where(e < 2, (e + 1) << 21, (e - 1) << 23)
    return tl.where(is_live, bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def float_of(byte, LESS: tl.constexpr):
    """A byte minus LESS as f32, exactly: the byte becomes the low bits of the mantissa of 2^23. A
    conversion (I2F) has a lower throughput on a multiprocessor; the gain is not measured."""
    return (byte.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LESS)


@triton.jit
def small_scales(row, unit, is_live, KIND: tl.constexpr):
    """See blocks.scales."""
    SMALL: tl.constexpr = small_block(KIND)
    at = head_at(unit, KIND)
    if SMALL.head == 1:  # noqa: SIM108
        low = exponent_at(row + at, is_live)
    else:
        low = half_at(row + at, is_live)
    high = low
    return low, high


@triton.jit
def head_at(unit, KIND: tl.constexpr):
    """The place in a row of the numbers before the quants of a unit's small block."""
    SMALL: tl.constexpr = small_block(KIND)
    UNITS_OF_BLOCK: tl.constexpr = 1 if SMALL.has_nibbles else 2
    STEP: tl.constexpr = SMALL.head if SMALL.is_planar else SMALL.size
    return unit // UNITS_OF_BLOCK * STEP


@triton.constexpr_function
def has_minimum(kind: str, types: dict[str, WeightType] = TYPE_OF) -> bool:
    """True for small blocks whose scale is followed by a minimum."""
    each = types[kind]
    return each.has_small_blocks and each.head_bytes == 4


@triton.jit
def minima(row_R, live_R, in_row_U, unit_U, KIND: tl.constexpr):
    """f32 [R, U] of the units of small blocks."""
    is_live = live_R[:, None] & in_row_U[None, :]
    return half_at(row_R[:, None] + (head_at(unit_U[None, :], KIND) + 2), is_live)


@triton.jit
def half_at(pointer, is_live):
    """The f16 number at a pointer to bytes, as f32."""
    return tl.load(pointer.to(tl.pointer_type(tl.float16)), mask=is_live, other=0).to(tl.float32)
