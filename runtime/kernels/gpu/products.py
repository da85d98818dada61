"""Multiplies the tokens of a prompt by matrices in blocks, whose weights are unpacked in registers.

A program holds a tile of the result and reads its weights once, in units of 16 bytes as all kernels
do (blocks.py): they become f16 and are multiplied by tensor cores, with sums in f32. A sum adds the
same products in the same order for every number of tokens and for every tile of tokens, so that a
token's result depends neither on the length of its pass nor on the other tokens.

Weights are the left factor, because those of Hopper may stay in registers.

Several experts, each with its own tokens, are one launch: a list of tiles says which expert and
which pairs of a token and one of its experts a program has, and a list of rows where a pair's input
and output are. Experts may be in the CPU's tiles and groups of rows, as they are streamed.

Letters: T tokens, D width, N rows, P pairs of a token and an expert, G tiles of pairs; in the
kernels R rows of a tile, U units, K terms of a step, C columns of a tile."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hotsplit.model.weight_types import file_kind
from hotsplit.runtime.kernels.gpu.blocks import columns, rows_at, values
from hotsplit.runtime.kernels.gpu.expert_pairs import LARGE_TILE, SMALL_TILE
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import NUM_WARPS, Layout, ceil_div
from hotsplit.runtime.kernels.gpu.reference import parts_of_heads, rows_of
from hotsplit.runtime.kernels.gpu.tiles import tile_values
from hotsplit.runtime.kernels.stored import StoredMatrix, rows_together
from hotsplit.runtime.kernels.stored import unpack as unpacked

# Rows, or units of columns, of a tile; and units, or rows, of a step of its sums, in f16. A step
# unpacks 64 values in each thread of a kind with nibbles; in f32 it has half as many terms, so that
# a block takes the same shared memory.
_ROWS, _STEP_UNITS = 64, 2
_UNITS, _STEP_ROWS = 4, 32
# Tokens of a tile: the fewest that hold the pass. Each tile of tokens unpacks the weights anew.
_TOKENS = (32, 128)


@gpu_kernel(reads=("x_TD", "power_T"), writes=("out_TN",), is_of_step=False)
def multiply(
    matrix: StoredMatrix,
    bias_N: Tensor | None,
    x_TD: Tensor,
    power_T: Tensor | None,
    out_TN: Tensor,
    *,
    tile_G3: Tensor | None = None,
    row_2P: Tensor | None = None,
    factor_P: Tensor | None = None,
    tile_size: int = 0,
    num_heads: int = 1,
) -> Versions:
    """out = power (x W^T) + bias, for any number of tokens T; weights are rounded to the type of
    `x_TD`, f16 for a matrix in blocks. Rows of `x_TD` and `out_TN` may be strided. `num_heads`: as
    in rows.dot.

    With `tile_G3` and `row_2P`, int32: the matrix has the N rows of one expert after those of
    another, and pair p of a token and an expert multiplies row row_2P[0, p] of `x_TD` and writes
    row row_2P[1, p] of `out_TN`, times its `factor_P`, of rows of `out_TN`, if given. See
    expert_pairs.Pairs. Then the matrix may be in the CPU's tiles and groups."""

    def reference() -> None:
        if tile_G3 is not None:
            for own, left_T, right_T in tiles_of(tile_G3, row_2P, out_TN.shape[1]):
                y_TN = x_TD.new_empty(len(left_T), out_TN.shape[1], dtype=torch.float64)
                multiply.reference(
                    replace(matrix, data=matrix.data[own]),
                    None if bias_N is None else bias_N[own],
                    x_TD[left_T],
                    None if power_T is None else power_T[left_T],
                    y_TN,
                )
                put(out_TN, right_T, y_TN, factor_P)
            return
        if num_heads > 1:
            x_THD, out_THN = parts_of_heads(matrix, x_TD, out_TN, num_heads)
            weight_HND = rows_of(matrix).unflatten(0, (num_heads, -1))
            y_THN = torch.einsum("thd,hnd->thn", x_THD.double(), weight_HND)
            out_THN.copy_(y_THN if power_T is None else y_THN * power_T[:, None, None])
            return
        y_TN = x_TD.double() @ unpacked(matrix.data, matrix.kind).double().T
        y_TN = y_TN if power_T is None else y_TN * power_T[:, None]
        out_TN.copy_(y_TN if bias_N is None else y_TN + bias_N)

    def launch() -> None:
        layout, together, num_rows = *_layout_of(matrix), out_TN.shape[1]
        num_tiles, tokens = _tiles_of(len(x_TD), tile_G3, row_2P, tile_size)
        assert x_TD.stride(1) == out_TN.stride(1) == 1, (x_TD.stride(), out_TN.stride())
        x, out = x_TD, out_TN
        head_strides: tuple[int, int] | tuple[None, None] = (None, None)
        if num_heads > 1:
            assert bias_N is None and tile_G3 is None
            x, out = parts_of_heads(matrix, x_TD, out_TN, num_heads)
            num_rows, head_strides = matrix.num_rows // num_heads, (x.stride(1), out.stride(1))
        _multiply[(num_tiles, ceil_div(num_rows, _ROWS), num_heads)](
            matrix.data,
            layout.stride,
            bias_N,
            x,
            power_T,
            out,
            tile_G3,
            row_2P,
            factor_P,
            0 if row_2P is None else row_2P.shape[1],
            num_rows,
            len(x_TD),
            x_TD.stride(0),
            out_TN.stride(0),
            *head_strides,
            **layout.constants(_ROWS, _STEP_UNITS * 2 // x_TD.element_size()),
            TOGETHER=together,
            TOKENS=tokens,
            num_warps=NUM_WARPS if tokens == 32 else 2 * NUM_WARPS,
        )

    return reference, launch


@gpu_kernel(reads=("hidden_TN", "power_T"), writes=("out_TD",), is_of_step=False)
def multiply_down(
    matrix: StoredMatrix,
    hidden_TN: Tensor,
    power_T: Tensor | None,
    out_TD: Tensor,
    *,
    is_added: bool,
    bias_D: Tensor | None = None,
    tile_G3: Tensor | None = None,
    row_2P: Tensor | None = None,
    factor_P: Tensor | None = None,
    tile_size: int = 0,
) -> Versions:
    """out = power (hidden W), or out += that; otherwise as multiply. Experts, of which each has as
    many rows as `hidden_TN` has columns, may have a bias, and nothing is added to `out_TD`."""

    def reference() -> None:
        if tile_G3 is not None:
            assert not is_added
            for own, left_T, right_T in tiles_of(tile_G3, row_2P, hidden_TN.shape[1]):
                y_TD = hidden_TN.new_empty(len(left_T), out_TD.shape[1], dtype=torch.float64)
                multiply_down.reference(
                    replace(matrix, data=matrix.data[own]),
                    hidden_TN[left_T],
                    None if power_T is None else power_T[left_T],
                    y_TD,
                    is_added=False,
                )
                if bias_D is not None:
                    place = own.start // hidden_TN.shape[1]
                    y_TD += bias_D.view(-1, out_TD.shape[1])[place]
                put(out_TD, right_T, y_TD, factor_P)
            return
        y_TD = hidden_TN.double() @ unpacked(matrix.data, matrix.kind).double()
        y_TD = y_TD if power_T is None else y_TD * power_T[:, None]
        out_TD.copy_(out_TD + y_TD if is_added else y_TD)

    def launch() -> None:
        layout, together, num_rows = *_layout_of(matrix), hidden_TN.shape[1]
        num_tiles, tokens = _tiles_of(len(hidden_TN), tile_G3, row_2P, tile_size)
        assert hidden_TN.stride(1) == 1 and out_TD.is_contiguous(), (hidden_TN.stride(), out_TD)
        _multiply_down[(num_tiles, ceil_div(layout.num_units, _UNITS))](
            matrix.data,
            layout.stride,
            bias_D,
            hidden_TN,
            power_T,
            out_TD,
            tile_G3,
            row_2P,
            factor_P,
            0 if row_2P is None else row_2P.shape[1],
            num_rows,
            len(hidden_TN),
            hidden_TN.stride(0),
            **layout.constants(_STEP_ROWS * 2 // hidden_TN.element_size(), _UNITS),
            TOGETHER=together,
            TOKENS=tokens,
            IS_ADDED=is_added,
            num_warps=NUM_WARPS if tokens == 32 else 2 * NUM_WARPS,
        )

    return reference, launch


def tiles_of(
    tile_G3: Tensor, row_2P: Tensor | None, num_rows: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each tile: the rows of its expert, which has `num_rows`, and those of its pairs' inputs
    and outputs [A]."""
    assert row_2P is not None
    for place, first, count in tile_G3.tolist():
        left_A, right_A = row_2P[:, first : first + count].long()
        yield slice(place * num_rows, (place + 1) * num_rows), left_A, right_A


def put(out_TN: Tensor, row_A: Tensor, y_AN: Tensor, factor_T: Tensor | None) -> None:
    """Writes rows of a result, each times its factor."""
    y_AN = y_AN if factor_T is None else y_AN * factor_T[row_A, None]
    out_TN[row_A] = y_AN.to(out_TN.dtype)


@triton.jit
def _pairs_of(tile, row, num_pairs, TOKENS: tl.constexpr):
    """(the expert's place, [T] whether there is a pair, [T] its row of the input, [T] of the
    output) for a program's tile of pairs."""
    own = tile + tl.program_id(0) * 3
    first = tl.load(own + 1)
    at_T = tl.arange(0, TOKENS)
    live_T = at_T < tl.load(own + 2)
    left_T = tl.load(row + first + at_T, mask=live_T, other=0)
    right_T = tl.load(row + num_pairs + first + at_T, mask=live_T, other=0)
    return tl.load(own).to(tl.int64), live_T, left_T, right_T


@triton.jit
def _weights(
    data,
    row_R,
    stride,
    live_R,
    in_row_U,
    unit_U,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """f32 [R, U, 16] of each part of some units of rows."""
    if TOGETHER == 1:
        row = rows_at(data, row_R, stride, ALIGN)
        low, high = values(row, live_R, in_row_U, unit_U, KIND, WIDTH)
    else:
        tile_R = data + (row_R // TOGETHER).to(tl.int64) * (stride * ALIGN * TOGETHER)
        is_live = live_R[:, None, None] & in_row_U[None, :, None]
        tile, row, unit = tile_R[:, None, None], row_R[:, None, None], unit_U[None, :, None]
        low, high = tile_values(tile, row % TOGETHER, unit, is_live, KIND, WIDTH, TOGETHER)
    return low, high


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_pairs", "x_stride", "out_stride"])
def _multiply(
    data,
    stride,
    bias,
    x,
    power,
    out,
    tile,
    row,
    factor,
    num_pairs,
    num_rows,
    num_tokens,
    x_stride,
    out_stride,
    head_x_stride,
    head_out_stride,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    NUM_UNITS: tl.constexpr = (WIDTH + 16 * PARTS - 1) // (16 * PARTS)
    row_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live_R = row_R < num_rows
    at_R = row_R
    end = NUM_UNITS
    if tile is None:
        token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        live_T = token_T < num_tokens
        target_T = token_T
        if head_x_stride is not None:
            at_R += tl.program_id(2) * num_rows
            x += tl.program_id(2) * head_x_stride
            out += tl.program_id(2) * head_out_stride
    else:
        place, live_T, token_T, target_T = _pairs_of(tile, row, num_pairs, TOKENS)
        at_R = place * num_rows + row_R
        end = tl.where(tl.sum(live_T.to(tl.int32), axis=0) > 0, NUM_UNITS, 0)  # no pairs: no reads
    x += token_T.to(tl.int64)[None, :] * x_stride
    total_RT = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, end, UNITS):
        unit_U = start + tl.arange(0, UNITS)
        in_row_U = unit_U < NUM_UNITS
        low, high = _weights(
            data, at_R, stride, live_R, in_row_U, unit_U, KIND, WIDTH, ALIGN, TOGETHER
        )
        for part in tl.static_range(PARTS):
            weight_RK = (low if part == 0 else high).to(x.dtype.element_ty)
            weight_RK = weight_RK.reshape(ROWS, UNITS * 16)
            column_K = columns(unit_U, KIND, part).reshape(UNITS * 16)
            is_live = live_T[None, :] & (column_K < WIDTH)[:, None]
            x_KT = tl.load(x + column_K[:, None], mask=is_live, other=0.0)
            total_RT = tl.dot(weight_RK, x_KT, total_RT, input_precision="ieee")
    if power is not None:
        total_RT *= tl.load(power + token_T, mask=live_T, other=0.0)[None, :]
    if bias is not None:
        total_RT += tl.load(bias + at_R, mask=live_R, other=0.0)[:, None]
    if factor is not None:
        total_RT *= tl.load(factor + target_T, mask=live_T, other=0.0)[None, :]
    target = out + target_T.to(tl.int64)[None, :] * out_stride + row_R[:, None]
    tl.store(target, total_RT, mask=live_R[:, None] & live_T[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_pairs", "hidden_stride"])
def _multiply_down(
    data,
    stride,
    bias,
    hidden,
    power,
    out,
    tile,
    row,
    factor,
    num_pairs,
    num_rows,
    num_tokens,
    hidden_stride,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_ADDED: tl.constexpr,
):
    NUM_UNITS: tl.constexpr = (WIDTH + 16 * PARTS - 1) // (16 * PARTS)
    if tile is None:
        place = 0
        end = num_rows
        token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        live_T = token_T < num_tokens
        target_T = token_T
    else:
        place, live_T, token_T, target_T = _pairs_of(tile, row, num_pairs, TOKENS)
        end = tl.where(tl.sum(live_T.to(tl.int32), axis=0) > 0, num_rows, 0)
    unit_U = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    in_row_U = unit_U < NUM_UNITS
    hidden += token_T.to(tl.int64)[None, :] * hidden_stride
    low_CT = tl.zeros([UNITS * 16, TOKENS], tl.float32)
    high_CT = tl.zeros([UNITS * 16, TOKENS], tl.float32)
    for start in tl.range(0, end, ROWS):
        row_R = start + tl.arange(0, ROWS)
        live_R = row_R < num_rows
        at_R = place * num_rows + row_R
        low, high = _weights(
            data, at_R, stride, live_R, in_row_U, unit_U, KIND, WIDTH, ALIGN, TOGETHER
        )
        is_live = live_R[:, None] & live_T[None, :]
        hidden_RT = tl.load(hidden + row_R[:, None], mask=is_live, other=0.0)
        low_RC = low.to(hidden.dtype.element_ty).reshape(ROWS, UNITS * 16)
        low_CT = tl.dot(low_RC.trans(), hidden_RT, low_CT, input_precision="ieee")
        if PARTS == 2:
            high_RC = high.to(hidden.dtype.element_ty).reshape(ROWS, UNITS * 16)
            high_CT = tl.dot(high_RC.trans(), hidden_RT, high_CT, input_precision="ieee")
    target = out + target_T.to(tl.int64)[None, :] * WIDTH
    for part in tl.static_range(PARTS):
        total_CT = low_CT if part == 0 else high_CT
        column_C = columns(unit_U, KIND, part).reshape(UNITS * 16)
        is_live = (column_C < WIDTH)[:, None] & live_T[None, :]
        if power is not None:
            total_CT *= tl.load(power + token_T, mask=live_T, other=0.0)[None, :]
        if bias is not None:
            own_bias = bias + place * WIDTH + column_C
            total_CT += tl.load(own_bias, mask=column_C < WIDTH, other=0.0)[:, None]
        if factor is not None:
            total_CT *= tl.load(factor + target_T, mask=live_T, other=0.0)[None, :]
        if IS_ADDED:
            total_CT += tl.load(target + column_C[:, None], mask=is_live, other=0.0)
        tl.store(target + column_C[:, None], total_CT, mask=is_live)


def tokens_of_tile(num_tokens: int) -> int:
    """Tokens of a tile for a pass of this length."""
    return next((size for size in _TOKENS if num_tokens <= size), _TOKENS[-1])


def _tiles_of(
    num_tokens: int, tile_G3: Tensor | None, row_2P: Tensor | None, tile_size: int
) -> tuple[int, int]:
    """(number of tiles, tokens of a tile)."""
    if tile_G3 is None:
        tokens = tokens_of_tile(num_tokens)
        return ceil_div(num_tokens, tokens), tokens
    assert row_2P is not None and tile_G3.is_contiguous() and row_2P.is_contiguous()
    assert tile_size in (SMALL_TILE, LARGE_TILE), tile_size
    return len(tile_G3), tile_size


def _layout_of(matrix: StoredMatrix) -> tuple[Layout, int]:
    """(the layout of a matrix, whose kind is that of a file if it is in tiles or groups; rows of
    such)."""
    together = rows_together(matrix.kind)
    if together > 1:
        assert matrix.data.is_contiguous(), (matrix.kind, matrix.data.stride())
        matrix = replace(matrix, kind=file_kind(matrix.kind))
    return Layout.of(matrix), together
