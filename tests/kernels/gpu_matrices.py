"""Matrices of every kind that GPU kernels take, and the bounds that their tests compare with.

Values are compared one by one, each with its own bound: the possible effect of f32 rounding on a
sum of such terms. A sum of n terms in f32, in any order, is off by at most n eps times the sum of
the terms' magnitudes. Errors add up like a random walk, so in practice a correct kernel stays
within sqrt(n) eps times that sum, and a few eps for the terms themselves."""

from typing import Any

import gguf
import numpy as np
import torch
from k_quants import BLOCK_BYTES, WITH_MINIMA, random_rows
from small_blocks import CODED, GROUPS, LIKE_Q6_K
from small_blocks import random_rows as random_small_rows
from torch import Tensor

from hotsplit.files.gguf_file import type_of
from hotsplit.model.blocks import NormKind
from hotsplit.model.rope import RopeScaling, Rotary
from hotsplit.model.spec import Attention, Norm
from hotsplit.model.weight_types import BY_NAME, TABLE_NAMES, TYPES, file_kind
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.kernels.planar import FILE_KIND, planar
from hotsplit.runtime.kernels.stored import unpack
from hotsplit.runtime.weights.matrix import Matrix

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
KINDS = (*FLOATS, "q8_0_planar", "q4_0_planar", "q4_k", "q5_k", "q6_k_planar")
# Kinds that differ from q4_0_planar or q6_k_planar only in how a block is unpacked.
CODED_KINDS = tuple(f"{name}_planar" for name in (*CODED, *LIKE_Q6_K, *TABLE_NAMES, *GROUPS))
# Supported by `unpack` alone.
FILE_KINDS = ("q8_0", "q4_0", "q6_k", *map(file_kind, CODED_KINDS))
TILE_KINDS = tuple(t.kind_in(form) for t in TYPES for form in t.forms if form != "planar")
EPS = torch.finfo(torch.float32).eps
NAN = float("nan")
REFERENCE = reference_kernels()


def heads_of(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    width: int = 32,
    *,
    is_adjacent: bool = False,
    magnitude: float = 1.0,
    epsilon: float = 1e-5,
    norm: NormKind = "rms",
    **more: Any,
) -> Attention:
    """Attention with norms and rotary embeddings, for kernels that get their weights."""
    scaling = RopeScaling(kind="longrope", attn_factor=magnitude)
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=width,
        rotary=Rotary(theta=1e4, pairing="adjacent" if is_adjacent else "halves", scaling=scaling),
        head_norm=Norm(name="", kind=norm, size=width, epsilon=epsilon),
        **more,
    )


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def block_width(kind: str) -> int:
    """Widths must be multiples of this."""
    return max(32, BY_NAME[file_kind(kind)].block_values)


def make_matrix(
    kind: str, num_rows: int, width: int, *, seed: int = 0, lies_apart: bool = False
) -> Matrix:
    """Random rows with values of about 1: contiguous or, if `lies_apart`, the middle third of
    longer rows."""
    data = _file_rows(FILE_KIND.get(kind, kind), num_rows, width, seed)
    if kind in FILE_KIND:
        data, made = planar(data, FILE_KIND[kind])
        assert made == kind
    if lies_apart:
        size = data.shape[1]
        whole = data.repeat(1, 3)
        whole[:, :size] = whole[:, 2 * size :] = 77
        return Matrix(data=whole.to(device())[:, size : 2 * size], kind=kind, width=width)
    return Matrix(data=data.to(device()), kind=kind, width=width)


def make_tiles(kind: str, num_rows: int, width: int) -> tuple[Matrix, Matrix]:
    """(a random matrix in tiles or groups, the same rows as in a file)."""
    form = kind.rpartition("_")[2]
    plain = make_matrix(file_kind(kind), num_rows, width)
    made = torch.empty(num_rows, plain.row_bytes, dtype=torch.uint8)
    assert library.pack_rows(plain.data.cpu(), plain.kind, None, made, form) == kind
    return Matrix(data=made.to(device()), kind=kind, width=width), plain


def _file_rows(kind: str, num_rows: int, width: int, seed: int) -> Tensor:
    if kind in BLOCK_BYTES:
        return torch.from_numpy(random_rows(kind, num_rows, width, 1.0, seed))
    if kind in CODED or kind in GROUPS:
        return torch.from_numpy(random_small_rows(kind, num_rows, width, 1.0, seed))
    values = np.random.default_rng(seed).standard_normal((num_rows, width)).astype(np.float32)
    if kind in FLOATS:
        return torch.from_numpy(values).to(FLOATS[kind])
    return torch.from_numpy(gguf.quants.quantize(values, type_of(kind)))


def vector(size: int, seed: int = 1) -> Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return values.to(device())


def sizes(matrix: Matrix) -> Tensor:
    """f64 [N, D]: the sizes of the terms that make up the values."""
    values = unpack(matrix.data, matrix.kind).double().abs()
    if matrix.kind[:4] in (*WITH_MINIMA, "q4_1", "q5_1"):  # a value is a difference
        values = values + values.amax(dim=1, keepdim=True)
    return values


def rounding(num_terms: int) -> float:
    """The f32 error allowed for a sum of this many terms whose magnitudes add up to 1."""
    return EPS * (4 + num_terms**0.5)


def product_bound(matrix: Matrix, x_D: Tensor, bias_N: Tensor | None) -> Tensor:
    """f64 [N]: the error allowed for each value of a product."""
    size_N = sizes(matrix) @ x_D.double().abs()
    size_N = size_N if bias_N is None else size_N + bias_N.abs()
    return rounding(matrix.width) * size_N


def assert_close(got: Tensor, want: Tensor, bound: Tensor | float) -> None:
    """Asserts that each value is within its bound, and NaN exactly where it is wanted."""
    assert got.shape == want.shape, (got.shape, want.shape)
    got, want = got.double(), want.double()
    assert torch.equal(got.isnan(), want.isnan()), (got, want)
    excess = ((got - want).abs() - bound).nan_to_num(nan=-1.0)
    at = excess.argmax()
    assert excess.max() <= 0, (int(at), float(got.flatten()[at]), float(want.flatten()[at]))
    assert want.nan_to_num().any(), "only zeros are wanted: any kernel would pass"


def assert_same_bits(got_B: Tensor, want_B: Tensor) -> None:
    assert got_B.dtype == want_B.dtype == torch.int32
    assert torch.equal(got_B, want_B), (got_B, want_B)


def both(kernels, name, out, *arguments, **options):
    """(what the kernel writes, what the reference writes) into copies of `out`, the last
    positional argument."""
    got, want = out.clone(), out.clone()
    getattr(kernels, name)(*arguments, got, **options)
    getattr(REFERENCE, name)(*arguments, want, **options)
    return got, want
