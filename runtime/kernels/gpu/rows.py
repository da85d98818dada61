"""Multiplies the rows of a matrix by the vectors of a step, and unpacks rows.

Letters: D width, N rows, A chosen rows, T rows of a step; in the kernels R rows of a tile, U
units."""

from torch import Tensor

from hotsplit.runtime.kernels.gpu.activation import capped
from hotsplit.runtime.kernels.gpu.blocks import columns, dot_rows, in_row, rows_at, values
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import (
    NUM_WARPS,
    Groups,
    Layout,
    ceil_div,
    overlap_options,
    rows_of_program,
    step_rows,
)
from hotsplit.runtime.kernels.gpu.overlap import admit_next, await_last
from hotsplit.runtime.kernels.gpu.reference import parts_of_heads, product, rows_of, soft_capped
from hotsplit.runtime.kernels.gpu.tiles import unpack_tiles
from hotsplit.runtime.kernels.stored import StoredMatrix, rows_together

# A tile of `unpack`: 8 rows of 16 units.
_UNPACK_ROWS = 8
_UNPACK_UNITS = 16


@gpu_kernel(reads=("x_D",), writes=("out_N",))
def dot(
    matrix: StoredMatrix,
    bias_N: Tensor | None,
    x_D: Tensor,
    out_N: Tensor,
    *,
    has_relu: bool = False,
    cap: float | None = None,
    num_heads: int = 1,
) -> Versions:
    """out = W x + bias, then max(0, .) if `has_relu`, or cap * tanh(. / cap); NaN stays NaN.

    With `num_heads`, W has the rows of one head after those of another, and each head multiplies
    the first values of its part of x, and writes the first of its part of out; there is no bias,
    and rows of x may be strided."""

    def reference() -> None:
        if num_heads > 1:
            x_HD, out_HN = parts_of_heads(matrix, x_D, out_N, num_heads)
            weight_HND = rows_of(matrix).unflatten(0, (num_heads, -1))
            out_HN.copy_((weight_HND @ x_HD.double()[..., None]).squeeze(-1))
            return
        y_N = soft_capped(product(matrix, bias_N, x_D), cap)
        out_N.copy_(y_N.relu() if has_relu else y_N)

    def launch() -> None:
        layout, own = Layout.of(matrix), matrix.num_rows // num_heads
        rows, groups = rows_of_program(matrix.num_rows), Groups.of(x_D, layout.group)
        x, out = x_D, out_N
        strides: tuple[int, int, int] | tuple[None, None, None] = (None, None, None)
        if num_heads > 1:
            assert bias_N is None and cap is None and not has_relu
            x, out = parts_of_heads(matrix, x_D, out_N, num_heads)
            strides = x_D.stride(0), x.stride(-2), out.stride(-2)
            groups = Groups(size=1, count=step_rows(x_D))
        assert num_heads > 1 or x_D.is_contiguous(), x_D.stride()
        assert out_N.dim() == x_D.dim(), (x_D.shape, out_N.shape)
        _dot[(ceil_div(own, rows) * groups.count, num_heads)](
            matrix.data,
            layout.stride,
            bias_N,
            x,
            out,
            own,
            None if x_D.dim() == 1 else out_N.stride(0),
            *strides,
            cap,
            **layout.constants(rows),
            **groups.constants,
            HAS_RELU=has_relu,
            **overlap_options(),
            num_warps=NUM_WARPS,
        )

    return reference, launch


@gpu_kernel(reads=("index_1", "out_D"), writes=("out_D",))
def embed(
    matrix: StoredMatrix,
    index_1: Tensor,
    out_D: Tensor,
    *,
    is_added: bool = False,
    scale: float = 1.0,
) -> Versions:
    """out = scale * row index_1[0] (int64 on the device), or out += that."""

    def reference() -> None:
        row_D = scale * rows_of(matrix, index_1)[0]
        out_D.copy_(out_D + row_D if is_added else row_D)

    def launch() -> None:
        out_TD = out_D[None] if out_D.dim() == 1 else out_D
        assert len(index_1) == len(out_TD), (index_1.shape, out_D.shape)
        _launch_unpack(matrix, index_1, out_TD, rows=1, is_added=is_added, scale=scale)

    return reference, launch


@gpu_kernel(reads=(), writes=("out_AD",), is_of_step=False)
def unpack(matrix: StoredMatrix, out_AD: Tensor, index_A: Tensor | None = None) -> Versions:
    """Unpacks the rows (those at `index_A`, int64 or int32, if given) to f32, f16 or bf16; output
    rows may be strided too. Also takes types with a planar layout as stored in files, and all rows
    of the CPU's tiles and groups (kernels.tiled, kernels.grouped)."""

    def reference() -> None:
        out_AD.copy_(rows_of(matrix, index_A))

    def launch() -> None:
        if rows_together(matrix.kind) > 1:
            assert index_A is None, f"rows of {matrix.kind} are unpacked all at once"
            unpack_tiles(matrix, out_AD)
            return
        _launch_unpack(matrix, index_A, out_AD, rows=_UNPACK_ROWS, is_added=False)

    return reference, launch


@triton.jit(do_not_specialize=["num_rows", "out_stride"])
def _dot(
    data,
    stride,
    bias,
    x,
    out,
    num_rows,
    out_stride,
    x_stride,
    head_x_stride,
    head_out_stride,
    cap,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    HAS_RELU: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The strides of `x` are given if there are heads, one for each program of the second axis."""
    admit_next(OVERLAPS)
    row_R = tl.program_id(0) // NUM_GROUPS * ROWS + tl.arange(0, ROWS)
    if NUM_GROUPS > 1:
        group = tl.program_id(0) % NUM_GROUPS
        x += group * GROUP * (WIDTH if x_stride is None else x_stride)
        out += group * GROUP * out_stride
    live_R = row_R < num_rows
    at_R = row_R
    if x_stride is not None:
        at_R += tl.program_id(1) * num_rows
        x += tl.program_id(1) * head_x_stride
        out += tl.program_id(1) * head_out_stride
    row = rows_at(data, at_R, stride, ALIGN)
    results = dot_rows(row, live_R, x, KIND, WIDTH, PARTS, ROWS, UNITS, GROUP, OVERLAPS)
    for t in tl.static_range(GROUP):
        y_R = results[t]
        if bias is not None:
            y_R += tl.load(bias + row_R, mask=live_R, other=0.0)
        if HAS_RELU:
            y_R = tl.where(y_R <= 0.0, 0.0, y_R)
        if cap is not None:
            y_R = capped(y_R, cap)
        tl.store(out + row_R, y_R, mask=live_R)
        if GROUP > 1:
            out += out_stride


@triton.jit(do_not_specialize=["num_rows"])
def _unpack(
    data,
    stride,
    index,
    out,
    out_stride,
    num_rows,
    scale,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    at_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live_R = at_R < num_rows
    row_R = at_R
    if index is not None:
        row_R = tl.load(index + at_R, mask=live_R, other=0)
    row = rows_at(data, row_R, stride, ALIGN)
    unit_U = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    in_row_U = unit_U < (WIDTH + 16 * PARTS - 1) // (16 * PARTS)
    low, high = values(row, live_R, in_row_U, unit_U, KIND, WIDTH)
    target = (out + at_R.to(tl.int64) * out_stride)[:, None, None]
    is_live = live_R[:, None, None] & in_row(unit_U, KIND, WIDTH, 0, PARTS)[None, :, :]
    for part in tl.static_range(PARTS):
        place = target + columns(unit_U, KIND, part)[None, :, :]
        value = low if part == 0 else high
        if scale is not None:
            value *= scale
        if IS_ADDED:
            value += tl.load(place, mask=is_live, other=0.0)
        tl.store(place, value, mask=is_live)


def _launch_unpack(
    matrix: StoredMatrix,
    index_A: Tensor | None,
    out_AD: Tensor,
    *,
    rows: int,
    is_added: bool,
    scale: float = 1.0,
) -> None:
    layout = Layout.of(matrix)
    assert out_AD.stride(1) == 1, out_AD.stride()
    count = len(out_AD)
    _unpack[(ceil_div(count, rows), ceil_div(layout.num_units, _UNPACK_UNITS))](
        matrix.data,
        layout.stride,
        index_A,
        out_AD,
        out_AD.stride(0),
        count,
        None if scale == 1.0 else scale,  # compiles to nothing
        **layout.constants(rows, _UNPACK_UNITS),
        IS_ADDED=is_added,
        **overlap_options(),
        num_warps=NUM_WARPS,
    )
