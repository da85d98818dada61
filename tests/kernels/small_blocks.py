"""Random blocks of 32 values for tests, of types whose rows are summed in f32."""

import numpy as np

from hotsplit.model.weight_types import NAMES, TABLE_NAMES, TYPES

CODED = {each.name: each for each in TYPES if each.has_nibbles and not each.has_integer_sums}
LIKE_Q6_K = ("q3_k", "q2_k", "iq4_xs")  # in tiles on the CPU, in planes on GPUs
# Where only bytes matter, mxfp4, whose blocks have an odd number of bytes, stands for CODED, and
# q6_k for those like it.
_STOOD_FOR = (*CODED, *LIKE_Q6_K, *TABLE_NAMES)
STORED_KINDS = (*(name for name in NAMES if name not in _STOOD_FOR), "mxfp4")


def random_rows(kind: str, num_rows: int, width: int, scale: float, seed: int = 0) -> np.ndarray:
    """uint8 [num_rows, row_bytes]: every bit of the quants random, values of about `scale`."""
    random, each = np.random.default_rng(seed), CODED[kind]
    blocks = random.integers(0, 256, (num_rows * width // 32, each.block_bytes), dtype=np.uint8)
    rms = np.std(each.levels)
    if each.head_bytes == 1:
        blocks[:, 0] = random.integers(-1, 2, len(blocks)) + round(np.log2(scale / rms)) + 128
        return blocks.reshape(num_rows, -1)
    first = scale / rms * random.uniform(0.5, 1.5, (len(blocks), 1)) * random.choice([-1, 1])
    numbers = [first, -first * np.mean(each.levels)][: each.head_bytes // 2]
    blocks[:, : each.head_bytes] = np.hstack(numbers).astype(np.float16).view(np.uint8)
    return blocks.reshape(num_rows, -1)


def edge_rows(kind: str) -> np.ndarray:
    """uint8 [N, block_bytes]: one block a row, every bit of the quants random, with every exponent
    or, as scales and minima, every finite f16 number: zeros of both signs, the largest,
    denormals."""
    random, each = np.random.default_rng(0), CODED[kind]
    if each.head_bytes == 1:
        heads = np.arange(256, dtype=np.uint8)[:, None]
    else:
        bits = np.arange(2**16, dtype=np.uint16)
        finite = bits[np.isfinite(bits.view(np.float16))]
        columns = [random.permutation(finite) for _ in range(each.head_bytes // 2)]
        heads = np.stack(columns, axis=1).view(np.uint8)
    quants = random.integers(0, 256, (len(heads), each.block_bytes - each.head_bytes), np.uint8)
    return np.hstack([heads, quants])
