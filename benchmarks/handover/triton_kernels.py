"""Small Triton kernels for gpu_handover.py. Addresses are integers, so that pinned memory is as
good as the device's. A kernel that waits for the CPU gives up after a second."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

VARYING = ["address", "flag", "stamp", "ns", "value"]
SECOND_NS = tl.constexpr(1_000_000_000)


@triton.jit(do_not_specialize=VARYING)
def busy(ns, stamp):
    """Runs for some ns; the time of its end goes to `stamp`, unless that is 0."""
    begin = globaltimer()
    time = begin
    while time - begin < ns:
        time = globaltimer()
    if stamp != 0:
        tl.store(stamp.to(tl.int64).to(tl.pointer_type(tl.int64)), time)


@triton.jit
def raise_flag(flag, value):
    """All threads' stores before it are visible to the CPU before the flag is."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        "st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;",
        "=r,l,r",
        [flag.to(tl.int64), value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def peek(flag):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];",
        "=r,l",
        [flag.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=VARYING)
def put(x, address, flag, value, D: tl.constexpr):
    """Writes x [D] to the address, then the flag, unless it is 0."""
    at = tl.arange(0, D)
    tl.store(address.to(tl.int64).to(tl.pointer_type(tl.float32)) + at, tl.load(x + at))
    if flag != 0:
        raise_flag(flag, value)


@triton.jit(do_not_specialize=VARYING)
def add(x, address, flag, value, D: tl.constexpr):
    """Waits for the flag, unless it is 0; then x = x / 2 + the D values at the address."""
    if flag != 0:
        begin = globaltimer()
        seen = peek(flag)
        while (seen != value) & (globaltimer() - begin < SECOND_NS):
            seen = peek(flag)
        tl.debug_barrier()
    at = tl.arange(0, D)
    y = tl.load(address.to(tl.int64).to(tl.pointer_type(tl.float32)) + at, cache_modifier=".cv")
    tl.store(x + at, tl.load(x + at) * 0.5 + y)


@triton.jit(do_not_specialize=VARYING)
def answer(flag, address, stamp, value):
    """Waits until the flag is 1, 2, ... `value`; notes each time, and sets `address` likewise."""
    number = 1
    begin = globaltimer()
    while (number <= value) & (globaltimer() - begin < SECOND_NS):
        if peek(flag) == number:
            at = (stamp.to(tl.int64) + 8 * number).to(tl.pointer_type(tl.int64))
            tl.store(at, globaltimer())
            raise_flag(address, number)
            number += 1


@triton.jit
def empty(x):
    tl.store(x, 1.0)


@triton.jit
def norm(x, w, y, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y [D] = the RMS norm of x; with PDL, the weights are read before the last kernel ends."""
    at = tl.arange(0, BLOCK)
    weight = tl.load(w + at, mask=at < D, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + at, mask=at < D, other=0.0)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / D + 1e-5)
    tl.store(y + at, value * scale * weight, mask=at < D)


@triton.jit
def product(w, x, y, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """y = some rows of w times x [D]; PDL as in `norm`."""
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    is_in = (at < D)[None, :]
    tile = tl.load(w + row[:, None] * D + at[None, :], mask=is_in, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + at, mask=at < D, other=0.0)
    tl.store(y + row, tl.sum(tile * value[None, :], axis=1) * 0.04)
