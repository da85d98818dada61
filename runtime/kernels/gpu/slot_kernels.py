"""Triton's kernels of the neuron cache; slots.py defines what they do.

Letters: C copies, U units of two bytes, N slots, W words of 32 bits."""

import triton
import triton.language as tl
from torch import Tensor

from hotsplit.model.weight_types import BY_NAME, WeightType
from hotsplit.runtime.kernels.gpu.launch import ceil_div
from hotsplit.runtime.kernels.planar import FORMS

_UNITS = 1024  # per program: 2 KiB, so a row of 4,096 values in 8 bits takes three programs
_WORDS = 8  # per program


@triton.jit
def _moved(at_U, byte_U, num_blocks, block, first, start, size):
    """Replaces, in the target places `at_U`, those of bytes `start` to `start + size` - 1 of each
    block of `block` bytes by their places in a plane. The planes before it hold `first` bytes of
    each block."""
    number_U = byte_U // block
    inner_U = byte_U % block
    is_in_U = (inner_U >= start) & (inner_U < start + size)
    return tl.where(is_in_U, first * num_blocks + number_U * size + inner_U - start, at_U)


# By form; the first copies bytes unchanged.
_TYPES = tuple(BY_NAME[form or "f16"] for form in FORMS)


# As in blocks.py, what kernels need is a default.
@triton.constexpr_function
def num_forms(types: tuple[WeightType, ...] = _TYPES) -> int:
    return len(types)


@triton.constexpr_function
def block_of(form: int, types: tuple[WeightType, ...] = _TYPES) -> int:
    """Bytes of a block. Blocks of an odd number of bytes are not copied two by two."""
    return types[form].block_bytes


@triton.constexpr_function
def num_planes(form: int, types: tuple[WeightType, ...] = _TYPES) -> int:
    return len(types[form].planes)


@triton.constexpr_function
def plane_start(form: int, number: int, types: tuple[WeightType, ...] = _TYPES) -> int:
    return types[form].planes[number][0]


@triton.constexpr_function
def plane_size(form: int, number: int, types: tuple[WeightType, ...] = _TYPES) -> int:
    return types[form].planes[number][1]


@triton.constexpr_function
def bytes_before(form: int, number: int, types: tuple[WeightType, ...] = _TYPES) -> int:
    """Bytes of a block in the planes before this one."""
    return sum(size for _, size in types[form].planes[:number])


@triton.jit
def _planar_place(byte_U, num_bytes, FORM: tl.constexpr):
    """The places in a planar row of bytes of a row as in a file."""
    at_U = byte_U
    for number in tl.static_range(num_planes(FORM)):
        at_U = _moved(
            at_U,
            byte_U,
            num_bytes // block_of(FORM),
            block_of(FORM),
            bytes_before(FORM, number),
            plane_start(FORM, number),
            plane_size(FORM, number),
        )
    return at_U


@triton.jit
def _scatter(staging, copies, UNITS: tl.constexpr):
    copy = copies + tl.program_id(0).to(tl.int64) * 4
    num_bytes = tl.load(copy + 2)
    form = tl.load(copy + 3)
    byte_U = 2 * (tl.program_id(1) * UNITS + tl.arange(0, UNITS)).to(tl.int64)
    source, target = staging + tl.load(copy), tl.load(copy + 1)
    at_U = byte_U
    has_odd = form < 0
    for other in tl.static_range(1, num_forms()):
        if block_of(other) % 2 == 1:
            has_odd = has_odd | (form == other)
        if form == other:
            at_U = _planar_place(byte_U, num_bytes, other)
    if has_odd:  # the places of two bytes need not be adjacent
        for other in tl.static_range(1, num_forms()):
            if block_of(other) % 2 == 1:
                own_target = target.to(tl.pointer_type(tl.uint8))
                for odd in tl.static_range(2):
                    own_U = byte_U + odd
                    is_own_U = (own_U < num_bytes) & (form == other)
                    value_U = tl.load(source + own_U, mask=is_own_U, other=0)
                    place_U = _planar_place(own_U, num_bytes, other)
                    tl.store(own_target + place_U, value_U, mask=is_own_U)
    else:
        is_there_U = byte_U + 1 < num_bytes
        unit_U = tl.load(
            source.to(tl.pointer_type(tl.int16)) + byte_U // 2, mask=is_there_U, other=0
        )
        tl.store(target.to(tl.pointer_type(tl.int16)) + at_U // 2, unit_U, mask=is_there_U)
        if num_bytes % 2 == 1:
            last_U = byte_U + 1 == num_bytes
            value_U = tl.load(source + byte_U, mask=last_U, other=0)
            tl.store(target.to(tl.pointer_type(tl.uint8)) + byte_U, value_U, mask=last_U)


@triton.jit(do_not_specialize=["num_neurons"])
def _pack_open(hidden, slot_F, open_W, num_neurons, WORDS: tl.constexpr):
    word_W = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bit_B = tl.arange(0, 32)
    neuron_WB = word_W[:, None] * 32 + bit_B[None, :]
    slot_WB = tl.load(slot_F + neuron_WB, mask=neuron_WB < num_neurons, other=-1)
    is_hot_WB = slot_WB >= 0
    value_WB = tl.load(hidden + tl.where(is_hot_WB, slot_WB, 0), mask=is_hot_WB, other=0.0)
    set_WB = (value_WB != 0.0).to(tl.int32) << bit_B[None, :]
    tl.store(open_W + word_W, tl.sum(set_WB, axis=1), mask=word_W * 32 < num_neurons)


def scatter(staging_B: Tensor, copies_C4: Tensor, most_bytes: int) -> None:
    assert copies_C4.is_contiguous() and copies_C4.shape[1] == 4, copies_C4.shape
    grid = len(copies_C4), ceil_div(most_bytes, 2 * _UNITS)
    _scatter[grid](staging_B, copies_C4, UNITS=_UNITS)


def pack_open(hidden_N: Tensor, slot_F: Tensor, open_W: Tensor) -> None:
    num_neurons = len(slot_F)
    assert len(open_W) == -(-num_neurons // 32), (len(open_W), num_neurons)
    grid = (ceil_div(len(open_W), _WORDS),)
    _pack_open[grid](hidden_N, slot_F, open_W, num_neurons, WORDS=_WORDS)
