"""Triton: reads weights of every kind in units of 16 bytes of quants, or of 16 float values.

One thread loads a whole unit. In kinds with nibbles it holds 32 values in two parts, the low
nibbles and the high ones; in q3_k and q2_k the parts are in bits 0 and 1 or 2 and 3, and four
places higher; in others it holds 16 values in one part; group_blocks.py has units of its own. A
tile is [rows, units, 16]. A value is scale times quant minus minimum, with scales and minima
[rows, units], so a product multiplies by the scale once for 16 values. Sums over the last axis stay
within a thread.

The kinds are the names of hotsplit.model.weight_types, in the layouts of files, and those of types
with planes also with "_planar" behind. The layouts: hotsplit.runtime.kernels.planar, and for
K-quants dequantize_row_q2_K to _q6_K and _iq4_xs in ggml-quants.c. What distinguishes types of
small blocks is in the table of weight types (`small_block`).

Letters: R rows, U units."""

# Kernels build tuples of tensors in loops.
# mypy: disable-error-code="assignment, var-annotated"

from hotsplit.runtime.kernels.gpu.group_blocks import (
    group_columns,
    group_quants,
    group_scales,
    is_group,
)
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.overlap import await_last
from hotsplit.runtime.kernels.gpu.small_blocks import (
    has_minimum,
    is_small,
    minima,
    small_block,
    small_quants,
    small_scales,
)
from hotsplit.runtime.kernels.gpu.super_blocks import (
    has_minima,
    layout_of,
    scales_and_minima,
    super_quants,
    super_scales,
)


@triton.jit
def rows_at(data, row_R, stride, ALIGN: tl.constexpr):
    """Pointers [R] to rows; `stride` is the row stride in units of ALIGN. Row stride and `data` are
    multiples of ALIGN, which the compiler must know to emit wide loads."""
    return data + row_R.to(tl.int64) * stride * ALIGN


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
    elif layout_of(KIND) == "iq4_xs":
        first = unit_U * 32 + 16 * PART
    elif KIND != "f32" and KIND != "f16" and KIND != "bf16":
        first = unit_U // 4 * 128 + unit_U % 4 * 16 + 64 * PART
    if is_group(KIND):  # noqa: SIM108  # Triton compiles one branch only
        column = group_columns(unit_U, KIND, PART)
    else:
        column = first[:, None] + tl.arange(0, 16)[None, :]
    return column


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
    read: they give the quants of zero bytes, -8 in q4_0 and -32 in q6_k, and their scales and
    minima are 0."""
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
        low, high = small_quants(row, unit, lane, is_live, KIND, WIDTH)
    elif is_group(KIND):
        low, high = group_quants(row, unit, lane, is_live, KIND, WIDTH)
    else:
        low, high = super_quants(row, unit, lane, is_live, KIND, WIDTH)
    return low, high


@triton.jit
def scales(row_R, live_R, in_row_U, unit_U, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """f32 [R, U] of each part; not for kinds without blocks, nor for those with minima."""
    row = row_R[:, None]
    unit = unit_U[None, :]
    is_live = live_R[:, None] & in_row_U[None, :]
    if is_small(KIND):
        low, high = small_scales(row, unit, is_live, KIND)
    elif is_group(KIND):
        low, high = group_scales(row, unit, is_live, KIND, WIDTH)
    else:
        low, high = super_scales(row, unit, is_live, KIND, WIDTH)
    return low, high


@triton.jit
def values(row_R, live_R, in_row_U, unit_U, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """f32 [R, U, 16] of each part, scaled; see `quants`."""
    # Scales are loaded first: the compiler keeps the order of loads, and if they came after the
    # quants, their latencies would add up.
    if has_minima(KIND):
        scale_low, scale_high, minimum_low, minimum_high = scales_and_minima(
            row_R, live_R, in_row_U, unit_U, KIND, WIDTH
        )
        low, high = quants(row_R, live_R, in_row_U, unit_U, KIND, WIDTH)
        low = low * scale_low[:, :, None] - minimum_low[:, :, None]
        high = high * scale_high[:, :, None] - minimum_high[:, :, None]
    elif KIND != "f32" and KIND != "f16" and KIND != "bf16":
        scale_low, scale_high = scales(row_R, live_R, in_row_U, unit_U, KIND, WIDTH)
        low, high = quants(row_R, live_R, in_row_U, unit_U, KIND, WIDTH)
        low = low * scale_low[:, :, None]
        high = high * scale_high[:, :, None]
        if has_minimum(KIND):
            minimum = minima(row_R, live_R, in_row_U, unit_U, KIND)
            low += minimum[:, :, None]
            high += minimum[:, :, None]
    else:
        low, high = quants(row_R, live_R, in_row_U, unit_U, KIND, WIDTH)
    return low, high


@triton.jit
def _are_units(unit_U, NUM_UNITS: tl.constexpr, UNITS: tl.constexpr):
    """Mask of the units of a tile that exist."""
    if NUM_UNITS % UNITS == 0:  # noqa: SIM108  # Triton compiles one branch only
        is_there_U = unit_U >= 0
    else:
        is_there_U = unit_U < NUM_UNITS
    return is_there_U


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
        if HAS_BLOCKS:
            totals = totals + (tl.zeros([ROWS, UNITS], tl.float32),)
        else:
            totals = totals + (tl.zeros([ROWS, UNITS, 16], tl.float32),)
    for start in range(0, NUM_UNITS, UNITS):
        unit_U = start + tl.arange(0, UNITS)
        in_row_U = _are_units(unit_U, NUM_UNITS, UNITS)
        if has_minima(KIND):
            scale_low, scale_high, minimum_low, minimum_high = scales_and_minima(
                row_R, live_R, in_row_U, unit_U, KIND, WIDTH
            )
        elif HAS_BLOCKS:
            scale_low, scale_high = scales(row_R, live_R, in_row_U, unit_U, KIND, WIDTH)
        if has_minimum(KIND):
            minimum = minima(row_R, live_R, in_row_U, unit_U, KIND)
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
            if has_minima(KIND):
                total -= minimum_low * tl.sum(x_low, axis=1)[None, :]
                total -= minimum_high * tl.sum(x_high, axis=1)[None, :]
            if has_minimum(KIND):
                total += minimum * (tl.sum(x_low, axis=1) + tl.sum(x_high, axis=1))[None, :]
            sums = sums + (total,)
        totals = sums
    return _row_sums(totals, HAS_BLOCKS, GROUP)


@triton.jit
def _row_sums(totals, HAS_BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """f32 [R] of each of GROUP vectors, from their sums over a row's tiles."""
    results = ()
    for t in tl.static_range(GROUP):
        total = totals[t]
        if not HAS_BLOCKS:
            total = tl.sum(total, axis=2)
        results = results + (tl.sum(total, axis=1),)
    return results
