"""Types without kernels whose blocks of 256 values a K-quant holds exactly.

A value of theirs is an integer w of few bits times a product of the block's f16 scale d and a small
integer s of each part of 32 values (dequantize_row_* in ggml-quants.c):

    tq1_0, tq2_0   w d, w = -1, 0 or 1               q2_k: d (w + 1) - d

Finite values that are not exact are refused.

Letters: N blocks."""

from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import type_of

# The type that holds the values of each of these.
SAME_VALUES = {"tq1_0": "q2_k", "tq2_0": "q2_k"}


def with_same_values(rows: np.ndarray, kind: str, label: str) -> np.ndarray:
    """Rows of a type in SAME_VALUES, uint8 [..., row_bytes], as rows of the type that holds them.
    Raises HotsplitError, about `label`, if it does not hold their values exactly."""
    blocks = rows.reshape(-1, GGML_QUANT_SIZES[type_of(kind)][1])
    with np.errstate(over="ignore"):  # compared below
        made = _MAKERS[kind](blocks)
    want = dequantize(blocks, type_of(kind))
    same = dequantize(made, type_of(SAME_VALUES[kind])) == want
    if not bool((same | ~np.isfinite(want)).all()):
        raise HotsplitError(
            f"{label} has scales that {SAME_VALUES[kind]} cannot hold exactly; use a file of"
            " another type"
        )
    return made.reshape(*rows.shape[:-1], -1)


def _ternary(blocks: np.ndarray) -> np.ndarray:
    d_N1 = _halves(blocks[:, -2:])
    kind = "tq1_0" if blocks.shape[1] == GGML_QUANT_SIZES[type_of("tq1_0")][1] else "tq2_0"
    w = _integers(dequantize(blocks, type_of(kind)), d_N1)
    pairs = (w + 1).reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6])[:, None]
    numbers = np.full((len(blocks), 16), 0x11, np.uint8)  # scales of 1, minima of 1
    return np.hstack([numbers, _bytes(pairs.sum(2)), blocks[:, -2:], blocks[:, -2:]])


def _halves(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _integers(values: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """values / unit, int64; 0 where the unit is 0 or not finite."""
    is_usable = np.isfinite(unit) & (unit != 0)
    return np.rint(np.divide(values, unit, out=np.zeros_like(values), where=is_usable)).astype(
        np.int64
    )


def _bytes(numbers: np.ndarray) -> np.ndarray:
    return numbers.reshape(len(numbers), -1).astype(np.uint8)


_MAKERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"tq1_0": _ternary, "tq2_0": _ternary}
