"""Random blocks of types whose values are entries of grids, for tests."""

import numpy as np
from gguf import GGML_QUANT_SIZES

from hotsplit.files.gguf_file import type_of

# About the root mean square of the values of random bits if the scale is 1.
RMS = {
    "iq1_s": 7.2,
    "iq1_m": 7.2,
    "iq2_xxs": 55.0,
    "iq2_xs": 55.0,
    "iq2_s": 55.0,
    "iq3_xxs": 142.0,
    "iq3_s": 141.0,
}


def blocks_of(kind: str, scales: list[float], seed: int = 0) -> np.ndarray:
    """uint8 [N, block_bytes]: every bit random but those of the f16 scale."""
    random = np.random.default_rng(seed)
    size = GGML_QUANT_SIZES[type_of(kind)][1]
    blocks = random.integers(0, 256, (len(scales), size), np.uint8)
    d = np.array(scales, np.float16)
    if kind == "iq1_m":  # four bits at the top of each of the last four numbers
        bits = d.view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)
        numbers = blocks[:, 48:].view(np.uint16)
        blocks[:, 48:] = (numbers & 0x0FFF | bits << 12).view(np.uint8)
    else:
        blocks[:, :2] = d[:, None].view(np.uint8)
    return blocks


def grid_rows(kind: str, num_rows: int, width: int, scale: float, seed: int = 0) -> np.ndarray:
    """uint8 [num_rows, row_bytes]: values of about `scale`, of both signs."""
    random = np.random.default_rng(seed)
    numbers = scale / RMS[kind] * random.uniform(0.5, 1.5, num_rows * width // 256)
    signs = random.choice([-1, 1], len(numbers))
    return blocks_of(kind, (numbers * signs).tolist(), seed).reshape(num_rows, -1)
