"""Computes the experts that a step's rows have chosen and that are stored on this GPU.

A program has some rows of an expert that one row of the step has chosen. It reads which expert that
is, and the expert's place, from memory, so one captured graph serves any routing; if the expert is
elsewhere, the program writes zeros and ends. A row's result is the same whatever the other rows
are. These kernels begin when the last one has ended, since the places of experts are in what it
wrote.

An expert that several rows have chosen is read from memory once: pairs are the grid's fastest axis,
so that between two programs that read the same rows of an expert there are at most T K others,
which read at most T K ROWS rows, 1.2 MB for 32 rows of a step, 8 experts each and rows of 1,152
bytes. A GPU's cache holds that.

Letters: E experts of the layer, K experts of a row, P experts stored here, F neurons of an expert,
D width, T rows of a step, S partial sums; in the kernels R rows of a tile, U units."""

# Kernels build tuples of tensors in loops.
# mypy: disable-error-code="assignment, var-annotated"

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu import neurons
from hotsplit.runtime.kernels.gpu.activation import activate, gated
from hotsplit.runtime.kernels.gpu.blocks import columns, dot_rows, in_row, rows_at
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import (
    NUM_WARPS,
    Layout,
    ceil_div,
    rows_of_program,
    step_rows,
)
from hotsplit.runtime.kernels.gpu.neurons import rows_of_neurons
from hotsplit.runtime.kernels.gpu.ranges import range_of
from hotsplit.runtime.kernels.gpu.reference import product
from hotsplit.runtime.kernels.stored import StoredMatrix

# Of `_expert_sum`: neurons that a program reads together, and units of columns that it sums.
_SUM_ROWS, _SUM_UNITS = 32, 8


@gpu_kernel(reads=("routed_2K", "x_D"), writes=("hidden_KF",))
def expert_gate_up(
    gate: StoredMatrix,
    gate_bias_N: Tensor | None,
    up: StoredMatrix | None,
    up_bias_N: Tensor | None,
    place_E: Tensor | None,
    routed_2K: Tensor,
    x_D: Tensor,
    rule: Gate,
    hidden_KF: Tensor,
) -> Versions:
    """The hidden values, as of gate_up, of each chosen expert: those of the F rows that begin at
    row F * place_E[expert] of the matrices. `place_E`, int32: below 0, the expert is elsewhere,
    and its hidden values are 0; None: the place is the expert's number."""

    def reference() -> None:
        hidden_KF.zero_()
        count = hidden_KF.shape[1]
        for number, place in _stored(place_E, routed_2K):
            own = slice(place * count, (place + 1) * count)
            own_gate = _of_expert(gate, place, count)
            own_up = None if up is None else _of_expert(up, place, count)
            biases = [None if each is None else each[own] for each in (gate_bias_N, up_bias_N)]
            weights = own_gate, biases[0], own_up, biases[1]
            neurons.gate_up.reference(*weights, None, None, x_D, rule, hidden_KF[number])

    def launch() -> None:
        assert not rule.needs_all
        layout = Layout.of(gate)
        up_layout = layout if up is None else Layout.of(up)
        num_used, num_neurons = hidden_KF.shape[-2:]
        rows = rows_of_program(num_used * num_neurons)
        assert routed_2K.is_contiguous() and x_D.is_contiguous() and hidden_KF.is_contiguous()
        assert hidden_KF.dim() == x_D.dim() + 1 == routed_2K.dim() + 1, hidden_KF.shape
        _expert_gate_up[(step_rows(x_D) * num_used, ceil_div(num_neurons, rows))](
            gate.data,
            layout.stride,
            gate_bias_N,
            None if up is None else up.data,
            up_layout.stride,
            up_bias_N,
            place_E,
            routed_2K,
            x_D,
            hidden_KF,
            float(rule.threshold),
            num_neurons,
            **layout.constants(rows),
            UP_KIND=up_layout.kind,
            UP_PARTS=up_layout.parts,
            UP_ALIGN=up_layout.align,
            UP_UNITS=up_layout.units_of_tile(rows),
            NUM_USED=num_used,
            ACTIVATION=rule.activation,
            IS_DENSE=rule.computes_all,
            num_warps=NUM_WARPS,
        )

    return reference, launch


@gpu_kernel(reads=("routed_2K", "hidden_KF"), writes=("parts_PD",), rows_axis={"parts_PD": 1})
def expert_down(
    down: StoredMatrix,
    bias_N: Tensor | None,
    place_E: Tensor | None,
    routed_2K: Tensor,
    hidden_KF: Tensor,
    parts_PD: Tensor,
    *,
    is_by_output: bool,
    skips_zeros: bool = False,
) -> Versions:
    """Row k of `parts_PD` is the weight of the k-th chosen expert times (W hidden + bias), where W
    has the D rows that begin at row D * place_E[expert]; 0 if the expert is elsewhere.

    Unless `is_by_output`, W has a row for each of the F neurons, and S rows of `parts_PD` are
    partial sums of an expert, as of down; the first has the bias. `add_norm` adds the parts."""

    def reference() -> None:
        num_used, width = len(hidden_KF), parts_PD.shape[1]
        parts_KSD = torch.zeros(num_used, len(parts_PD) // num_used, width, dtype=torch.float64)
        for number, place in _stored(place_E, routed_2K):
            part_SD, hidden_F = parts_KSD[number], hidden_KF[number]
            if is_by_output:
                part_SD[0] = product(_of_expert(down, place, width), None, hidden_F)
            else:
                own = _of_expert(down, place, len(hidden_F))
                neurons.down.reference(own, hidden_F, part_SD, skips_zeros=skips_zeros)
            if bias_N is not None:
                part_SD[0] += bias_N[place * width :][:width].to(part_SD.device)
            part_SD *= float(routed_2K[num_used + number])
        parts_PD.copy_(parts_KSD.flatten(0, 1))

    def launch() -> None:
        layout = Layout.of(down)
        num_used, num_neurons = hidden_KF.shape[-2:]
        num_pairs, width = step_rows(routed_2K) * num_used, parts_PD.shape[-1]
        num_parts = len(parts_PD) // num_used
        assert routed_2K.is_contiguous() and hidden_KF.is_contiguous() and parts_PD.is_contiguous()
        assert down.width == (num_neurons if is_by_output else width), (down.width, hidden_KF.shape)
        assert len(parts_PD) == num_parts * num_used and (num_parts == 1 or not is_by_output)
        tensors = down.data, layout.stride, bias_N, place_E, routed_2K, hidden_KF, parts_PD
        if is_by_output:
            rows = rows_of_program(num_used * width)
            _expert_down[(num_pairs, ceil_div(width, rows))](
                *tensors,
                width,
                parts_PD.stride(0),
                **layout.constants(rows),
                NUM_USED=num_used,
                num_warps=NUM_WARPS,
            )
            return
        _expert_sum[(num_pairs, ceil_div(layout.num_units, _SUM_UNITS), num_parts)](
            *tensors,
            num_neurons,
            range_of(num_neurons, num_parts),
            parts_PD.stride(0),
            **layout.constants(_SUM_ROWS, _SUM_UNITS),
            NUM_USED=num_used,
            NUM_PARTS=num_parts,
            SKIPS_ZEROS=skips_zeros,
            num_warps=NUM_WARPS,
        )

    return reference, launch


def _stored(place_E: Tensor | None, routed_2K: Tensor) -> Iterator[tuple[int, int]]:
    """The chosen experts that are stored: (number among the chosen, place)."""
    for number, expert in enumerate(routed_2K[: len(routed_2K) // 2].long().tolist()):
        place = expert if place_E is None else int(place_E[expert])
        if place >= 0:
            yield number, place


def _of_expert(matrix: StoredMatrix, place: int, num_rows: int) -> StoredMatrix:
    return replace(matrix, data=matrix.data[place * num_rows :][:num_rows])


@triton.jit
def _place_of(place, routed, pair, NUM_USED: tl.constexpr):
    """The place of the expert of a pair of a row and one of its experts; below 0: it is
    elsewhere."""
    expert = tl.load(routed + pair // NUM_USED * 2 * NUM_USED + pair % NUM_USED).to(tl.int32)
    if place is not None:
        expert = tl.load(place + expert)
    return expert.to(tl.int64)


@triton.jit(do_not_specialize=["num_rows"])
def _expert_gate_up(
    gate,
    gate_stride,
    gate_bias,
    up,
    up_stride,
    up_bias,
    place,
    routed,
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
    NUM_USED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_DENSE: tl.constexpr,
):
    pair = tl.program_id(0)
    own = _place_of(place, routed, pair, NUM_USED)
    row_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live_R = row_R < num_rows
    value_R = tl.zeros([ROWS], tl.float32)
    if own >= 0:
        at_R = own * num_rows + row_R
        own_x = x + pair // NUM_USED * WIDTH
        row = rows_at(gate, at_R, gate_stride, ALIGN)
        gate_R = dot_rows(row, live_R, own_x, KIND, WIDTH, PARTS, ROWS, UNITS, 1, False)[0]
        if gate_bias is not None:
            gate_R += tl.load(gate_bias + at_R, mask=live_R, other=0.0)
        value_R, fires_R = activate(gate_R, threshold, ACTIVATION)
        open_R = live_R
        if not IS_DENSE:
            open_R = live_R & fires_R
        if up is not None:
            row = rows_at(up, at_R, up_stride, UP_ALIGN)
            ups = dot_rows(row, open_R, own_x, UP_KIND, WIDTH, UP_PARTS, ROWS, UP_UNITS, 1, False)
            up_R = ups[0]
            if up_bias is not None:
                up_R += tl.load(up_bias + at_R, mask=open_R, other=0.0)
            value_R = gated(value_R, up_R, ACTIVATION)
        value_R = tl.where(open_R, value_R, 0.0)
    tl.store(hidden + pair * num_rows + row_R, value_R, mask=live_R)


@triton.jit(do_not_specialize=["num_rows", "part_stride"])
def _expert_down(
    data,
    stride,
    bias,
    place,
    routed,
    hidden,
    parts,
    num_rows,
    part_stride,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    NUM_USED: tl.constexpr,
):
    pair = tl.program_id(0)
    own = _place_of(place, routed, pair, NUM_USED)
    token = pair // NUM_USED
    number = pair % NUM_USED
    row_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live_R = row_R < num_rows
    value_R = tl.zeros([ROWS], tl.float32)
    if own >= 0:
        at_R = own * num_rows + row_R
        row = rows_at(data, at_R, stride, ALIGN)
        own_x = hidden + pair * WIDTH
        value_R = dot_rows(row, live_R, own_x, KIND, WIDTH, PARTS, ROWS, UNITS, 1, False)[0]
        if bias is not None:
            value_R += tl.load(bias + at_R, mask=live_R, other=0.0)
        value_R *= tl.load(routed + token * 2 * NUM_USED + NUM_USED + number)
    target = parts + number * part_stride + token * num_rows
    tl.store(target + row_R, value_R, mask=live_R)


@triton.jit(do_not_specialize=["num_rows", "size", "part_stride"])
def _expert_sum(
    data,
    stride,
    bias,
    place,
    routed,
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
    NUM_USED: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    SKIPS_ZEROS: tl.constexpr,
):
    """One of NUM_PARTS ranges of an expert's neurons, each of which has a row."""
    pair = tl.program_id(0)
    part = tl.program_id(2)
    own = _place_of(place, routed, pair, NUM_USED)
    token = pair // NUM_USED
    number = pair % NUM_USED
    unit_U = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    low = tl.zeros([ROWS, UNITS, 16], tl.float32)
    high = tl.zeros([ROWS, UNITS, 16], tl.float32)
    start = part * size
    end = tl.minimum(start + size, num_rows)
    if own < 0:
        end = start
    while start < end:
        neuron_R = start + tl.arange(0, ROWS)
        live_R = neuron_R < end
        weight_R = tl.load(hidden + pair * num_rows + neuron_R, mask=live_R, other=0.0)
        if SKIPS_ZEROS:
            live_R = live_R & (weight_R != 0.0)
        value_low, value_high = rows_of_neurons(
            data, stride, own * num_rows + neuron_R, live_R, unit_U, KIND, WIDTH, PARTS, ALIGN
        )
        low += value_low * weight_R[:, None, None]
        if PARTS == 2:
            high += value_high * weight_R[:, None, None]
        start += ROWS
    factor = tl.load(routed + token * 2 * NUM_USED + NUM_USED + number)
    target = parts + (number * NUM_PARTS + part) * part_stride + token * WIDTH
    has_bias = (own >= 0) & (part == 0)
    for side in tl.static_range(PARTS):
        is_there = in_row(unit_U, KIND, WIDTH, side, PARTS)
        column = columns(unit_U, KIND, side)
        total = tl.sum(low if side == 0 else high, axis=0)
        if bias is not None:
            total += tl.load(bias + (own * WIDTH + column), mask=is_there & has_bias, other=0.0)
        tl.store(target + column, total * factor, mask=is_there)
