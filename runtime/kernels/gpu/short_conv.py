"""Gated short convolutions on a GPU, for the rows of a step and the tokens of a prompt alike. Runs
and slots are as those of delta nets (delta.py); a token has the same bits in every pass.

Letters: T rows, R runs of rows, S slots, D hidden size, J taps."""

import torch
from torch import Tensor

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
        for first, count, source in run_R3.tolist():
            if not count:
                continue
            b, c, u = rows_TX[first : first + count].chunk(3, dim=1)
            before = torch.zeros_like(state_SJD[0]) if source < 0 else state_SJD[source]
            # Their products are f32: a row's bits do not depend on its pass.
            x = torch.cat([before, b * u]).double()
            taps = [x[tap : tap + count] * conv_DJ[:, tap].double() for tap in range(num_taps)]
            out[first : first + count] = (c * torch.stack(taps).sum(dim=0)).to(out.dtype)
            for row, target in enumerate(writes_T[first : first + count].tolist(), start=1):
                if target >= 0:
                    state_SJD[target] = x[row : row + num_taps - 1].to(state_SJD.dtype)

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
    number_R = tl.arange(0, RUNS)
    first_R, count_R = tl.load(run + 3 * number_R), tl.load(run + 3 * number_R + 1)
    is_own_R = (first_R <= row) & (row < first_R + count_R)
    if tl.sum(is_own_R.to(tl.int32), axis=0) > 0:  # else the row repeats another
        run += 3 * tl.sum(tl.where(is_own_R, number_R, 0), axis=0)
        first, source = tl.load(run), tl.load(run + 2).to(tl.int64)
        target = tl.load(writes + row).to(tl.int64)
        own = projected + row * 3 * WIDTH + column
        total = tl.zeros([COLUMNS], tl.float32)
        for tap in tl.static_range(TAPS):
            old = row - first + tap  # the place in the slot of a row before the run
            is_here = old >= TAPS - 1
            at = own + (tap - TAPS + 1) * 3 * WIDTH
            here = tl.load(at, mask=is_in & is_here, other=0.0)
            here *= tl.load(at + 2 * WIDTH, mask=is_in & is_here, other=0.0)
            before = tl.load(
                state + (source * (TAPS - 1) + old) * WIDTH + column,
                mask=is_in & (is_here == 0) & (source >= 0),
                other=0.0,
            )
            value = tl.where(is_here, here, before)
            total += value * tl.load(conv + column * TAPS + tap, mask=is_in, other=0.0)
            if tap > 0:
                tl.store(
                    state + (target * (TAPS - 1) + tap - 1) * WIDTH + column,
                    value,
                    mask=is_in & (target >= 0),
                )
        gate = tl.load(own + WIDTH, mask=is_in, other=0.0)
        tl.store(out + row * WIDTH + column, gate * total, mask=is_in)
