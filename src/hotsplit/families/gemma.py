"""Gemma 3 (arXiv 2503.19786): windows in five of six layers, with a rotary base of their own, norms
before and after each block, norms of heads, and embeddings scaled by sqrt(D)."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import gguf
import numpy as np

from hotsplit.families.blueprint import ADD_ONE, Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.family import PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import whole_sizes
from hotsplit.families.sizes import Sizes
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import Activation, ModelSpec, Rotary

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

PERIOD, LOCAL_THETA, LAYERS_OF_27B = 6, 10000.0, 62


def gemma3(read: ConfigReader) -> Blueprint:
    """Gemma3ForCausalLM. Its norms multiply by 1 + weight; a model file has that sum."""
    read.refuse("use_bidirectional_attention", False, why="attention is always causal")
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    sizes, whole, _ = read.rotary_of(sizes, "full_attention", "rope_theta", 1e6)
    _, local, _ = read.rotary_of(sizes, "sliding_attention", "rope_local_base_freq", LOCAL_THETA)
    return Blueprint(
        spec=gemma3_spec(
            sizes, (whole, local), read.activation("hidden_activation", GATED),
            read.layers_with_window(sizes.num_layers, PERIOD), read.count("sliding_window"),
            read.positive("query_pre_attn_scalar") ** -0.5,
            PROJECTION_BIASES if read.flag("attention_bias") else (),
        ),
        name_of=gguf_names(gguf.MODEL_ARCH.GEMMA3, sizes.num_layers),
        changes={"norm.weight": ADD_ONE},
    )  # fmt: skip


def gemma3_spec(
    sizes: Sizes, rotaries: tuple[Rotary, Rotary], activation: Activation, is_local_L: Sequence[bool],
    window: int, scale: float, options: Collection[str] = (),
) -> ModelSpec:  # fmt: skip
    """`rotaries`: of layers without a window, and of those with one. `scale`: of scores."""
    neurons, arrange = sizes.neurons(activation, options), sizes.arrangement()
    layers = [
        arrange.sandwich(
            sizes.attention(
                rotaries[is_local], options, window=window if is_local else None, scale=scale,
                has_head_norms=True,
            ),
            neurons,
        )
        for is_local in is_local_L
    ]  # fmt: skip
    return sizes.model("gemma3", layers, embedding_scale=math.sqrt(sizes.hidden_size))


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes = read.sizes()
    whole, local = read.rotary("halves"), Rotary(
        theta=read.positive("gemma3.rope.freq_base_swa", LOCAL_THETA), pairing="halves"
    )  # fmt: skip
    return gemma3_spec(
        sizes, (whole, local), read.activation(), read.layers_with_window(sizes.num_layers, PERIOD),
        read.count("attention.sliding_window"),
        read.positive(
            "gemma3.attention.scale",
            _stock_scale(sizes.num_layers, sizes.hidden_size, sizes.num_heads, sizes.head_dim),
        ),
        read.options(sizes.num_layers),
    )  # fmt: skip


def _stock_scale(num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> float:
    """The scale of scores that llama.cpp assumes (src/models/gemma3.cpp)."""
    return 1.0 / math.sqrt(hidden_size // num_heads if num_layers == LAYERS_OF_27B else head_dim)


def not_in_stock(spec: ModelSpec) -> str | None:
    """What llama.cpp has no key for."""
    is_local_L = [attention.window is not None for attention in spec.attentions]
    if is_local_L != [(layer + 1) % PERIOD != 0 for layer in range(spec.num_layers)]:
        return f"has windows in all layers but each {PERIOD}th, this model in others"
    attention = spec.attentions[-1]
    stock = _stock_scale(spec.num_layers, spec.hidden_size, attention.num_heads, attention.head_dim)
    if not math.isclose(attention.score_scale, stock, rel_tol=1e-6):
        return f"multiplies scores by {stock:g}, this model by {attention.score_scale:g}"
    return None


def keys(spec: ModelSpec) -> Mapping[str, Value]:
    attentions = spec.attentions
    local = next((a for a in attentions if a.window is not None), None)
    found: dict[str, Value] = {
        "attention.scale": np.float32(attentions[-1].score_scale),
        "attention.sliding_window_pattern": [a.window is not None for a in attentions],
        "attention.sliding_window": np.uint32(spec.context_length),
    }
    if local is not None and local.window is not None and local.rotary is not None:
        found["attention.sliding_window"] = np.uint32(local.window)
        found["rope.freq_base_swa"] = np.float32(local.rotary.theta)
    return found


GEMMA3 = Family(
    model_types=("gemma3_text",),
    blueprint=gemma3,
    defaults={
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "use_bidirectional_attention": False,
    },
)
GRAPH = Architecture(
    name="gemma3",
    of_keys=of_keys,
    keys=keys,
    known_keys=(
        "attention.scale",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
    ),
    options=PROJECTION_BIASES,
    stock_activations=("gelu_tanh",),
    not_in_stock=not_in_stock,
)
