"""A prompt's products with several experts in one launch, against float64: Triton's kernels in its
interpreter (on a device if there is one), and as executed PTX.

Letters: T tokens, K experts of a token, P pairs, D width, N rows of an expert."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu_matrices import EPS, FLOATS, REFERENCE, TILE_KINDS, device, make_matrix, make_tiles, sizes
from ptx import DataRace, Uninitialised
from ptx.kernels import PtxKernels
from test_gpu_products import F16, is_right, powers, tokens

from hotsplit.runtime.kernels.gpu.expert_pairs import LARGE_TILE, SMALL_TILE, Pairs

triton = pytest.importorskip("triton")

from hotsplit.runtime.kernels.gpu.kernels import reference_kernels, triton_kernels  # noqa: E402

NUM_USED = 2
# Experts' places and numbers of pairs: a whole tile, one more, one, several tiles; two parts.
PARTS = [{2: 32, 0: 33}, {1: 1}]
LONG = [{1: 129, 0: 90}]
ADA = 89


def num_pairs(parts) -> int:
    return sum(sum(part.values()) for part in parts)


def pairs(parts=PARTS) -> list[Pairs]:
    """The pairs of each part, of tokens in random order; an output has the row of its pair."""
    pair_P = np.random.default_rng(0).permutation(num_pairs(parts))
    found, first = [], 0
    for part in parts:
        own_P = pair_P[first : first + sum(part.values())]
        size = SMALL_TILE if len(own_P) <= 2 * SMALL_TILE * len(part) else LARGE_TILE
        tiles, start = [], 0
        for place, count in part.items():
            for done in range(0, count, size):
                tiles.append([place, start + done, min(size, count - done)])
            start += count
        row_3P = np.stack([own_P // NUM_USED, np.arange(len(own_P)), own_P])
        tensors = (torch.tensor(np.array(x), dtype=torch.int32) for x in (tiles, row_3P))
        tile_G3, row_3P = (each.to(device()) for each in tensors)
        weight_P = torch.zeros(0)
        found.append(Pairs(tile_G3=tile_G3, row_3P=row_3P, weight_P=weight_P, tile_size=size))
        first += len(own_P)
    return found


def bound(left_PK, sizes_PKN, factor_P, dtype) -> torch.Tensor:
    """The error allowed for each value; `sizes_PKN`: of the terms of each pair."""
    size_PN = torch.einsum("pk,pkn->pn", left_PK.double().abs(), sizes_PKN) * factor_P[:, None]
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}.get(dtype, F16)
    return (rounding + EPS * (4 + left_PK.shape[1] ** 0.5)) * size_PN + EPS


def matrix_of(kind, num_rows, width):
    """A matrix, and one in rows with the same values."""
    if kind in TILE_KINDS:
        return make_tiles(kind, num_rows, width)
    made = make_matrix(kind, num_rows, width)
    return made, made


def as_input(kind, num_rows, width):
    return tokens(num_rows, width).to(FLOATS.get(kind, torch.float16))


def assert_outputs(kernels, kind, parts=PARTS, *, num_rows=64, width=0, slack=1.0):
    """Products of tokens, with biases and, as of down projections by outputs, with weights."""
    width = width or (256 if "_k" in kind or "iq4_xs" in kind else 64)
    matrix, plain = matrix_of(kind, 3 * num_rows, width)
    total = num_pairs(parts)
    num_tokens = -(-total // NUM_USED)
    x_TD, bias_N = as_input(kind, num_tokens, width), torch.linspace(-1, 1, 3 * num_rows)
    factor_P = torch.linspace(0.5, 1.5, total).to(device())
    sizes_NK = sizes(plain)
    for own in pairs(parts):
        for bias, power, factor in (
            (None, None, None),
            (bias_N.to(device()), powers(num_tokens), factor_P),
        ):
            given = {"tile_G3": own.tile_G3, "tile_size": own.tile_size, "factor_P": factor}
            if factor is None:
                given["row_2P"], count = own.in_2P, own.row_3P.shape[1]
            else:  # rows of all pairs
                given["row_2P"], count = own.row_3P[[0, 2]], total
            got, want = (torch.full((count, num_rows), 7.0, device=device()) for _ in range(2))
            kernels.multiply(matrix, bias, x_TD, power, got, **given)
            REFERENCE.multiply(plain, bias, x_TD, power, want, **given)
            assert_right(got, want, own, given, x_TD, sizes_NK, num_rows, power, slack)


def assert_right(got, want, own, given, x_TD, sizes_NK, num_rows, power, slack):
    left_P, right_P = given["row_2P"].long()
    place_P = torch.zeros(len(left_P), dtype=torch.long, device=device())
    is_own_P = torch.zeros_like(place_P, dtype=torch.bool)
    for place, first, count in own.tile_G3.tolist():
        place_P[first : first + count], is_own_P[first : first + count] = place, True
    left_P, right_P, place_P = left_P[is_own_P], right_P[is_own_P], place_P[is_own_P]
    factor_P = torch.ones(len(left_P), dtype=torch.double, device=device())
    factor_P = factor_P if power is None else factor_P * power[left_P]
    factor_P = factor_P if given["factor_P"] is None else factor_P * given["factor_P"][right_P]
    sizes_PKN = sizes_NK.view(-1, num_rows, x_TD.shape[1])[place_P].transpose(1, 2)
    allowed = slack * bound(x_TD[left_P], sizes_PKN, factor_P, x_TD.dtype)
    assert is_right(got[right_P], want[right_P], allowed)
    others = torch.ones(len(got), dtype=torch.bool, device=device())
    others[right_P] = False
    assert (got[others] == 7.0).all()  # nothing else is written


def assert_sums(kernels, kind, parts=PARTS, *, num_rows=64, width=0, slack=1.0):
    """Sums of rows, as of down projections by neurons."""
    width = width or (256 if "_k" in kind or "iq4_xs" in kind else 64)
    matrix, plain = matrix_of(kind, 3 * num_rows, width)
    bias_D = torch.linspace(-1, 1, 3 * width).to(device())
    total = num_pairs(parts)
    factor_P = torch.linspace(0.5, 1.5, total).to(device())
    sizes_NK = sizes(plain).view(3, num_rows, width).transpose(1, 2).flatten(0, 1)
    for own in pairs(parts):
        hidden, power = as_input(kind, own.row_3P.shape[1], num_rows), powers(own.row_3P.shape[1])
        given = {
            "tile_G3": own.tile_G3,
            "row_2P": own.out_2P,
            "factor_P": factor_P,
            "tile_size": own.tile_size,
        }
        got, want = (torch.full((total, width), 7.0, device=device()) for _ in range(2))
        kernels.multiply_down(matrix, hidden, power, got, is_added=False, bias_D=bias_D, **given)
        REFERENCE.multiply_down(plain, hidden, power, want, is_added=False, bias_D=bias_D, **given)
        assert_right(got, want, own, given, hidden, sizes_NK, width, power, slack)


@pytest.mark.parametrize("kind", ["q4_k", "f32", "q8_0_tiled", "mxfp4_tiled", "q6_k_tiled"])
def test_outputs_of_experts(kind):
    assert_outputs(triton_kernels(), kind)


@pytest.mark.parametrize(
    "kind", ["q8_0_planar", "f16", "q4_0_grouped", "f16_grouped", "q8_0_tiled"]
)
def test_sums_of_experts(kind):
    assert_sums(triton_kernels(), kind)


def test_experts_with_many_tokens_take_longer_tiles():
    assert [own.tile_size for own in pairs(LONG)] == [64]
    assert_outputs(triton_kernels(), "q4_0_planar", LONG, num_rows=40)


def test_a_pair_has_the_bits_of_its_token_alone():
    """Whatever the other pairs of its tile are, as in a product of one matrix."""
    kernels, matrix, x_TD = triton_kernels(), make_matrix("q4_k", 120, 256), tokens(33, 256)
    (own, _), got = pairs(), torch.empty(65, 40, device=device())
    kernels.multiply(
        matrix, None, x_TD, None, got, tile_G3=own.tile_G3, row_2P=own.in_2P, tile_size=32
    )
    for place, first, count in own.tile_G3.tolist():
        for pair in (first, first + count - 1):
            token, alone = int(own.row_3P[0, pair]), torch.empty(1, 40, device=device())
            part = replace(matrix, data=matrix.data[place * 40 :][:40])
            kernels.multiply(part, None, x_TD[token : token + 1], None, alone)
            assert torch.equal(alone[0], got[own.row_3P[1, pair]])


@pytest.mark.parametrize("fault", ["expert", "first pair", "weights", "rows"])
def test_wrong_pairs_are_found(fault):
    def wrong(right):
        def run(*arguments, **given):
            if fault == "expert":
                given["tile_G3"] = given["tile_G3"] * torch.tensor([0, 1, 1], device=device())
            elif fault == "first pair":
                given["tile_G3"] = given["tile_G3"] - torch.tensor([0, 0, 1], device=device())
            elif fault == "weights":
                given["factor_P"] = None
            else:
                given["row_2P"] = given["row_2P"].roll(1, dims=1)
            right(*arguments, **given)

        return run

    right = reference_kernels()
    kernels = right.replaced(multiply=wrong(right.multiply))
    with pytest.raises(AssertionError):
        assert_outputs(kernels, "q8_0_planar")


# ---- as executed PTX -------------------------------------------------------------------------

SMALL = [{2: 1, 0: 35, 1: 3}]
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the device instead")


@on_the_cpu
def test_ptx():
    kernels = PtxKernels(ADA).kernels
    assert_outputs(kernels, "q4_0_tiled", SMALL, num_rows=16, slack=2.0)
    assert_sums(kernels, "q8_0_planar", SMALL, num_rows=33, slack=2.0)


@on_the_cpu
@pytest.mark.parametrize(
    "old, new, found",
    [
        (r"cp\.async\.wait_group\s+\d+", "cp.async.wait_group 90", (DataRace, Uninitialised)),
        (r"(mma\.sync\S+ \{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2", AssertionError),
    ],
)
def test_faults_in_ptx_are_found(old, new, found):
    def edit(name: str, text: str) -> str:
        changed = re.sub(old, new, text)
        if changed == text:
            raise LookupError("nothing to change")
        return changed

    with pytest.raises(found):
        assert_outputs(PtxKernels(ADA, edit=edit).kernels, "q8_0_planar", SMALL, num_rows=16)
