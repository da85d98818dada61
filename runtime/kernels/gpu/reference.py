"""Parts of the GPU kernels' references in float64 with torch: slow and plain.

Letters: see kernels.py."""

import torch
from torch import Tensor

from hotsplit.runtime.kernels import stored
from hotsplit.runtime.kernels.stored import StoredMatrix


def positions_of(cache_BPKW: Tensor, block_N: Tensor, count: int) -> Tensor:
    """At least the first `count` positions [C, K, W] of a sequence with these blocks."""
    used = -(-count // cache_BPKW.shape[1])
    return cache_BPKW[block_N[:used].long()].flatten(0, 1)


def rows_of(matrix: StoredMatrix, index_A: Tensor | None = None) -> Tensor:
    """f64 [A, D]."""
    if index_A is None:
        return stored.unpack(matrix.data, matrix.kind).double()
    return stored.unpack_chosen(matrix.data, matrix.kind, index_A.long()).double()


def product(matrix: StoredMatrix, bias_N: Tensor | None, x_D: Tensor) -> Tensor:
    """f64 [N]: W x + bias."""
    y_N = rows_of(matrix) @ x_D.double()
    return y_N if bias_N is None else y_N + bias_N


def parts_of_heads(
    matrix: StoredMatrix, x_TD: Tensor, out_TN: Tensor, num_heads: int
) -> tuple[Tensor, Tensor]:
    """(what each head of a matrix with the rows of one after those of another multiplies
    [..., H, D], what it writes [..., H, N]): the first values of its part of a row."""
    x, out = (rows.unflatten(-1, (num_heads, -1)) for rows in (x_TD, out_TN))
    return x[..., : matrix.width], out[..., : matrix.num_rows // num_heads]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight


def soft_capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
