"""Checks that the bytes of a tensor give the values they were made from, up to the rounding of the
type.

Letters: N rows, M values of a row."""

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, type_of

# Bounds of a value's error, relative to the largest magnitude of its block or, for floats, to its
# own magnitude. Blocks add the rounding of their f16 scale; q4_0 goes from -8 to 7, so a value at
# the far end is off by a whole step. The scales of K-quants are fitted and clip outliers: the
# largest errors in 240,000 unusual blocks of each were 0.13, 0.07 and 0.024, about half of the
# bounds.
ERRORS = {
    "f32": 0.0,
    "f16": 2.0**-11,
    "bf16": 2.0**-8,
    "q8_0": 0.5 / 127 + 2.0**-11,
    "q4_0": 1 / 8 + 2.0**-11,
    "q4_k": 0.25,
    "q5_k": 0.15,
    "q6_k": 0.06,
}
# Bounds of the absolute error near zero, where f16 has steps of 2^-24. So has the scale of a block,
# which is multiplied by up to 127 or 8. The scales of K-quants are multiplied by up to 63 * 15,
# 63 * 31 and 128 * 32, and are off by half a step.
TINY = {"f32": 0.0, "f16": 2.0**-24, "bf16": 1e-38, "q8_0": 127 * 2.0**-24, "q4_0": 8 * 2.0**-24,
        "q4_k": 2.0**-15, "q5_k": 2.0**-14, "q6_k": 2.0**-13}  # fmt: skip


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
