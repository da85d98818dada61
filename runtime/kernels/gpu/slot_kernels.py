"""Triton's kernels of the neuron cache; slots.py defines what they do.

Letters: C copies, U units of two bytes, N slots, W words of 32 bits."""

import triton
import triton.language as tl
from torch import Tensor

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


@triton.jit
def _scatter(staging, copies, UNITS: tl.constexpr):
    copy = copies + tl.program_id(0).to(tl.int64) * 4
    num_bytes = tl.load(copy + 2)
    form = tl.load(copy + 3)
    byte_U = 2 * (tl.program_id(1) * UNITS + tl.arange(0, UNITS)).to(tl.int64)
    is_there_U = byte_U < num_bytes
    at_U = byte_U
    if form == 1:  # 18 bytes: scales, nibbles
        at_U = _moved(at_U, byte_U, num_bytes // 18, 18, 0, 0, 2)
        at_U = _moved(at_U, byte_U, num_bytes // 18, 18, 2, 2, 16)
    if form == 2:  # q8_0: scales, values
        at_U = _moved(at_U, byte_U, num_bytes // 34, 34, 0, 0, 2)
        at_U = _moved(at_U, byte_U, num_bytes // 34, 34, 2, 2, 32)
    if form == 3:  # q6_k: ql, qh, scales, d
        at_U = _moved(at_U, byte_U, num_bytes // 210, 210, 0, 0, 128)
        at_U = _moved(at_U, byte_U, num_bytes // 210, 210, 128, 128, 64)
        at_U = _moved(at_U, byte_U, num_bytes // 210, 210, 192, 192, 16)
        at_U = _moved(at_U, byte_U, num_bytes // 210, 210, 208, 208, 2)
    source = (staging + tl.load(copy)).to(tl.pointer_type(tl.int16))
    target = tl.load(copy + 1).to(tl.pointer_type(tl.int16))
    unit_U = tl.load(source + byte_U // 2, mask=is_there_U, other=0)
    tl.store(target + at_U // 2, unit_U, mask=is_there_U)


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
    grid = len(copies_C4), triton.cdiv(most_bytes, 2 * _UNITS)
    _scatter[grid](staging_B, copies_C4, UNITS=_UNITS)


def pack_open(hidden_N: Tensor, slot_F: Tensor, open_W: Tensor) -> None:
    num_neurons = len(slot_F)
    assert len(open_W) == -(-num_neurons // 32), (len(open_W), num_neurons)
    grid = (triton.cdiv(len(open_W), _WORDS),)
    _pack_open[grid](hidden_N, slot_F, open_W, num_neurons, WORDS=_WORDS)
