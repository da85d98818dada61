"""Types without kernels whose blocks of 256 values a K-quant holds exactly.

A value of theirs is an integer w of few bits times a product of the block's f16 scale d and a small
integer s of each part of 32 values (dequantize_row_* in ggml-quants.c):

    tq1_0, tq2_0   w d, w = -1, 0 or 1               q2_k: d (w + 1) - d
    iq3_s          w d s, w = -15, -13 ... 15        q5_k: d s (w + 16) - 16 d s
    iq3_xxs        w (d / 2) s, |w| up to 31         q6_k: (d / 2) s w

s = 1, 3 ... 31. Halves and sixteenfold values of f16 numbers are exact, except where d is below
2^-14 or above 4094, which no model has; finite values that are not exact are refused. Why:
docs/decisions/023.

Letters: N blocks."""

from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import type_of

# The type that holds the values of each of these.
SAME_VALUES = {"tq1_0": "q2_k", "tq2_0": "q2_k", "iq3_s": "q5_k", "iq3_xxs": "q6_k"}


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


def _iq3_s(blocks: np.ndarray) -> np.ndarray:
    d_N1, nibbles = _halves(blocks[:, :2]), blocks[:, -4:, None] >> np.array([0, 4], np.uint8)
    s = 2 * (nibbles & 15).reshape(-1, 8) + 1
    w = _integers(dequantize(blocks, type_of("iq3_s")), np.repeat(d_N1 * s, 32, axis=1))
    quants = (w + 16).reshape(-1, 4, 2, 32)
    fifth = ((quants >> 4).reshape(-1, 8, 32) << np.arange(8)[:, None]).sum(1)
    quants &= 15
    # Scales and minima are equal: numbers 4 to 7 have their nibbles twice, and their upper bits.
    low = s[:, :4] | s[:, 4:] >> 4 << 6
    both = (s[:, 4:] & 15) * 17
    halves = np.hstack([d_N1, 16 * d_N1]).astype(np.float16).view(np.uint8)
    parts = [low, low, both, fifth, quants[:, :, 0] | quants[:, :, 1] << 4]
    return np.hstack([halves, *map(_bytes, parts)])


def _iq3_xxs(blocks: np.ndarray) -> np.ndarray:
    d_N1 = _halves(blocks[:, :2])
    words = np.ascontiguousarray(blocks[:, -32:]).view("<u4")
    s = 2 * (words >> 28).astype(np.int64) + 1
    w = _integers(dequantize(blocks, type_of("iq3_xxs")), np.repeat(d_N1 * s / 2, 32, axis=1))
    quants = (w + 32).reshape(-1, 2, 4, 32)
    nibbles = quants[:, :, :2] & 15 | (quants[:, :, 2:] & 15) << 4
    upper = (quants >> 4 << np.array([0, 2, 4, 6])[:, None]).sum(2)
    scale = (d_N1 / 2).astype(np.float16).view(np.uint8)
    return np.hstack([_bytes(nibbles), _bytes(upper), _bytes(np.repeat(s, 2, axis=1)), scale])


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


_MAKERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tq1_0": _ternary,
    "tq2_0": _ternary,
    "iq3_s": _iq3_s,
    "iq3_xxs": _iq3_xxs,
}
