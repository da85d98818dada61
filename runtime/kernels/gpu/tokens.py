"""What a prompt's pass computes for each token between its products, in one launch each: a norm, or
the hidden values of neurons, rounded to the type of the product that reads them.

f16 ends at 65,504. Where values may be larger, those of a token are divided by a power of two
first, which is exact.

Letters: T tokens, D width, N neurons; in the kernels C columns of a chunk."""

import torch
from torch import Tensor

from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.activation import activate, gated, relu
from hotsplit.runtime.kernels.gpu.gpu_kernel import Versions, gpu_kernel
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.gpu.launch import power_of_2
from hotsplit.runtime.kernels.gpu.norm import normed
from hotsplit.runtime.kernels.gpu.reference import rms_norm

_COLUMNS = 2048  # of a chunk of hidden values
_WARPS = 8


@gpu_kernel(reads=("x_TD", "added_TD"), writes=("out_TD", "power_T", "x_out_TD"), is_of_step=False)
def round_tokens(
    x_TD: Tensor,
    added_TD: Tensor | None,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    epsilon: float,
    out_TD: Tensor,
    power_T: Tensor | None,
    x_out_TD: Tensor | None,
) -> Versions:
    """t = x + added; x_out = t; out = norm(t), or t without a weight, in the type of `out_TD`.
    `power_T`, if given, takes the power of two at or below the largest magnitude of each token, by
    which its values are divided before they are rounded. Any number of tokens. Rows of `x_TD` and
    `out_TD` may be strided; each output may be `x_TD`."""

    def reference() -> None:
        total_TD = x_TD.double() if added_TD is None else x_TD.double() + added_TD
        if x_out_TD is not None:
            x_out_TD.copy_(total_TD)
        if weight_D is not None:
            if bias_D is not None:
                total_TD = total_TD - total_TD.mean(dim=1, keepdim=True)
            total_TD = rms_norm(total_TD, weight_D, epsilon)
            total_TD = total_TD if bias_D is None else total_TD + bias_D
        _round(total_TD, out_TD, power_T)

    def launch() -> None:
        num_tokens, width = x_TD.shape
        for each in (x_TD, added_TD):
            assert each is None or each.stride(1) == 1, each.stride()
        assert out_TD.stride(1) == 1 and (x_out_TD is None or x_out_TD.is_contiguous())
        block = power_of_2(width)
        _round_tokens[(num_tokens,)](
            x_TD,
            added_TD,
            weight_D,
            bias_D,
            float(epsilon),
            out_TD,
            power_T,
            x_out_TD,
            x_TD.stride(0),
            0 if added_TD is None else added_TD.stride(0),
            None if out_TD.is_contiguous() else out_TD.stride(0),
            WIDTH=width,
            BLOCK=block,
            num_warps=max(1, min(16, block // 256)),
        )

    return reference, launch


@gpu_kernel(
    reads=("gate_TN", "up_TN", "named_TW", "id_N"), writes=("out_TN", "power_T"), is_of_step=False
)
def hidden_tokens(
    gate_TN: Tensor,
    up_TN: Tensor | None,
    named_TW: Tensor | None,
    rule: Gate,
    out_TN: Tensor,
    power_T: Tensor | None,
    id_N: Tensor | None = None,
) -> Versions:
    """The hidden values of gate_up for any number of tokens, from the products with gate and up, of
    all gates of a layer if `rule` needs them. `named_TW`: int32 bits, by `id_N` as in gate_up.
    Rounded and divided as by round_tokens. `out_TN` may be `up_TN`, and `gate_TN` unless all gates
    are needed."""

    def reference() -> None:
        value_TN, fires_TN = rule.act(rule.prepare(gate_TN.double()))
        value_TN = rule.hidden(value_TN, up_TN)
        if not rule.computes_all:
            value_TN = torch.where(fires_TN, value_TN, 0.0)
        if named_TW is not None:
            own_N = torch.arange(gate_TN.shape[1]) if id_N is None else id_N.long()
            is_named_TW = (named_TW[:, own_N // 32] >> (own_N % 32)) & 1 != 0
            value_TN = torch.where(is_named_TW, value_TN, 0.0)
        _round(value_TN, out_TN, power_T)

    def launch() -> None:
        for each in (gate_TN, out_TN):
            assert each.is_contiguous(), each.stride()
        assert up_TN is None or up_TN.stride(1) == 1, up_TN.stride()
        assert named_TW is None or named_TW.stride(1) == 1, named_TW.stride()
        _hidden_tokens[(len(gate_TN),)](
            gate_TN,
            up_TN,
            named_TW,
            id_N,
            float(rule.threshold),
            out_TN,
            power_T,
            None if rule.cutoff is None else float(rule.cutoff),
            gate_TN.shape[1],
            0 if up_TN is None else up_TN.stride(0),
            0 if named_TW is None else named_TW.stride(0),
            ACTIVATION=rule.activation,
            IS_DENSE=rule.computes_all,
            COLUMNS=_COLUMNS,
            num_warps=_WARPS,
        )

    return reference, launch


def _round(value_TK: Tensor, out_TK: Tensor, power_T: Tensor | None) -> None:
    """Writes values divided by a power of two for each token: that of the largest magnitude,
    limited to those with a normal inverse; NaN and infinity have the largest one."""
    if power_T is not None:
        largest_T = value_TK.abs().amax(dim=1).nan_to_num(nan=torch.inf).float()
        exponent_T = torch.frexp(largest_T.clamp(2.0**-126, 2.0**126))[1] - 1
        power_T.copy_(torch.ldexp(torch.ones_like(power_T), exponent_T))
        value_TK = value_TK / power_T[:, None]
    out_TK.copy_(value_TK)


@triton.jit
def _power_of(largest):
    """(the power of two at or below a magnitude, limited to those whose inverse is a normal number,
    its inverse). The exponent's bits alone are the power; those of infinity and NaN are above the
    limit, those of zero and of subnormal numbers below."""
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)
    inverse = 0x7F000000 - bits
    return bits.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def _round_tokens(
    x,
    added,
    weight,
    bias,
    epsilon,
    out,
    power,
    x_out,
    x_stride,
    added_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_row = column < WIDTH
    value = tl.load(x + token * x_stride + column, mask=in_row, other=0.0)
    if added is not None:
        value += tl.load(added + token * added_stride + column, mask=in_row, other=0.0)
    if out_stride is not None:
        tl.debug_barrier()  # in place: all threads must have loaded before any stores
    if x_out is not None:
        tl.store(x_out + token * WIDTH + column, value, mask=in_row)
    if weight is not None:
        value = normed(value, in_row, column, weight, bias, epsilon, WIDTH)
    if power is not None:
        divisor, factor = _power_of(tl.max(tl.abs(value), axis=0))
        tl.store(power + token, divisor)
        value *= factor
    at = token * (WIDTH if out_stride is None else out_stride)
    tl.store(out + at + column, value.to(out.dtype.element_ty), mask=in_row)


@triton.jit
def _hidden_at(
    gate,
    up,
    named,
    id,
    column_C,
    num_neurons,
    threshold,
    floor,
    ACTIVATION: tl.constexpr,
    IS_DENSE: tl.constexpr,
):
    in_row_C = column_C < num_neurons
    gate_C = tl.load(gate + column_C, mask=in_row_C, other=0.0)
    if floor is not None:
        gate_C = relu(gate_C - floor)
    value_C, fires_C = activate(gate_C, threshold, ACTIVATION)
    if up is not None:
        up_C = tl.load(up + column_C, mask=in_row_C, other=0.0)
        value_C = gated(value_C, up_C, ACTIVATION)
    if not IS_DENSE:
        value_C = tl.where(fires_C, value_C, 0.0)
    if named is not None:
        id_C = column_C
        if id is not None:
            id_C = tl.load(id + column_C, mask=in_row_C, other=0)
        word_C = tl.load(named + id_C // 32, mask=in_row_C, other=0)
        value_C = tl.where((word_C >> (id_C % 32)) & 1 != 0, value_C, 0.0)
    return tl.where(in_row_C, value_C, 0.0)


@triton.jit
def _floor_of(gate, cutoff, num_neurons, COLUMNS: tl.constexpr):
    """The gate at a cutoff: so many deviations above the mean."""
    sum_C = tl.zeros([COLUMNS], tl.float32)
    start = 0
    while start < num_neurons:
        column_C = start + tl.arange(0, COLUMNS)
        sum_C += tl.load(gate + column_C, mask=column_C < num_neurons, other=0.0)
        start += COLUMNS
    mean = tl.sum(sum_C, axis=0) / num_neurons
    sum_C = tl.zeros([COLUMNS], tl.float32)
    start = 0
    while start < num_neurons:
        column_C = start + tl.arange(0, COLUMNS)
        centred_C = tl.load(gate + column_C, mask=column_C < num_neurons, other=0.0) - mean
        sum_C += tl.where(column_C < num_neurons, centred_C * centred_C, 0.0)
        start += COLUMNS
    return mean + cutoff * tl.sqrt(tl.sum(sum_C, axis=0) / num_neurons)


@triton.jit(do_not_specialize=["num_neurons", "up_stride", "named_stride", "threshold"])
def _hidden_tokens(
    gate,
    up,
    named,
    id,
    threshold,
    out,
    power,
    cutoff,
    num_neurons,
    up_stride,
    named_stride,
    ACTIVATION: tl.constexpr,
    IS_DENSE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes the values twice if they are divided: for the largest magnitude, and to write
    them."""
    token = tl.program_id(0).to(tl.int64)
    gate += token * num_neurons
    out += token * num_neurons
    if up is not None:
        up += token * up_stride
    if named is not None:
        named += token * named_stride
    floor = None
    if cutoff is not None:
        floor = _floor_of(gate, cutoff, num_neurons, COLUMNS)
    if power is not None:
        largest_C = tl.zeros([COLUMNS], tl.float32)
        start = 0
        while start < num_neurons:
            column_C = start + tl.arange(0, COLUMNS)
            value_C = _hidden_at(
                gate, up, named, id, column_C, num_neurons, threshold, floor, ACTIVATION, IS_DENSE
            )
            largest_C = tl.maximum(largest_C, tl.abs(value_C))
            start += COLUMNS
        divisor, factor = _power_of(tl.max(largest_C, axis=0))
        tl.store(power + token, divisor)
    start = 0
    while start < num_neurons:
        column_C = start + tl.arange(0, COLUMNS)
        value_C = _hidden_at(
            gate, up, named, id, column_C, num_neurons, threshold, floor, ACTIVATION, IS_DENSE
        )
        if power is not None:
            value_C *= factor
        value_C = value_C.to(out.dtype.element_ty)
        tl.store(out + column_C, value_C, mask=column_C < num_neurons)
        start += COLUMNS
