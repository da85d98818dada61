"""In how many parts torch's flash attention divides the keys, each with sums of its own in f32.

The rule is num_splits_heuristic in PyTorch's aten/src/ATen/native/transformers/cuda/flash_attn/
flash_api.cpp, for one sequence. A card's blocks of threads are filled with parts of keys if there
are few queries, so the sums of 192 tokens may take several times those of 256."""

import math
from functools import cache

import torch

QUERIES = 64  # in a block
MOST_PARTS = 128


@cache
def multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a CUDA device; 0 for the CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def num_parts(
    num_heads: int, num_tokens: int, num_positions: int, head_width: int, num_multiprocessors: int
) -> int:
    """The parts for the last tokens of so many positions."""
    blocks, room = num_heads * -(-num_tokens // QUERIES), 2 * num_multiprocessors
    if blocks >= 0.8 * room:
        return 1
    keys = _key_blocks(num_positions, head_width)
    efficiency = {}
    for parts in range(1, min(MOST_PARTS, room, keys) + 1):
        if parts == 1 or -(-keys // parts) != -(-keys // (parts - 1)):
            waves = blocks * parts / room
            efficiency[parts] = waves / math.ceil(waves)
    best = max(efficiency.values())
    return next(parts for parts, found in efficiency.items() if found >= 0.85 * best)


def sum_bytes(
    num_heads: int, num_tokens: int, num_positions: int, head_width: int, num_multiprocessors: int
) -> int:
    """Bytes of the sums of all parts; 0 if the keys are not divided."""
    parts = num_parts(num_heads, num_tokens, num_positions, head_width, num_multiprocessors)
    return parts * num_tokens * _part_bytes(num_heads, head_width) if parts > 1 else 0


def most_sum_bytes(num_heads: int, num_positions: int, head_width: int) -> int:
    """Upper bound on `sum_bytes` for each token, on any card."""
    parts = min(MOST_PARTS, _key_blocks(num_positions, head_width))
    return parts * _part_bytes(num_heads, head_width) if parts > 1 else 0


def _key_blocks(num_positions: int, head_width: int) -> int:
    size = 256 if head_width <= 64 else 128 if head_width <= 128 else 64
    return -(-num_positions // size)


def _part_bytes(num_heads: int, head_width: int) -> int:
    """Bytes of a token's sums in one part; torch rounds the width up."""
    return 4 * num_heads * -(-head_width // 32) * 32
