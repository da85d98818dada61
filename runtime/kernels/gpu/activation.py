"""Triton: activations of neurons, as in hotsplit.runtime.kernels.gate.Gate, and soft caps, in
f32."""

from hotsplit.runtime.kernels.gpu.language import tl, triton


@triton.jit
def relu(x):
    """ReLU; NaN stays NaN."""
    return tl.where(x <= 0.0, 0.0, x)


@triton.jit
def capped(x, cap):
    """cap * tanh(x / cap), near 0 by tanh's series, where 1 - e^(-2 |y|) would cancel."""
    y = x / cap
    power = tl.exp(-2.0 * tl.abs(y))
    large = (1.0 - power) / (1.0 + power)
    square = y * y
    series = 2.1869488e-2 * square - 5.3968254e-2
    series = (series * square + 0.13333333) * square - 0.33333333
    small = y + y * square * series
    return cap * tl.where(tl.abs(y) < 0.3, small, tl.where(y < 0.0, -large, large))


@triton.jit
def smooth(x, ACTIVATION: tl.constexpr):
    """SiLU, GELU, tanh GELU, whose (1 + tanh y) / 2 is 1 / (1 + e^-2y), or gpt-oss's clamped
    gate."""
    if ACTIVATION == "silu":
        value = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "swiglu_oai":
        clamped = tl.where(x > 7.0, 7.0, x)
        value = clamped / (1.0 + tl.exp(-1.702 * clamped))
    elif ACTIVATION == "gelu":
        value = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh", "an unknown activation")
        value = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return value


@triton.jit
def gated(value, up, ACTIVATION: tl.constexpr):
    """An activated gate times its up; NaN stays NaN."""
    if ACTIVATION == "drelu":
        up = relu(up)
    elif ACTIVATION == "swiglu_oai":
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    return value * up


@triton.jit
def activate(gate, threshold, ACTIVATION: tl.constexpr):
    """(activation, whether the neuron fires); NaN fires."""
    IS_GELU: tl.constexpr = ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh"
    if ACTIVATION == "silu" or ACTIVATION == "swiglu_oai" or IS_GELU:
        value = smooth(gate, ACTIVATION)
        is_silent = value == 0.0
    else:
        if ACTIVATION == "fatrelu":
            is_silent = gate <= threshold
        else:
            IS_RELU: tl.constexpr = ACTIVATION == "relu" or ACTIVATION == "relu2"
            tl.static_assert(IS_RELU or ACTIVATION == "drelu", "unknown activation")
            is_silent = gate <= 0.0
        value = tl.where(is_silent, 0.0, gate)
        if ACTIVATION == "relu2":
            value *= value
    return value, is_silent == 0
