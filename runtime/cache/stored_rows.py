"""The cache's rows of keys and values, as kernels/cpu/cache_rows.h stores them.

Letters: W values of a row, X its width as stored (W values, or the bytes of its blocks), N blocks
of a row."""

import torch
from torch import Tensor

from hotsplit.options.cache_types import CacheType
from hotsplit.runtime.kernels.stored import FLOATS, unpack


def dtype_of(kind: CacheType) -> torch.dtype:
    return FLOATS.get(kind.kind, torch.uint8)


def kept_width(kind: CacheType, width: int) -> int:
    """The width X of a stored row, in values of `dtype_of`."""
    return kind.row_bytes(width) if kind.is_blocks else width


def decode(rows: Tensor, kind: CacheType) -> Tensor:
    """Decodes rows [..., X] -> [..., W], blocks to f32; float types are returned unchanged."""
    return unpack(rows, kind.kind) if kind.is_blocks else rows


def turn_by_hadamard(x: Tensor) -> Tensor:
    """Multiplies each run of B values of x, f32 [..., W], by the orthonormal Hadamard matrix of
    size B, the largest power of two that divides W. Doing it twice gives x again."""
    width = x.shape[-1]
    block = width & -width
    parts = x.unflatten(-1, (-1, block))
    half = 1
    while half < block:
        pairs = parts.unflatten(-1, (-1, 2, half))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        parts = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        half *= 2
    return (parts * block**-0.5).flatten(-2)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale; 0 where that is not finite in f32, because such a scale is 0 in f16."""
    found = 1.0 / scale
    return torch.where(found.isfinite(), found, 0.0)
