"""The products of a prompt, against float64: Triton's kernels in its interpreter (on a device if
there is one).

Letters: T tokens, D width, N rows."""

from dataclasses import replace

import pytest
import torch
from gpu_matrices import (
    CODED_KINDS,
    EPS,
    KINDS,
    REFERENCE,
    block_width,
    device,
    make_matrix,
    sizes,
    vector,
)
from reference import rel_error

from hotsplit.runtime.device.streams import PlainStream
from hotsplit.runtime.kernels.gpu.products import tokens_of_tile
from hotsplit.runtime.ops.device import TileLauncher, tile_dtype
from hotsplit.runtime.weights.matrix import Linear

triton = pytest.importorskip("triton")

from hotsplit.runtime.kernels.gpu.kernels import triton_kernels  # noqa: E402

F16 = 2.0**-11  # the relative error of rounding a weight to f16
ALL_KINDS = [*KINDS, "q4_0", "q8_0", "q6_k"]
ROOMS = ("rounded_room", "power_T", "hidden_power_T")


def tokens(num_tokens: int, width: int, seed: int = 1, kind: str = "q8_0") -> torch.Tensor:
    values = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed))
    return values.to(tile_dtype(kind)).to(device())


def powers(num_tokens: int) -> torch.Tensor:
    return (2.0 ** (torch.arange(num_tokens) % 5 - 2)).to(device())


def bound(left_TK, sizes_KN, power_T) -> torch.Tensor:
    """The error allowed for each value: weights rounded to f16, and sums of K terms in f32."""
    size_TN = left_TK.double().abs() @ sizes_KN
    size_TN = size_TN if power_T is None else size_TN * power_T[:, None]
    return (F16 + EPS * (4 + left_TK.shape[1] ** 0.5)) * size_TN


def is_right(got, want, allowed) -> bool:
    assert want.abs().max() > 0
    return bool(((got.double() - want.double()).abs() <= allowed).all())


@pytest.mark.parametrize("kind", [*ALL_KINDS, *CODED_KINDS])
def test_rows_times_tokens(kind):
    unit = block_width(kind)
    # Fewer and more rows, units and tokens than a tile has; more, where only unpacking differs.
    shapes = ((65, 3 * unit, 33), (1, unit, 1), (63, unit, 32))
    for num_rows, width, count in shapes[: 1 if kind in CODED_KINDS else 3]:
        matrix = make_matrix(kind, num_rows, width, lies_apart=count == 33)
        x_TD, bias, power = tokens(count, width, kind=kind), None, None
        if count == 33:
            bias, power = torch.linspace(-1, 1, num_rows).to(device()), powers(count)
        out = torch.full((count, num_rows + 3), torch.nan, device=device())
        got, want = out[:, :num_rows], torch.empty_like(out[:, :num_rows])
        triton_kernels().multiply(matrix, bias, x_TD, power, got)
        REFERENCE.multiply(matrix, bias, x_TD, power, want)
        assert is_right(got, want, bound(x_TD, sizes(matrix).T, power) + EPS)
        assert out[:, num_rows:].isnan().all()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_sums_of_rows(kind):
    unit = block_width(kind)
    for num_rows, width, count in ((1, unit, 1), (65, 3 * unit, 33), (32, unit, 32)):
        matrix = make_matrix(kind, num_rows, width, lies_apart=count == 33)
        hidden_TN = tokens(count, num_rows + 8, kind=kind)[:, :num_rows]
        is_added = count == 33
        power = powers(count) if is_added else None
        got = torch.full((count, width), 0.5 if is_added else torch.nan, device=device())
        want = got.clone()
        triton_kernels().multiply_down(matrix, hidden_TN, power, got, is_added=is_added)
        REFERENCE.multiply_down(matrix, hidden_TN, power, want, is_added=is_added)
        assert is_right(got, want, bound(hidden_TN, sizes(matrix), power) + EPS)


@pytest.mark.parametrize("kind", ["f32", "q4_0_planar"])
@pytest.mark.parametrize("count", [2, 7, 64, 128, 129, 257])
def test_any_number_of_tokens(kind, count):
    """In one tile or several."""
    matrix, kernels, bad = make_matrix(kind, 40, 64), triton_kernels(), torch.nan
    x_TD, hidden_TN = tokens(count, 64, kind=kind), tokens(count, 40, kind=kind)
    got, down = (torch.full((count + 1, size), bad, device=device()) for size in (40, 64))
    want, want_down = torch.empty_like(got[1:]), torch.empty_like(down[1:])
    kernels.multiply(matrix, None, x_TD, powers(count), got[:-1])
    kernels.multiply_down(matrix, hidden_TN, powers(count), down[:-1], is_added=False)
    REFERENCE.multiply(matrix, None, x_TD, powers(count), want)
    REFERENCE.multiply_down(matrix, hidden_TN, powers(count), want_down, is_added=False)
    assert is_right(got[:-1], want, bound(x_TD, sizes(matrix).T, powers(count)) + EPS)
    assert is_right(down[:-1], want_down, bound(hidden_TN, sizes(matrix), powers(count)) + EPS)
    assert got[-1].isnan().all() and down[-1].isnan().all()


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "q8_0_planar"])
def test_rows_may_exceed_the_range_of_f16(kind):
    """A pass rounds them: in f16, they are divided by powers of two."""
    matrix, x_TD = make_matrix(kind, 40, 64), 2.0**24 * vector(3 * 64).view(3, 64)
    rooms = (torch.empty(size, device=device()) for size in (3 * 64, 3, 3))
    launcher = TileLauncher(
        kernels=triton_kernels(), main=PlainStream(), **dict(zip(ROOMS, rooms, strict=True))
    )
    got, want = torch.empty(2, 3, 40, device=device())
    launcher.dot(Linear(weight=matrix), x_TD, got)
    REFERENCE.multiply(matrix, None, x_TD, None, want)
    assert rel_error(got, want) < (2.0**-8 if kind == "bf16" else 2 * F16)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_weights_may_exceed_the_range_of_f16(kind):
    matrix = make_matrix(kind, 40, 64)
    matrix = replace(matrix, data=matrix.data * 2.0**24)
    x_TD, (got, want) = tokens(3, 64, kind=kind), torch.empty(2, 3, 40, device=device())
    triton_kernels().multiply(matrix, None, x_TD, None, got)
    REFERENCE.multiply(matrix, None, x_TD, None, want)
    assert is_right(got, want, bound(x_TD, sizes(matrix).T, None))


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("width", [1, 15, 17, 40, 72])
def test_rows_of_floats_may_have_any_width(kind, width):
    kernels, matrix = triton_kernels(), make_matrix(kind, 33, width)
    x_TD, hidden_TN = tokens(5, width, kind=kind), tokens(5, 33, kind=kind)
    for name, left, size_KN, options in (
        ("multiply", x_TD, sizes(matrix).T, {}),
        ("multiply_down", hidden_TN, sizes(matrix), {"is_added": False}),
    ):
        got, want = torch.full((2, 5, size_KN.shape[1]), torch.nan, device=device())
        bias = [None] if name == "multiply" else []
        getattr(kernels, name)(matrix, *bias, left, None, got, **options)
        getattr(REFERENCE, name)(matrix, *bias, left, None, want, **options)
        assert is_right(got, want, bound(left, size_KN, None) + EPS)


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda t: 0.9 * t, lambda t: t.flip(0)])
def test_the_bound_rejects_wrong_products(wrong):
    matrix, x_TD = make_matrix("q4_k", 40, 256), tokens(5, 256)
    want = torch.empty(5, 40, device=device())
    REFERENCE.multiply(matrix, None, x_TD, None, want)
    assert is_right(want, want, bound(x_TD, sizes(matrix).T, None))
    assert not is_right(wrong(want), want, bound(x_TD, sizes(matrix).T, None))


def test_a_token_has_the_same_bits_in_every_pass():
    kernels = triton_kernels()
    for kind in ("q8_0_planar", "q4_k"):
        matrix, x_TD = make_matrix(kind, 40, 256), tokens(40, 256)
        whole, down = (torch.empty(40, size, device=device()) for size in (40, 256))
        kernels.multiply(matrix, None, x_TD, None, whole)
        kernels.multiply_down(matrix, x_TD[:, :40], None, down, is_added=False)
        for start, stop in ((0, 1), (7, 39)):
            assert tokens_of_tile(stop - start) != tokens_of_tile(40)
            own, own_down = (torch.empty(stop - start, size, device=device()) for size in (40, 256))
            kernels.multiply(matrix, None, x_TD[start:stop], None, own)
            kernels.multiply_down(matrix, x_TD[start:stop, :40], None, own_down, is_added=False)
            assert torch.equal(own, whole[start:stop]) and torch.equal(own_down, down[start:stop])
