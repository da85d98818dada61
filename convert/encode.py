"""Weights encoded as the bytes of a type, refused if they would not survive, and checked to read
back up to the type's rounding.

Letters: N rows, M values of a row."""

import math

import numpy as np
import torch
from torch import Tensor

from hotsplit.convert.native.encoder_library import encode_rows
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, values_of
from hotsplit.model.weight_types import BY_NAME

DTYPES = {"f32": np.float32, "f16": np.float16}


def encode(
    values: np.ndarray | Tensor,
    kind: str,
    name: str,
    *,
    rows: np.ndarray | None = None,
    importance: np.ndarray | None = None,
    wider: str = "bf16",
) -> np.ndarray:
    """The bytes of f32, f16 or bf16 values [M] or [N, M]; each row taken becomes a row of bytes.
    `rows` are the indices of the rows to take, in order; None means all. A transposed view is read
    in place. `importance` are the mean squares [M] of what the columns are multiplied by, by which
    errors are weighed (see native.encoder_library.encode_rows). An error names the tensor and its
    file by `name`, and suggests the outtype `wider` (f32 if `kind` is bf16). Raises HotsplitError
    for NaN and infinite values, and for values that `kind` cannot hold. The bytes are ggml's."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    assert tensor.dim() in (1, 2) and tensor.numel() > 0, tensor.shape
    weight_type = BY_NAME[kind]
    is_searched = importance is not None and not weight_type.is_float
    # The search may take larger scales.
    limit = weight_type.overflows_at / (2 if is_searched else 1)
    encoded, largest = encode_rows(
        torch.atleast_2d(tensor), kind, rows=rows, importance_M=importance, limit=limit
    )
    if not math.isfinite(largest):
        raise not_finite(name)
    if largest >= limit:
        other = "f32" if kind == "bf16" else wider
        raise HotsplitError(
            f"{name} holds a magnitude of {largest:g}, which overflows {kind}; use outtype {other}"
        )
    encoded = encoded.view(DTYPES.get(kind, np.uint8))
    return encoded if tensor.dim() == 2 else encoded.reshape(-1)


def not_finite(name: str) -> HotsplitError:
    return HotsplitError(f"{name} has NaN or infinite values; download its damaged file again")


def restore(
    entry: TensorEntry, want: np.ndarray, name: str, importance: np.ndarray | None = None
) -> np.ndarray:
    """The values of `entry` as f32; it was made from `want`, f32 of the same shape, by
    `importance`. Raises HotsplitError if they differ by more than the type's rounding."""
    values = values_of(entry.read(), entry.kind).reshape(entry.shape)
    if not is_rounding(values, want, entry.kind, importance):
        raise HotsplitError(
            f"{name}: written as {entry.kind}, it does not read back as it was; the file is not"
            " kept: is the disk failing? please report it"
        )
    return values


def is_rounding(
    got: np.ndarray, want: np.ndarray, kind: str, importance: np.ndarray | None = None
) -> bool:
    """True if `got` is `want`, f32 [M] or [N, M], rounded to the type. With importances [M], single
    values may be far off; their mean square error, weighed by these, is within the bound of the
    type."""
    if got.shape != want.shape:
        return False
    is_searched = importance is not None and BY_NAME[kind].block_values > 1
    weight = np.ones(1, np.float32) if importance is None or not is_searched else importance
    scale = np.abs(want)
    weight_type = BY_NAME[kind]
    block = weight_type.block_values
    if block > 1:
        scale = scale.reshape(-1, block).max(axis=1, keepdims=True)
        weight = np.broadcast_to(weight, want.shape).reshape(-1, block)
        got, want = got.reshape(-1, block), want.reshape(-1, block)
    bound = np.float32(weight_type.relative_error) * scale + np.float32(weight_type.absolute_error)
    if is_searched:
        off = weight * (got - want).astype(np.float64) ** 2
        return bool(off.sum() <= (weight * bound.astype(np.float64) ** 2).sum())
    return bool((np.abs(got - want) <= bound).all())
