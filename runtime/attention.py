"""Norm, rotary embedding, KV cache and attention, in f32.

Letters: T tokens, C cached tokens, H heads, K key-value heads, W head width, D model width."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sparkinfer.model_file import ModelShape
from sparkinfer.runtime.matrix import Matrix


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019)."""
    return F.rms_norm(x_TD, weight_D.shape, weight_D, epsilon)


@dataclass(frozen=True)
class Rotary:
    """Turns adjacent pairs of a head by position times frequency (Su et al. 2021).

    llama.cpp's order of a head's values; `convert` permutes the rows of q and k to it."""

    frequency_W: Tensor  # f64 [W / 2]

    @classmethod
    def of(cls, shape: ModelShape, factors: Tensor | None, device: torch.device) -> "Rotary":
        """`factors` divide the frequencies one by one (Llama 3's long-context scaling)."""
        pairs = torch.arange(0, shape.head_width, 2, dtype=torch.float64, device=device)
        frequency = shape.rope_theta ** (-pairs / shape.head_width) / shape.rope_linear_factor
        return cls(frequency if factors is None else frequency / factors)

    def angles(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin, f32 [T, 1, W / 2], of positions start .. start + count - 1."""
        positions = torch.arange(start, start + count, device=self.frequency_W.device)
        angle = positions[:, None, None] * self.frequency_W
        return angle.cos().float(), angle.sin().float()


def rotate(x_THW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x_THW[..., 0::2], x_THW[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, [C, K, W], allocated once for the whole context."""

    key_CKW: Tensor
    value_CKW: Tensor

    def append(self, start: int, key_TKW: Tensor, value_TKW: Tensor) -> tuple[Tensor, Tensor]:
        """Stores T tokens at `start`; returns all keys and values up to them in f32."""
        end = start + len(key_TKW)
        self.key_CKW[start:end] = key_TKW
        self.value_CKW[start:end] = value_TKW
        return self.key_CKW[:end].float(), self.value_CKW[:end].float()


def attend(query_THW: Tensor, key_CKW: Tensor, value_CKW: Tensor) -> Tensor:
    """Causal attention of the last T of C positions, heads in groups: f32 [T, H * W]."""
    num_tokens, num_cached = len(query_THW), len(key_CKW)
    if num_tokens == 1:
        return _attend_one(query_THW[0], key_CKW, value_CKW)
    mask = None
    if num_tokens < num_cached:
        mask = torch.ones(num_tokens, num_cached, dtype=torch.bool, device=query_THW.device)
        mask = mask.tril(num_cached - num_tokens)
    out_HTW = F.scaled_dot_product_attention(
        query_THW.transpose(0, 1)[None],
        key_CKW.transpose(0, 1)[None],
        value_CKW.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query_THW.shape[1] != key_CKW.shape[1],
    )[0]
    return out_HTW.transpose(0, 1).flatten(1)


def _attend_one(query_HW: Tensor, key_CKW: Tensor, value_CKW: Tensor) -> Tensor:
    """Attention of the last position, f32 [1, H * W]: three small products, no kernel's set-up."""
    grouped_KGW = query_HW.view(key_CKW.shape[1], -1, query_HW.shape[-1])
    scores_KGC = grouped_KGW @ key_CKW.permute(1, 2, 0) / math.sqrt(query_HW.shape[-1])
    return (scores_KGC.softmax(dim=-1) @ value_CKW.transpose(0, 1)).reshape(1, -1)


@dataclass(frozen=True, kw_only=True)
class Attention:
    norm_D: Tensor
    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    cache: LayerCache
    head_width: int

    def forward(self, x_TD: Tensor, start: int, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Attention of T normed tokens at positions from `start`, [T, D]; appends to the cache."""
        width = self.head_width
        query = multiply(self.query, x_TD).unflatten(-1, (-1, width))
        key = multiply(self.key, x_TD).unflatten(-1, (-1, width))
        value = multiply(self.value, x_TD).unflatten(-1, (-1, width))
        keys, values = self.cache.append(start, rotate(key, *angles), value)
        return multiply(self.output, attend(rotate(query, *angles), keys, values))


def multiply(matrix: Matrix, x_TD: Tensor) -> Tensor:
    """f32 [T, N]: the single-token product where T is 1."""
    return matrix.dot(x_TD[0].contiguous())[None] if len(x_TD) == 1 else matrix.product(x_TD)
