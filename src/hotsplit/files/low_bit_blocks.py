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
_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)


def twos_of_trits(rows: np.ndarray) -> np.ndarray:
    """Rows of tq1_0, uint8 [..., row_bytes], as tq2_0. A byte has five digits of base three, the
    first of which is on top: 32 bytes, then 16, then 4 with four digits."""
    blocks = rows.reshape(-1, block_sizes("tq1_0")[1])
    digits = []
    for start, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = blocks[:, None, start:stop] * _POWERS[:count, None]  # modulo 256
        digits.append((powers.astype(np.uint16) * 3 >> 8).reshape(len(blocks), -1))
    codes = np.concatenate(digits, axis=1).astype(np.uint8)
    pairs = codes.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    twos = np.bitwise_or.reduce(pairs, axis=2).reshape(len(blocks), -1)
    return np.hstack([twos, blocks[:, -2:]]).reshape(*rows.shape[:-1], -1)


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
