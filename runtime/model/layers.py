"""The loaded parts of a model that a forward pass needs."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from hotsplit.artifacts.limits_file import LayerLimits
from hotsplit.runtime.cache.kv_cache import KVCache
from hotsplit.runtime.model.attention import Attention, Norm
from hotsplit.runtime.model.feed_forward import FeedForward
from hotsplit.runtime.weights.matrix import Linear, Matrix


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer. `ffn_norm` is None if attention and feed-forward are parallel: both then read
    attn_norm's output, unless attention has `attn_norm_2`."""

    device: torch.device  # of attention's matrices, norms, predictor, and cache unless offloaded
    attn_norm: Norm
    attn_norm_2: Norm | None
    attention: Attention
    ffn_norm: Norm | None
    ffn: FeedForward
    is_post_norm: bool

    def with_threshold(self, threshold: float) -> "Layer":
        """The layer with another activation threshold."""
        gate = replace(self.ffn.gate, threshold=threshold)
        return replace(self, ffn=replace(self.ffn, gate=gate))


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Everything a forward pass needs."""

    embedding: Matrix
    positions: Matrix | None  # learned positions, on the CPU; None if positions are rotary
    layers: tuple[Layer, ...]
    output_norm: Norm | None
    head: Linear
    head_device: torch.device

    @cached_property
    def most_neurons(self) -> int:
        """F of the widest layer."""
        return max(layer.ffn.num_neurons for layer in self.layers)

    @property
    def most_widths(self) -> tuple[int, int]:
        """The largest of each of Attention.widths."""
        qkv, heads = zip(*(layer.attention.widths for layer in self.layers), strict=True)
        return max(qkv), max(heads)

    @cached_property
    def cache(self) -> KVCache:
        caches = tuple(layer.attention.cache for layer in self.layers)
        return KVCache(table=caches[0].table, layers=caches)


def limited(layer: Layer, limits: LayerLimits) -> Layer:
    """The layer with these limits instead of its own; mode "dense" has none."""
    is_absent = limits.gate_F is None or layer.ffn.mode == "dense"
    gate_F = None if is_absent else torch.from_numpy(limits.gate_F.copy())
    blocks = tuple(block.limited(gate_F) for block in layer.ffn.blocks)
    return replace(layer, ffn=replace(layer.ffn, blocks=blocks))
