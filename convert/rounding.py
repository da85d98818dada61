"""Are the bytes of a tensor the values they were made from, to the rounding of the type?

Letters: N rows, M values of a row."""

import numpy as np
from gguf.quants import dequantize

from sparkinfer.errors import SparkinferError
from sparkinfer.gguf_file import TensorEntry, type_of

BLOCK = 32
# The largest error of a value, as a share of the largest magnitude of its block of 32 values, or
# for floats of its own. Blocks add the rounding of their f16 scale; q4_0 goes from -8 to 7, so
# that the far end is a step off.
ERRORS = {
    "f32": 0.0,
    "f16": 2.0**-11,
    "bf16": 2.0**-8,
    "q8_0": 0.5 / 127 + 2.0**-11,
    "q4_0": 1 / 8 + 2.0**-11,
    **dict.fromkeys(("q4_k", "q5_k", "q6_k"), 0.0),  # only ever copied
}
# f16 has steps of 2^-24 near zero, and so has the scale of a block: up to 127 of them a value.
TINY = {"f32": 0.0, "f16": 2.0**-24, "bf16": 1e-38, "q8_0": 127 * 2.0**-24, "q4_0": 8 * 2.0**-24,
        "q4_k": 0.0, "q5_k": 0.0, "q6_k": 0.0}  # fmt: skip


def restore(entry: TensorEntry, want: np.ndarray, name: str) -> np.ndarray:
    """f32 values of `entry`, which were made from `want`, f32 of the same shape.

    Raises SparkinferError where they differ by more than the type's rounding."""
    values = dequantize(entry.read(), type_of(entry.kind)).reshape(entry.shape)
    if not is_rounding(values, want, entry.kind):
        raise SparkinferError(
            f"{name}: written as {entry.kind}, it does not read back as it was; the file is not"
            " kept: is the disk failing? please report it"
        )
    return values


def is_rounding(got: np.ndarray, want: np.ndarray, kind: str) -> bool:
    """Whether `got` is `want`, f32 [M] or [N, M], rounded to the type."""
    if got.shape != want.shape:
        return False
    scale = np.abs(want)
    if kind in ("q8_0", "q4_0"):
        scale = scale.reshape(-1, BLOCK).max(axis=1, keepdims=True)
        got, want = got.reshape(-1, BLOCK), want.reshape(-1, BLOCK)
    return bool(
        (np.abs(got - want) <= np.float32(ERRORS[kind]) * scale + np.float32(TINY[kind])).all()
    )
