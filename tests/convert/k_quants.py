"""Random K-quants for tests: gguf unpacks them but cannot pack."""

import numpy as np
import torch
from torch import Tensor

BLOCK_BYTES = {"q4_k": 144, "q5_k": 176, "q6_k": 210, "q3_k": 110, "q2_k": 84, "iq4_xs": 136}
# Offsets of a block's f16 numbers, each with its size relative to the first, such that the values
# of random bits average 0.
F16_AT = {
    "q4_k": {0: 1.0, 2: 7.5},
    "q5_k": {0: 1.0, 2: 15.5},
    "q6_k": {208: 1.0},
    "q3_k": {108: 1.0},
    "q2_k": {80: 1.0, 82: 1.5},
    "iq4_xs": {0: 1.0},
}
# About the root mean square of the values of random bits if the first number is 1.
RMS = {"q4_k": 272.0, "q5_k": 550.0, "q6_k": 1405.0, "q3_k": 43.0, "q2_k": 14.0, "iq4_xs": 1290.0}
# The bytes of a block that hold its quants.
QUANTS_AT = {
    "q4_k": slice(16, 144),
    "q5_k": slice(16, 176),
    "q6_k": slice(0, 192),
    "q3_k": slice(0, 96),
    "q2_k": slice(16, 80),
    "iq4_xs": slice(8, 136),
}
WITH_MINIMA = ("q4_k", "q5_k", "q2_k")
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def random_rows(kind: str, num_rows: int, width: int, scale: float, seed: int = 0) -> np.ndarray:
    """uint8 [num_rows, row_bytes]: every bit of the format random, values of about `scale`."""
    random = np.random.default_rng(seed)
    shape = (num_rows * width // 256, BLOCK_BYTES[kind])
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    first = scale / RMS[kind] * random.uniform(0.5, 1.5, len(blocks))
    for at, factor in F16_AT[kind].items():
        blocks[:, at : at + 2] = (first * factor).astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


def by_hand(kind: str) -> tuple[bytes, Tensor]:
    """The bytes of a block and its values, f32 [256], as the comments of ggml-common.h define
    them."""
    one, half = b"\x00\x3c", b"\x00\x38"
    part, count, number = torch.arange(8)[:, None], torch.arange(32), torch.arange(16)
    if kind == "q6_k":
        # Part p, 32 values, has scales (p + 1) / 2; quants count up in low nibbles, down in high
        # ones, and their upper bits are the part's place in its half of the block, 0 to 3.
        nibbles = [*(count % 16 | (15 - count % 16) << 4)] * 4
        upper, scales = [0b11_10_01_00] * 64, [p + 1 for p in range(8) for _ in range(2)]
        low, high = count % 16, 15 - count % 16
        nibble = torch.stack([low, low, high, high, low, low, high, high])
        values = (part + 1) * (nibble + 16 * (part % 4) - 32)
        return bytes([*nibbles, *upper, *scales]) + half, 0.5 * values.flatten().float()
    if kind in ("q3_k", "q2_k"):
        place = torch.arange(4)[:, None]
        two = (count + place) % 4  # of each half of the block
        pairs = [*(two << 2 * place).sum(0)] * 2
        quants = two.repeat(2, 1).reshape(16, 16)
    if kind == "q2_k":  # scale i and minimum 15 - i of 16 values each
        values = number[:, None] * quants - 0.5 * (15 - number[:, None])
        return bytes(
            [*(number | (15 - number) << 4), *pairs]
        ) + one + half, values.flatten().float()
    if kind == "q3_k":  # scales -15, -13 ... 15, as 17, 19 ... 47
        third = (count // 4 + part) % 2
        scale = 2 * number + 17
        low, upper = [*(scale[:8] & 15 | (scale[8:] & 15) << 4)], scale.reshape(4, 4) >> 4
        upper = [*(upper << 2 * torch.arange(4)[:, None]).sum(0)]
        values = (scale[:, None] - 32) * (quants + (4 * third - 4).reshape(16, 16))
        data = [*(third << part).sum(0), *pairs, *low, *upper]
        return bytes(int(byte) for byte in data) + half, 0.5 * values.flatten().float()
    if kind == "iq4_xs":  # scales -20, -15 ... 15, as 12, 17 ... 47
        scale = 5 * part[:, 0] + 12
        upper = int((scale >> 4 << 2 * part[:, 0]).sum())
        low = (scale[::2] & 15) | (scale[1::2] & 15) << 4
        level = torch.tensor(IQ4_VALUES).float()
        values = (scale[:, None] - 32) * torch.cat([level, level.flip(0)])
        nibbles = [*(number | (15 - number) << 4)] * 8
        return one + upper.to_bytes(2, "little") + bytes([*low, *nibbles]), values.flatten()
    # Part p has scale p + 1 and minimum p / 2.
    numbers = [1, 2, 3, 4, 0, 1, 2, 3, *(p + 1 | p << 4 for p in range(4, 8))]
    fifth = [0b11001010] * 32 if kind == "q5_k" else []
    quants = torch.stack([count % 16, 15 - count % 16] * 4)
    nibbles = [*(count % 16 | (15 - count % 16) << 4)] * 4
    if fifth:
        quants += 16 * (0b11001010 >> part & 1)
    values = (part + 1) * quants - 0.5 * part
    return one + half + bytes([*numbers, *fifth, *nibbles]), values.flatten().float()
