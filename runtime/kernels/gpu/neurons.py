"""The neurons of a block for one token: gate and up to hidden values, and `down` to partial sums.

Letters: N neurons, D width, S parts."""

import triton
import triton.language as tl
from torch import Tensor

from sparkinfer.architecture import Activation
from sparkinfer.runtime.kernels.gpu.activation import activate, relu
from sparkinfer.runtime.kernels.gpu.blocks import columns, dot_rows, in_row, rows_at, values
from sparkinfer.runtime.kernels.gpu.launch import NUM_WARPS, Layout, rows_of_program
from sparkinfer.runtime.kernels.gpu.ranges import range_of
from sparkinfer.runtime.kernels.stored import StoredMatrix

# For `down`: units of columns that a program sums, a super-block of K-quants or 128 bytes of
# nibbles; and neurons whose hidden values it scans at once for nonzeros. It takes these 16 at a
# time: at 32, sums and scan together take 150 to 250 registers.
_UNITS = 8
_CHUNK = 256


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up(
    gate,
    gate_stride,
    gate_bias,
    up,
    up_stride,
    up_bias,
    id_N,
    named,
    x,
    hidden,
    threshold,
    num_rows,
    KIND: tl.constexpr,
    UP_KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    UP_PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    UP_ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    UP_UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_DENSE: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_block_R = row_R < num_rows
    live_R = in_block_R
    if named is not None:
        neuron_R = row_R
        if id_N is not None:
            neuron_R = tl.load(id_N + row_R, mask=in_block_R, other=0)
        word_R = tl.load(named + neuron_R // 32, mask=in_block_R, other=0)
        live_R = live_R & (((word_R >> (neuron_R % 32)) & 1) != 0)
    value_R = tl.zeros([ROWS], tl.float32)
    if tl.max(live_R.to(tl.int32), axis=0) > 0:
        row = rows_at(gate, row_R, gate_stride, ALIGN)
        gate_R = dot_rows(row, live_R, x, KIND, WIDTH, PARTS, ROWS, UNITS)
        if gate_bias is not None:
            gate_R += tl.load(gate_bias + row_R, mask=live_R, other=0.0)
        value_R, fires_R = activate(gate_R, threshold, ACTIVATION)
        if not IS_DENSE:
            live_R = live_R & fires_R
        if up is not None:
            row = rows_at(up, row_R, up_stride, UP_ALIGN)
            up_R = dot_rows(row, live_R, x, UP_KIND, WIDTH, UP_PARTS, ROWS, UP_UNITS)
            if up_bias is not None:
                up_R += tl.load(up_bias + row_R, mask=live_R, other=0.0)
            value_R *= relu(up_R) if ACTIVATION == "drelu" else up_R
        value_R = tl.where(live_R, value_R, 0.0)
    tl.store(hidden + row_R, value_R, mask=in_block_R)


@triton.jit
def _add_rows(
    low, high, data, stride, hidden, neuron_R, live_R, unit_U, KIND: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Sums [R, U, 16] of both parts with some neurons added."""
    in_row_U = unit_U < (WIDTH + 16 * PARTS - 1) // (16 * PARTS)
    weight_R = tl.load(hidden + neuron_R, mask=live_R, other=0.0)
    row = rows_at(data, neuron_R, stride, ALIGN)
    value_low, value_high = values(row, live_R, in_row_U, unit_U, KIND, WIDTH)
    low += value_low * weight_R[:, None, None]
    if PARTS == 2:
        high += value_high * weight_R[:, None, None]
    return low, high


@triton.jit(do_not_specialize=["num_rows", "size"])
def _down(
    data,
    stride,
    hidden,
    parts,
    num_rows,
    size,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SKIPS_ZEROS: tl.constexpr,
):
    unit_U = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    begin = tl.program_id(1) * size
    end = tl.minimum(begin + size, num_rows)
    low = tl.zeros([ROWS, UNITS, 16], tl.float32)
    high = tl.zeros([ROWS, UNITS, 16], tl.float32)
    if SKIPS_ZEROS:
        start = begin
        while start < end:
            neuron_C = start + tl.arange(0, CHUNK)
            value_C = tl.load(hidden + neuron_C, mask=neuron_C < end, other=0.0)
            is_open_C = (value_C != 0.0).to(tl.int32)
            open_up_to_C = tl.cumsum(is_open_C, axis=0)
            num_open = tl.sum(is_open_C, axis=0)
            first = 0
            while first < num_open:
                # Open neuron k's index is the number of neurons whose inclusive count of open ones
                # is at most k.
                number_R = first + tl.arange(0, ROWS)
                is_before = open_up_to_C[None, :] <= number_R[:, None]
                neuron_R = start + tl.sum(is_before.to(tl.int32), axis=1)
                low, high = _add_rows(
                    low, high, data, stride, hidden, neuron_R, number_R < num_open, unit_U,
                    KIND, WIDTH, PARTS, ALIGN,
                )  # fmt: skip
                first += ROWS
            start += CHUNK
    else:
        start = begin
        while start < end:
            neuron_R = start + tl.arange(0, ROWS)
            low, high = _add_rows(
                low, high, data, stride, hidden, neuron_R, neuron_R < end, unit_U,
                KIND, WIDTH, PARTS, ALIGN,
            )  # fmt: skip
            start += ROWS
    target = parts + tl.program_id(1).to(tl.int64) * WIDTH
    is_there = in_row(unit_U, KIND, WIDTH, 0, PARTS)
    tl.store(target + columns(unit_U, KIND, 0), tl.sum(low, axis=0), mask=is_there)
    if PARTS == 2:
        tl.store(target + columns(unit_U, KIND, 1), tl.sum(high, axis=0), mask=is_there)


def gate_up(
    gate: StoredMatrix,
    gate_bias_N: Tensor | None,
    up: StoredMatrix | None,
    up_bias_N: Tensor | None,
    id_N: Tensor | None,
    named_B: Tensor | None,
    x_D: Tensor,
    activation: Activation,
    threshold: float,
    is_dense: bool,
    hidden_N: Tensor,
) -> None:
    layout = Layout.of(gate)
    up_layout = layout if up is None else Layout.of(up)
    # A program of four neurons more often has a predicted one, so fewer programs would exit early.
    rows = rows_of_program(gate.num_rows, 4 if named_B is None else 2)
    _gate_up[(triton.cdiv(gate.num_rows, rows),)](
        gate.data,
        layout.stride,
        gate_bias_N,
        None if up is None else up.data,
        up_layout.stride,
        up_bias_N,
        id_N,
        named_B,
        x_D,
        hidden_N,
        float(threshold),
        gate.num_rows,
        KIND=layout.kind,
        UP_KIND=up_layout.kind,
        WIDTH=layout.width,
        PARTS=layout.parts,
        UP_PARTS=up_layout.parts,
        ALIGN=layout.align,
        UP_ALIGN=up_layout.align,
        ROWS=rows,
        UNITS=layout.units_of_tile(rows),
        UP_UNITS=up_layout.units_of_tile(rows),
        ACTIVATION=activation,
        IS_DENSE=is_dense,
        num_warps=NUM_WARPS,
    )


def down(down: StoredMatrix, hidden_N: Tensor, parts_SD: Tensor, *, skips_zeros: bool) -> None:
    layout = Layout.of(down)
    assert parts_SD.is_contiguous() and parts_SD.shape[1] == down.width, parts_SD.shape
    rows, num_warps = (16, NUM_WARPS) if skips_zeros else (_dense_rows(layout), 2 * NUM_WARPS)
    _down[(triton.cdiv(layout.num_units, _UNITS), len(parts_SD))](
        down.data,
        layout.stride,
        hidden_N,
        parts_SD,
        down.num_rows,
        range_of(down.num_rows, len(parts_SD)),
        KIND=layout.kind,
        WIDTH=layout.width,
        PARTS=layout.parts,
        ALIGN=layout.align,
        ROWS=rows,
        UNITS=_UNITS,
        CHUNK=_CHUNK,
        SKIPS_ZEROS=skips_zeros,
        num_warps=num_warps,
    )


def _dense_rows(layout: Layout) -> int:
    """Neurons of a tile of `down`: 64 take 128 registers or fewer, except for f32 and q6_k."""
    return 32 if layout.kind in ("f32", "q6_k_planar") else 64
