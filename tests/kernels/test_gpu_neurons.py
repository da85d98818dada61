"""The GPU kernels for a block of neurons, compared with a float64 reference on a CUDA device, or
in Triton's interpreter if there is none."""

import pytest
import torch
from gpu_matrices import (
    EPS,
    KINDS,
    NAN,
    REFERENCE,
    assert_close,
    block_width,
    both,
    device,
    make_matrix,
    product_bound,
    rounding,
    sizes,
    vector,
)

from hotsplit.model.neurons import SMOOTH
from hotsplit.runtime.device.bits import pack_bits
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.ranges import down_parts

pytestmark = pytest.mark.usefixtures("several_rows")


# ---- gate and up ---------------------------------------------------------------------------


def hidden_bound(gate, gate_bias, up, up_bias, x, hidden):
    """The bound on the error of act(g) u: du |g| + 1.2 dg |u|, where dg and du are the errors of g
    and u. Activations have slopes below 1.2 and are at most |g| in magnitude."""
    gate_off = 1.2 * product_bound(gate, x, gate_bias) + 8 * EPS
    gate_size = sizes(gate) @ x.double().abs() + (0 if gate_bias is None else gate_bias.abs())
    if up is None:
        return gate_off + 16 * EPS * gate_size
    up_off = product_bound(up, x, up_bias)
    up_size = sizes(up) @ x.double().abs() + (0 if up_bias is None else up_bias.abs())
    return (gate_off * up_size + up_off * gate_size) + 16 * EPS * hidden.double().abs().nan_to_num()


def assert_hidden(kernels, gate, up, x, activation, threshold, **options):
    """Compares the kernel with the reference; returns the kernel's output."""
    gate_bias, up_bias = options.get("gate_bias"), options.get("up_bias")
    rule = Gate(
        activation=activation, threshold=threshold, computes_all=options.get("is_dense", False)
    )
    arguments = (gate, gate_bias, up, up_bias, options.get("id_N"), options.get("named"), x, rule)
    out = torch.full((gate.num_rows,), NAN, device=device())
    got, want = both(kernels, "gate_up", out, *arguments)
    bound = hidden_bound(gate, gate_bias, up, up_bias, x, want).nan_to_num()
    assert_close(got, want, bound)
    assert ((got == 0) == (want == 0))[want.abs() > bound].all() and (got[want == 0] == 0).all()
    return got


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gate_up(kernels, kind, blocks):
    width = blocks * block_width(kind)
    gate, up = (make_matrix(kind, 9, width, seed=s, lies_apart=blocks == 1) for s in (0, 5))
    named = pack_bits(torch.arange(9, device=device()) % 3 != 1)
    got = assert_hidden(kernels, gate, up, vector(width), "fatrelu", 0.2, named=named)
    assert 0 < (got != 0).sum() < 6


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    "activation", ["relu", "relu2", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh"]
)
def test_gate_up_of_every_activation(kernels, activation, is_gated, is_dense):
    gate = make_matrix("f16", 13, 64)
    up = make_matrix("q8_0_planar", 13, 64, seed=5) if is_gated else None
    biases = {"gate_bias": vector(13, 6), "up_bias": vector(13, 7) if is_gated else None}
    x, threshold = vector(64) * 0.3, 0.4
    got = assert_hidden(kernels, gate, up, x, activation, threshold, is_dense=is_dense, **biases)
    num_zeros = int((got == 0).sum())
    if activation in SMOOTH:
        assert num_zeros == 0 or activation == "gelu"  # 0 in f32 for very negative gates
    else:
        assert 1 < num_zeros < 12


@pytest.mark.filterwarnings("ignore:overflow")
def test_gate_up_of_nan_and_large_values(kernels):
    """NaN fires and stays NaN; extreme values do not become NaN."""
    gate, up = make_matrix("f32", 6, 32), make_matrix("f32", 6, 32, seed=5)
    gate.data.zero_()
    gate.data[:, 0] = torch.tensor([NAN, -200.0, 200.0, -3e18, 3e18, 1.0])
    x = vector(32)
    x[0] = 1
    for activation in ("relu", "relu2", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh"):
        for is_dense in (False, True):
            got = torch.empty(6, device=device())
            want = got.clone()
            rule = Gate(activation=activation, threshold=0.1, computes_all=is_dense)
            arguments = (gate, None, up, None, None, None, x, rule)
            kernels.gate_up(*arguments, got)
            REFERENCE.gate_up(*arguments, want)
            assert got.isnan().tolist() == [True] + [False] * 5, activation
            assert_close(got, want, 1e-5 * want.abs().nan_to_num() + 1e-30)


@pytest.mark.parametrize("num_neurons", [1, 2, 19])
def test_named_neurons_are_looked_up_by_their_ids(kernels, num_neurons):
    gate, up = (make_matrix("f16", num_neurons, 32, seed=seed) for seed in (0, 5))
    ids = torch.randperm(200, generator=torch.Generator().manual_seed(3))[:num_neurons]
    is_named = torch.rand(200, generator=torch.Generator().manual_seed(4)) < 0.5
    is_named[ids[0]] = True
    got = assert_hidden(
        kernels,
        gate,
        up,
        vector(32),
        "silu",
        0.0,
        id_N=ids.int().to(device()),
        named=pack_bits(is_named.to(device())),
    )
    assert torch.equal((got != 0).cpu(), is_named[ids])


def test_rows_that_are_not_needed_are_not_read(kernels):
    """Both rows of neurons that are not named, and the `up` row of those that do not fire, are
    NaN here, so a neuron computed from them would be NaN."""
    gate, up = make_matrix("f32", 16, 32), make_matrix("f32", 16, 32, seed=5)
    x = vector(32)
    fires = (gate.data @ x) > 0
    is_named = torch.arange(16, device=device()) % 3 == 0
    gate.data[~is_named] = NAN
    up.data[~(is_named & fires)] = NAN
    got = torch.empty(16, device=device())
    kernels.gate_up(
        gate, None, up, None, None, pack_bits(is_named), x, Gate(activation="relu"), got
    )
    assert torch.equal(got != 0, is_named & fires) and (is_named & fires).any()


# ---- down ----------------------------------------------------------------------------------


def hidden_with_zeros(size, share, seed=3):
    hidden = vector(size, seed)
    hidden[vector(size, seed + 1).abs() < share] = 0
    return hidden


def down_bound(matrix, hidden):
    return rounding(matrix.num_rows) * (hidden.double().abs() @ sizes(matrix))


def assert_down(kernels, matrix, hidden, skips_zeros, num_parts=2):
    parts = torch.full((num_parts, matrix.width), NAN, device=device())
    got, want = both(kernels, "down", parts, matrix, hidden, skips_zeros=skips_zeros)
    assert_close(got, want, down_bound(matrix, hidden))


@pytest.mark.parametrize("skips_zeros", [False, True])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_down(kernels, kind, is_wide, skips_zeros):
    """Rows are narrower than a tile of columns, or one or two tiles and a remainder wide. Rows of
    super-blocks are one or two tiles wide."""
    blocks = (2 if block_width(kind) == 256 else 9) if is_wide else 1
    matrix = make_matrix(kind, 70, blocks * block_width(kind), lies_apart=not is_wide)
    assert_down(kernels, matrix, hidden_with_zeros(70, 1.0), skips_zeros)


@pytest.mark.parametrize("num_neurons", [1, 16, 17, 64, 65, 300])
@pytest.mark.parametrize("skips_zeros", [False, True])
def test_down_of_any_number_of_neurons(kernels, num_neurons, skips_zeros):
    """In `down_parts` parts, in one, and in three; two of the three are empty for one neuron."""
    matrix = make_matrix("f16", num_neurons, 32)
    hidden = hidden_with_zeros(num_neurons, 0.5)
    hidden[255:257] = 0.5  # the last of a scan and the first of the next, if there is one part
    hidden[-1] = 1.5
    for num_parts in (down_parts(num_neurons, 32), 1, 3):
        assert_down(kernels, matrix, hidden, skips_zeros, num_parts)


@pytest.mark.parametrize("skips_zeros", [False, True])
@pytest.mark.parametrize(("kind", "width"), [("f16", 8), ("f16", 40), ("q6_k_planar", 256)])
def test_down_of_rows_of_any_width(kernels, kind, width, skips_zeros):
    """The last unit of a row is incomplete. A row of an odd number of q6_K super-blocks has an odd
    multiple of two bytes, here 210."""
    assert_down(kernels, make_matrix(kind, 37, width), hidden_with_zeros(37, 1.0), skips_zeros)


def test_rows_of_zeros_are_not_read(kernels):
    """Rows whose hidden value is 0 hold NaN here. A hidden value of NaN is not 0, so its row is
    read."""
    matrix, hidden = make_matrix("f32", 300, 32), hidden_with_zeros(300, 1.0)
    matrix.data[hidden == 0] = NAN
    parts = torch.empty(2, 32, device=device())
    got, want = both(kernels, "down", parts, matrix, hidden, skips_zeros=True)
    assert_close(got, want, 1e-4)
    kernels.down(matrix, hidden, got, skips_zeros=False)
    assert got.isnan().all()
    hidden[hidden == 0] = NAN
    kernels.down(matrix, hidden, got, skips_zeros=True)
    assert got.isnan().all()
    kernels.down(matrix, torch.zeros_like(hidden), got, skips_zeros=True)
    assert (got == 0).all()


# ---- the measure rejects wrong results ------------------------------------------------------


def test_the_bound_rejects_wrong_sums_of_rows():
    matrix, hidden = make_matrix("q4_k", 70, 256), hidden_with_zeros(70, 1.0)
    want = torch.empty(2, 256, device=device())
    REFERENCE.down(matrix, hidden, want, skips_zeros=True)
    hidden[int(hidden.nonzero()[3])] = 0  # as if a neuron had been left out
    got = torch.empty_like(want)
    REFERENCE.down(matrix, hidden, got, skips_zeros=True)
    with pytest.raises(AssertionError):
        assert_close(got, want, down_bound(matrix, hidden))
