"""Gated delta nets (Yang, Kautz and Hatamizadeh, arXiv 2412.06464) on a GPU, for the rows of a step
and for the tokens of a prompt alike: the convolution with norms and gates, the recurrence, and the
gated norm of its output.

The recurrence walks over all rows of a run with the state in registers, a column's sums in one
warp, so that a token's bits depend neither on the pass that has it nor on the other rows. Runs and
slots are read from memory, so a captured launch is right for every pass. The slot with which a run
begins is none that the pass writes: it is loaded before the wait for the kernel before
(overlap.py).

A row waits for the row before: by the code for sm_90, 460 instructions and two sums over eight
lanes, some 500 cycles for a warp alone on its scheduler (docs/hybrid.md). Not measured on a card so
far.

A run is the consecutive rows of one sequence in a pass, run_R3 int32 on the device: first row,
number of rows (0: no run), and the slot of the state before them (-1: none, zeros). `writes_T`,
int32: the slot that takes the state after a row, or -1; no run reads it. Runs do not overlap; a row
in none of them is not computed. Triton takes a power of 2 of runs. The references compute token by
token, as the equations stand, with a state in f32 between them.

In Kimi Delta Attention (arXiv 2510.26692) each row of a state has a decay of its own.

Letters: T rows, R runs of rows, S slots, C channels (queries, keys and values), J taps, W values of
a row's projections, X of its inputs of the recurrence, G key heads, V value heads, N width of a key
head, M of a value head, A decays: one for each value head, or N."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import overlap_options, power_of_2
from hotsplit.runtime.kernels.gpu.overlap import admit_next, await_last

# Columns of the state that a warp holds: 64 registers a thread for keys of 128 values.
_COLUMNS = 16


@dataclass(frozen=True, kw_only=True)
class DeltaSizes:
    key_heads: int
    value_heads: int
    decays: int
    key_width: int
    value_width: int

    @classmethod
    def of(
        cls,
        projected_TW: Tensor,
        taps_CJ: Tensor,
        step_bias_A: Tensor,
        rate_V: Tensor,
        key_heads: int,
    ) -> "DeltaSizes":
        channels, value_heads, decays = len(taps_CJ), len(rate_V), len(step_bias_A)
        value_width = (projected_TW.shape[-1] - channels - decays) // value_heads - 1
        return cls(
            key_heads=key_heads,
            value_heads=value_heads,
            decays=decays,
            key_width=(channels - value_heads * value_width) // (2 * key_heads),
            value_width=value_width,
        )

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    @property
    def projected(self) -> int:
        """W: the channels, of each value head the strength of an update, of each decay the step,
        and the gates of the output."""
        return self.mixed + self.value_heads * self.value_width

    @property
    def mixed(self) -> int:
        """X: queries, keys and values, the strengths and the decays."""
        return self.channels + self.value_heads + self.decays


@gpu_kernel(
    reads=("projected_TW", "conv_SJC", "run_R3", "writes_T"),
    writes=("mixed_TX", "conv_SJC"),
    shared=("conv_SJC", "run_R3"),
    takes_rows=True,
)
def convolve(
    projected_TW: Tensor,
    taps_CJ: Tensor,
    step_bias_A: Tensor,
    rate_V: Tensor,
    conv_SJC: Tensor,
    run_R3: Tensor,
    writes_T: Tensor,
    mixed_TX: Tensor,
    num_key_heads: int,
) -> Versions:
    """For each row of a run: u = silu(the sum over taps j of taps_j x of the row J-1-j before);
    queries and keys divided by sqrt(|.|^2 + 1e-6) of their head, queries also by sqrt(N); strength
    = sigmoid(its number); decay = exp(rate softplus(its number + step_bias)). The x of rows before
    a run are in its slot of `conv_SJC` [S, J-1, C]; that of the last rows is a part of the
    state."""

    def reference() -> None:
        s = DeltaSizes.of(projected_TW, taps_CJ, step_bias_A, rate_V, num_key_heads)
        rows_TW, out_TX = projected_TW.view(-1, s.projected), mixed_TX.view(-1, s.mixed)
        keys, rate_A = s.key_heads * s.key_width, _of_decays(rate_V, s.decays)
        for rows, before_JC in runs_ref(run_R3, conv_SJC):
            row_TW = rows_TW[rows].double()
            x_TC = torch.cat([before_JC.double(), row_TW[:, : s.channels]])
            sum_TC = sum_of_taps_ref(x_TC, taps_CJ, conv_SJC, writes_T[rows])
            u_TC = torch.nn.functional.silu(sum_TC)
            query, key, value = u_TC.split([keys, keys, s.channels - 2 * keys], dim=1)
            query, key = (each.unflatten(1, (-1, s.key_width)) for each in (query, key))
            query, key = (
                x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key)
            )
            gates_TX = row_TW[:, s.channels : s.mixed]
            strength_TV, step_TA = gates_TX.split([s.value_heads, s.decays], dim=1)
            step_TA = (step_TA + step_bias_A).exp().log1p()
            parts = [
                query.flatten(1) / s.key_width**0.5,
                key.flatten(1),
                value,
                strength_TV.sigmoid(),
                (rate_A * step_TA).exp(),
            ]
            out_TX[rows] = torch.cat(parts, dim=1).to(out_TX.dtype)

    def launch() -> None:
        sizes = DeltaSizes.of(projected_TW, taps_CJ, step_bias_A, rate_V, num_key_heads)
        for each in (projected_TW, taps_CJ, conv_SJC, run_R3, mixed_TX):
            assert each.is_contiguous(), each.stride()
        num_taps, num_rows = taps_CJ.shape[1], mixed_TX.numel() // sizes.mixed
        assert projected_TW.numel() == num_rows * sizes.projected, projected_TW.shape
        assert conv_SJC.shape[1:] == (num_taps - 1, sizes.channels), conv_SJC.shape
        _convolve[(2 * sizes.key_heads + sizes.value_heads, num_rows)](
            projected_TW,
            taps_CJ,
            step_bias_A,
            rate_V,
            conv_SJC,
            run_R3,
            writes_T,
            mixed_TX,
            KEY_HEADS=sizes.key_heads,
            VALUE_HEADS=sizes.value_heads,
            KEY_WIDTH=sizes.key_width,
            VALUE_WIDTH=sizes.value_width,
            DECAYS=sizes.decays // sizes.value_heads,
            QUERY_SCALE=sizes.key_width**-0.5,
            TAPS=num_taps,
            RUNS=len(run_R3),
            BLOCK=power_of_2(max(sizes.key_width, sizes.value_width)),
            **overlap_options(),
            num_warps=1,
        )

    return reference, launch


@gpu_kernel(
    reads=("mixed_TX", "state_SVNM", "run_R3", "writes_T"),
    writes=("out_TVM", "state_SVNM"),
    shared=("state_SVNM", "run_R3"),
    takes_rows=True,
)
def delta_rule(
    mixed_TX: Tensor,
    state_SVNM: Tensor,
    run_R3: Tensor,
    writes_T: Tensor,
    out_TVM: Tensor,
    num_key_heads: int,
    *,
    is_grouped: bool,
    is_by_row: bool,
) -> Versions:
    """For each row of a run, in order, and each value head h, which reads key head h % G or, if
    `is_grouped`, h // (V / G), with its state S: S *= decay; S += k (strength (v - S^T k))^T; out
    = S^T q. `is_by_row`: each row of S has a decay."""

    def reference() -> None:
        _, value_heads, key_width, value_width = state_SVNM.shape
        keys, values = num_key_heads * key_width, value_heads * value_width
        decays = value_heads * (key_width if is_by_row else 1)
        row_TX = mixed_TX.view(-1, 2 * keys + values + value_heads + decays)
        result_TVM = out_TVM.view(-1, value_heads, value_width)
        head_V = torch.arange(value_heads, device=mixed_TX.device)
        head_V = head_V // (value_heads // num_key_heads) if is_grouped else head_V % num_key_heads
        for rows, before_VNM in runs_ref(run_R3, state_SVNM):
            state_VNM = before_VNM.double()
            for row in range(rows.start, rows.stop):
                query, key, value, strength_V, decay_A = (
                    row_TX[row].double().split([keys, keys, values, value_heads, decays])
                )
                query_VN, key_VN = (x.view(num_key_heads, -1)[head_V] for x in (query, key))
                state_VNM = state_VNM * decay_A.view(value_heads, -1, 1)
                held_VM = torch.einsum("vnm,vn->vm", state_VNM, key_VN)
                delta_VM = strength_V[:, None] * (value.view(value_heads, -1) - held_VM)
                state_VNM = state_VNM + key_VN[:, :, None] * delta_VM[:, None]
                # A state is f32 after each row: a row's bits do not depend on its pass.
                state_VNM = state_VNM.to(state_SVNM.dtype).double()
                result_TVM[row] = torch.einsum("vnm,vn->vm", state_VNM, query_VN).to(out_TVM.dtype)
                if writes_T[row] >= 0:
                    state_SVNM[int(writes_T[row])] = state_VNM.to(state_SVNM.dtype)

    def launch() -> None:
        for each in (mixed_TX, state_SVNM, run_R3, out_TVM):
            assert each.is_contiguous(), each.stride()
        _, value_heads, key_width, value_width = state_SVNM.shape
        columns = min(_COLUMNS, power_of_2(value_width))
        _delta_rule[(value_heads * -(-value_width // columns), len(run_R3))](
            mixed_TX,
            state_SVNM,
            run_R3,
            writes_T,
            out_TVM,
            KEY_HEADS=num_key_heads,
            VALUE_HEADS=value_heads,
            KEY_WIDTH=key_width,
            VALUE_WIDTH=value_width,
            IS_GROUPED=is_grouped,
            DECAYS=key_width if is_by_row else 1,
            KEY_BLOCK=power_of_2(key_width),
            COLUMNS=columns,
            **overlap_options(),
            num_warps=1,
        )

    return reference, launch


@gpu_kernel(reads=("projected_TW", "out_TVM"), writes=("out_TVM",))
def gate_norm(
    out_TVM: Tensor, projected_TW: Tensor, weight_M: Tensor, epsilon: float, *, is_sigmoid: bool
) -> Versions:
    """out = RMS norm of each head of out, times silu of its gates, the last values of `projected`;
    `is_sigmoid`: times their sigmoid."""

    def reference() -> None:
        heads, width = out_TVM.shape[-2:]
        gate = projected_TW[..., -heads * width :].double().reshape(out_TVM.shape)
        value = out_TVM.double()
        value = value * (value.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight_M
        out_TVM.copy_(value * (gate.sigmoid() if is_sigmoid else torch.nn.functional.silu(gate)))

    def launch() -> None:
        assert out_TVM.is_contiguous() and projected_TW.is_contiguous(), out_TVM.stride()
        heads, width = out_TVM.shape[-2:]
        num_rows = out_TVM.numel() // (heads * width)
        _gate_norm[(heads, num_rows)](
            out_TVM,
            projected_TW,
            weight_M,
            float(epsilon),
            BEFORE=projected_TW.numel() // num_rows - heads * width,
            HEADS=heads,
            WIDTH=width,
            IS_SIGMOID=is_sigmoid,
            BLOCK=power_of_2(width),
            **overlap_options(),
            num_warps=1,
        )

    return reference, launch


def _of_decays(x_V: Tensor, decays: int) -> Tensor:
    """A number of each value head, for each of its decays."""
    return x_V.repeat_interleave(decays // len(x_V))


def runs_ref(run_R3: Tensor, state_SX: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of each run, and the state before them."""
    for first, count, source in run_R3.tolist():
        if count:
            before = torch.zeros_like(state_SX[0]) if source < 0 else state_SX[source]
            yield slice(first, first + count), before


def sum_of_taps_ref(x_TC: Tensor, taps_CJ: Tensor, state_SJC: Tensor, writes_T: Tensor) -> Tensor:
    """The convolution of a run, of which `x_TC` has the rows before it as well; writes the states
    after its rows."""
    num_taps = taps_CJ.shape[1]
    for row, target in enumerate(writes_T.tolist(), start=1):
        if target >= 0:
            state_SJC[target] = x_TC[row : row + num_taps - 1].to(state_SJC.dtype)
    taps = [x_TC[tap:][: len(writes_T)] * taps_CJ[:, tap].double() for tap in range(num_taps)]
    return torch.stack(taps).sum(dim=0)


@triton.jit
def run_with(run, row, RUNS: tl.constexpr):
    """(whether a run has the row, that run's first row, its slot)."""
    number_R = tl.arange(0, RUNS)
    first_R, count_R = tl.load(run + 3 * number_R), tl.load(run + 3 * number_R + 1)
    is_own_R = (first_R <= row) & (row < first_R + count_R)
    run += 3 * tl.sum(tl.where(is_own_R, number_R, 0), axis=0)
    is_there = tl.sum(is_own_R.to(tl.int32), axis=0) > 0
    return is_there, tl.load(run), tl.load(run + 2).to(tl.int64)


@triton.jit
def sum_of_taps(
    total,
    projected,
    state,
    taps,
    row,
    first,
    source,
    target,
    channel,
    is_in,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STRIDE: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """`total`, plus the products of some channels' taps with their values in a row, at `projected`,
    and in those before it: STRIDE values apart in the run, which begins at row `first`, or else in
    its slot. FACTOR: how far behind a value is another that multiplies it; 0: none is. Writes the
    state after the row to the slot that takes it."""
    for tap in tl.static_range(TAPS):
        old = row - first + tap  # the place in the slot of a row before the run
        is_here = old >= TAPS - 1
        at = projected + (tap - TAPS + 1) * STRIDE + channel
        here = tl.load(at, mask=is_in & is_here, other=0.0)
        if FACTOR:
            here *= tl.load(at + FACTOR, mask=is_in & is_here, other=0.0)
        place = state + (source * (TAPS - 1) + old) * CHANNELS + channel
        before = tl.load(place, mask=is_in & (is_here == 0) & (source >= 0), other=0.0)
        value = tl.where(is_here, here, before)
        if tap > 0:
            place = state + (target * (TAPS - 1) + tap - 1) * CHANNELS + channel
            tl.store(place, value, mask=is_in & (target >= 0))
        total += value * tl.load(taps + channel * TAPS + tap, mask=is_in, other=0.0)
    return total


@triton.jit
def softplus(x):
    """log(1 + e^x). The series of 2 atanh(e / (2 + e)) keeps small results precise, where an
    approximate logarithm is off by 2e-7: a decay close to 1 is applied thousands of times."""
    small = tl.exp(-tl.abs(x))
    s = small / (2.0 + small)
    square = s * s
    series = 1.0 / 13.0 + square * (1.0 / 15.0)
    series = 1.0 / 9.0 + square * (1.0 / 11.0 + square * series)
    series = 1.0 / 5.0 + square * (1.0 / 7.0 + square * series)
    series = 1.0 + square * (1.0 / 3.0 + square * series)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _convolve(
    projected,
    taps,
    step_bias,
    rate,
    conv,
    run,
    writes,
    mixed,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    DECAYS: tl.constexpr,
    QUERY_SCALE: tl.constexpr,
    TAPS: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per row and head of queries, keys or values. DECAYS: of a value head."""
    VALUES: tl.constexpr = 2 * KEY_HEADS * KEY_WIDTH  # the first channel of values
    CHANNELS: tl.constexpr = VALUES + VALUE_HEADS * VALUE_WIDTH
    MIXED: tl.constexpr = CHANNELS + VALUE_HEADS * (1 + DECAYS)
    PROJECTED: tl.constexpr = MIXED + VALUE_HEADS * VALUE_WIDTH
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    is_there, first, source = run_with(run, row, RUNS)
    if is_there:  # else the row repeats another
        target = tl.load(writes + row).to(tl.int64)
        value_head = head - 2 * KEY_HEADS
        is_key = value_head < 0
        column = tl.arange(0, BLOCK)
        in_head = column < tl.where(is_key, KEY_WIDTH, VALUE_WIDTH)
        begin = tl.where(is_key, head * KEY_WIDTH, VALUES + value_head * VALUE_WIDTH)
        channel = begin + column
        projected += row * PROJECTED
        mixed += row * MIXED
        total = tl.zeros([BLOCK], tl.float32)
        rows = row, first, source, target
        total = sum_of_taps(
            total, projected, conv, taps, *rows, channel, in_head, TAPS, CHANNELS, PROJECTED, 0
        )
        total = total / (1.0 + tl.exp(-total))
        if is_key:
            total *= tl.rsqrt(tl.sum(total * total, axis=0) + 1e-6)
            if head < KEY_HEADS:
                total *= QUERY_SCALE
        else:
            strength = tl.load(projected + CHANNELS + value_head)
            tl.store(mixed + CHANNELS + value_head, 1.0 / (1.0 + tl.exp(-strength)))
            own = value_head * DECAYS
            first_decay = CHANNELS + VALUE_HEADS + own
            if DECAYS == 1:
                step = softplus(tl.load(projected + first_decay) + tl.load(step_bias + own))
                tl.store(mixed + first_decay, tl.exp(tl.load(rate + value_head) * step))
            else:
                has_decay = column < DECAYS
                step = tl.load(projected + first_decay + column, mask=has_decay, other=0.0)
                step += tl.load(step_bias + own + column, mask=has_decay, other=0.0)
                decay = tl.exp(tl.load(rate + value_head) * softplus(step))
                tl.store(mixed + first_decay + column, decay, mask=has_decay)
        tl.store(mixed + channel, total, mask=in_head)


@triton.jit
def _delta_rule(
    mixed,
    state,
    run,
    writes,
    out,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    DECAYS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per run, value head and block of columns of its state."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_WIDTH  # the first value of keys
    VALUES: tl.constexpr = 2 * KEYS
    GATES: tl.constexpr = VALUES + VALUE_HEADS * VALUE_WIDTH
    MIXED: tl.constexpr = GATES + VALUE_HEADS * (1 + DECAYS)
    PARTS: tl.constexpr = (VALUE_WIDTH + COLUMNS - 1) // COLUMNS
    admit_next(OVERLAPS)
    head = tl.program_id(0) // PARTS
    run += 3 * tl.program_id(1)
    first, count = tl.load(run).to(tl.int64), tl.load(run + 1)
    source = tl.load(run + 2).to(tl.int64)
    row_N = tl.arange(0, KEY_BLOCK)
    column_M = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    in_key_N, in_head_M = row_N < KEY_WIDTH, column_M < VALUE_WIDTH
    is_live_NM = in_key_N[:, None] & in_head_M[None, :]
    place_NM = (head * KEY_WIDTH + row_N)[:, None] * VALUE_WIDTH + column_M[None, :]
    size = VALUE_HEADS * KEY_WIDTH * VALUE_WIDTH
    is_read_NM = is_live_NM & (count > 0) & (source >= 0)
    state_NM = tl.load(state + source * size + place_NM, mask=is_read_NM, other=0.0)
    await_last(OVERLAPS)
    mixed += first * MIXED
    out += (first * VALUE_HEADS + head) * VALUE_WIDTH
    key_head = head // (VALUE_HEADS // KEY_HEADS) if IS_GROUPED else head % KEY_HEADS
    query = mixed + key_head * KEY_WIDTH
    value = mixed + VALUES + head * VALUE_WIDTH
    gates = mixed + GATES + head
    # One number, or one of each row of the state.
    decays = mixed + GATES + VALUE_HEADS + head * DECAYS + (row_N if DECAYS > 1 else 0)
    writes += first
    # A row's values are loaded while the row before is computed.
    is_next = count > 0
    query_N = tl.load(query + row_N, mask=in_key_N & is_next, other=0.0)
    key_N = tl.load(query + KEYS + row_N, mask=in_key_N & is_next, other=0.0)
    value_M = tl.load(value + column_M, mask=in_head_M & is_next, other=0.0)
    strength = tl.load(gates, mask=is_next, other=0.0)
    has_decay = in_key_N if DECAYS > 1 else True
    decay = tl.load(decays, mask=has_decay & is_next, other=0.0)
    number = 0
    while number < count:
        query += MIXED
        value += MIXED
        gates += MIXED
        decays += MIXED
        number += 1
        is_next = number < count
        next_query_N = tl.load(query + row_N, mask=in_key_N & is_next, other=0.0)
        next_key_N = tl.load(query + KEYS + row_N, mask=in_key_N & is_next, other=0.0)
        next_value_M = tl.load(value + column_M, mask=in_head_M & is_next, other=0.0)
        next_strength = tl.load(gates, mask=is_next, other=0.0)
        next_decay = tl.load(decays, mask=has_decay & is_next, other=0.0)
        state_NM *= decay[:, None] if DECAYS > 1 else decay
        # The output is that of the new state: S^T q + (k . q) delta, which need not wait for delta.
        held_M = tl.sum(state_NM * key_N[:, None], axis=0)
        out_M = tl.sum(state_NM * query_N[:, None], axis=0)
        delta_M = strength * (value_M - held_M)
        out_M += tl.sum(key_N * query_N, axis=0) * delta_M
        state_NM += key_N[:, None] * delta_M[None, :]
        tl.store(out + column_M, out_M, mask=in_head_M)
        target = tl.load(writes).to(tl.int64)
        if target >= 0:
            tl.store(state + target * size + place_NM, state_NM, mask=is_live_NM)
        out += VALUE_HEADS * VALUE_WIDTH
        writes += 1
        query_N, key_N, value_M = next_query_N, next_key_N, next_value_M
        strength, decay = next_strength, next_decay


@triton.jit
def _gate_norm(
    out,
    projected,
    weight,
    epsilon,
    BEFORE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per head and row, in place."""
    admit_next(OVERLAPS)
    await_last(OVERLAPS)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_head = column < WIDTH
    out += (row * HEADS + head) * WIDTH
    projected += row * (BEFORE + HEADS * WIDTH) + BEFORE + head * WIDTH
    value = tl.load(out + column, mask=in_head, other=0.0)
    gate = tl.load(projected + column, mask=in_head, other=0.0)
    scale = tl.load(weight + column, mask=in_head, other=0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + epsilon)
    tl.debug_barrier()  # in place: all threads must have loaded before any stores
    gate = (1.0 if IS_SIGMOID else gate) / (1.0 + tl.exp(-gate))
    tl.store(out + column, value * scale * gate, mask=in_head)
