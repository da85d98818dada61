"""The kernels of the neuron cache on a GPU.

A copy is described by four numbers (planar.COPY): offset in staging, target address, number of
bytes, and form (planar.FORMS): "" copies the bytes unchanged, the others rearrange a file's blocks
to planar rows (runtime.kernels.planar). Offsets are multiples of 2, and so are addresses and sizes
but those of rows with an odd number of blocks of an odd number of bytes.

Letters: C copies, B bytes of staging, F neurons of a layer, N slots; in the kernels U units of two
bytes, W words of 32 bits."""

import ctypes

from torch import Tensor

from hotsplit.model.weight_types import BY_NAME, WeightType
from hotsplit.runtime.device.bits import pack_bits
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import ceil_div
from hotsplit.runtime.kernels.planar import FORMS, planar

_UNITS = 1024  # per program: 2 KiB, so a row of 4,096 values in 8 bits takes three programs
_WORDS = 8  # per program


@gpu_kernel(reads=("staging_B", "copies_C4"), writes=(), is_of_step=False)
def scatter(staging_B: Tensor, copies_C4: Tensor, most_bytes: int) -> Versions:
    """Makes copies of at most `most_bytes` each, in any order; the reference on the CPU, in
    theirs."""

    def reference() -> None:
        for offset, target, num_bytes, form in copies_C4.tolist():
            row = staging_B[offset : offset + num_bytes]
            row = planar(row, FORMS[form])[0].contiguous()
            ctypes.memmove(target, row.data_ptr(), num_bytes)

    def launch() -> None:
        assert copies_C4.is_contiguous() and copies_C4.shape[1] == 4, copies_C4.shape
        grid = len(copies_C4), ceil_div(most_bytes, 2 * _UNITS)
        _scatter[grid](staging_B, copies_C4, UNITS=_UNITS)

    return reference, launch


@gpu_kernel(reads=("hidden_N", "slot_F"), writes=("open_W",), is_of_step=False)
def pack_open(hidden_N: Tensor, slot_F: Tensor, open_W: Tensor) -> Versions:
    """Sets bit j if neuron j is in a slot and its hidden value is not 0, and clears all others.
    `slot_F`, int32: the slot of each neuron, negative if it has none."""

    def reference() -> None:
        value_F = hidden_N[slot_F.clamp(min=0).long()]
        open_W.copy_(pack_bits((slot_F >= 0) & (value_F != 0)))

    def launch() -> None:
        num_neurons = len(slot_F)
        assert len(open_W) == -(-num_neurons // 32), (len(open_W), num_neurons)
        grid = (ceil_div(len(open_W), _WORDS),)
        _pack_open[grid](hidden_N, slot_F, open_W, num_neurons, WORDS=_WORDS)

    return reference, launch


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


@triton.constexpr_function
def bytes_of_row(form: int, types: tuple[WeightType, ...] = _TYPES) -> int:
    """Bytes before a row's blocks, which are behind its planes."""
    return types[form].row_head


@triton.jit
def _planar_place(byte_U, num_bytes, FORM: tl.constexpr):
    """The places in a planar row of bytes of a row as in a file."""
    HEAD: tl.constexpr = bytes_of_row(FORM)
    at_U = byte_U
    if HEAD:
        at_U += num_bytes - HEAD
    for number in tl.static_range(num_planes(FORM)):
        at_U = _moved(
            at_U,
            byte_U - HEAD,
            (num_bytes - HEAD) // block_of(FORM),
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
    has_odd = target % 2 == 1  # every second slot of rows with an odd number of bytes
    for other in tl.static_range(1, num_forms()):
        if block_of(other) % 2 == 1:
            has_odd = has_odd | (form == other)
        if form == other:
            at_U = _planar_place(byte_U, num_bytes, other)
    if has_odd:  # the places of two bytes need not be adjacent
        for odd in tl.static_range(2):
            own_U = byte_U + odd
            place_U = own_U
            for other in tl.static_range(1, num_forms()):
                if block_of(other) % 2 == 1:  # noqa: SIM102  # else compiled to nothing
                    if form == other:
                        place_U = _planar_place(own_U, num_bytes, other)
            is_own_U = own_U < num_bytes
            value_U = tl.load(source + own_U, mask=is_own_U, other=0)
            tl.store(target.to(tl.pointer_type(tl.uint8)) + place_U, value_U, mask=is_own_U)
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
