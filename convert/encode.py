"""Weights encoded as the bytes of a type, refused if they would not survive, and checked to read back
up to the type's rounding.

Letters: N rows, M values of a row."""

import math

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from hotsplit.convert.native.library import encode_rows
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, type_of
from hotsplit.model.weight_types import BY_NAME

DTYPES = {"f32": np.float32, "f16": np.float16}


def encode(
    values: np.ndarray | Tensor, kind: str, name: str, *, rows: np.ndarray | None = None,
    wider: str = "bf16",
) -> np.ndarray:  # fmt: skip
    """The bytes of f32, f16 or bf16 values [M] or [N, M]; each row taken becomes a row of bytes.

    `rows` are the indices of the rows to take, in order; None means all. A transposed view is read
    in place. An error names the tensor and its file by `name`, and suggests the outtype `wider`
    (f32 if `kind` is bf16). Raises HotsplitError for NaN and infinite values, and for
    values that `kind` cannot hold. The bytes are those of gguf.quants or, for K-quants, of ggml."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    assert tensor.dim() in (1, 2) and tensor.numel() > 0, tensor.shape
    encoded, largest = encode_rows(torch.atleast_2d(tensor), kind, rows=rows)
    if not math.isfinite(largest):
        raise not_finite(name)
    if largest >= BY_NAME[kind].overflows_at:
        other = "f32" if kind == "bf16" else wider
        raise HotsplitError(
            f"{name} holds a magnitude of {largest:g}, which overflows {kind}; use outtype {other}"
        )
    encoded = encoded.view(DTYPES.get(kind, np.uint8))
    return encoded if tensor.dim() == 2 else encoded.reshape(-1)


def not_finite(name: str) -> HotsplitError:
    return HotsplitError(
        f"{name} has NaN or infinite values; its file is damaged: download it again"
    )


def restore(entry: TensorEntry, want: np.ndarray, name: str) -> np.ndarray:
    """The values of `entry` as f32; it was made from `want`, f32 of the same shape.

    Raises HotsplitError if they differ by more than the type's rounding."""
    values = dequantize(entry.read(), type_of(entry.kind)).reshape(entry.shape)
    if not is_rounding(values, want, entry.kind):
        raise HotsplitError(
            f"{name}: written as {entry.kind}, it does not read back as it was; the file is not"
            " kept: is the disk failing? please report it"
        )
    return values


def is_rounding(got: np.ndarray, want: np.ndarray, kind: str) -> bool:
    """True if `got` is `want`, f32 [M] or [N, M], rounded to the type."""
    if got.shape != want.shape:
        return False
    scale = np.abs(want)
    weight_type = BY_NAME[kind]
    block = weight_type.block_values
    if block > 1:
        scale = scale.reshape(-1, block).max(axis=1, keepdims=True)
        got, want = got.reshape(-1, block), want.reshape(-1, block)
    bound = np.float32(weight_type.relative_error) * scale + np.float32(weight_type.absolute_error)
    return bool((np.abs(got - want) <= bound).all())
