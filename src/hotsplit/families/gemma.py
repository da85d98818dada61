"""Gemma 2 (arXiv 2408.00118): windows in every second layer, norms before and after each block,
embeddings scaled by sqrt(D), soft caps of scores and logits. Gemma 3 (arXiv 2503.19786): windows in
five of six layers, with a rotary base of their own, and norms of heads instead of caps of scores."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import gguf
import numpy as np

from hotsplit.families.blueprint import ADD_ONE, Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.family import PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import whole_sizes
from hotsplit.families.sizes import Sizes
from hotsplit.families.soft_caps import LOGIT_CAP, SCORE_CAP, cap_of_config, cap_of_keys
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import Activation, ModelSpec, Rotary

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

LOCAL_THETA = 10000.0
# Of Gemma 2 and 3: the period of the layers without a window, and the layers of the model of 27B.
PERIODS, LAYERS_OF_27B = {"gemma2": 2, "gemma3": 6}, {"gemma2": 46, "gemma3": 62}
# llama.cpp's caps and window where a file has no key, as the first ones of Gemma 2; 0 means none.
STOCK_CAPS = {"gemma2": (50.0, 30.0), "gemma3": (0.0, 0.0)}
STOCK_WINDOWS = {"gemma2": 4096, "gemma3": 0}


def gemma2(read: ConfigReader) -> Blueprint:
    """Gemma2ForCausalLM. Its norms multiply by 1 + weight; a model file has that sum."""
    read.refuse("use_bidirectional_attention", False, why="attention is always causal")
    read.refuse("sliding_window_pattern", PERIODS["gemma2"])
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    sizes, rotary, factors = read.rotary(sizes, "halves")
    is_local_L = read.layers_with_window(sizes.num_layers, PERIODS["gemma2"])
    return Blueprint(
        spec=gemma_spec(
            "gemma2",
            sizes,
            (rotary, rotary),
            read.activation("hidden_activation", GATED),
            is_local_L,
            read.window_of(is_local_L),
            read.positive("query_pre_attn_scalar") ** -0.5,
            (cap_of_config(read, SCORE_CAP), cap_of_config(read, LOGIT_CAP)),
            PROJECTION_BIASES if read.flag("attention_bias") else (),
        ),
        # llama.cpp's map of Gemma 2 lacks a head that is not the embedding.
        name_of=gguf_names(gguf.MODEL_ARCH.GEMMA3, sizes.num_layers),
        rope_factors=factors,
        changes={"norm.weight": ADD_ONE},
    )


def gemma3(read: ConfigReader) -> Blueprint:
    """Gemma3ForCausalLM. Its norms multiply by 1 + weight; a model file has that sum."""
    read.refuse("use_bidirectional_attention", False, why="attention is always causal")
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    sizes, whole, _ = read.rotary_of(sizes, "full_attention", "rope_theta", 1e6)
    _, local, _ = read.rotary_of(sizes, "sliding_attention", "rope_local_base_freq", LOCAL_THETA)
    is_local_L = read.layers_with_window(sizes.num_layers, PERIODS["gemma3"])
    return Blueprint(
        spec=gemma_spec(
            "gemma3",
            sizes,
            (whole, local),
            read.activation("hidden_activation", GATED),
            is_local_L,
            read.window_of(is_local_L),
            read.positive("query_pre_attn_scalar") ** -0.5,
            (None, cap_of_config(read, LOGIT_CAP)),
            PROJECTION_BIASES if read.flag("attention_bias") else (),
        ),
        name_of=gguf_names(gguf.MODEL_ARCH.GEMMA3, sizes.num_layers),
        changes={"norm.weight": ADD_ONE},
    )


def gemma_spec(
    name: str,
    sizes: Sizes,
    rotaries: tuple[Rotary, Rotary],
    activation: Activation,
    is_local_L: Sequence[bool],
    window: int,
    scale: float,
    caps: tuple[float | None, float | None],
    options: Collection[str] = (),
) -> ModelSpec:
    """`rotaries`: of layers without a window, and of those with one. `scale`: of scores. `caps`: of
    scores and of logits."""
    score_cap, logit_cap = caps
    neurons, arrange = sizes.neurons(activation, options), sizes.arrangement()
    layers = [
        arrange.sandwich(
            sizes.attention(
                rotaries[is_local],
                options,
                window=window if is_local else None,
                scale=scale,
                has_head_norms=name == "gemma3",
            ),
            neurons,
        ).with_attention(score_cap=score_cap)
        for is_local in is_local_L
    ]
    spec = sizes.model(name, layers, embedding_scale=math.sqrt(sizes.hidden_size))
    return replace(spec, logit_cap=logit_cap)


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes, name = read.sizes(), read.graph.name
    whole = local = read.rotary("halves")
    if name == "gemma3":
        theta = read.positive("gemma3.rope.freq_base_swa", LOCAL_THETA)
        local = Rotary(theta=theta, pairing="halves")
    score_cap, logit_cap = (
        cap_of_keys(read, key, default)
        for key, default in zip((SCORE_CAP, LOGIT_CAP), STOCK_CAPS[name], strict=True)
    )
    window = read.whole("attention.sliding_window", STOCK_WINDOWS[name])
    is_local_L = read.layers_with_window(sizes.num_layers, PERIODS[name])
    return gemma_spec(
        name,
        sizes,
        (whole, local),
        read.activation(),
        is_local_L if window else [False] * sizes.num_layers,
        window,
        read.positive(
            f"{name}.attention.scale",
            _stock_scale(
                name, sizes.num_layers, sizes.hidden_size, sizes.num_heads, sizes.head_dim
            ),
        ),
        (score_cap, logit_cap),
        read.options(sizes.num_layers),
    )


def _stock_scale(
    name: str, num_layers: int, hidden_size: int, num_heads: int, head_dim: int
) -> float:
    """The scale of scores that llama.cpp assumes (src/models/gemma2.cpp, gemma3.cpp)."""
    is_27b = num_layers == LAYERS_OF_27B[name]
    return 1.0 / math.sqrt(hidden_size // num_heads if is_27b else head_dim)


def not_in_stock(spec: ModelSpec) -> str | None:
    """What llama.cpp has no key for."""
    is_local_L = [attention.window is not None for attention in spec.attentions]
    name, attention = spec.architecture, spec.attentions[-1]
    period = PERIODS[name]
    if is_local_L != [(layer + 1) % period != 0 for layer in range(spec.num_layers)]:
        return f"has windows in all layers but each {period}th, this model in others"
    if name == "gemma2" and not (attention.score_cap and spec.logit_cap):
        return "caps scores and logits, this model not both"
    stock = _stock_scale(
        name, spec.num_layers, spec.hidden_size, attention.num_heads, attention.head_dim
    )
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
        SCORE_CAP: np.float32(attentions[-1].score_cap or 0.0),
        LOGIT_CAP: np.float32(spec.logit_cap or 0.0),
    }
    if local is not None and local.window is not None and local.rotary is not None:
        found["attention.sliding_window"] = np.uint32(local.window)
        found["rope.freq_base_swa"] = np.float32(local.rotary.theta)
    return {key: value for key, value in found.items() if key in KNOWN_KEYS[spec.architecture]}


GEMMA2_DEFAULTS = {
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    SCORE_CAP: 50.0,
    LOGIT_CAP: 30.0,
}
GEMMA2 = Family(
    title="Gemma 2",
    model_types=("gemma2",),
    blueprint=gemma2,
    read_keys=(SCORE_CAP, LOGIT_CAP),
    defaults=GEMMA2_DEFAULTS,
)
GEMMA3 = Family(
    title="Gemma 3",
    model_types=("gemma3_text",),
    blueprint=gemma3,
    read_keys=(LOGIT_CAP,),
    defaults=GEMMA2_DEFAULTS
    | {SCORE_CAP: None, LOGIT_CAP: None, "use_bidirectional_attention": False},
)
COMMON_KEYS = (
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    LOGIT_CAP,
)
KNOWN_KEYS = {"gemma2": (*COMMON_KEYS, SCORE_CAP), "gemma3": (*COMMON_KEYS, "rope.freq_base_swa")}
GRAPHS = tuple(
    Architecture(
        name=name,
        of_keys=of_keys,
        keys=keys,
        known_keys=known_keys,
        options=PROJECTION_BIASES,
        stock_activations=("gelu_tanh",),
        not_in_stock=not_in_stock,
    )
    for name, known_keys in KNOWN_KEYS.items()
)
