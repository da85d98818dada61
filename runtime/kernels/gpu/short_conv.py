"""Gated short convolutions on a GPU, for the rows of a step and the tokens of a prompt alike. Runs
and slots are as those of delta nets (delta.py); a token has the same bits in every pass.

Letters: T rows, R runs of rows, S slots, D hidden size, J taps."""

import torch
from torch import Tensor

from hotsplit.runtime.kernels.gpu.delta import run_with, runs_ref, sum_of_taps, sum_of_taps_ref
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import overlap_options
from hotsplit.runtime.kernels.gpu.overlap import admit_next, await_last

_COLUMNS = 128  # of a program


@gpu_kernel(
    reads=("projected_TX", "state_SJD", "run_R3", "writes_T"),
    writes=("out_TD", "state_SJD"),
    shared=("state_SJD", "run_R3"),
    takes_rows=True,
)
def convolve_gated(
    projected_TX: Tensor,
    conv_DJ: Tensor,
    state_SJD: Tensor,
    run_R3: Tensor,
    writes_T: Tensor,
    out_TD: Tensor,
) -> Versions:
    """For each row of a run, whose projections X are b, c and u: out = c * the sum over taps j of
    conv_j (b u) of the row J-1-j before. The b u of rows before a run are in its slot of
    `state_SJD` [S, J-1, D], which takes those of the last rows."""
    width, num_taps = conv_DJ.shape

    def reference() -> None:
        rows_TX, out = projected_TX.view(-1, 3 * width), out_TD.view(-1, width)
        for rows, before in runs_ref(run_R3, state_SJD):
            b, c, u = rows_TX[rows].chunk(3, dim=1)
            # Their products are f32: a row's bits do not depend on its pass.
            x = torch.cat([before, b * u]).double()
            out[rows] = (c * sum_of_taps_ref(x, conv_DJ, state_SJD, writes_T[rows])).to(out.dtype)

    def launch() -> None:
        for each in (projected_TX, conv_DJ, state_SJD, run_R3, out_TD):
            assert each.is_contiguous(), each.stride()
        num_rows = out_TD.numel() // width
        assert projected_TX.numel() == 3 * num_rows * width, projected_TX.shape
        assert state_SJD.shape[1:] == (num_taps - 1, width), state_SJD.shape
        _convolve_gated[(-(-width // _COLUMNS), num_rows)](
            projected_TX,
            conv_DJ,
            state_SJD,
            run_R3,
            writes_T,
            out_TD,
            WIDTH=width,
            TAPS=num_taps,
            RUNS=len(run_R3),
            COLUMNS=_COLUMNS,
            **overlap_options(),
            num_warps=4,
        )

    return reference, launch


@triton.jit
def _convolve_gated(
    projected,
    conv,
    state,
    run,
    writes,
    out,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    RUNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per row and block of columns."""
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    column, row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1).to(tl.int64)
    is_in = column < WIDTH
    is_there, first, source = run_with(run, row, RUNS)
    if is_there:  # else the row repeats another
        target = tl.load(writes + row).to(tl.int64)
        own = projected + row * 3 * WIDTH
        total = tl.zeros([COLUMNS], tl.float32)
        rows = row, first, source, target
        total = sum_of_taps(
            total, own, state, conv, *rows, column, is_in, TAPS, WIDTH, 3 * WIDTH, 2 * WIDTH
        )
        gate = tl.load(own + WIDTH + column, mask=is_in, other=0.0)
        tl.store(out + row * WIDTH + column, gate * total, mask=is_in)
