"""f32 weights to the bytes of a type, or a refusal where they would not survive.

Letters: N rows, M values of a row."""

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf.quants import quantize

from sparkinfer.errors import SparkinferError
from sparkinfer.gguf_file import type_of

# The smallest magnitude that becomes infinite: where rounding leaves the type, and for blocks
# where their f16 scale (the largest magnitude over 127 or 8) does.
F16_LIMIT = 65520.0
LIMITS = {
    "f32": np.inf,
    "f16": F16_LIMIT,
    "bf16": float.fromhex("0x1.FFp127"),
    "q8_0": 127 * F16_LIMIT,
    "q4_0": 8 * F16_LIMIT,
}


def kind_for(shape: tuple[int, ...], outtype: str) -> str:
    """The type a tensor gets: vectors stay f32, rows that are no whole blocks become f16."""
    if len(shape) == 1:
        return "f32"
    block, _ = GGML_QUANT_SIZES[type_of(outtype)]
    return outtype if shape[-1] % block == 0 else "f16"


def encode(values: np.ndarray, kind: str, name: str, *, wider: str = "bf16") -> np.ndarray:
    """Bytes of f32 [M] or [N, M], in an array whose rows are the rows.

    `name` says in a refusal which tensor, and of which file, and `wider` which outtype would hold
    what `kind` does not. Raises SparkinferError for NaN and infinite values, and for values that
    `kind` cannot hold. The bytes are those of gguf.quants; f16 and bf16 come from torch, which
    rounds to nearest even too, 9 and 4 times as fast (f32 [2048, 4096], one core)."""
    assert values.dtype == np.float32 and values.ndim <= 2, (values.dtype, values.shape)
    largest = max(float(values.max()), -float(values.min()))
    if not np.isfinite(largest):
        raise SparkinferError(
            f"{name} has NaN or infinite values; its file is damaged: get it again"
        )
    if largest >= LIMITS[kind]:
        other = "f32" if kind == "bf16" else wider
        raise SparkinferError(
            f"{name} holds a magnitude of {largest:g}, which overflows {kind}; use outtype {other}"
        )
    values = np.ascontiguousarray(values)
    if kind == "f16":
        return torch.from_numpy(values).to(torch.float16).numpy()
    if kind == "bf16":
        return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8).numpy()
    # The inverse scale of a block of denormals is infinite; its scale is zero, and so is its value.
    with np.errstate(over="ignore", invalid="ignore"):
        return quantize(values, type_of(kind))
