"""The GPU kernels for rows and predictors, compared with a float64 reference.

The kernels run on a CUDA device, or in Triton's interpreter if there is none; without Triton their
tests fail. test_gpu_neurons.py and test_gpu_attention.py test the other kernels of a step."""

from dataclasses import replace

import pytest
import torch
from gpu_matrices import (
    CODED_KINDS,
    EPS,
    FILE_KINDS,
    FLOATS,
    KINDS,
    NAN,
    REFERENCE,
    TILE_KINDS,
    assert_close,
    assert_same_bits,
    block_width,
    both,
    device,
    make_matrix,
    make_tiles,
    product_bound,
    sizes,
    vector,
)
from small_blocks import CODED, edge_rows

from hotsplit.runtime.device.bits import pack_bits, unpack_bits
from hotsplit.runtime.kernels.gpu import launch
from hotsplit.runtime.kernels.gpu.language import tl, triton
from hotsplit.runtime.kernels.planar import planar
from hotsplit.runtime.kernels.stored import rows_together, unpack
from hotsplit.runtime.weights.matrix import Matrix

pytestmark = pytest.mark.usefixtures("several_rows")


@pytest.fixture
def one_row(several_rows, monkeypatch):
    """A program takes one row, as it does of small matrices outside these tests."""
    monkeypatch.setattr(launch, "LEAST_PROGRAMS", 512)


# ---- rows ----------------------------------------------------------------------------------


def assert_dot(kernels, matrix, bias=None):
    x = vector(matrix.width)
    got, want = both(kernels, "dot", vector(matrix.num_rows), matrix, bias, x)
    assert_close(got, want, product_bound(matrix, x, bias))


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("kind", [*KINDS, *CODED_KINDS])
def test_dot(kernels, kind, blocks):
    matrix = make_matrix(kind, 5, blocks * block_width(kind), lies_apart=blocks == 3)
    assert_dot(kernels, matrix, vector(5, seed=2) if blocks == 1 else None)


@pytest.mark.parametrize("kind", KINDS)
def test_dot_of_a_long_row(kernels, kind):
    """A row is longer than a tile and not a multiple of one."""
    assert_dot(kernels, make_matrix(kind, 2, 4864 if kind in ("q4_0_planar", "q4_k") else 2304))


@pytest.mark.parametrize("width", [1, 40, 100])
@pytest.mark.parametrize("kind", FLOATS)
def test_rows_of_floats_may_have_any_width(kernels, kind, width):
    """Predictors may have any rank. The memory after each row holds NaN."""
    matrix, inner = make_matrix(kind, 37, width), vector(width)
    whole = torch.full((37, width + 9), NAN, dtype=matrix.data.dtype, device=device())
    whole[:, :width] = matrix.data
    matrix = replace(matrix, data=whole[:, :width])
    assert_dot(kernels, matrix)
    named, right = predicted(kernels, matrix, None, inner, 0.2)
    assert_same_bits(named, right)
    out = torch.full((37, width + 3), 7.0, device=device())
    got, want = both(kernels, "unpack", out[:, :width], matrix)
    assert torch.equal(got, want)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5])
def test_dot_of_any_number_of_rows(kernels, num_rows):
    assert_dot(kernels, make_matrix("f16", num_rows, 32))


@pytest.mark.parametrize("kind", ["bf16", "q4_0_planar", "q5_k"])
def test_dot_with_one_row_per_program(kernels, one_row, kind):
    assert_dot(kernels, make_matrix(kind, 3, 3 * block_width(kind)))


def test_dot_with_relu(kernels):
    matrix, x = make_matrix("f32", 6, 32), vector(32)
    matrix.data[2] = NAN
    got, want = both(kernels, "dot", vector(6), matrix, vector(6, 3), x, has_relu=True)
    assert got[2].isnan() and (got == 0).any() and (got > 0).any()
    assert_close(got, want, product_bound(matrix, x, None).nan_to_num())


def test_dot_with_a_cap(kernels):
    """Near zero, where tanh is its argument, and far from it."""
    matrix, x = make_matrix("f32", 40, 32), vector(32)
    matrix.data.mul_(torch.logspace(-6, 2, 40, device=device())[:, None])
    got, want = both(kernels, "dot", vector(40), matrix, None, x, cap=3.0)
    plain = matrix.data.double() @ x.double()
    assert_close(want, 3 * (plain / 3).tanh(), 1e-6 * plain.abs())
    assert_close(got, want, product_bound(matrix, x, None).clamp(max=1e-5) + 1e-6 * want.abs())
    assert (want.abs() > 2.9).any() and (want.abs() < 1e-4).any()


@pytest.mark.parametrize(("is_added", "scale"), [(False, 7.3), (True, 1.0), (True, 7.3)])
@pytest.mark.parametrize("kind", KINDS)
def test_embed(kernels, kind, is_added, scale):
    """The scale multiplies the row, and not what it is added to."""
    matrix = make_matrix(kind, 4, 5 * block_width(kind), lies_apart=is_added)
    index, start = torch.tensor([3], device=device()), vector(matrix.width)
    given = {"is_added": is_added, "scale": scale}
    got, want = both(kernels, "embed", start, matrix, index, **given)
    bound = 4 * EPS * (scale * sizes(matrix)[3] + start.abs())
    row = scale * unpack(matrix.data[3:4], kind)[0].double()
    assert_close(got, want, bound)
    assert_close(got, row + start if is_added else row, bound)


@pytest.mark.parametrize("kind", [*KINDS, *CODED_KINDS, *FILE_KINDS])
def test_unpack(kernels, kind):
    """The values are exact in f32 up to the rounding of a product and a difference."""
    matrix = make_matrix(kind, 9, 3 * block_width(kind))
    got, want = both(kernels, "unpack", torch.empty(9, matrix.width, device=device()), matrix)
    assert_close(got, want, 2 * EPS * sizes(matrix))


@pytest.mark.parametrize("kind", [*KINDS, *FILE_KINDS])
def test_unpack_of_chosen_rows_with_gaps(kernels, kind):
    matrix = make_matrix(kind, 9, 9 * block_width(kind), lies_apart=True)
    index = torch.tensor([8, 0, 8], device=device(), dtype=torch.int32)
    out = torch.empty(3, matrix.width + 32, device=device(), dtype=torch.bfloat16)
    got, want = both(kernels, "unpack", out[:, : matrix.width], matrix, index_A=index)
    assert_close(got, want, torch.finfo(torch.bfloat16).eps * sizes(matrix)[index.long()])


@pytest.mark.parametrize("blocks, tiles", [(2, 2), (5, 1)])
@pytest.mark.parametrize("kind", TILE_KINDS)
def test_unpack_of_tiles_and_groups(kernels, kind, blocks, tiles):
    """Blocks of a tile may be stored together, and the last ones are fewer; a row has more units
    than a program takes, and none are written past it."""
    num_rows, width = tiles * rows_together(kind), blocks * block_width(kind)
    matrix, plain = make_tiles(kind, num_rows, width)
    out = torch.full((num_rows, width + 16), 7.0, device=device())
    kernels.unpack(matrix, out[:, :width])
    _, want = both(kernels, "unpack", torch.empty(num_rows, width, device=device()), plain)
    assert_close(out[:, :width], want, 2 * EPS * sizes(plain))
    assert (out[:, width:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_unpack_of_tiles_to_16_bits(kernels, dtype):
    kind = "q4_k_tiled" if dtype == torch.float16 else "bf16_grouped"
    matrix, plain = make_tiles(kind, rows_together(kind), block_width(kind))
    out = torch.empty(matrix.num_rows, matrix.width, dtype=dtype, device=device())
    kernels.unpack(matrix, out)
    assert_close(out, unpack(plain.data, plain.kind), torch.finfo(dtype).eps * sizes(plain))


def test_unpack_to_f16_into_rows_with_gaps(kernels):
    matrix, out = make_matrix("q8_0", 3, 64), torch.full((3, 80), 7.0, device=device()).half()
    kernels.unpack(matrix, out[:, :64])
    _, want = both(kernels, "unpack", torch.empty(3, 64, device=device()), matrix)
    assert_close(out[:, :64], want, torch.finfo(torch.float16).eps * want.abs())
    assert (out[:, 64:] == 7).all()


# ---- predictors ----------------------------------------------------------------------------


def predicted(kernels, matrix, bias, inner, threshold):
    out = torch.full((-(-matrix.num_rows // 32),), -1, dtype=torch.int32, device=device())
    return both(kernels, "predict", out, matrix, bias, inner, threshold)


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_bits_are_written_twice(kernels, num_rows):
    """Also to main memory when the CPU has a part of the layer."""
    matrix, inner = make_matrix("f16", 37, 32), vector(32 * num_rows)
    shape = (2,) if num_rows == 1 else (num_rows, 2)
    inner = inner if num_rows == 1 else inner.view(num_rows, 32)
    named, copy = (torch.full(shape, -1, dtype=torch.int32, device=device()) for _ in range(2))
    kernels.predict(matrix, None, inner, 0.0, named, copy)
    assert torch.equal(named, copy) and named.any() and not (named == -1).all()


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
    """All neurons are named, by a threshold below every score or by NaN scores."""
    matrix = make_matrix("f16", num_neurons, 32)
    for inner in (vector(32), torch.full_like(vector(32), NAN)):
        got, want = predicted(kernels, matrix, None, inner, -1e9)
        assert_same_bits(got, want)
        assert unpack_bits(got).sum() == num_neurons


def test_a_score_at_the_threshold_names_no_neuron(kernels):
    """The scores are exactly 0, 2, 3, ..., 7, and one is NaN."""
    matrix = make_matrix("f32", 8, 32)
    matrix.data.zero_()
    matrix.data[:, 5] = torch.arange(8)
    matrix.data[1] = NAN
    inner = torch.zeros(32, device=device())
    inner[5] = 1
    got, want = predicted(kernels, matrix, None, inner, 3.0)
    assert_same_bits(got, want)
    assert unpack_bits(got).nonzero().flatten().tolist() == [1, 4, 5, 6, 7]


# ---- the measures reject wrong results -----------------------------------------------------


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(
    "wrong",
    [torch.zeros_like, lambda t: 0.5 * t, lambda t: t.flip(0), lambda t: t + 1e-3, lambda t: -t],
)
def test_the_bound_rejects_wrong_products(kind, wrong):
    matrix, x = make_matrix(kind, 8, 256), vector(256)
    want = torch.empty(8, device=device())
    REFERENCE.dot(matrix, None, x, want)
    bound = product_bound(matrix, x, None)
    assert_close(want, want, bound)
    with pytest.raises(AssertionError):
        assert_close(wrong(want), want, bound)


def test_the_bound_rejects_one_nan_and_one_wrong_value():
    want = vector(64)
    for value in (NAN, float(want[9]) * 1.001):
        got = want.clone()
        got[9] = value
        with pytest.raises(AssertionError):
            assert_close(got, want, 1e-4 * want.abs())


@pytest.mark.parametrize("bit", [0, 5, 31])
def test_the_bound_rejects_one_flipped_bit(bit):
    want = pack_bits(torch.arange(64, device=device()) % 3 == 0)
    assert_same_bits(want.clone(), want)
    got = want.clone()
    got[1] ^= -(1 << 31) if bit == 31 else 1 << bit
    with pytest.raises(AssertionError):
        assert_same_bits(got, want)


@pytest.mark.parametrize("kind", [*CODED, "q2_0", "q1_0"])
def test_edge_blocks_are_unpacked_to_the_bit(kernels, kind):
    blocks = edge_rows(kind)
    data = torch.from_numpy(blocks[:: 1 + len(blocks) // 64])
    want = unpack(data, kind)
    for rows, own in ((data, kind), planar(data, kind)):
        matrix = Matrix(data=rows.to(device()), kind=own, width=block_width(kind))
        got = torch.full_like(want, torch.nan, device=device())
        kernels.unpack(matrix, got)
        assert torch.equal(got.cpu().view(torch.int32), want.view(torch.int32))


# ---- the interpreter -----------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the device instead")
@pytest.mark.parametrize("value, overflows", [(2**31 - 2, False), (2**31 - 1, True)])
def test_an_integer_that_overflows_is_found(value, overflows):
    """See interpreter_loops.py."""
    from triton.runtime.errors import InterpreterError

    @triton.jit
    def add_one(x):
        tl.store(x, tl.load(x) + tl.full((), 1, tl.int32))

    x = torch.tensor([value], dtype=torch.int32)
    if overflows:
        with pytest.raises(InterpreterError, match="int32 overflows: add"):
            add_one[(1,)](x)
    else:
        add_one[(1,)](x)
        assert x.item() == 2**31 - 1
