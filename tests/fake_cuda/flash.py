"""torch's flash attention on the fake devices, with what it takes from the allocator:
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from fake_cuda import library
from fake_cuda.devices import NUM_MULTIPROCESSORS
from fake_cuda.tensors import borrowed, ranges_of
from torch import Tensor
from torch.nn import functional

from hotsplit.runtime.ops.attention import attend


def num_splits(num_blocks: int, num_key_blocks: int) -> int:
    """num_splits_heuristic of flash_api.cpp for one sequence: in how many parts the keys are
    attended to; `num_blocks` is heads times blocks of 64 queries."""
    room, most = 2 * NUM_MULTIPROCESSORS, 128
    if num_blocks >= 0.8 * room:
        return 1
    most = min(most, room, num_key_blocks)
    efficiency = []
    for count in range(1, most + 1):
        is_same = count > 1 and -(-num_key_blocks // count) == -(-num_key_blocks // (count - 1))
        waves = num_blocks * count / room
        efficiency.append(0.0 if is_same else waves / math.ceil(waves))
    best = max(efficiency)
    return next(n for n, e in enumerate(efficiency, 1) if e and e >= 0.85 * best)


def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`attend.flash_attention` with all that torch's takes from the allocator."""
    _, heads, tokens, width = query.shape
    size = 256 if width <= 64 else 128 if width <= 128 else 64
    parts = num_splits(heads * -(-tokens // 64), -(-key.shape[2] // size))
    held = [query.new_empty(heads, tokens, dtype=torch.float32)]
    held += [query.new_empty(1, dtype=torch.int64) for _ in range(2)]
    if parts > 1:
        rounded = -(-width // 32) * 32
        held.append(query.new_empty(parts, heads, tokens, dtype=torch.float32))
        held.append(query.new_empty(parts, heads, tokens, rounded, dtype=torch.float32))
    out = query.new_empty(1, tokens, heads, width).transpose(1, 2)
    given = [borrowed(each) for each in (query, key, value, out)]
    ranges = ranges_of((query, key, value), (out, *held))
    stream = torch.cuda.current_stream(query.device).cuda_stream
    library.launch("flash attention", stream, partial(_compute, *given), ranges)
    return out


def _compute(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    tokens, positions = query.shape[2], key.shape[2]
    mask = torch.ones(tokens, positions, dtype=torch.bool).tril(positions - tokens)
    is_grouped = query.shape[1] != key.shape[1]
    out.copy_(
        functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=1.0, enable_gqa=is_grouped
        )
    )


@contextmanager
def with_flash_attention() -> Iterator[None]:
    """The devices of the fake runtime have flash attention within the block."""
    with (
        mock.patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True),
        mock.patch.object(attend, "can_use_flash_attention", lambda params: True),
        mock.patch.object(attend, "flash_attention", flash_attention),
    ):
        yield
