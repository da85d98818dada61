"""Random blocks of 32, 64 and 128 values for tests, of types whose rows are summed in f32."""

import numpy as np

from hotsplit.files.gguf_types import block_sizes
from hotsplit.model.weight_types import NAMES, TABLE_NAMES, TYPES

CODED = {each.name: each for each in TYPES if each.has_nibbles and not each.has_integer_sums}
GROUPS = {each.name: each for each in TYPES if each.shares_heads}
LIKE_Q6_K = ("q3_k", "q2_k", "iq4_xs", "tq2_0")  # in tiles on the CPU, in planes on GPUs
# Where only bytes matter, mxfp4, whose blocks have an odd number of bytes, stands for CODED, and
# q6_k for those like it.
_STOOD_FOR = (*CODED, *GROUPS, *LIKE_Q6_K, *TABLE_NAMES)
STORED_KINDS = (*(name for name in NAMES if name not in _STOOD_FOR), "mxfp4")


def random_rows(kind: str, num_rows: int, width: int, scale: float, seed: int = 0) -> np.ndarray:
    """uint8 [num_rows, row_bytes]: every bit of the quants random, values of about `scale`."""
    if kind == "nvfp4":  # of a file, without the factors
        return random_rows("nvfp4_scaled", num_rows, width, scale, seed)[:, 4:]
    random = np.random.default_rng(seed)
    if kind in ("tq1_0", "q2_0_128"):  # the f16 scale is last or first
        block, size = block_sizes(kind)
        blocks = random.integers(0, 256, (num_rows * width // block, size), np.uint8)
        at = slice(-2, None) if kind == "tq1_0" else slice(0, 2)
        blocks[:, at] = np.array([scale], np.float16).view(np.uint8)
        return blocks.reshape(num_rows, -1)
    each = (CODED | GROUPS)[kind]
    shape = (num_rows * width // each.block_values, each.block_bytes)
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    rms = np.std(each.levels)
    if each.row_head:  # scales of 1/4 to 4, halved; factors of either sign
        blocks[:, : each.head_bytes] = random.integers(40, 72, (len(blocks), each.head_bytes))
        factor = scale / rms * random.uniform(0.5, 1.5, (num_rows, 1)) * random.choice([-1, 1])
        heads = factor.astype("<f4").view(np.uint8)
        return np.hstack([heads, blocks.reshape(num_rows, -1)])
    if each.head_bytes == 1:
        blocks[:, 0] = random.integers(-1, 2, len(blocks)) + round(np.log2(scale / rms)) + 128
        return blocks.reshape(num_rows, -1)
    first = scale / rms * random.uniform(0.5, 1.5, (len(blocks), 1)) * random.choice([-1, 1])
    numbers = [first, -first * np.mean(each.levels)][: each.head_bytes // 2]
    blocks[:, : each.head_bytes] = np.hstack(numbers).astype(np.float16).view(np.uint8)
    return blocks.reshape(num_rows, -1)


def exact_values(kind: str, rows: np.ndarray) -> np.ndarray:
    """float64 [N, D] of rows of GROUPS, value by value as llama.cpp's ggml-quants.c defines them
    (dequantize_row_q1_0, dequantize_row_q2_0, ggml_ue4m3_to_fp32)."""
    each = GROUPS[kind]
    blocks = rows[:, each.row_head :].reshape(-1, each.block_bytes).astype(np.int64)
    heads, quants = blocks[:, : each.head_bytes], blocks[:, each.head_bytes :]
    values = np.empty((len(blocks), each.block_values))
    for i in range(each.block_values):
        if kind == "q1_0":
            values[:, i] = np.where(quants[:, i // 8] >> i % 8 & 1, 1, -1)
        elif kind == "q2_0":
            values[:, i] = (quants[:, i // 4] >> i % 4 * 2 & 3) - 1
        else:
            byte, number = quants[:, i // 16 * 8 + i % 8], heads[:, i // 16]
            code = byte >> 4 if i % 16 >= 8 else byte & 15
            exponent, mantissa = number >> 3 & 15, number & 7
            small, large = mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            scale = np.where(exponent == 0, small, large) * (number != 127)
            magnitude = np.array([0, 1, 2, 3, 4, 6, 8, 12])[code & 7]  # doubled; there is no -0
            values[:, i] = np.where(code & 8, -magnitude, magnitude) * (scale / 2)
    if each.halves:
        values *= heads.astype(np.uint8).view(np.float16).astype(np.float64)
    values = values.reshape(len(rows), -1)
    if each.row_head:
        values *= np.ascontiguousarray(rows[:, : each.row_head]).view("<f4").astype(np.float64)
    return values


def edge_rows(kind: str) -> np.ndarray:
    """uint8 [N, block_bytes]: one block a row, every bit of the quants random, with every exponent
    or, as scales and minima, every finite f16 number: zeros of both signs, the largest,
    denormals."""
    random, each = np.random.default_rng(0), (CODED | GROUPS)[kind]
    if each.row_head:  # every scale in every place, a few factors
        heads = np.stack([random.permutation(256) for _ in range(each.head_bytes)], axis=1)
        factors = np.resize(np.array([1, -0.3, 0, -0.0, 3e38, 1e-45, 2.5e-7], "<f4"), (256, 1))
        heads = np.hstack([factors.view(np.uint8), heads.astype(np.uint8)])
    elif each.head_bytes == 1:
        heads = np.arange(256, dtype=np.uint8)[:, None]
    else:
        bits = np.arange(2**16, dtype=np.uint16)
        finite = bits[np.isfinite(bits.view(np.float16))]
        columns = [random.permutation(finite) for _ in range(each.head_bytes // 2)]
        heads = np.stack(columns, axis=1).view(np.uint8)
    size = each.block_bytes - each.head_bytes
    quants = random.integers(0, 256, (len(heads), size), np.uint8)
    return np.hstack([heads, quants])
