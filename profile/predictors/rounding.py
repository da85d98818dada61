"""Rounds a predictor's matrix to its type in the model file.

If the input's second moment is given, nibbles are rounded with error feedback (GPTQ, arXiv
2210.17323): the columns that follow compensate for the error that rounding a column adds to the
product. The scale of a block is ggml's, the value of largest magnitude over -8, so that encoding
the rounded values again gives the same bytes.

Letters: N rows, M values of a row, B values of a block."""

import numpy as np
import torch
from gguf import quants
from torch import Tensor

from hotsplit.artifacts.predictor_file import PredictorMatrix
from hotsplit.files.gguf_file import is_whole_blocks, type_of
from hotsplit.model.weight_types import BY_NAME
from hotsplit.runtime.kernels.stored import unpack
from hotsplit.runtime.weights.matrix import Matrix

BLOCK = 32
DAMPING = 0.01  # relative to the mean of the moment's diagonal, as in GPTQ
F16_LIMIT = 65504.0


def rounded(weight_NM: Tensor, kind: str, moment_MM: Tensor | None = None) -> Matrix:
    """The matrix as stored; `moment_MM` is E[x x^T] of its input (nibbles only)."""
    num_rows, width = weight_NM.shape
    assert is_whole_blocks(width, kind), (width, kind)
    weight_NM = weight_NM.float()
    if kind == "f16":
        data = weight_NM.clamp(-F16_LIMIT, F16_LIMIT).half().contiguous()
        return Matrix(data=data, kind=kind, width=width)
    if BY_NAME[kind].has_nibbles and moment_MM is not None:
        weight_NM = with_feedback(weight_NM, moment_MM)
    values = np.ascontiguousarray(weight_NM.cpu().numpy())
    data = torch.from_numpy(quants.quantize(values, type_of(kind))).to(weight_NM.device)
    return Matrix(data=data, kind=kind, width=width)


def stored(matrix: Matrix) -> PredictorMatrix:
    return PredictorMatrix(matrix.data.cpu().numpy(), matrix.kind)


def values_of(matrix: Matrix) -> Tensor:
    """f32 [N, M]: the values that a reader of the file gets."""
    return unpack(matrix.data, matrix.kind)


def with_feedback(weight_NM: Tensor, moment_MM: Tensor) -> Tensor:
    """f32 [N, M]: values that nibbles represent exactly, close to the weights in the norm that the
    moment defines."""
    inverse = torch.cholesky_inverse(_damped_factor(moment_MM.double()))
    factor_MM = torch.linalg.cholesky(inverse, upper=True).float()
    left_NM, result_NM = weight_NM.clone(), torch.empty_like(weight_NM)
    for start in range(0, weight_NM.shape[1], BLOCK):
        columns = slice(start, start + BLOCK)
        piece_NB, factor_BB = left_NM[:, columns], factor_MM[columns, columns]
        result_NB, error_NB = _block(piece_NB, factor_BB)
        result_NM[:, columns] = result_NB
        left_NM[:, start + BLOCK :] -= error_NB @ factor_MM[columns, start + BLOCK :]
    return result_NM


def _damped_factor(moment_MM: Tensor) -> Tensor:
    """The Cholesky factor of the moment with the least of three dampings that makes it positive
    definite; if none does, that of its diagonal with damping. With fewer tokens than values the
    moment is singular, and rounding can make eigenvalues negative."""
    eye_MM = torch.eye(len(moment_MM), dtype=moment_MM.dtype, device=moment_MM.device)
    unit = moment_MM.diagonal().mean().clamp(min=1e-30)
    for damping in (DAMPING, 10 * DAMPING, 100 * DAMPING):
        factor_MM, failed_at = torch.linalg.cholesky_ex(moment_MM + damping * unit * eye_MM)
        if not failed_at:
            return factor_MM
    return torch.linalg.cholesky(moment_MM.diagonal().clamp(min=0).diag() + unit * eye_MM)


def _block(piece_NB: Tensor, factor_BB: Tensor) -> tuple[Tensor, Tensor]:
    """One block of columns: its rounded values, and the scaled errors for the following columns."""
    left_NB = piece_NB.clone()
    result_NB, error_NB = torch.empty_like(left_NB), torch.empty_like(left_NB)
    place_N = left_NB.abs().argmax(dim=1)
    scale_N = (left_NB.gather(1, place_N[:, None])[:, 0] / -8).half().float()
    divisor_N = torch.where(scale_N == 0, 1.0, scale_N)
    for column in range(left_NB.shape[1]):
        value_N = left_NB[:, column]
        steps_N = (value_N / divisor_N).round().clamp(-8, 7)
        steps_N = torch.where(place_N == column, -8.0, steps_N)  # keeps the scale as it is
        result_N = steps_N * scale_N
        error_N = (value_N - result_N) / factor_BB[column, column]
        left_NB[:, column + 1 :] -= error_N[:, None] * factor_BB[column, column + 1 :]
        result_NB[:, column], error_NB[:, column] = result_N, error_N
    return result_NB, error_NB
