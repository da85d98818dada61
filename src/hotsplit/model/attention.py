"""The attention of a layer.

Its numbers are in groups, each of which has one place in each of the kernels' languages. The C++
structs of the groups are mirrored from them field by field (runtime/ops/structs.py), so a number or
flag that is added here is a field of the group, of its struct at the same place, and what the
group's functions make of it.

Letters: H heads, K key-value heads, W head width."""

import math
from dataclasses import dataclass, fields

from hotsplit.model.blocks import Kept, Norm
from hotsplit.model.indexer import Indexer
from hotsplit.model.latent import Latent
from hotsplit.model.rope import Rotary

QUERY_NORM, KEY_NORM = "attn_q_norm", "attn_k_norm"


@dataclass(frozen=True)
class HeadVector:
    """A tensor of the layer, f32 [H], by its name: a number of each head."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What becomes of the products of queries with keys: HsScores and its functions
    (kernels/cpu/scores.h), kernels/gpu/scores.py. `score_cap` c: a scaled score s counts as c
    tanh(s / c) (Gemma 2, arXiv 2408.00118). `head_sinks`: each head has one more score, whose share
    is of no value (arXiv 2309.17453)."""

    scale: float | None = None  # None: 1 / sqrt(head_dim)
    score_cap: float | None = None
    head_sinks: HeadVector | None = None


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What becomes of queries, keys and values between their projection and the cache: HsAttention
    and its functions (kernels/cpu/heads.h), kernels/gpu/heads.py. `num_kv_projections`: 2, of keys
    and of values; 1, of keys, which are the values as they are before their norm and rotation
    (Gemma 4); or 0, if keys and values are an earlier layer's. `value_width`: values are so many of
    the last values of the keys as the cache has them, and are not stored beside (latent attention).
    `window`: how many of the latest
    tokens a token attends to, itself included; None for all. Queries at position p are multiplied
    by 1 + growth * log(1 + floor(p / growth_length)) after they rotate (Llama 4's temperature;
    transformers, modeling_ministral3.py), if these are given. The norm of each head is of all heads
    together with `norms_all_heads` (OLMoE), and has weights for each head with `norms_by_head`
    (Command R+). `norms_values`: each head of values has an RMS norm without weights, with the
    epsilon of `head_norm` (Gemma 4). `is_gated`: attn_q has a gate after each head's query, whose
    sigmoid multiplies the head's output (Qwen3-Next). `gate_width`: attn_gate projects so many such
    gates for each head, one for each of its values (Muse-Glimmer) or one for all of them (Step
    3.5); 0: there is no such matrix. `norms_rotated`: the norms of each head of queries and keys
    come after they rotate (Hunyuan), by default before."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_kv_projections: int = 2
    value_width: int | None = None
    window: int | None = None
    growth_length: int | None = None
    gate_width: int = 0
    growth: float | None = None
    norms_all_heads: bool = False
    norms_by_head: bool = False
    norms_values: bool = False
    is_gated: bool = False
    norms_rotated: bool = False


@dataclass(frozen=True, kw_only=True)
class Attention(Heads, Scores):
    """Causal grouped-query attention. `head_norm`: the norm of each head of queries and keys.
    `biases`: names of the projections that have one. `source`: the layer before it whose keys and
    values it reads, as that layer has stored them, and has none of its own (Gemma 3n, the E-models
    of Gemma 4), or one of another model (model/assistant.py). `latent`: how queries and the only
    key are made, and outputs of what the heads sum (DeepSeek). `indexer`: of sparse attention,
    which is computed where it is to all tokens (Qwen3.8-Flash-Next)."""

    rotary: Rotary | None
    head_norm: Norm | None = None
    source: int | None = None
    latent: Latent | None = None
    indexer: Indexer | None = None
    is_fused: bool = False  # queries, keys and values are one matrix, attn_qkv
    biases: frozenset[str] = frozenset()
    reads: str = "attn_in"
    writes: str = "attn_out"

    def __post_init__(self) -> None:
        assert (self.source is None) == (self.num_kv_projections > 0), self
        assert self.gate_width in ((0,) if self.is_gated else (0, 1, self.head_dim)), self
        assert not (self.norms_rotated and self.norms_all_heads), self

    @property
    def vectors(self) -> dict[str, HeadVector]:
        """Its vectors, by the field that says of each that it has one."""
        each = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in each.items() if isinstance(value, HeadVector)}

    @property
    def stores_values(self) -> bool:
        """False if its values are a part of its keys."""
        return self.value_width is None

    @property
    def value_dim(self) -> int:
        """Values of a head's output: of latents, before their product with `attn_v_b`."""
        return self.head_dim if self.value_width is None else self.value_width

    @property
    def score_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def num_rotated(self) -> int:
        """Values of a head that rotate."""
        return 0 if self.rotary is None else self.rotary.num_values or self.head_dim

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def heads_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def key_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def output_size(self) -> int:
        """Values of a token that the output projection reads."""
        width = self.head_dim if self.latent is None else self.latent.value_size
        return self.num_heads * width

    @property
    def qkv_size(self) -> int:
        """Queries, keys and values of a token as far as they are projected, without gates."""
        return self.query_size + self.num_kv_projections * self.key_size

    @property
    def projected(self) -> tuple[int, ...]:
        """Heads of queries, of keys and of values, as far as they are projected."""
        return self.num_heads, *[self.num_kv_heads] * self.num_kv_projections

    def kept(self, index: int) -> Kept:
        """The keys and values of layer `index` with this attention."""
        store = index if self.source is None else self.source
        return Kept(
            name=f"cache.{store}", what="keys and values", is_written=self.num_kv_projections > 0
        )

    @property
    def gate_size(self) -> int:
        """Gates of a token: behind each query, or behind all that is projected otherwise."""
        return self.query_size if self.is_gated else self.num_heads * self.gate_width

    @property
    def projections(self) -> dict[str, int]:
        """Rows of each matrix that multiplies the input, by name."""
        if self.latent is not None:
            return self.latent.inputs(self.num_heads)
        own = {"attn_gate": self.gate_size} if self.gate_width else {}
        if self.is_fused:
            return {"attn_qkv": self.qkv_size, **own}
        rows = {"attn_q": self.query_size + (self.gate_size if self.is_gated else 0)}
        rows |= dict.fromkeys(("attn_k", "attn_v")[: self.num_kv_projections], self.key_size)
        return rows | own

    @property
    def normed(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights of `head_norm`, by name."""
        if self.head_norm is None:
            return {}
        heads = {QUERY_NORM: self.num_heads}
        heads |= {KEY_NORM: self.num_kv_heads} if self.num_kv_projections else {}
        return {name: self._norm_shape(count) for name, count in heads.items()}

    def _norm_shape(self, num_heads: int) -> tuple[int, ...]:
        if self.norms_by_head:
            return num_heads, self.head_dim
        return (self.head_dim * (num_heads if self.norms_all_heads else 1),)
