"""Adds partial sums to a vector and computes its norm, in one program per row of a step. In a layer
that is divided with the CPU, it also reads the CPU's sum from main memory and leaves its result
there, which saves two copies.

One program reads all parts, so that norm and sum take one launch. The order in which parts are
added depends only on shapes.

Letters: D width, P parts, T rows of a step."""

from torch import Tensor

from hotsplit.model.blocks import PLAIN_SUM, SumFactors
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import overlap_options, power_of_2, step_rows
from hotsplit.runtime.kernels.gpu.overlap import admit_next, await_last
from hotsplit.runtime.kernels.gpu.reference import rms_norm

# Most values of several parts that are loaded together. Loading parts one by one would cost a
# memory latency for each; more values do not fit into the registers of a program.
_AT_ONCE = 1 << 16


@gpu_kernel(
    reads=("x_D", "parts_PD", "term_D"),
    writes=("out_D", "x_out_D", "copy_D"),
    rows_axis={"parts_PD": 1},
)
def add_norm(
    x_D: Tensor,
    parts_PD: Tensor | None,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    epsilon: float,
    out_D: Tensor | None,
    x_out_D: Tensor | None,
    term_D: Tensor | None = None,
    copy_D: Tensor | None = None,
    factors: SumFactors = PLAIN_SUM,
) -> Versions:
    """t = the sum, with these factors, of x and of the others, the rows of `parts_PD` and term;
    x_out = t, and out = copy = norm(t), by ops.norm.Norm; each optional, but a copy needs `out_D`.
    `x_out_D` and `out_D` may be `x_D`; rows of these may be strided. `term_D`, `copy_D` and
    `x_out_D` may be in pinned memory of the host."""

    def reference() -> None:
        total_D = x_D.double()
        if parts_PD is not None:
            total_D = total_D + factors.factor * parts_PD.double().sum(dim=0)
        if term_D is not None:
            total_D = total_D + factors.factor * term_D.to(x_D.device).double()
        total_D = factors.times * total_D
        if out_D is not None:
            assert weight_D is not None
            centred_D = total_D if bias_D is None else total_D - total_D.mean()
            normed_D = rms_norm(centred_D, weight_D, epsilon)
            out_D.copy_(normed_D if bias_D is None else normed_D + bias_D)
            if copy_D is not None:
                copy_D.copy_(out_D)
        if x_out_D is not None:
            x_out_D.copy_(total_D)

    def launch() -> None:
        assert out_D is None or weight_D is not None
        assert copy_D is None or out_D is not None
        num_rows, width = step_rows(x_D), x_D.shape[-1]
        parts = None if parts_PD is None else parts_PD[0]
        for each in (x_out_D, term_D, copy_D, parts):
            assert each is None or each.is_contiguous(), each.stride()
        block = power_of_2(width)
        num_parts = 0 if parts_PD is None else len(parts_PD)
        _add_norm[(num_rows,)](
            x_D,
            parts_PD,
            0 if parts_PD is None else parts_PD.stride(0),
            weight_D,
            bias_D,
            float(epsilon),
            out_D,
            x_out_D,
            term_D,
            copy_D,
            None if factors.factor == 1.0 else float(factors.factor),
            None if factors.times == 1.0 else float(factors.times),
            _stride_between(x_D),
            None if out_D is None else _stride_between(out_D),
            NUM_PARTS=num_parts,
            AT_ONCE=max(1, min(16, _AT_ONCE // block, power_of_2(max(1, num_parts)))),
            WIDTH=width,
            BLOCK=block,
            NUM_ROWS=num_rows,
            **overlap_options(),
            num_warps=max(1, min(32, block // 128)),
        )

    return reference, launch


@triton.jit
def normed(total, in_row, column, weight, bias, epsilon, WIDTH: tl.constexpr):
    """The norm of a vector, whose values outside of the row are 0."""
    centred = total
    if bias is not None:
        centred = tl.where(in_row, total - tl.sum(total, axis=0) / WIDTH, 0.0)
    mean_square = tl.sum(centred * centred, axis=0) / WIDTH
    scale = tl.load(weight + column, mask=in_row, other=0.0)
    value = centred * tl.rsqrt(mean_square + epsilon) * scale
    if bias is not None:
        value += tl.load(bias + column, mask=in_row, other=0.0)
    return value


@triton.jit
def _add_norm(
    x,
    parts,
    part_stride,
    weight,
    bias,
    epsilon,
    out,
    x_out,
    term,
    copy,
    factor,
    sum_scale,
    x_stride,
    out_stride,
    NUM_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    if NUM_ROWS > 1:
        at = tl.program_id(0) * WIDTH
        x += at if x_stride is None else tl.program_id(0) * x_stride
        if parts is not None:
            parts += at
        if out is not None:
            out += at if out_stride is None else tl.program_id(0) * out_stride
        if x_out is not None:
            x_out += at
        if term is not None:
            term += at
        if copy is not None:
            copy += at
    column = tl.arange(0, BLOCK)
    in_row = column < WIDTH
    total = tl.load(x + column, mask=in_row, other=0.0)
    if parts is not None:
        for first in range(0, NUM_PARTS, AT_ONCE):
            part = (first + tl.arange(0, AT_ONCE))[:, None]
            is_live = in_row[None, :] & (part < NUM_PARTS)
            values = tl.load(parts + part * part_stride + column[None, :], mask=is_live, other=0.0)
            sum_D = tl.sum(values, axis=0)
            total += sum_D if factor is None else factor * sum_D
    if term is not None:  # which the CPU may have written since the last kernel: never cached
        term_D = tl.load(term + column, mask=in_row, other=0.0, cache_modifier=".cv")
        total += term_D if factor is None else factor * term_D
    if sum_scale is not None:
        total *= sum_scale
    if x_stride is not None:
        tl.debug_barrier()  # in place: all threads must have loaded before any stores
    if x_out is not None:
        tl.store(x_out + column, total, mask=in_row)
    if out is not None:
        normed_D = normed(total, in_row, column, weight, bias, epsilon, WIDTH)
        tl.store(out + column, normed_D, mask=in_row)
        if copy is not None:
            tl.store(copy + column, normed_D, mask=in_row)


def _stride_between(x: Tensor) -> int | None:
    """The stride of rows that other values lie between, as between the queries of two rows; None if
    nothing does."""
    assert x.stride(-1) == 1, x.stride()
    return None if x.is_contiguous() else x.stride(0)
