"""Checks that the bytes of a tensor give the values they were made from, up to the rounding of the
type.

Letters: N rows, M values of a row."""

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, type_of
from hotsplit.model.weight_types import TYPES

# Bounds of a value's error: relative to the largest magnitude of its block, and near zero.
ERRORS: dict[str, float] = {each.name: each.relative_error for each in TYPES}
TINY: dict[str, float] = {each.name: each.absolute_error for each in TYPES}


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
    block = GGML_QUANT_SIZES[type_of(kind)][0]
    if block > 1:
        scale = scale.reshape(-1, block).max(axis=1, keepdims=True)
        got, want = got.reshape(-1, block), want.reshape(-1, block)
    return bool(
        (np.abs(got - want) <= np.float32(ERRORS[kind]) * scale + np.float32(TINY[kind])).all()
    )
