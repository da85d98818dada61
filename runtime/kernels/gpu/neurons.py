"""Computes the neurons of a block for the rows of a step: hidden values from gate and up, and
partial sums from `down`.

Letters: N neurons, D width, S parts, T rows of a step; in the kernels R rows of a tile, U units, C
neurons of a chunk."""

# Kernels build tuples of tensors in loops.
# mypy: disable-error-code="assignment, var-annotated"

import torch
from torch import Tensor

from hotsplit.runtime.device.bits import unpack_bits
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.activation import activate, gated
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
)
from hotsplit.runtime.kernels.gpu.overlap import admit_next, await_last
from hotsplit.runtime.kernels.gpu.ranges import range_of
from hotsplit.runtime.kernels.gpu.reference import product, rows_of
from hotsplit.runtime.kernels.stored import StoredMatrix

# For `down`: units of columns that a program sums (a super-block of K-quants, or 128 bytes of
# nibbles; 512 bytes of f16, with which one row takes an H100 0.85 of the time of 256 for all
# neurons of a 7 B layer, and 0.95 for a fifth of them), and neurons whose hidden values it scans
# together for nonzeros. It reads nonzero neurons 16 at a time; with 32, sums and scan would take up
# to 250 registers.
_UNITS, _HALF_UNITS = 8, 16
_CHUNK = 256
# Rows of a step whose sums a program of `down` holds, by (parts of a unit, whether zeros are
# skipped). Per row and part, sums take 16 registers if zeros are skipped, else 32 (16 for f32 and
# q6_k); for 16-bit floats twice as many, which have twice the units. With two rows the compiler
# uses 170 to 234 registers if zeros are skipped, else 128, or 254 for 16-bit floats.
_DOWN_GROUP = {(1, True): 2, (2, True): 2, (1, False): 2, (2, False): 1}


@gpu_kernel(reads=("x_D", "named_B"), writes=("hidden_N",))
def gate_up(
    gate: StoredMatrix,
    gate_bias_N: Tensor | None,
    up: StoredMatrix | None,
    up_bias_N: Tensor | None,
    id_N: Tensor | None,
    named_B: Tensor | None,
    x_D: Tensor,
    rule: Gate,
    hidden_N: Tensor,
) -> Versions:
    """hidden_j = act(gate_j x + bias) (up_j x + bias), as in hotsplit.runtime.kernels.gate.Gate.

    It is 0 for neurons that are not predicted and, unless `rule` computes all, for those that do
    not fire. With Triton, the rows of the former and the up rows of the latter are not read,
    unless another row of the step needs them. `id_N`, int32: the neurons' ids in the layer, which
    index `named_B`; None: 0, 1, ..."""

    def reference() -> None:
        value_N, fires_N = rule.act(product(gate, gate_bias_N, x_D))
        hidden = rule.hidden(value_N, None if up is None else product(up, up_bias_N, x_D))
        if rule.computes_all:
            fires_N = torch.ones_like(fires_N)
        if named_B is not None:
            bits_F = unpack_bits(named_B)
            fires_N = fires_N & (bits_F[: len(fires_N)] if id_N is None else bits_F[id_N.long()])
        hidden_N.copy_(torch.where(fires_N, hidden, 0.0))

    def launch() -> None:
        assert not rule.needs_all
        layout = Layout.of(gate)
        up_layout = layout if up is None else Layout.of(up)
        # With four neurons per program, fewer programs would have no predicted one and exit early.
        rows = rows_of_program(gate.num_rows, 4 if named_B is None else 2)
        groups = Groups.of(x_D, min(layout.group, up_layout.group))
        assert x_D.is_contiguous() and hidden_N.is_contiguous(), (x_D.stride(), hidden_N.stride())
        assert named_B is None or named_B.dim() == x_D.dim() == hidden_N.dim(), named_B.shape
        _gate_up[(ceil_div(gate.num_rows, rows) * groups.count,)](
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
            float(rule.threshold),
            gate.num_rows,
            None if named_B is None or x_D.dim() == 1 else named_B.stride(0),
            **layout.constants(rows),
            **groups.constants,
            UP_KIND=up_layout.kind,
            UP_PARTS=up_layout.parts,
            UP_ALIGN=up_layout.align,
            UP_UNITS=up_layout.units_of_tile(rows),
            ACTIVATION=rule.activation,
            IS_DENSE=rule.computes_all,
            **overlap_options(),
            num_warps=NUM_WARPS,
        )

    return reference, launch


@gpu_kernel(reads=("hidden_N",), writes=("parts_SD",), rows_axis={"parts_SD": 1})
def down(down: StoredMatrix, hidden_N: Tensor, parts_SD: Tensor, *, skips_zeros: bool) -> Versions:
    """Row s of `parts_SD` is the sum of hidden_j down_j over the s-th range of ceil(N / S)
    neurons, zeros if the range is empty. With `skips_zeros`, neurons whose hidden value is 0 are
    left out and their rows not read. `add_norm` adds the parts."""

    def reference() -> None:
        size = range_of(len(hidden_N), len(parts_SD))
        for part, parts_D in enumerate(parts_SD):
            index_A = torch.arange(part * size, part * size + size, device=hidden_N.device)
            index_A = index_A[index_A < len(hidden_N)]
            if skips_zeros:
                index_A = index_A[hidden_N[index_A] != 0]
            parts_D.copy_(hidden_N[index_A].double() @ rows_of(down, index_A))

    def launch() -> None:
        layout = Layout.of(down)
        assert parts_SD.is_contiguous() and parts_SD.shape[-1] == down.width, parts_SD.shape
        assert hidden_N.is_contiguous() and parts_SD.dim() == hidden_N.dim() + 1, hidden_N.shape
        groups = Groups.of(hidden_N, _DOWN_GROUP[layout.parts, skips_zeros])
        is_half, rows, num_warps = layout.kind in ("f16", "bf16"), 16, NUM_WARPS
        units = _HALF_UNITS if is_half else _UNITS
        if not skips_zeros:
            # At most 128 registers, except for f32 and q6_k.
            rows = 32 if is_half or layout.kind in ("f32", "q6_k_planar") else 64
            num_warps = NUM_WARPS if is_half else 2 * NUM_WARPS
        _down[(ceil_div(layout.num_units, units) * groups.count, len(parts_SD))](
            down.data,
            layout.stride,
            hidden_N,
            parts_SD,
            down.num_rows,
            range_of(down.num_rows, len(parts_SD)),
            None if hidden_N.dim() == 1 else parts_SD.stride(0),
            **layout.constants(rows, units),
            **groups.constants,
            CHUNK=_CHUNK,
            SKIPS_ZEROS=skips_zeros,
            **overlap_options(),
            num_warps=num_warps,
        )

    return reference, launch


@triton.jit(do_not_specialize=["num_rows", "named_stride"])
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
    named_stride,
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
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Reads a neuron if any row of the group needs it; rows that do not need it get 0."""
    admit_next(OVERLAPS)
    BEFORE_WAIT: tl.constexpr = OVERLAPS and named is None  # weights are read before the wait
    row_R = tl.program_id(0) // NUM_GROUPS * ROWS + tl.arange(0, ROWS)
    if NUM_GROUPS > 1:
        first = tl.program_id(0) % NUM_GROUPS * GROUP
        x += first * WIDTH
        hidden += first * num_rows
        if named is not None:
            named += first * named_stride
    in_block_R = row_R < num_rows
    lives = ()
    if named is not None:
        neuron_R = row_R
        if id_N is not None:
            neuron_R = tl.load(id_N + row_R, mask=in_block_R, other=0)
        await_last(OVERLAPS)
        for _ in tl.static_range(GROUP):
            word_R = tl.load(named + neuron_R // 32, mask=in_block_R, other=0)
            lives = lives + (in_block_R & (((word_R >> (neuron_R % 32)) & 1) != 0),)
            if GROUP > 1:
                named += named_stride
    else:
        for _ in tl.static_range(GROUP):
            lives = lives + (in_block_R,)
    live_R = _any(lives, GROUP)
    values = ()
    for _ in tl.static_range(GROUP):
        values = values + (tl.zeros([ROWS], tl.float32),)
    if tl.max(live_R.to(tl.int32), axis=0) > 0:
        row = rows_at(gate, row_R, gate_stride, ALIGN)
        gates = dot_rows(row, live_R, x, KIND, WIDTH, PARTS, ROWS, UNITS, GROUP, BEFORE_WAIT)
        opens, values = (), ()
        for t in tl.static_range(GROUP):
            gate_R, live_R = gates[t], lives[t]
            if gate_bias is not None:
                gate_R += tl.load(gate_bias + row_R, mask=live_R, other=0.0)
            value_R, fires_R = activate(gate_R, threshold, ACTIVATION)
            if not IS_DENSE:
                live_R = live_R & fires_R
            values = values + (value_R,)
            opens = opens + (live_R,)
        if up is not None:
            live_R = _any(opens, GROUP)
            row = rows_at(up, row_R, up_stride, UP_ALIGN)
            ups = dot_rows(row, live_R, x, UP_KIND, WIDTH, UP_PARTS, ROWS, UP_UNITS, GROUP, False)
            products = ()
            for t in tl.static_range(GROUP):
                up_R, value_R = ups[t], values[t]
                if up_bias is not None:
                    up_R += tl.load(up_bias + row_R, mask=opens[t], other=0.0)
                products = products + (gated(value_R, up_R, ACTIVATION),)
            values = products
        kept = ()
        for t in tl.static_range(GROUP):
            kept = kept + (tl.where(opens[t], values[t], 0.0),)
        values = kept
    for t in tl.static_range(GROUP):
        tl.store(hidden + t * num_rows + row_R, values[t], mask=in_block_R)


@triton.jit
def _any(lives, GROUP: tl.constexpr):
    """Mask of the neurons that any row of the group needs."""
    live_R = lives[0]
    for t in tl.static_range(1, GROUP):
        live_R = live_R | lives[t]
    return live_R


@triton.jit
def rows_of_neurons(
    data,
    stride,
    neuron_R,
    live_R,
    unit_U,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Both parts of some neurons' rows, f32 [R, U, 16] each."""
    in_row_U = unit_U < (WIDTH + 16 * PARTS - 1) // (16 * PARTS)
    row = rows_at(data, neuron_R, stride, ALIGN)
    return values(row, live_R, in_row_U, unit_U, KIND, WIDTH)


@triton.jit(do_not_specialize=["num_rows", "size", "part_stride"])
def _down(
    data,
    stride,
    hidden,
    parts,
    num_rows,
    size,
    part_stride,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SKIPS_ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """If zeros are skipped, each row of the group reads the nonzero neurons of a chunk separately,
    in the same order as in a step of one row; neurons that two rows share are then in cache."""
    admit_next(OVERLAPS)
    unit_U = tl.program_id(0) // NUM_GROUPS * UNITS + tl.arange(0, UNITS)
    if NUM_GROUPS > 1:
        first_row = tl.program_id(0) % NUM_GROUPS * GROUP
        hidden += first_row * num_rows
        parts += first_row * WIDTH
    begin = tl.program_id(1) * size
    end = tl.minimum(begin + size, num_rows)
    lows, highs = (), ()
    for _ in tl.static_range(GROUP):
        lows = lows + (tl.zeros([ROWS, UNITS, 16], tl.float32),)
        highs = highs + (tl.zeros([ROWS, UNITS, 16], tl.float32),)
    if SKIPS_ZEROS:
        await_last(OVERLAPS)
        start = begin
        while start < end:
            neuron_C = start + tl.arange(0, CHUNK)
            new_lows, new_highs = (), ()
            for t in tl.static_range(GROUP):
                low, high = lows[t], highs[t]
                own = hidden + t * num_rows
                value_C = tl.load(own + neuron_C, mask=neuron_C < end, other=0.0)
                is_open_C = (value_C != 0.0).to(tl.int32)
                open_up_to_C = tl.cumsum(is_open_C, axis=0)
                num_open = tl.sum(is_open_C, axis=0)
                first = 0
                while first < num_open:
                    # The index of nonzero neuron k is the number of neurons whose inclusive count
                    # of nonzeros is at most k.
                    number_R = first + tl.arange(0, ROWS)
                    is_before = open_up_to_C[None, :] <= number_R[:, None]
                    neuron_R = start + tl.sum(is_before.to(tl.int32), axis=1)
                    live_R = number_R < num_open
                    weight_R = tl.load(own + neuron_R, mask=live_R, other=0.0)
                    value_low, value_high = rows_of_neurons(
                        data, stride, neuron_R, live_R, unit_U, KIND, WIDTH, PARTS, ALIGN
                    )
                    low += value_low * weight_R[:, None, None]
                    if PARTS == 2:
                        high += value_high * weight_R[:, None, None]
                    first += ROWS
                new_lows, new_highs = new_lows + (low,), new_highs + (high,)
            lows, highs = new_lows, new_highs
            start += CHUNK
    else:
        start = begin
        while start < end:
            neuron_R = start + tl.arange(0, ROWS)
            value_low, value_high = rows_of_neurons(
                data, stride, neuron_R, neuron_R < end, unit_U, KIND, WIDTH, PARTS, ALIGN
            )
            if OVERLAPS:  # noqa: SIM102  # else compiled to nothing
                if start == begin:
                    await_last(OVERLAPS)
            weights = ()
            for t in tl.static_range(GROUP):
                own = hidden + t * num_rows
                weights = weights + (tl.load(own + neuron_R, mask=neuron_R < end, other=0.0),)
            new_lows, new_highs = (), ()
            for t in tl.static_range(GROUP):
                low, high = lows[t], highs[t]
                low += value_low * weights[t][:, None, None]
                if PARTS == 2:
                    high += value_high * weights[t][:, None, None]
                new_lows, new_highs = new_lows + (low,), new_highs + (high,)
            lows, highs = new_lows, new_highs
            start += ROWS
        await_last(OVERLAPS)  # a part may have no neurons
    target = parts + tl.program_id(1).to(tl.int64) * WIDTH
    if part_stride is not None:
        target = parts + tl.program_id(1).to(tl.int64) * part_stride
    is_there = in_row(unit_U, KIND, WIDTH, 0, PARTS)
    for t in tl.static_range(GROUP):
        own = target + t * WIDTH
        tl.store(own + columns(unit_U, KIND, 0), tl.sum(lows[t], axis=0), mask=is_there)
        if PARTS == 2:
            tl.store(own + columns(unit_U, KIND, 1), tl.sum(highs[t], axis=0), mask=is_there)
