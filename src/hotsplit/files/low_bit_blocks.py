"""Blocks of a file's types of one, two and four bits as blocks of their types in memory, with the
same values (weight_types.IN_MEMORY), and the values of those that `gguf` does not unpack.

The layouts are those of dequantize_row_* in llama.cpp's ggml-quants.c.

Letters: N blocks."""

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from hotsplit.files.gguf_types import block_sizes
from hotsplit.model.weight_types import BY_NAME

_SCALED = BY_NAME["nvfp4_scaled"]
# The five digits of base three that each byte of tq1_0 has: the first is its third on top.
_DIGITS = [(np.arange(256) * 3**k % 256 * 3 >> 8).astype(np.uint8) for k in range(5)]
_FIRST_FOUR = sum((digit << 2 * k for k, digit in enumerate(_DIGITS[:4])), np.zeros(256, np.uint8))


def twos_of_trits(rows: np.ndarray) -> np.ndarray:
    """Rows of tq1_0, uint8 [..., row_bytes], as tq2_0. Values 0 to 159 are the digits of 32 bytes:
    all first ones, all second ones and so on; then likewise those of 16 bytes, and four of each of
    4 bytes."""
    blocks = rows.reshape(-1, block_sizes("tq1_0")[1])
    first, second, last = blocks[:, :32], blocks[:, 32:48], blocks[:, 48:52]
    low = [np.hstack([_DIGITS[k][second], _DIGITS[k + 1][second]]) for k in (0, 2)]
    rest = np.hstack([_DIGITS[4][second], *(digit[last] for digit in _DIGITS[:4])])
    made = np.empty((len(blocks), block_sizes("tq2_0")[1]), np.uint8)
    made[:, :32] = _FIRST_FOUR[first]
    made[:, 32:64] = _DIGITS[4][first] | low[0] << 2 | low[1] << 4 | rest << 6
    made[:, 64:] = blocks[:, 52:]
    return made.reshape(*rows.shape[:-1], -1)


def smaller_groups(rows: np.ndarray) -> np.ndarray:
    """Rows of q2_0_128, uint8 [..., row_bytes], as q2_0: the scale for each half."""
    blocks = rows.reshape(-1, block_sizes("q2_0_128")[1])
    made = np.empty((len(blocks), 2, block_sizes("q2_0")[1]), np.uint8)
    made[:, :, :2] = blocks[:, None, :2]
    made[:, :, 2:] = blocks[:, 2:].reshape(len(blocks), 2, -1)
    return made.reshape(*rows.shape[:-1], -1)


def scaled_rows(rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Rows of nvfp4, uint8 [..., row_bytes], as nvfp4_scaled; `scale`: f32 [...], of each row."""
    made = np.empty((*rows.shape[:-1], _SCALED.row_head + rows.shape[-1]), np.uint8)
    made[..., : _SCALED.row_head] = np.ascontiguousarray(scale, "<f4")[..., None].view(np.uint8)
    made[..., _SCALED.row_head :] = rows
    return made


def scaled_values(rows: np.ndarray) -> np.ndarray:
    """The f32 values of rows of nvfp4_scaled, uint8 [..., row_bytes]."""
    factor = np.ascontiguousarray(rows[..., : _SCALED.row_head]).view("<f4")
    blocks = np.ascontiguousarray(rows[..., _SCALED.row_head :])
    return dequantize(blocks, GGMLQuantizationType.NVFP4) * factor


def bit_values(rows: np.ndarray, kind: str) -> np.ndarray:
    """The f32 values of rows of q1_0, q2_0 or q2_0_128, uint8 [..., row_bytes]: codes of one or two
    bits, from the lowest bits of a byte on, stand for the type's levels."""
    block, size = block_sizes(kind)
    bits = 8 * (size - 2) // block
    blocks = rows.reshape(-1, size)
    places = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (blocks[:, 2:, None] >> places & ((1 << bits) - 1)).reshape(len(blocks), block)
    levels = np.array(BY_NAME["q1_0" if bits == 1 else "q2_0"].levels, np.float32)
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    return (levels[codes] * scale).reshape(*rows.shape[:-1], -1)
