"""The C++ encoder in this folder, called on torch tensors.

It reads f32, f16 or bf16 weights in place, by rows or by columns, writes the same bytes as ggml,
and finds the largest magnitude in the same pass.

If the C++ is not built, importing this raises HotsplitError.

Letters: N rows, M values of a row."""

import ctypes
import math

import numpy as np
import torch
from torch import Tensor

from hotsplit.files.gguf_file import row_bytes, type_of
from hotsplit.system.shared_libraries import INT, POINTER, SIZE, open_library

LEVELS = ("generic", "avx2", "avx512")  # enum Level in encode.h
SOURCE_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_OK = 0


# hs_encode of encode.h: level, source kind | data, strides, list of rows, sizes | type, limit |
# results
_SOURCE = (INT, INT, POINTER, SIZE, SIZE, POINTER, SIZE, SIZE)
_TAKEN = (*_SOURCE, INT, ctypes.c_float, POINTER, POINTER, POINTER)
_lib = open_library(
    "hotsplit.convert._encode", {"hs_encode_best_level": (INT, ()), "hs_encode": (INT, _TAKEN)}
)


def usable_levels() -> tuple[str, ...]:
    """The instruction sets that this build has and this processor can run, best last."""
    return LEVELS[: _lib.hs_encode_best_level() + 1]


def encode_rows(
    weight_NM: Tensor,
    kind: str,
    *,
    rows: np.ndarray | None = None,
    importance_M: np.ndarray | None = None,
    limit: float = math.inf,
    level: str | None = None,
) -> tuple[np.ndarray, float]:
    """Bytes, uint8 [N, row bytes], and the largest magnitude, which is NaN if there is a NaN.
    weight_NM: f32, f16 or bf16 on the CPU, rows or (without `rows`) columns contiguous; others are
    copied. rows: int64, the rows to encode, in order; None means all. importance_M: f32, finite and
    at least 0, the mean squares of what the columns are multiplied by, by which the search for
    scales weighs errors; None: no such weights. If the magnitude is NaN or reaches `limit`, the
    bytes are meaningless. `level`: one of usable_levels(); None is the best."""
    assert weight_NM.dim() == 2 and weight_NM.is_cpu, (weight_NM.shape, weight_NM.device)
    num_rows, width = weight_NM.shape
    if 1 in weight_NM.shape:  # torch leaves the stride of a single row or column open
        weight_NM = weight_NM.clone(memory_format=torch.contiguous_format)
    is_whole = rows is None and importance_M is None
    is_by_columns = is_whole and weight_NM.stride(0) == 1 and weight_NM.stride(1) != 1
    if not is_by_columns and weight_NM.stride(1) != 1:
        weight_NM = weight_NM.contiguous()
    if rows is not None:
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        assert rows.ndim == 1 and (rows >= 0).all() and (rows < num_rows).all(), rows
        num_rows = len(rows)
    if importance_M is not None:
        importance_M = np.ascontiguousarray(importance_M, dtype=np.float32)
        assert importance_M.shape == (width,), (importance_M.shape, width)
    encoded = np.empty((num_rows, row_bytes(width, kind)), np.uint8)
    largest = ctypes.c_float()
    status = _lib.hs_encode(
        _lib.hs_encode_best_level() if level is None else LEVELS.index(level),
        SOURCE_KINDS[weight_NM.dtype],
        weight_NM.data_ptr(),
        *weight_NM.stride(),
        None if rows is None else rows.ctypes.data,
        num_rows,
        width,
        int(type_of(kind)),
        limit,
        None if importance_M is None else importance_M.ctypes.data,
        encoded.ctypes.data,
        ctypes.byref(largest),
    )
    assert status == _OK, (status, weight_NM.shape, weight_NM.stride(), kind, level)
    return encoded, largest.value
