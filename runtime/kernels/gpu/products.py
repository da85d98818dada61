"""Multiplies the tokens of a prompt by matrices in blocks, whose weights are unpacked in registers.

A program holds a tile of the result and reads its weights once, in units of 16 bytes as all kernels
do (blocks.py): they become f16 and are multiplied by tensor cores, with sums in f32. A sum adds the
same products in the same order for every number of tokens and for every tile of tokens, so that a
token's result depends neither on the length of its pass nor on the other tokens.

Weights are the left factor, because those of Hopper may stay in registers.

Letters: T tokens, D width, N rows; in the kernels R rows of a tile, U units, K terms of a step, C
columns of a tile."""

import triton
import triton.language as tl
from torch import Tensor

from hotsplit.runtime.kernels.gpu.blocks import columns, rows_at, values
from hotsplit.runtime.kernels.gpu.launch import NUM_WARPS, Layout, ceil_div
from hotsplit.runtime.kernels.stored import StoredMatrix

# Rows, or units of columns, of a tile; and units, or rows, of a step of its sums. A step unpacks 64
# values in each thread of a kind with nibbles.
_ROWS, _STEP_UNITS = 64, 2
_UNITS, _STEP_ROWS = 4, 32
# Tokens of a tile: the fewest that hold the pass. Each tile of tokens unpacks the weights anew.
_TOKENS = (32, 128)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "x_stride", "out_stride"])
def _multiply(
    data,
    stride,
    bias,
    x,
    power,
    out,
    num_rows,
    num_tokens,
    x_stride,
    out_stride,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    NUM_UNITS: tl.constexpr = WIDTH // (16 * PARTS)
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live_T, live_R = token_T < num_tokens, row_R < num_rows
    row = rows_at(data, row_R, stride, ALIGN)
    x += token_T.to(tl.int64)[None, :] * x_stride
    total_RT = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, NUM_UNITS, UNITS):
        unit_U = start + tl.arange(0, UNITS)
        in_row_U = unit_U < NUM_UNITS
        low, high = values(row, live_R, in_row_U, unit_U, KIND, WIDTH)
        for part in tl.static_range(PARTS):
            weight_RK = (low if part == 0 else high).to(tl.float16).reshape(ROWS, UNITS * 16)
            column_K = columns(unit_U, KIND, part).reshape(UNITS * 16)
            is_live = live_T[None, :] & (column_K < WIDTH)[:, None]
            x_KT = tl.load(x + column_K[:, None], mask=is_live, other=0.0)
            total_RT = tl.dot(weight_RK, x_KT, total_RT)
    if power is not None:
        total_RT *= tl.load(power + token_T, mask=live_T, other=0.0)[None, :]
    if bias is not None:
        total_RT += tl.load(bias + row_R, mask=live_R, other=0.0)[:, None]
    target = out + token_T.to(tl.int64)[None, :] * out_stride + row_R[:, None]
    tl.store(target, total_RT, mask=live_R[:, None] & live_T[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "hidden_stride"])
def _multiply_down(
    data,
    stride,
    hidden,
    power,
    out,
    num_rows,
    num_tokens,
    hidden_stride,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_ADDED: tl.constexpr,
):
    NUM_UNITS: tl.constexpr = WIDTH // (16 * PARTS)
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live_T = token_T < num_tokens
    unit_U = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    in_row_U = unit_U < NUM_UNITS
    hidden += token_T.to(tl.int64)[None, :] * hidden_stride
    low_CT = tl.zeros([UNITS * 16, TOKENS], tl.float32)
    high_CT = tl.zeros([UNITS * 16, TOKENS], tl.float32)
    for start in tl.range(0, num_rows, ROWS):
        row_R = start + tl.arange(0, ROWS)
        live_R = row_R < num_rows
        row = rows_at(data, row_R, stride, ALIGN)
        low, high = values(row, live_R, in_row_U, unit_U, KIND, WIDTH)
        is_live = live_R[:, None] & live_T[None, :]
        hidden_RT = tl.load(hidden + row_R[:, None], mask=is_live, other=0.0)
        low_CT = tl.dot(low.to(tl.float16).reshape(ROWS, UNITS * 16).trans(), hidden_RT, low_CT)
        if PARTS == 2:
            high_RC = high.to(tl.float16).reshape(ROWS, UNITS * 16)
            high_CT = tl.dot(high_RC.trans(), hidden_RT, high_CT)
    target = out + token_T.to(tl.int64)[None, :] * WIDTH
    for part in tl.static_range(PARTS):
        total_CT = low_CT if part == 0 else high_CT
        column_C = columns(unit_U, KIND, part).reshape(UNITS * 16)
        is_live = (column_C < WIDTH)[:, None] & live_T[None, :]
        if power is not None:
            total_CT *= tl.load(power + token_T, mask=live_T, other=0.0)[None, :]
        if IS_ADDED:
            total_CT += tl.load(target + column_C[:, None], mask=is_live, other=0.0)
        tl.store(target + column_C[:, None], total_CT, mask=is_live)


def tokens_of_tile(num_tokens: int) -> int:
    """Tokens of a tile for a pass of this length."""
    return next((size for size in _TOKENS if num_tokens <= size), _TOKENS[-1])


def multiply(
    matrix: StoredMatrix,
    bias_N: Tensor | None,
    x_TD: Tensor,
    power_T: Tensor | None,
    out_TN: Tensor,
) -> None:
    layout, tokens = Layout.of(matrix), tokens_of_tile(len(x_TD))
    assert x_TD.stride(1) == out_TN.stride(1) == 1, (x_TD.stride(), out_TN.stride())
    assert matrix.width % (16 * layout.parts) == 0, (matrix.kind, matrix.width)
    _multiply[(ceil_div(len(x_TD), tokens), ceil_div(matrix.num_rows, _ROWS))](
        matrix.data,
        layout.stride,
        bias_N,
        x_TD,
        power_T,
        out_TN,
        matrix.num_rows,
        len(x_TD),
        x_TD.stride(0),
        out_TN.stride(0),
        KIND=layout.kind,
        WIDTH=layout.width,
        PARTS=layout.parts,
        ALIGN=layout.align,
        ROWS=_ROWS,
        UNITS=_STEP_UNITS,
        TOKENS=tokens,
        num_warps=NUM_WARPS if tokens == 32 else 2 * NUM_WARPS,
    )


def multiply_down(
    matrix: StoredMatrix,
    hidden_TN: Tensor,
    power_T: Tensor | None,
    out_TD: Tensor,
    *,
    is_added: bool,
) -> None:
    layout, tokens = Layout.of(matrix), tokens_of_tile(len(hidden_TN))
    assert hidden_TN.stride(1) == 1 and out_TD.is_contiguous(), (hidden_TN.stride(), out_TD)
    assert matrix.width % (16 * layout.parts) == 0, (matrix.kind, matrix.width)
    _multiply_down[(ceil_div(len(hidden_TN), tokens), ceil_div(layout.num_units, _UNITS))](
        matrix.data,
        layout.stride,
        hidden_TN,
        power_T,
        out_TD,
        matrix.num_rows,
        len(hidden_TN),
        hidden_TN.stride(0),
        KIND=layout.kind,
        WIDTH=layout.width,
        PARTS=layout.parts,
        ALIGN=layout.align,
        ROWS=_STEP_ROWS,
        UNITS=_UNITS,
        TOKENS=tokens,
        IS_ADDED=is_added,
        num_warps=NUM_WARPS if tokens == 32 else 2 * NUM_WARPS,
    )
