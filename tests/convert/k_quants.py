"""Random K-quants, and blocks of table types, for tests: gguf unpacks them but cannot pack."""

import numpy as np

from hotsplit.model.weight_types import TABLE_NAMES

BLOCK_BYTES = {"q4_k": 144, "q5_k": 176, "q6_k": 210, "q3_k": 110, "q2_k": 84, "iq4_xs": 136}
BLOCK_BYTES["tq2_0"] = 66
BLOCK_BYTES |= dict(zip(TABLE_NAMES, (110, 110, 136, 136), strict=True))
# Offsets of a block's f16 numbers, each with its size relative to the first, such that the values
# of random bits average 0.
F16_AT = {
    "q4_k": {0: 1.0, 2: 7.5},
    "q5_k": {0: 1.0, 2: 15.5},
    "q6_k": {208: 1.0},
    "q3_k": {108: 1.0},
    "q2_k": {80: 1.0, 82: 1.5},
    "iq4_xs": {0: 1.0},
    "tq2_0": {64: 1.0},
}
F16_AT |= {name: F16_AT["q3_k" if BLOCK_BYTES[name] == 110 else "iq4_xs"] for name in TABLE_NAMES}
# About the root mean square of the values of random bits if the first number is 1.
RMS = {"q4_k": 272.0, "q5_k": 550.0, "q6_k": 1405.0, "q3_k": 43.0, "q2_k": 14.0, "iq4_xs": 1290.0}
RMS["tq2_0"] = 1.2
RMS |= dict(zip(TABLE_NAMES, (13.0, 58.0, 172.0, 170.0), strict=True))
# The bytes of a block that hold its quants.
QUANTS_AT = {
    "q4_k": slice(16, 144),
    "q5_k": slice(16, 176),
    "q6_k": slice(0, 192),
    "q3_k": slice(0, 96),
    "q2_k": slice(16, 80),
    "iq4_xs": slice(8, 136),
    "tq2_0": slice(0, 64),
}
QUANTS_AT |= {
    name: QUANTS_AT["q3_k" if BLOCK_BYTES[name] == 110 else "iq4_xs"] for name in TABLE_NAMES
}
WITH_MINIMA = ("q4_k", "q5_k", "q2_k")


def random_rows(kind: str, num_rows: int, width: int, scale: float, seed: int = 0) -> np.ndarray:
    """uint8 [num_rows, row_bytes]: every bit of the format random, values of about `scale`."""
    random = np.random.default_rng(seed)
    shape = (num_rows * width // 256, BLOCK_BYTES[kind])
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    first = scale / RMS[kind] * random.uniform(0.5, 1.5, len(blocks))
    for at, factor in F16_AT[kind].items():
        blocks[:, at : at + 2] = (first * factor).astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(num_rows, -1)
