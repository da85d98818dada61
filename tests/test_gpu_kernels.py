"""The GPU kernels of rows, neurons and predictors against their float64 reference.

They run on a CUDA device where there is one, else in Triton's interpreter; without Triton they
fail. Attention and norms: test_gpu_attention.py; the reference: test_gpu_reference.py."""

from dataclasses import replace

import pytest
import torch
from gpu_matrices import (
    EPS,
    FILE_KINDS,
    FLOATS,
    KINDS,
    assert_close,
    assert_same_bits,
    block_width,
    device,
    make_matrix,
    product_bound,
    rounding,
    sizes,
    vector,
)

from sparkinfer.architecture import SMOOTH
from sparkinfer.runtime.kernels.gpu import launch
from sparkinfer.runtime.kernels.gpu.kernels import reference_kernels, triton_kernels
from sparkinfer.runtime.kernels.gpu.ranges import down_parts
from sparkinfer.runtime.kernels.gpu.reference import pack_bits, unpack_bits

REFERENCE = reference_kernels()
NAN = float("nan")


@pytest.fixture(scope="module")
def kernels():
    return triton_kernels()


@pytest.fixture(autouse=True)
def several_rows(monkeypatch):
    """Programs of four rows, as large matrices get them, for these small ones too: where there are
    as many rows. The interpreter takes some 10 ms a program."""
    monkeypatch.setattr(launch, "LEAST_PROGRAMS", 1)


@pytest.fixture
def one_row(several_rows, monkeypatch):
    """Programs of one row, as small matrices get them."""
    monkeypatch.setattr(launch, "LEAST_PROGRAMS", 512)


def both(kernels, name, out, *arguments, **options):
    """(what the kernel writes, what the reference writes) into copies of `out`, the last argument."""
    got, want = out.clone(), out.clone()
    getattr(kernels, name)(*arguments, got, **options)
    getattr(REFERENCE, name)(*arguments, want, **options)
    return got, want


# ---- rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_dot(kernels, kind, blocks):
    matrix = make_matrix(kind, 5, blocks * block_width(kind), lies_apart=blocks == 3)
    x, bias = vector(matrix.width), vector(5, seed=2) if blocks == 1 else None
    got, want = both(kernels, "dot", torch.empty_like(vector(5)), matrix, bias, x)
    assert_close(got, want, product_bound(matrix, x, bias))


@pytest.mark.parametrize("kind", KINDS)
def test_dot_of_a_long_row(kernels, kind):
    """Longer than a tile, and no multiple of one."""
    matrix = make_matrix(kind, 2, 4864 if kind in ("q4_0_planar", "q4_k") else 2304)
    x = vector(matrix.width)
    got, want = both(kernels, "dot", vector(2), matrix, None, x)
    assert_close(got, want, product_bound(matrix, x, None))


@pytest.mark.parametrize("width", [1, 8, 40, 100])
@pytest.mark.parametrize("kind", FLOATS)
def test_rows_of_floats_may_have_any_width(kernels, kind, width):
    """Ranks of predictors may be anything; values behind a row's are NaN here."""
    matrix, inner = make_matrix(kind, 37, width), vector(width)
    whole = torch.full((37, width + 9), NAN, dtype=matrix.data.dtype, device=device())
    whole[:, :width] = matrix.data
    matrix = replace(matrix, data=whole[:, :width])
    got, want = both(kernels, "dot", vector(37), matrix, None, inner)
    assert_close(got, want, product_bound(matrix, inner, None))
    named, right = predicted(kernels, matrix, None, inner, 0.2)
    assert_same_bits(named, right)
    out = torch.full((37, width + 3), 7.0, device=device())
    got, want = both(kernels, "unpack", out[:, :width], matrix)
    assert torch.equal(got, want)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5])
def test_dot_of_any_number_of_rows(kernels, num_rows):
    matrix, x = make_matrix("f16", num_rows, 32), vector(32)
    got, want = both(kernels, "dot", vector(num_rows), matrix, None, x)
    assert_close(got, want, product_bound(matrix, x, None))


@pytest.mark.parametrize("kind", ["bf16", "q4_0_planar", "q5_k"])
def test_dot_by_single_rows(kernels, one_row, kind):
    matrix = make_matrix(kind, 3, 3 * block_width(kind))
    x = vector(matrix.width)
    got, want = both(kernels, "dot", vector(3), matrix, None, x)
    assert_close(got, want, product_bound(matrix, x, None))


def test_few_rows_get_programs_of_their_own(one_row):
    found = [launch.rows_of_program(count) for count in (1, 1023, 1024, 2047, 2048, 1 << 20)]
    assert found == [1, 1, 2, 2, 4, 4]
    assert launch.rows_of_program(1 << 20, 2) == 2


def test_dot_leaves_alone_what_is_not_its_own(kernels):
    matrix, out = make_matrix("q8_0_planar", 5, 64), torch.full((9,), 7.0, device=device())
    kernels.dot(matrix, None, vector(64), out[2:7])
    assert out[:2].tolist() == [7, 7] and out[7:].tolist() == [7, 7]


def test_dot_with_relu(kernels):
    matrix, x = make_matrix("f32", 6, 32), vector(32)
    matrix.data[2] = NAN
    got, want = both(kernels, "dot", vector(6), matrix, vector(6, 3), x, has_relu=True)
    assert got[2].isnan() and (got == 0).any() and (got > 0).any()
    assert_close(got, want, product_bound(matrix, x, None).nan_to_num())


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_embed(kernels, kind, is_added):
    matrix = make_matrix(kind, 4, 5 * block_width(kind), lies_apart=is_added)
    index = torch.tensor([3], device=device())
    start = vector(matrix.width)
    got, want = both(kernels, "embed", start, matrix, index, is_added=is_added)
    assert_close(got, want, 4 * EPS * (sizes(matrix)[3] + start.abs()))


@pytest.mark.parametrize("kind", [*KINDS, *FILE_KINDS])
def test_unpack(kernels, kind):
    """f32 to the last bits of a product and a difference."""
    matrix = make_matrix(kind, 9, 3 * block_width(kind))
    got, want = both(kernels, "unpack", torch.empty(9, matrix.width, device=device()), matrix)
    assert_close(got, want, 2 * EPS * sizes(matrix))


@pytest.mark.parametrize("kind", [*KINDS, *FILE_KINDS])
def test_unpack_of_chosen_rows_that_lie_apart(kernels, kind):
    matrix = make_matrix(kind, 9, 9 * block_width(kind), lies_apart=True)
    index = torch.tensor([8, 0, 8], device=device(), dtype=torch.int32)
    out = torch.empty(3, matrix.width + 32, device=device(), dtype=torch.bfloat16)
    got, want = both(kernels, "unpack", out[:, : matrix.width], matrix, index_A=index)
    assert_close(got, want, torch.finfo(torch.bfloat16).eps * sizes(matrix)[index.long()])


def test_unpack_to_f16_into_rows_that_lie_apart(kernels):
    matrix, out = make_matrix("q8_0", 3, 64), torch.full((3, 80), 7.0, device=device()).half()
    kernels.unpack(matrix, out[:, :64])
    want = torch.empty(3, 64, device=device())
    REFERENCE.unpack(matrix, want)
    assert_close(out[:, :64], want, torch.finfo(torch.float16).eps * want.abs())
    assert (out[:, 64:] == 7).all()


# ---- predictors ----------------------------------------------------------------------------


def predicted(kernels, matrix, bias, inner, threshold, kind="linear", activation="relu"):
    out = torch.full((-(-matrix.num_rows // 32),), -1, dtype=torch.int32, device=device())
    return both(kernels, "predict", out, matrix, bias, inner, threshold, kind, activation)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_predict(kernels, kind, blocks):
    matrix = make_matrix(kind, 37, blocks * block_width(kind), lies_apart=blocks == 1)
    inner = vector(matrix.width)
    bias = vector(37, seed=2) if blocks == 1 else None
    got, want = predicted(kernels, matrix, bias, inner, 1.5)
    assert_same_bits(got, want)
    assert 5 < unpack_bits(got).sum() < 32


@pytest.mark.parametrize("num_neurons", [1, 8, 9, 32, 33])
def test_bits_past_the_last_neuron_are_zero(kernels, num_neurons):
    """All are named, by a threshold below every score and by scores that are no numbers."""
    matrix = make_matrix("f16", num_neurons, 32)
    for inner in (vector(32), torch.full_like(vector(32), NAN)):
        got, want = predicted(kernels, matrix, None, inner, -1e9)
        assert_same_bits(got, want)
        assert unpack_bits(got).sum() == num_neurons


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("activation", SMOOTH)
def test_predict_of_a_gate(kernels, activation):
    matrix = make_matrix("f16", 64, 32)
    got, want = predicted(kernels, matrix, None, vector(32), 0.15, "gate", activation)
    assert_same_bits(got, want)
    assert 20 < unpack_bits(got).sum() < 60


def test_a_score_at_the_threshold_does_not_name(kernels):
    """Scores 0, 1, 2, ... in exact arithmetic, and one that is no number."""
    matrix = make_matrix("f32", 8, 32)
    matrix.data.zero_()
    matrix.data[:, 5] = torch.arange(8)
    matrix.data[1] = NAN
    inner = torch.zeros(32, device=device())
    inner[5] = 1
    got, want = predicted(kernels, matrix, None, inner, 3.0)
    assert_same_bits(got, want)
    assert unpack_bits(got).nonzero().flatten().tolist() == [1, 4, 5, 6, 7]


# ---- gate and up ---------------------------------------------------------------------------


def hidden_bound(gate, gate_bias, up, up_bias, x, hidden):
    """Activations have slopes below 1.13; act(g) u is off by du |act(g)| + 1.13 dg |u|."""
    gate_off = 1.2 * product_bound(gate, x, gate_bias) + 8 * EPS
    gate_size = sizes(gate) @ x.double().abs() + (0 if gate_bias is None else gate_bias.abs())
    if up is None:
        return gate_off + 16 * EPS * gate_size
    up_off = product_bound(up, x, up_bias)
    up_size = sizes(up) @ x.double().abs() + (0 if up_bias is None else up_bias.abs())
    return (gate_off * up_size + up_off * gate_size) + 16 * EPS * hidden.double().abs().nan_to_num()


def assert_hidden(kernels, gate, up, x, activation, threshold, **options):
    """Compares; returns what the kernel wrote."""
    gate_bias, up_bias = options.get("gate_bias"), options.get("up_bias")
    arguments = (
        gate, gate_bias, up, up_bias, options.get("id_N"), options.get("named"), x, activation,
        threshold, options.get("is_dense", False),
    )  # fmt: skip
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
@pytest.mark.parametrize("activation", ["relu", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh"])
def test_gate_up_of_every_activation(kernels, activation, is_gated, is_dense):
    gate = make_matrix("f16", 13, 64)
    up = make_matrix("q8_0_planar", 13, 64, seed=5) if is_gated else None
    biases = {"gate_bias": vector(13, 6), "up_bias": vector(13, 7) if is_gated else None}
    x, threshold = vector(64) * 0.3, 0.4
    got = assert_hidden(kernels, gate, up, x, activation, threshold, is_dense=is_dense, **biases)
    num_zeros = int((got == 0).sum())
    if is_dense and activation in SMOOTH:
        assert num_zeros == 0 or activation == "gelu"  # which is 0 in f32 far to the left
    else:
        assert 1 < num_zeros < 12


@pytest.mark.filterwarnings("ignore:overflow")
def test_gate_up_of_what_is_no_number_or_large(kernels):
    """NaN fires and stays; numbers far out leave no NaN behind."""
    gate, up = make_matrix("f32", 6, 32), make_matrix("f32", 6, 32, seed=5)
    gate.data.zero_()
    gate.data[:, 0] = torch.tensor([NAN, -200.0, 200.0, -3e18, 3e18, 1.0])
    x = vector(32)
    x[0] = 1
    for activation in ("relu", "fatrelu", "drelu", *SMOOTH):
        for is_dense in (False, True):
            got = torch.empty(6, device=device())
            want = got.clone()
            arguments = (gate, None, up, None, None, None, x, activation, 0.1, is_dense)
            kernels.gate_up(*arguments, got)
            REFERENCE.gate_up(*arguments, want)
            assert got.isnan().tolist() == [True] + [False] * 5, activation
            assert_close(got, want, 1e-5 * want.abs().nan_to_num() + 1e-30)


@pytest.mark.parametrize("num_neurons", [1, 2, 19])
def test_neurons_are_looked_up_by_their_numbers(kernels, num_neurons):
    gate, up = (make_matrix("f16", num_neurons, 32, seed=seed) for seed in (0, 5))
    ids = torch.randperm(200, generator=torch.Generator().manual_seed(3))[:num_neurons]
    is_named = torch.rand(200, generator=torch.Generator().manual_seed(4)) < 0.5
    is_named[ids[0]] = True
    got = assert_hidden(
        kernels, gate, up, vector(32), "silu", 0.0,
        id_N=ids.int().to(device()), named=pack_bits(is_named.to(device())),
    )  # fmt: skip
    assert torch.equal((got != 0).cpu(), is_named[ids])


def test_rows_that_are_not_needed_are_not_read(kernels):
    """They hold what is no number, which any use of them would spread: of those that are not named
    both, of those that do not fire those of `up`."""
    gate, up = make_matrix("f32", 16, 32), make_matrix("f32", 16, 32, seed=5)
    x = vector(32)
    fires = (gate.data @ x) > 0
    is_named = torch.arange(16, device=device()) % 3 == 0
    gate.data[~is_named] = NAN
    up.data[~(is_named & fires)] = NAN
    got = torch.empty(16, device=device())
    kernels.gate_up(gate, None, up, None, None, pack_bits(is_named), x, "relu", 0.0, False, got)
    assert torch.equal(got != 0, is_named & fires) and (is_named & fires).any()


def test_no_neuron_is_named(kernels):
    gate, got = make_matrix("q4_0_planar", 40, 32), torch.full((40,), NAN, device=device())
    named = torch.zeros(2, dtype=torch.int32, device=device())
    kernels.gate_up(gate, None, gate, None, None, named, vector(32), "silu", 0.0, False, got)
    assert (got == 0).all()


# ---- down ----------------------------------------------------------------------------------


def hidden_with_zeros(size, share, seed=3):
    hidden = vector(size, seed)
    hidden[vector(size, seed + 1).abs() < share] = 0
    return hidden


def down_bound(matrix, hidden):
    return rounding(matrix.num_rows) * (hidden.double().abs() @ sizes(matrix))


@pytest.mark.parametrize("skips_zeros", [False, True])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_down(kernels, kind, is_wide, skips_zeros):
    """In less than one tile of columns, and in one and a piece: super-blocks are one each."""
    blocks = (2 if block_width(kind) == 256 else 9) if is_wide else 1
    matrix = make_matrix(kind, 70, blocks * block_width(kind), lies_apart=not is_wide)
    hidden = hidden_with_zeros(70, 1.0)
    parts = torch.full((2, matrix.width), NAN, device=device())
    got, want = both(kernels, "down", parts, matrix, hidden, skips_zeros=skips_zeros)
    assert_close(got, want, down_bound(matrix, hidden))


@pytest.mark.parametrize("num_neurons", [1, 16, 17, 64, 65, 300])
@pytest.mark.parametrize("skips_zeros", [False, True])
def test_down_of_any_number_of_neurons(kernels, num_neurons, skips_zeros):
    """Into as many parts as are made for it, into one, and into more than there are neurons."""
    matrix = make_matrix("f16", num_neurons, 32)
    hidden = hidden_with_zeros(num_neurons, 0.5)
    hidden[-1] = 1.5
    for num_parts in (down_parts(num_neurons, 32), 1, 3):
        parts = torch.full((num_parts, 32), NAN, device=device())
        got, want = both(kernels, "down", parts, matrix, hidden, skips_zeros=skips_zeros)
        assert_close(got, want, down_bound(matrix, hidden))


def test_empty_parts_are_zeros(kernels):
    matrix = make_matrix("f16", 4, 32)
    for skips_zeros in (False, True):
        parts = torch.full((7, 32), NAN, device=device())
        kernels.down(matrix, vector(4), parts, skips_zeros=skips_zeros)
        assert (parts[4:] == 0).all() and parts[:4].abs().sum(dim=1).ne(0).all()


def test_rows_of_zeros_are_not_read(kernels):
    """NaN is not 0: it is to be seen in the result."""
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


@pytest.mark.parametrize(("num_neurons", "width"), [(1, 32), (11008, 4096), (28672, 8192)])
def test_parts_are_not_too_many_for_one_program_to_add_up(num_neurons, width):
    assert 1 <= down_parts(num_neurons, width) <= 32
    assert down_parts(num_neurons, width) * width <= 1 << 17


# ---- the measures reject wrong results -----------------------------------------------------


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(
    "wrong",
    [torch.zeros_like, lambda t: 0.5 * t, lambda t: t.flip(0), lambda t: t + 1e-3, lambda t: -t],
)
def test_the_measure_rejects_wrong_products(kind, wrong):
    matrix, x = make_matrix(kind, 8, 256), vector(256)
    want = torch.empty(8, device=device())
    REFERENCE.dot(matrix, None, x, want)
    bound = product_bound(matrix, x, None)
    assert_close(want, want, bound)
    with pytest.raises(AssertionError):
        assert_close(wrong(want), want, bound)


def test_the_measure_rejects_one_value_that_is_none_or_wrong():
    want = vector(64)
    for value in (NAN, float(want[9]) * 1.001):
        got = want.clone()
        got[9] = value
        with pytest.raises(AssertionError):
            assert_close(got, want, 1e-4 * want.abs())


def test_the_measure_rejects_wrong_sums_of_rows():
    matrix, hidden = make_matrix("q4_k", 70, 256), hidden_with_zeros(70, 1.0)
    want = torch.empty(2, 256, device=device())
    REFERENCE.down(matrix, hidden, want, skips_zeros=True)
    hidden[int(hidden.nonzero()[3])] = 0  # as if a neuron had been left out
    got = torch.empty_like(want)
    REFERENCE.down(matrix, hidden, got, skips_zeros=True)
    with pytest.raises(AssertionError):
        assert_close(got, want, down_bound(matrix, hidden))


@pytest.mark.parametrize("bit", [0, 5, 31])
def test_the_measure_rejects_one_flipped_bit(bit):
    want = pack_bits(torch.arange(64, device=device()) % 3 == 0)
    assert_same_bits(want.clone(), want)
    got = want.clone()
    got[1] ^= -(1 << 31) if bit == 31 else 1 << bit
    with pytest.raises(AssertionError):
        assert_same_bits(got, want)
