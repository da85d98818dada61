"""The C++ kernels against float64, for every level of this processor and sizes around block edges.

Kinds: those of model files and the planar ones; test_tiled.py and test_grouped.py test the others.

Shapes: F rows of the matrix, D values in a row, A chosen rows.
"""

import os
import subprocess
import threading
from functools import cache
from typing import NamedTuple

import forked
import gguf
import numpy as np
import pytest
import torch
from k_quants import BLOCK_BYTES, F16_AT, QUANTS_AT, WITH_MINIMA, random_rows
from reference import rounds_to_bf16
from small_blocks import CODED, GROUPS, edge_rows, exact_values
from small_blocks import random_rows as random_small_rows
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.files.table_blocks import table_values
from hotsplit.model.weight_types import BY_NAME, TABLE_NAMES
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.stored import unpack
from hotsplit.system import shared_libraries

EPS = torch.finfo(torch.float32).eps
K_QUANTS = [name for name in BLOCK_BYTES if name not in TABLE_NAMES]
FLOAT_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
QUANT_TYPES = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_0_planar": gguf.GGMLQuantizationType.Q4_0,
    "q8_0_planar": gguf.GGMLQuantizationType.Q8_0,
} | {name: gguf.GGMLQuantizationType[name.upper()] for name in (*K_QUANTS, *CODED)}
LARGEST_TWOS = {"iq1_table": 0, "iq2_table": 0xAA}  # bits of -9 and -43 below the third
PLANAR = ["q4_0_planar", "q8_0_planar"]
BLOCKS = [*QUANT_TYPES, *TABLE_NAMES, *GROUPS]
SMALL_BLOCKS = ["q8_0", "q4_0", *PLANAR]
QUANT_BYTES = {"q4": 16, "q8": 32}  # of a block of 32 values, after its scale
KINDS = [*FLOAT_DTYPES, *BLOCKS]
LEVELS = library.usable_levels()
SIZES = [(kind, D) for kind in FLOAT_DTYPES for D in (1, 31, 32, 33, 100, 256)]
SIZES += [(kind, D) for kind in SMALL_BLOCKS for D in (32, 64, 96, 128, 160, 256)]
SIZES += [(kind, D) for kind in PLANAR for D in (480, 512, 544, 2048)]
SIZES += [(kind, D) for kind in BLOCK_BYTES for D in (256, 768)]
SIZES += [(kind, D) for kind in CODED for D in (32, 224)]
SIZES += [(kind, n * each.block_values) for kind, each in GROUPS.items() for n in (1, 2, 5)]
NUMBERS_OF_ROWS = (1, 2, 7, 64, 300)
WRONG = [torch.zeros_like, lambda y: 0.5 * y, lambda y: y.flip(0)]


class Matrix(NamedTuple):
    """A weight as the kernels take it, and the same numbers in float64."""

    kind: str
    weight: Tensor
    exact_FD: Tensor


def planar(weight: Tensor, kind: str) -> Tensor:
    """Rows of q4_0 or q8_0 blocks with all scales first."""
    blocks = weight.reshape(len(weight), -1, 2 + QUANT_BYTES[kind[:2]])
    return torch.cat([blocks[..., :2].flatten(1), blocks[..., 2:].flatten(1)], dim=1)


def interleaved(weight: Tensor, kind: str) -> Tensor:
    """The inverse of `planar`."""
    count = weight.shape[1] // (2 + QUANT_BYTES[kind[:2]])
    scales, quants = weight[:, : 2 * count], weight[:, 2 * count :]
    parts = [scales.reshape(-1, count, 2), quants.reshape(len(weight), count, -1)]
    return torch.cat(parts, dim=2).flatten(1)


def dequantised(kind: str, weight: Tensor) -> Tensor:
    if kind in FLOAT_DTYPES:
        return weight.double()
    if kind in PLANAR:
        weight = interleaved(weight, kind)
    if kind in GROUPS:
        return torch.from_numpy(exact_values(kind, weight.numpy()))
    if kind in TABLE_NAMES:
        return torch.from_numpy(table_values(weight.numpy(), kind)).double()
    return torch.from_numpy(gguf.quants.dequantize(weight.numpy(), QUANT_TYPES[kind])).double()


def matrix(kind: str, F: int, D: int, seed: int = 0) -> Matrix:
    dense_FD = torch.randn(F, D, generator=torch.Generator().manual_seed(seed))
    if kind in FLOAT_DTYPES:
        weight = dense_FD.to(FLOAT_DTYPES[kind])
    elif kind in BLOCK_BYTES:
        weight = torch.from_numpy(random_rows(kind, F, D, 1.0, seed))
    elif kind in CODED or kind in GROUPS:
        weight = torch.from_numpy(random_small_rows(kind, F, D, 1.0, seed))
    else:
        weight = torch.from_numpy(gguf.quants.quantize(dense_FD.numpy(), QUANT_TYPES[kind]))
        weight = planar(weight, kind) if kind in PLANAR else weight
    return Matrix(kind, weight, dequantised(kind, weight))


def vector(length: int, seed: int = 1) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def indices(F: int) -> list[Tensor | None]:
    """No index, an empty one, one row, every third row, all rows backwards, repeated rows."""
    chosen = [[], [F - 1], range(0, F, 3), range(F - 1, -1, -1), [0, F - 1, F // 2, 0, 0, F - 1]]
    return [None, *(torch.tensor([*rows], dtype=torch.int32) for rows in chosen)]


def taken(exact_FD: Tensor, index_A: Tensor | None) -> Tensor:
    return exact_FD if index_A is None else exact_FD[index_A.long()]


def rounded(kind: str, values: Tensor) -> Tensor:
    """Vectors or coefficients as the current level takes them with rows of bf16, in f32."""
    return values.bfloat16().float() if kind == "bf16" and rounds_to_bf16() else values


def as_taken(kind: str, x_D: Tensor) -> Tensor:
    """x in float64 as dot_rows rounds it: for the block kinds to 16-bit integers (kernels.h), for
    bf16 as `rounded` does."""
    if kind in FLOAT_DTYPES:
        return rounded(kind, x_D).double()
    limit = np.float32(32639)
    x_NB = x_D.reshape(-1, 32).numpy()
    largest_N1 = np.abs(x_NB).max(axis=1, keepdims=True)
    factor_N1 = np.divide(
        limit, largest_N1, out=np.zeros_like(largest_N1), where=largest_N1 >= 1e-30
    )
    scale_N1 = np.where(largest_N1 >= 1e-30, largest_N1 / limit, np.float32(0))
    value_NB = np.rint((x_NB * factor_N1).astype(np.float32))
    return torch.from_numpy(value_NB.astype(np.float64) * scale_N1.astype(np.float64)).flatten()


def magnitudes_of(W: "Matrix") -> Tensor:
    """Upper bounds on the magnitudes that are summed for each weight, float64 [F, D]: dot_rows
    counts q4_0's nibbles from 0 and subtracts 8 times the sum of x afterwards; it also subtracts
    the minima of K-quants."""
    magnitudes_FD = W.exact_FD.abs()
    if W.kind.startswith("q4_0"):
        weight = W.weight if W.kind == "q4_0" else interleaved(W.weight, W.kind)
        bits = weight.reshape(len(weight), -1, 18)[..., :2].contiguous().view(torch.float16)
        magnitudes_FD = magnitudes_FD + 16 * bits.double().abs().expand(-1, -1, 32).flatten(1)
    elif W.kind in WITH_MINIMA:
        zeros = W.weight.reshape(len(W.weight), -1, BLOCK_BYTES[W.kind]).clone()
        zeros[..., QUANTS_AT[W.kind]] = 0  # what is left is minus the minimum
        minimum_FD = dequantised(W.kind, zeros.flatten(1))
        magnitudes_FD = (W.exact_FD - minimum_FD).abs() + minimum_FD.abs()
    return magnitudes_FD


def dot_terms(W: "Matrix", x_D: Tensor, index_A: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The products that dot_rows sums, and bounds on the magnitudes of the terms that it adds."""
    taken_D = as_taken(W.kind, x_D)
    magnitudes_AD = taken(magnitudes_of(W), index_A) * taken_D.abs()
    return taken(W.exact_FD, index_A) * taken_D, magnitudes_AD


def accumulate_terms(
    W: "Matrix", c_A: Tensor, index_A: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same for accumulate_rows, [D, A]."""
    if W.kind in SMALL_BLOCKS:
        return planar_terms(W, c_A, index_A)
    c_A1 = rounded(W.kind, c_A).double()[:, None]
    magnitudes_AD = taken(magnitudes_of(W), index_A) * c_A1.abs()
    return (taken(W.exact_FD, index_A) * c_A1).T, magnitudes_AD.T


def planar_terms(W: "Matrix", c_A: Tensor, index_A: Tensor | None) -> tuple[Tensor, Tensor]:
    """The terms of q8_0 and q4_0: factors c * scale are 16-bit integers (planar_template.h). Quants
    count from 0 in the sum, and 8 or 128 times the factor is subtracted afterwards."""
    weight = taken(W.weight if W.kind in PLANAR else planar(W.weight, W.kind), index_A)
    count = weight.shape[1] // (2 + QUANT_BYTES[W.kind[:2]])
    scale_AB = weight[:, : 2 * count].contiguous().view(torch.float16).float()
    quant_AB = weight[:, 2 * count :].unflatten(1, (count, -1))
    if W.kind.startswith("q8_0"):
        value_AB, zero = quant_AB.view(torch.int8).double(), 128
    else:
        value_AB, zero = torch.cat([quant_AB & 15, quant_AB >> 4], dim=2).double() - 8, 8
    factor_AB = factors_as_taken(c_A[:, None] * scale_AB)[..., None]
    terms_AD = (factor_AB * value_AB).flatten(1)
    return terms_AD.T, (factor_AB.abs() * (value_AB.abs() + 2 * zero)).flatten(1).T


def factors_as_taken(factor_AB: Tensor) -> Tensor:
    """The f32 factors as the kernel rounds them, in float64: in each block column, 64 rows share
    the scale (largest magnitude) / 32704; if the largest is below 2^-99, all are 0."""
    parts = []
    for part in factor_AB.split(64) if len(factor_AB) else ():
        most = part.abs().amax(0)
        is_some = most >= 2.0**-99
        up = torch.where(is_some, torch.tensor(32704.0) / most.where(is_some, torch.ones(())), 0.0)
        parts.append((part * up).double().round() * (most * torch.tensor(1 / 32704.0)).double())
    return torch.cat(parts) if parts else factor_AB.double()


def is_right(got: Tensor, terms: Tensor, magnitudes: Tensor | None = None) -> bool:
    """Whether `got` is terms.sum(-1) within f32 rounding. terms: the float64 products, [..., N].

    Summing N products in f32, in any order, with two scales multiplied in, rounds each term at most
    N + 4 times, by EPS / 2 each (Higham, Accuracy and Stability, 3.1); EPS leaves a factor of two.
    """
    magnitudes = terms.abs() if magnitudes is None else magnitudes
    bound = (terms.shape[-1] + 4) * EPS * magnitudes.sum(-1)
    return bool(((got.double() - terms.sum(-1)).abs() <= bound).all())


@pytest.mark.parametrize("kind, D", SIZES)
def test_dot_rows(level, kind, D):
    for F in NUMBERS_OF_ROWS:
        W, x_D = matrix(kind, F, D), vector(D)
        for index_A in indices(F):
            terms_AD, magnitudes_AD = dot_terms(W, x_D, index_A)
            y_A = library.dot_rows(W.weight, kind, x_D, index_A)
            assert y_A.dtype == torch.float32 and y_A.shape == terms_AD.shape[:1]
            assert is_right(y_A, terms_AD, magnitudes_AD), (F, index_A)


@pytest.mark.parametrize(
    "kind, is_extreme", [*((k, False) for k in BLOCKS), *((k, True) for k in BLOCK_BYTES)]
)
def test_products_have_the_same_bits_at_every_level_and_with_any_vectors(kind, is_extreme):
    """Extreme: all quants and all values of x have the largest magnitude. Then the sum of a q5_k
    part's 32 products may exceed the 24 bits of an f32."""
    F, D, T = 45, 768, 132
    W = matrix(kind, F, D)
    x_TD = torch.stack([vector(D, seed) for seed in range(T)])
    if is_extreme:
        blocks = W.weight.reshape(F, -1, BLOCK_BYTES[kind])
        blocks[..., QUANTS_AT[kind]] = 255
        if kind in LARGEST_TWOS:
            blocks[..., 32:96] = LARGEST_TWOS[kind]
        x_TD = x_TD.sign() * torch.linspace(0.5, 2.0, T)[:, None]
    index_A = torch.arange(F - 1, -1, -2, dtype=torch.int32)
    want = None
    for level in reversed(library.usable_levels()):
        library.set_level(level)
        for counts in ([T], [66, 66], [1, 2, 3, 5, 40, 81]):  # 64 or more: two tiles of K-quants
            parts = x_TD.split(counts)
            got = [library.dot_rows(W.weight, kind, part) for part in parts]
            want = torch.cat(got) if want is None else want
            assert torch.equal(torch.cat(got), want), (level, counts)
            some = [library.dot_rows(W.weight, kind, part, index_A) for part in parts]
            assert torch.equal(torch.cat(some), want[:, index_A.long()]), (level, counts)
    assert want is not None and want.isfinite().all() and want.unique().numel() > T


@pytest.mark.parametrize("kind, D", SIZES)
def test_accumulate_rows(level, kind, D):
    for F in NUMBERS_OF_ROWS:
        W = matrix(kind, F, D)
        for index_A in indices(F):
            c_A = vector(len(taken(W.exact_FD, index_A)))
            y_D = library.accumulate_rows(W.weight, kind, c_A, index_A)
            assert y_D.dtype == torch.float32 and y_D.shape == (D,)
            assert is_right(y_D, *accumulate_terms(W, c_A, index_A)), (F, index_A)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_strided(level, kind):
    """Rows of three interleaved matrices, like a neuron's gate, up and down."""
    D = 256 if kind in BLOCK_BYTES or kind in GROUPS else 96
    matrices = [matrix(kind, 9, D, seed) for seed in range(3)]
    whole = torch.cat([W.weight for W in matrices], dim=1)
    x_D, c_F, width = vector(D), vector(9), matrices[0].weight.shape[1]
    for number, W in enumerate(matrices):
        apart = whole[:, number * width : (number + 1) * width]
        for index_A in indices(9):
            y_A = library.dot_rows(W.weight, kind, x_D, index_A)
            assert torch.equal(library.dot_rows(apart, kind, x_D, index_A), y_A)
            c_A = c_F[: len(y_A)]
            y_D = library.accumulate_rows(W.weight, kind, c_A, index_A)
            assert torch.equal(library.accumulate_rows(apart, kind, c_A, index_A), y_D)
            assert is_unpacked(W, unpacked(W._replace(weight=apart), index_A), index_A)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in PLANAR])
def test_packed_rows_are_the_chosen_ones(kind):
    W = matrix(kind, 300, 512 if kind in BLOCK_BYTES or kind in GROUPS else 544)
    raw = W.weight.view(torch.uint8) if kind in FLOAT_DTYPES else W.weight
    is_planar = f"{kind}_planar" in PLANAR
    want = planar(raw, kind) if is_planar else raw
    for index_A in indices(300):
        chosen = taken(want, index_A)
        whole = torch.zeros(len(chosen), raw.shape[1] + 7, dtype=torch.uint8)
        packed = library.pack_rows(W.weight, kind, index_A, whole[:, 3:-4])
        assert packed == (f"{kind}_planar" if is_planar else kind)
        assert torch.equal(whole[:, 3:-4], chosen)
        assert not whole[:, :3].any() and not whole[:, -4:].any()
    with pytest.raises(IndexError, match="rows 0 to 299"):
        out, index_A = torch.zeros(1, raw.shape[1], dtype=torch.uint8), torch.tensor([300])
        library.pack_rows(W.weight, kind, index_A.int(), out)
    for bad in (torch.zeros(299, raw.shape[1], dtype=torch.uint8), torch.zeros(300, 544)):
        with pytest.raises(ValueError, match="out: wanted"):
            library.pack_rows(W.weight, kind, None, bad)


def unpacked(W: Matrix, index_A: Tensor | None = None) -> Tensor:
    count = len(W.weight) if index_A is None else len(index_A)
    out_AD = torch.full((count, W.exact_FD.shape[1]), torch.nan)
    library.unpack_rows(W.weight, W.kind, out_AD, index_A)
    return out_AD


def is_unpacked(W: Matrix, got_AD: Tensor, index_A: Tensor | None = None) -> bool:
    """Whether these are the rows, bit for bit: a value of q8_0 or q4_0 is an 11-bit scale times an
    integer of at most 8 bits, which f32 holds exactly. K-quants are rounded on the way and get a
    bound."""
    exact_AD = taken(W.exact_FD, index_A)
    if W.kind not in BLOCK_BYTES:
        return torch.equal(got_AD, exact_AD.float())
    bound_AD = 2 * torch.finfo(got_AD.dtype).eps * taken(magnitudes_of(W), index_A)
    return bool(((got_AD.double() - exact_AD).abs() <= bound_AD).all())


@pytest.mark.parametrize("kind, D", SIZES)
def test_unpack_rows(level, kind, D):
    for F in (1, 7, 64):
        W = matrix(kind, F, D)
        for index_A in indices(F):
            assert is_unpacked(W, unpacked(W, index_A), index_A), (F, index_A)


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(8, 63),
        torch.zeros(7, 64),
        torch.zeros(8, 64).half(),
        torch.zeros(64, 8).T,
        torch.zeros(8, 128)[:, ::2],
        torch.zeros(8, 64, device="meta"),
    ],
)
def test_a_wrong_output_tensor_is_refused(out):
    with pytest.raises(ValueError, match="out_AD"):
        library.unpack_rows(torch.ones(8, 64), "f32", out)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_the_measure_rejects_wrong_results(kind, wrong):
    W, x_D, c_F = matrix(kind, 64, 256), vector(256), vector(64)
    right_FD = unpacked(W)
    assert is_unpacked(W, right_FD) and not is_unpacked(W, wrong(right_FD))
    y_F, y_D = library.dot_rows(W.weight, kind, x_D), library.accumulate_rows(W.weight, kind, c_F)
    assert is_right(y_F, *dot_terms(W, x_D)) and not is_right(wrong(y_F), *dot_terms(W, x_D))
    assert is_right(y_D, *accumulate_terms(W, c_F))
    assert not is_right(wrong(y_D), *accumulate_terms(W, c_F))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_every_half_precision_number_is_unpacked_exactly(level, kind):
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    weight = bits.view(FLOAT_DTYPES[kind])[None].clone()
    want_D = weight[0].float()
    if kind == "bf16" and rounds_to_bf16():  # the instruction reads denormals as 0
        want_D[want_D.abs() < 2**-126] = 0.0
    y_D = library.accumulate_rows(weight, kind, torch.ones(1))
    assert torch.equal(y_D.nan_to_num(nan=0.5), want_D.nan_to_num(nan=0.5))
    tail_A1 = weight.reshape(-1, 1)  # D = 1: the path for the remainder
    y_A = library.dot_rows(tail_A1, kind, torch.ones(1))
    assert torch.equal(y_A.nan_to_num(nan=0.5), want_D.nan_to_num(nan=0.5))


@pytest.mark.parametrize("kind", SMALL_BLOCKS)
def test_every_scale_and_every_quant_is_unpacked_exactly(level, kind):
    """All 63,488 finite scales, each with different random quants."""
    bits = np.arange(2**16, dtype=np.uint16)
    scales = bits[np.isfinite(bits.view(np.float16))].view(np.uint8).reshape(-1, 2)
    size = (len(scales), QUANT_BYTES[kind[:2]])
    quants = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    weight = torch.from_numpy(np.concatenate([scales, quants], axis=1).reshape(1, -1))
    weight = planar(weight, kind) if kind in PLANAR else weight
    want_D = dequantised(kind, weight)[0]
    unpacked_1D = torch.empty(1, len(want_D))
    library.unpack_rows(weight, kind, unpacked_1D)
    assert torch.equal(unpacked_1D[0].double(), want_D)
    y_D = library.accumulate_rows(weight, kind, torch.ones(1))
    # A factor is an integer times largest / 32704, which f32 rounds.
    rounded = 3 * torch.finfo(torch.float32).eps
    assert ((y_D.double() - want_D).abs() <= rounded * want_D.abs()).all()


@cache
def k_quants_of_many_numbers(kind: str) -> tuple[Tensor, Tensor]:
    """One row with every 17th of the finite f16 numbers and those of both ends, each in a block of
    different random bits, and its values. Other tests unpack all numbers."""
    bits = np.arange(2**16, dtype=np.uint16)
    finite = bits[np.isfinite(bits.view(np.float16))].reshape(2, -1)
    numbers = np.concatenate(
        [finite[:, ::17].ravel(), finite[:, :9].ravel(), finite[:, -9:].ravel()]
    )
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (len(numbers), BLOCK_BYTES[kind]), dtype=np.uint8)
    for at in F16_AT[kind]:
        blocks[:, at : at + 2] = random.permutation(numbers)[:, None].view(np.uint8)
    weight = torch.from_numpy(blocks.reshape(1, -1))
    return weight, dequantised(kind, weight)[0].float()


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_numbers_of_every_magnitude_in_k_quants_are_unpacked_exactly(level, kind):
    """Zeros, negative ones too, denormals and the largest: every bit of the values is gguf's."""
    weight, want_D = k_quants_of_many_numbers(kind)
    assert torch.equal(library.accumulate_rows(weight, kind, torch.ones(1)), want_D)
    out_1D = torch.empty(1, len(want_D))
    library.unpack_rows(weight, kind, out_1D)
    assert torch.equal(out_1D[0].view(torch.int32), want_D.view(torch.int32))
    if level == library.usable_levels()[0]:
        assert torch.equal(unpack(weight, kind)[0].view(torch.int32), want_D.view(torch.int32))


@pytest.mark.parametrize("kind", [*CODED, *GROUPS])
def test_edge_blocks_are_unpacked_to_the_bit(level, kind):
    each = BY_NAME[kind]
    weight = torch.from_numpy(edge_rows(kind)[:: 9 if each.halves else 1].copy())
    want_FD = dequantised(kind, weight).float()
    assert torch.equal(unpack(weight, kind).view(torch.int32), want_FD.view(torch.int32))
    out_FD = torch.empty(len(weight), each.block_values)
    library.unpack_rows(weight, kind, out_FD)
    assert torch.equal(out_FD.view(torch.int32), want_FD.view(torch.int32))
    tiles = torch.empty_like(weight[: len(weight) // 16 * 16])
    tiled_kind = library.pack_rows(weight[: len(tiles)], kind, None, tiles, form="tiled")
    library.unpack_rows(tiles, tiled_kind, out_FD[: len(tiles)].zero_())
    assert torch.equal(out_FD.view(torch.int32), want_FD.view(torch.int32))


@pytest.mark.parametrize("kind", FLOAT_DTYPES)
@pytest.mark.parametrize("num_vectors", [1, 2, 7])
def test_products_of_rows_without_columns_are_zero(level, kind, num_vectors):
    weight = torch.zeros(3, 0, dtype=FLOAT_DTYPES[kind])
    assert torch.equal(
        library.dot_rows(weight, kind, torch.zeros(num_vectors, 0)), torch.zeros(num_vectors, 3)
    )


@pytest.mark.parametrize("num_threads", [0, -1, 1025, 2**40])
def test_an_impossible_thread_count_is_refused(num_threads):
    with pytest.raises(ValueError, match="1 to 1024"):
        library.set_threads(num_threads)


def test_no_level_is_missing_because_its_probe_failed():
    """The tests above cover only the levels that the probe accepted."""
    assert library._lib.hs_faulty_level() is None


def test_rows_beyond_two_gib_are_found(level):
    """The matrix takes 4.3 GiB of address space, but only its last row is ever touched."""
    F, D = 4_500_000, 256
    weight = torch.empty(F, D)
    weight[-1] = vector(D)
    last = torch.tensor([F - 1], dtype=torch.int32)
    assert torch.equal(library.accumulate_rows(weight, "f32", torch.ones(1), last), weight[-1])
    y_A = library.dot_rows(weight, "f32", vector(D, seed=2), last)
    assert is_right(y_A, (weight[-1:].double() * vector(D, seed=2).double()))


@pytest.mark.parametrize("row", [-1, 7, -(2**31), 2**31 - 1])
def test_an_index_out_of_range_is_refused(row):
    weight, x_D = torch.ones(7, 32), torch.ones(32)
    index_A = torch.tensor([0, row, 6], dtype=torch.int32)
    with pytest.raises(IndexError, match="rows 0 to 6"):
        library.dot_rows(weight, "f32", x_D, index_A)
    with pytest.raises(IndexError, match="rows 0 to 6"):
        library.accumulate_rows(weight, "f32", torch.ones(3), index_A)
    with pytest.raises(IndexError, match="rows 0 to 6"):
        library.unpack_rows(weight, "f32", torch.zeros(3, 32), index_A)


@pytest.mark.parametrize("kind", QUANT_TYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_with_nan_or_infinity_gives_nan(level, kind, bad):
    W, x_D = matrix(kind, 5, 256), vector(256)
    x_D[40] = bad
    assert library.dot_rows(W.weight, kind, x_D).isnan().all()


@pytest.mark.parametrize("kind", QUANT_TYPES)
def test_quantising_the_vector_costs_less_than_an_f16_would(level, kind):
    W, x_D = matrix(kind, 300, 2048), vector(2048) * torch.logspace(-3, 3, 2048)
    got, want = library.dot_rows(W.weight, kind, x_D).double(), W.exact_FD @ x_D.double()
    assert (got - want).norm() / want.norm() < torch.finfo(torch.float16).eps / 16
    tiny = library.dot_rows(W.weight, kind, torch.full((2048,), 1e-31))
    assert torch.equal(tiny, torch.zeros(300))


@pytest.mark.parametrize("kind", PLANAR)
def test_rounding_the_factors_of_a_sum_costs_less_than_an_f16_would(level, kind):
    """Also where coefficients of one group differ by up to six orders of magnitude."""
    W, c_F = matrix(kind, 300, 2048), vector(300) * torch.logspace(-3, 3, 300)
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    for c in (c_F, c_F[shuffled]):
        got, want = library.accumulate_rows(W.weight, kind, c).double(), W.exact_FD.T @ c.double()
        assert (got - want).norm() / want.norm() < torch.finfo(torch.float16).eps / 16
    tiny = library.accumulate_rows(W.weight, kind, torch.full((300,), 1e-38))
    assert torch.equal(tiny, torch.zeros(2048))


@pytest.mark.parametrize("kind", QUANT_TYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_coefficient_that_is_not_finite_reaches_every_sum(level, kind, bad):
    W, c_F = matrix(kind, 5, 256), vector(5)
    for a in (0, 4):  # in a group of four rows, and alone
        c_F[a] = bad
        assert not library.accumulate_rows(W.weight, kind, c_F).isfinite().any()
        c_F[a] = 1.0


@pytest.mark.parametrize("kind", PLANAR)
@pytest.mark.parametrize("size", [3.4e38, 1.0, 1e-27])
def test_factors_of_every_magnitude_are_kept(level, kind, size):
    """One row of scale 1 with quants 0, 1 and -1: a sum is 0 or plus or minus the coefficient."""
    value_D = torch.tensor([0.0, 1.0, -1.0, 1.0]).repeat(64)
    if kind == "q8_0_planar":
        quants = value_D.to(torch.int8).view(torch.uint8)
    else:
        nibble_BV = (value_D + 8).to(torch.uint8).unflatten(0, (-1, 32))
        quants = (nibble_BV[:, :16] | nibble_BV[:, 16:] << 4).flatten()
    row = torch.cat([torch.ones(8).half().view(torch.uint8), quants])[None]
    got = library.accumulate_rows(row, kind, torch.tensor([size])).double()
    assert ((got - size * value_D.double()).abs() <= size * 2**-15).all()


GOOD = {"weight": torch.ones(8, 64), "kind": "f32", "index_A": torch.arange(8, dtype=torch.int32)}


@pytest.mark.parametrize(
    "bad, match",
    [
        ({"kind": "q3_z"}, "unknown kind"),
        ({"kind": "f16"}, "f16 weight"),
        ({"weight": torch.ones(64)}, "weight"),
        ({"weight": torch.ones(64, 8).T}, "weight"),
        ({"weight": torch.ones(8, 128)[:, ::2]}, "weight"),
        ({"weight": torch.ones(8, 64, device="meta")}, "weight"),
        ({"weight": torch.ones(1, 64).expand(8, 64)}, "weight"),
        ({"kind": "q8_0", "weight": torch.ones(8, 68, dtype=torch.int8)}, "q8_0 weight"),
        ({"kind": "q8_0", "weight": torch.ones(8, 67, dtype=torch.uint8)}, "34-byte blocks"),
        ({"kind": "q4_0", "weight": torch.ones(8, 34, dtype=torch.uint8)}, "18-byte blocks"),
        ({"kind": "q4_k", "weight": torch.ones(8, 72, dtype=torch.uint8)}, "144-byte blocks"),
        ({"kind": "q6_k", "weight": torch.ones(8, 144, dtype=torch.uint8)}, "210-byte blocks"),
        ({"vector": torch.ones(8, 8)}, "^x: |coefficient_A"),
        ({"vector": torch.ones(65)}, "^x: |coefficient_A"),
        ({"vector": torch.ones(64).double()}, "^x: |coefficient_A"),
        ({"vector": torch.ones(128)[::2]}, "^x: |coefficient_A"),
        ({"vector": torch.ones(16)[::2]}, "^x: |coefficient_A"),
        ({"index_A": torch.arange(8)}, "index_A"),
        ({"index_A": torch.arange(16, dtype=torch.int32)[::2]}, "index_A"),
        ({"index_A": torch.zeros(2, 4, dtype=torch.int32)}, "index_A"),
    ],
)
def test_wrong_arguments_are_refused(bad, match):
    good = {k: bad.get(k, v) for k, v in GOOD.items()}
    weight, kind, index_A = good["weight"], good["kind"], good["index_A"]
    with pytest.raises(ValueError, match=match):
        library.dot_rows(weight, kind, bad.get("vector", torch.ones(64)), index_A)
    with pytest.raises(ValueError, match=match):
        library.accumulate_rows(weight, kind, bad.get("vector", torch.ones(8)), index_A)
    if "vector" not in bad:
        with pytest.raises(ValueError, match=match):
            library.unpack_rows(weight, kind, torch.zeros(8, 64), index_A)


@pytest.mark.parametrize("columns, codes", [(33, (3, 4, 8, 99, -1)), (224, (5, 6, 7)), (0, (99,))])
def test_the_library_itself_refuses_partial_blocks_and_unknown_kinds(columns, codes):
    lib, y = library._lib, torch.zeros(columns + 1)
    weight, x = torch.zeros(1, 256, dtype=torch.uint8), torch.zeros(columns)
    of_weight = weight.data_ptr(), 256, 1, columns
    of_rows = None, 1, y.data_ptr()
    for code in codes:  # no whole blocks, or no such kind
        status = lib.hs_dot_rows(code, *of_weight, x.data_ptr(), 1, *of_rows)
        assert status == library._BAD_ARGUMENT
        status = lib.hs_accumulate_rows(code, *of_weight, x.data_ptr(), *of_rows)
        assert status == library._BAD_ARGUMENT


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import hotsplit.runtime.kernels.cpu.library as library\n" + code
    return forked.run_python(code, env=os.environ | environment)


@pytest.mark.parametrize("name", LEVELS)
def test_the_environment_chooses_the_level(name):
    done = run_python("print(library.level())", HOTSPLIT_CPU_LEVEL=name)
    assert done.stdout.strip() == name, done.stderr


@pytest.mark.parametrize("name", ["avx1024", "", "AVX2"])
def test_nonsense_in_the_environment_is_refused(name):
    done = run_python("", HOTSPLIT_CPU_LEVEL=name)
    assert done.returncode != 0
    assert f"HotsplitError: HOTSPLIT_CPU_LEVEL={name!r}: must be one of" in done.stderr


def test_a_level_this_machine_lacks_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="there is no CPU level 'sse9'"):
        library.set_level("sse9")
    monkeypatch.setattr(library, "LEVELS", ("sse9", *library.LEVELS))  # known, but not here
    monkeypatch.setenv("HOTSPLIT_CPU_LEVEL", "sse9")
    with pytest.raises(HotsplitError, match="CPU_LEVEL='sse9': this machine cannot run"):
        library._use_level_from_environment()


def test_without_the_shared_library(monkeypatch):
    monkeypatch.setattr(shared_libraries, "find_spec", lambda name: None)
    with pytest.raises(HotsplitError, match=r"missing: .* make build .* C\+\+ compiler"):
        library._load()


def test_the_kernels_work_after_a_fork():
    done = run_python(
        """
import os, torch
library.set_threads(3)
weight, x = torch.randn(300, 2048), torch.randn(2048)
before = library.dot_rows(weight, "f32", x)
for generation in range(2):
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for _ in range(100):
        after = library.dot_rows(weight, "f32", x)
    assert library.num_threads() == 3
    assert len(os.listdir("/proc/self/task")) == 3
    assert after.tolist() == before.tolist()
print("the same", flush=True)
os._exit(0)
"""
    )
    assert done.returncode == 0 and done.stdout == "the same\n", done.stderr


def test_callers_in_several_threads_do_not_mix_their_results():
    library.set_threads(3)
    W = matrix("f32", 64, 2048)
    x_ND = torch.randn(4, 2048, generator=torch.Generator().manual_seed(3))
    want = [library.dot_rows(W.weight, "f32", x_D) for x_D in x_ND]
    wrong = []

    def call(n: int) -> None:
        for _ in range(300):
            if not torch.equal(library.dot_rows(W.weight, "f32", x_ND[n]), want[n]):
                wrong.append(n)

    callers = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
