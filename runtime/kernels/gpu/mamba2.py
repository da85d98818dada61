"""Mamba-2 (Dao and Gu, arXiv 2405.21060) on a GPU, for the rows of a step and the tokens of a
prompt alike: the convolution with steps and decays, the recurrence, and the gates with the norm of
groups. Runs and slots are as those of delta nets (delta.py); the recurrence walks over all rows of
a run with the state in registers, a column's sum in one warp, so that a token has the same bits in
every pass.

Letters: T rows, R runs of rows, S slots, W values of a row's projections, C channels, J taps, X
inputs of the recurrence, H heads, P head width, G groups, N state width, I values of all heads."""

import torch
from torch import Tensor

from hotsplit.runtime.kernels.gpu.delta import (
    run_with,
    runs_ref,
    softplus,
    sum_of_taps,
    sum_of_taps_ref,
)
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import overlap_options, power_of_2
from hotsplit.runtime.kernels.gpu.overlap import admit_next, await_last

_CHANNELS = 128  # of a program
_STATE_VALUES = 2048  # that a warp holds: 64 registers a thread


@gpu_kernel(
    reads=("projected_TW", "conv_SJC", "run_R3", "writes_T"),
    writes=("mixed_TX", "conv_SJC"),
    shared=("conv_SJC", "run_R3"),
    takes_rows=True,
)
def convolve_channels(
    projected_TW: Tensor,
    taps_CJ: Tensor,
    bias_C: Tensor,
    step_bias_H: Tensor,
    rate_H: Tensor,
    conv_SJC: Tensor,
    run_R3: Tensor,
    writes_T: Tensor,
    mixed_TX: Tensor,
) -> Versions:
    """For each row of a run, whose projections are gates, channels and a number of each head: u =
    silu(bias + the sum over taps j of taps_j x of the row J-1-j before); step = softplus(its number
    + step_bias); decay = exp(rate step). The x of rows before a run are in its slot of `conv_SJC`
    [S, J-1, C], which takes those of the last rows."""
    channels, num_taps = taps_CJ.shape
    heads, num_rows = len(step_bias_H), mixed_TX.numel() // (channels + 2 * len(step_bias_H))
    size = projected_TW.numel() // num_rows - channels - heads  # I

    def reference() -> None:
        rows_TW, out_TX = projected_TW.view(num_rows, -1), mixed_TX.view(num_rows, -1)
        for rows, before_JC in runs_ref(run_R3, conv_SJC):
            row_TW = rows_TW[rows].double()
            x_TC = torch.cat([before_JC.double(), row_TW[:, size : size + channels]])
            sum_TC = bias_C + sum_of_taps_ref(x_TC, taps_CJ, conv_SJC, writes_T[rows])
            step_TH = (row_TW[:, size + channels :] + step_bias_H).exp().log1p()
            parts = [torch.nn.functional.silu(sum_TC), step_TH, (rate_H * step_TH).exp()]
            out_TX[rows] = torch.cat(parts, dim=1).to(out_TX.dtype)

    def launch() -> None:
        for each in (projected_TW, taps_CJ, conv_SJC, run_R3, mixed_TX):
            assert each.is_contiguous(), each.stride()
        assert conv_SJC.shape[1:] == (num_taps - 1, channels), conv_SJC.shape
        of_channels, of_heads = (-(-count // _CHANNELS) for count in (channels, heads))
        _convolve_channels[(of_channels + of_heads, num_rows)](
            projected_TW,
            taps_CJ,
            bias_C,
            step_bias_H,
            rate_H,
            conv_SJC,
            run_R3,
            writes_T,
            mixed_TX,
            SIZE=size,
            CHANNELS=channels,
            HEADS=heads,
            TAPS=num_taps,
            RUNS=len(run_R3),
            BLOCKS=of_channels,
            BLOCK=_CHANNELS,
            **overlap_options(),
            num_warps=4,
        )

    return reference, launch


@gpu_kernel(
    reads=("mixed_TX", "state_SHNP", "run_R3", "writes_T"),
    writes=("out_THP", "state_SHNP"),
    shared=("state_SHNP", "run_R3"),
    takes_rows=True,
)
def scan_states(
    mixed_TX: Tensor,
    skip_H: Tensor,
    state_SHNP: Tensor,
    run_R3: Tensor,
    writes_T: Tensor,
    out_THP: Tensor,
    num_groups: int,
) -> Versions:
    """For each row of a run, in order, and each head h, which reads group h // (H / G), with its
    state S: S = decay S + b (step x)^T; out = S^T c + skip x."""
    _, heads, width, head_dim = state_SHNP.shape
    size, groups = heads * head_dim, num_groups * width
    num_rows = out_THP.numel() // size

    def reference() -> None:
        row_TX = mixed_TX.view(num_rows, -1)
        result_THP = out_THP.view(num_rows, heads, head_dim)
        group_H = torch.arange(heads, device=mixed_TX.device) // (heads // num_groups)
        for rows, before_HNP in runs_ref(run_R3, state_SHNP):
            state_HNP = before_HNP.double()
            for row in range(rows.start, rows.stop):
                x, b, c, step_H, decay_H = (
                    row_TX[row].double().split([size, groups, groups, heads, heads])
                )
                b_HN, c_HN = (each.view(num_groups, -1)[group_H] for each in (b, c))
                x_HP = x.view(heads, -1)
                added_HNP = b_HN[:, :, None] * (step_H[:, None] * x_HP)[:, None]
                state_HNP = state_HNP * decay_H[:, None, None] + added_HNP
                # A state is f32 after each row: a row's bits do not depend on its pass.
                state_HNP = state_HNP.to(state_SHNP.dtype).double()
                out_HP = torch.einsum("hnp,hn->hp", state_HNP, c_HN) + skip_H[:, None] * x_HP
                result_THP[row] = out_HP.to(out_THP.dtype)
                if writes_T[row] >= 0:
                    state_SHNP[int(writes_T[row])] = state_HNP.to(state_SHNP.dtype)

    def launch() -> None:
        for each in (mixed_TX, state_SHNP, run_R3, out_THP):
            assert each.is_contiguous(), each.stride()
        block = power_of_2(width)
        columns = max(1, min(_STATE_VALUES // block, power_of_2(head_dim)))
        _scan_states[(heads * -(-head_dim // columns), len(run_R3))](
            mixed_TX,
            skip_H,
            state_SHNP,
            run_R3,
            writes_T,
            out_THP,
            HEADS=heads,
            WIDTH=head_dim,
            GROUPS=num_groups,
            STATE=width,
            BLOCK=block,
            COLUMNS=columns,
            **overlap_options(),
            num_warps=1,
        )

    return reference, launch


@gpu_kernel(reads=("projected_TW", "out_TI"), writes=("out_TI",))
def gate_groups(
    out_TI: Tensor, projected_TW: Tensor, weight_I: Tensor | None, epsilon: float, num_groups: int
) -> Versions:
    """out = the RMS norm of each group of out * silu(its gates), which begin a row's projections;
    without weights there is no norm."""
    size = out_TI.shape[-1]
    width = size // num_groups

    def reference() -> None:
        gate = projected_TW[..., :size].double()
        value = out_TI.double() * torch.nn.functional.silu(gate)
        if weight_I is not None:
            group = value.unflatten(-1, (num_groups, width))
            group = group * (group.square().mean(-1, keepdim=True) + epsilon).rsqrt()
            value = group.flatten(-2) * weight_I
        out_TI.copy_(value)

    def launch() -> None:
        assert out_TI.is_contiguous() and projected_TW.is_contiguous(), out_TI.stride()
        num_rows = out_TI.numel() // size
        _gate_groups[(num_groups, num_rows)](
            out_TI,
            projected_TW,
            out_TI if weight_I is None else weight_I,
            float(epsilon),
            PROJECTED=projected_TW.numel() // num_rows,
            SIZE=size,
            WIDTH=width,
            HAS_NORM=weight_I is not None,
            BLOCK=power_of_2(width),
            **overlap_options(),
            num_warps=4,
        )

    return reference, launch


@triton.jit
def _convolve_channels(
    projected,
    taps,
    bias,
    step_bias,
    rate,
    conv,
    run,
    writes,
    mixed,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    TAPS: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per row and block of channels or, after these, of heads."""
    WIDTH: tl.constexpr = SIZE + CHANNELS + HEADS
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    is_there, first, source = run_with(run, row, RUNS)
    if is_there:  # else the row repeats another
        target = tl.load(writes + row).to(tl.int64)
        own = projected + row * WIDTH + SIZE
        mixed += row * (CHANNELS + 2 * HEADS)
        if block < BLOCKS:
            channel = block * BLOCK + tl.arange(0, BLOCK)
            is_in = channel < CHANNELS
            total = tl.load(bias + channel, mask=is_in, other=0.0)
            rows = row, first, source, target
            total = sum_of_taps(
                total, own, conv, taps, *rows, channel, is_in, TAPS, CHANNELS, WIDTH, 0
            )
            tl.store(mixed + channel, total / (1.0 + tl.exp(-total)), mask=is_in)
        else:
            head = (block - BLOCKS) * BLOCK + tl.arange(0, BLOCK)
            is_in = head < HEADS
            step = tl.load(own + CHANNELS + head, mask=is_in, other=0.0)
            step = softplus(step + tl.load(step_bias + head, mask=is_in, other=0.0))
            decay = tl.exp(tl.load(rate + head, mask=is_in, other=0.0) * step)
            tl.store(mixed + CHANNELS + head, step, mask=is_in)
            tl.store(mixed + CHANNELS + HEADS + head, decay, mask=is_in)


@triton.jit
def _scan_states(
    mixed,
    skip,
    state,
    run,
    writes,
    out,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per run, head and block of columns of its state."""
    SIZE: tl.constexpr = HEADS * WIDTH  # the first value of b
    CHANNELS: tl.constexpr = SIZE + 2 * GROUPS * STATE
    MIXED: tl.constexpr = CHANNELS + 2 * HEADS
    PARTS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    admit_next(OVERLAPS)
    head = tl.program_id(0) // PARTS
    run += 3 * tl.program_id(1)
    first, count = tl.load(run).to(tl.int64), tl.load(run + 1)
    source = tl.load(run + 2).to(tl.int64)
    row_N = tl.arange(0, BLOCK)
    column_P = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    in_state_N, in_head_P = row_N < STATE, column_P < WIDTH
    is_live_NP = in_state_N[:, None] & in_head_P[None, :]
    place_NP = (head * STATE + row_N)[:, None] * WIDTH + column_P[None, :]
    size = HEADS * STATE * WIDTH
    is_read_NP = is_live_NP & (count > 0) & (source >= 0)
    state_NP = tl.load(state + source * size + place_NP, mask=is_read_NP, other=0.0)
    await_last(OVERLAPS)
    own_skip = tl.load(skip + head)
    mixed += first * MIXED
    out += (first * HEADS + head) * WIDTH
    x = mixed + head * WIDTH
    b = mixed + SIZE + head // (HEADS // GROUPS) * STATE
    numbers = mixed + CHANNELS + head
    writes += first
    # A row's values are loaded while the row before is computed.
    is_next = count > 0
    x_P = tl.load(x + column_P, mask=in_head_P & is_next, other=0.0)
    b_N = tl.load(b + row_N, mask=in_state_N & is_next, other=0.0)
    c_N = tl.load(b + GROUPS * STATE + row_N, mask=in_state_N & is_next, other=0.0)
    step = tl.load(numbers, mask=is_next, other=0.0)
    decay = tl.load(numbers + HEADS, mask=is_next, other=0.0)
    number = 0
    while number < count:
        x += MIXED
        b += MIXED
        numbers += MIXED
        number += 1
        is_next = number < count
        next_x_P = tl.load(x + column_P, mask=in_head_P & is_next, other=0.0)
        next_b_N = tl.load(b + row_N, mask=in_state_N & is_next, other=0.0)
        next_c_N = tl.load(b + GROUPS * STATE + row_N, mask=in_state_N & is_next, other=0.0)
        next_step = tl.load(numbers, mask=is_next, other=0.0)
        next_decay = tl.load(numbers + HEADS, mask=is_next, other=0.0)
        state_NP = decay * state_NP + b_N[:, None] * (step * x_P)[None, :]
        out_P = tl.sum(state_NP * c_N[:, None], axis=0) + own_skip * x_P
        tl.store(out + column_P, out_P, mask=in_head_P)
        target = tl.load(writes).to(tl.int64)
        if target >= 0:
            tl.store(state + target * size + place_NP, state_NP, mask=is_live_NP)
        out += HEADS * WIDTH
        writes += 1
        x_P, b_N, c_N, step, decay = next_x_P, next_b_N, next_c_N, next_step, next_decay


@triton.jit
def _gate_groups(
    out,
    projected,
    weight,
    epsilon,
    PROJECTED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per group and row, in place."""
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    group, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_group = column < WIDTH
    out += row * SIZE + group * WIDTH
    gate = tl.load(projected + row * PROJECTED + group * WIDTH + column, mask=in_group, other=0.0)
    value = tl.load(out + column, mask=in_group, other=0.0) * (gate / (1.0 + tl.exp(-gate)))
    if HAS_NORM:
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + epsilon)
        value *= tl.load(weight + group * WIDTH + column, mask=in_group, other=0.0)
    tl.debug_barrier()  # in place: all threads must have loaded before any stores
    tl.store(out + column, value, mask=in_group)
