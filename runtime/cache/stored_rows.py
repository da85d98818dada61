"""Encodes and decodes the cache's rows of keys and values: the torch reference for
kernels/cpu/cache_rows.h.

Letters: W values of a row, X its width as stored (W values, or the bytes of its blocks), N blocks
of a row."""

import torch
from torch import Tensor

from hotsplit.model.weight_types import BY_NAME
from hotsplit.options.cache_types import CacheType
from hotsplit.runtime.kernels.stored import FLOATS, unpack

BLOCK = 32


def dtype_of(kind: CacheType) -> torch.dtype:
    return FLOATS.get(kind.kind, torch.uint8)


def kept_width(kind: CacheType, width: int) -> int:
    """The width X of a stored row, in values of `dtype_of`."""
    return kind.row_bytes(width) if kind.is_blocks else width


def encode(x: Tensor, kind: CacheType) -> Tensor:
    """Encodes rows, f32 [..., W] -> [..., X]."""
    if not kind.is_blocks:
        return x.to(dtype_of(kind))
    x_N32 = x.float().unflatten(-1, (-1, BLOCK))
    is_finite_N1 = x_N32.isfinite().all(dim=-1, keepdim=True)
    x_N32 = torch.where(is_finite_N1, x_N32, 0.0)
    largest_N1 = x_N32.gather(-1, x_N32.abs().argmax(dim=-1, keepdim=True))
    if not BY_NAME[kind.kind].has_nibbles:
        scale_N1 = largest_N1.abs() / 127.0
        scaled = x_N32 * inverse(scale_N1)
        whole = scaled.trunc()  # rounds halves away from zero, like C's round()
        is_up = (scaled - whole).abs() >= 0.5
        rounded = whole + torch.where(is_up, scaled.sign(), 0.0)
        quants = rounded.clamp(-127, 127).to(torch.int8).view(torch.uint8)
    else:
        scale_N1 = largest_N1 / -8.0
        nibbles = (x_N32 * inverse(scale_N1) + 8.5).clamp(0.0, 15.0).to(torch.uint8)
        quants = nibbles[..., :16] | nibbles[..., 16:] << 4
    half_N1 = torch.where(is_finite_N1, scale_N1, torch.nan).to(torch.float16)
    return torch.cat([half_N1.contiguous().view(torch.uint8), quants], dim=-1).flatten(-2)


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
