"""Encodes weights as the bytes of a type, or refuses values that would not survive.

Letters: N rows, M values of a row."""

import math

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from torch import Tensor

from hotsplit.convert.native.library import encode_rows
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import type_of
from hotsplit.model.weight_types import TYPES

LIMITS: dict[str, float] = {
    each.name: each.overflows_at for each in TYPES
}  # the smallest magnitude that is refused
DTYPES = {"f32": np.float32, "f16": np.float16}


def kind_for(shape: tuple[int, ...], outtype: str) -> str:
    """The type of a tensor: f32 for vectors; for matrices whose rows are not whole blocks q8_0, or f16 if
    they are not whole blocks of that either."""
    if len(shape) == 1:
        return "f32"
    kinds = (outtype, "q8_0")
    return next((k for k in kinds if shape[-1] % GGML_QUANT_SIZES[type_of(k)][0] == 0), "f16")


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
    encoded, largest = encode_rows(torch.atleast_2d(tensor), kind, LIMITS[kind], rows=rows)
    if not math.isfinite(largest):
        raise HotsplitError(
            f"{name} has NaN or infinite values; its file is damaged: download it again"
        )
    if largest >= LIMITS[kind]:
        other = "f32" if kind == "bf16" else wider
        raise HotsplitError(
            f"{name} holds a magnitude of {largest:g}, which overflows {kind}; use outtype {other}"
        )
    encoded = encoded.view(DTYPES.get(kind, np.uint8))
    return encoded if tensor.dim() == 2 else encoded.reshape(-1)
