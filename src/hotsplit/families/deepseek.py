"""Latent attention: DeepSeek V2 and V3 (arXiv 2405.04434 and 2412.19437) and models with their
graph (Kimi K2, GLM 4.7 Flash), Mistral Small 4 and MiniCPM 3."""

import math
from dataclasses import replace
from functools import partial

import numpy as np

from hotsplit.families.blueprint import Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import (
    COUNTS,
    dense_layers_of_types,
    experts_of_keys,
    with_choice_bias,
)
from hotsplit.families.expert_keys import KEYS as EXPERT_KEYS
from hotsplit.families.family import Architecture, Family
from hotsplit.families.glm import router_keys
from hotsplit.families.granite import FACTOR_KEYS
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.latent_keys import (
    KEYS,
    attention_of,
    derived,
    latent_keys,
    latent_of_keys,
    latent_sources,
    latents_apart,
    other_yarn,
    scaling_of_keys,
    sizes_of_keys,
)
from hotsplit.families.llama import without_windows
from hotsplit.families.mistral import GROWTH_KEY
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.files.gguf_file import Value
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.route import CHOICE_BIAS, Gating
from hotsplit.model.spec import ModelSpec

RANKS = ("q_lora_rank", "kv_lora_rank")  # keys of configs that other families refuse
MINICPM_FACTORS = ("scale_emb", "scale_depth")
GROWTH_LENGTH_KEY = "attention.temperature_length"
# Neither biases nor shares of heads are in checkpoints.
PLAIN = {"attention_bias": False}
# What llama.cpp knows models by (src/models/deepseek2.cpp): those without latents of queries, such
# as DeepSeek V2 Lite, and those whose experts sigmoids choose without a key that says so.
LITE_LAYERS = (26, 27)
GLM_LAYERS, GLM_VOCAB = (47, 48), 154880
# The constants of llama.cpp's graph (src/models/minicpm3.cpp).
MINICPM_SCALES, MINICPM_BASE = (12.0, 1.4), 256


def keys_of_v2(read: ConfigReader) -> dict[str, Value]:
    """transformers never renormalises, whatever `norm_topk_prob` says, and pairs are neighbours
    whatever `rope_interleave` does."""
    read.refuse("topk_method", "greedy", "group_limited_greedy")
    read.refuse("norm_topk_prob", False, why="transformers ignores it")
    read.refuse("rope_interleave", True, why="transformers ignores it")
    has_groups = read.values.get("topk_method") == "group_limited_greedy"
    groups = {} if has_groups else {"n_group": 1, "topk_group": 1}
    return keys_with(read.with_values(groups), gating="softmax")


def keys_with(read: ConfigReader, gating: Gating = "sigmoid") -> dict[str, Value]:
    """The keys of DeepSeek-V3's router, with another function perhaps."""
    return without_windows(read) | latent_keys(read) | router_keys(read, gating)


def derived_of_glm(read: ConfigReader) -> dict[str, object]:
    return {**derived(read), "first_k_dense_replace": dense_layers_of_types(read, 1)}


def derived_of_mistral(read: ConfigReader) -> dict[str, object]:
    """Its heads are given whole, of which a part rotates."""
    plain, rotated = read.count("qk_nope_head_dim"), read.count("qk_rope_head_dim")
    share = rotated / (plain + rotated)
    own = {"head_dim": plain + rotated, "partial_rotary_factor": share}
    return {**derived(read), **own}


def keys_of_mistral(read: ConfigReader) -> dict[str, Value]:
    rope, growth = read.rope(), dict[str, Value]()
    if rope.values.get("llama_4_scaling_beta"):
        growth = {
            GROWTH_KEY: np.float32(rope.positive("llama_4_scaling_beta")),
            GROWTH_LENGTH_KEY: np.uint32(rope.count("original_max_position_embeddings")),
        }
    return keys_with(read, "softmax") | growth


def derived_of_minicpm(read: ConfigReader) -> dict[str, object]:
    heads, width = read.count("num_attention_heads"), read.count("hidden_size")
    return {**derived(read), "v_head_dim": read.count("v_head_dim", max(1, width // heads))}


def keys_of_minicpm(read: ConfigReader) -> dict[str, Value]:
    width, num_layers = read.count("hidden_size"), read.count("num_hidden_layers")
    depth = read.positive("scale_depth", math.sqrt(num_layers))
    factors = {
        "embedding_scale": read.positive("scale_emb"),
        "residual_scale": depth / math.sqrt(num_layers),
        "logit_scale": read.positive("dim_model_base", width) / width,
    }
    numbers = {name: np.float32(factor) for name, factor in factors.items()}
    return without_windows(read) | latent_keys(read) | numbers


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    """A layer beyond the last is left out unless it is a draft block."""
    is_adjacent = read.values.get("rope_interleave") is not False
    return replace(
        latent_sources(spec, is_adjacent=is_adjacent),
        renamed=with_choice_bias,
        ignored_prefixes=() if spec.draft else (f"model.layers.{spec.num_layers}.",),
    )


def of_keys(read: KeyReader) -> ModelSpec:
    """DeepSeek's graph and Mistral Small 4's."""
    own, sizes = sizes_of_keys(read)
    name, is_mistral = read.graph.name, read.graph.name == "mistral4"
    gating: Gating = "softmax"
    if sizes.num_layers + read.num_skipped in GLM_LAYERS and sizes.vocab_size == GLM_VOCAB:
        gating = "sigmoid"
    experts = None
    if read.whole("expert_count", 0):
        experts = experts_of_keys(read, gating=gating, renormalises=False, has_shared=True)
        is_v2 = experts.route.gating == "softmax" and not is_mistral
        experts = replace(experts, route=replace(experts.route, groups_by_largest=is_v2))
    rotary = own.rotary("adjacent", sizes.head_dim)
    scaling, multiplier = scaling_of_keys(read, rotary.scaling)
    attention = attention_of(latent_of_keys(read, sizes), scaling, multiplier)
    if growth := read.number(f"{name}.{GROWTH_KEY}", 0.0):
        length = scaling.original_length or read.count("context_length")
        attention |= {"growth": growth, "growth_length": read.count(GROWTH_LENGTH_KEY, length)}
    return decoder(
        own,
        rotary=replace(rotary, scaling=scaling),
        is_partly_rotated=True,
        experts=experts,
        attention=attention,
    )


def of_minicpm_keys(read: KeyReader) -> ModelSpec:
    """Without keys for its factors, they are the constants of llama.cpp's graph."""
    own, sizes = sizes_of_keys(read)
    width, name = sizes.hidden_size, read.graph.name
    embedding, depth = MINICPM_SCALES
    defaults = embedding, depth / math.sqrt(sizes.num_layers), MINICPM_BASE / width
    names = ("embedding_scale", "residual_scale", "logit_scale")
    embedding, residual, logits = (
        read.positive(f"{name}.{key}", default)
        for key, default in zip(names, defaults, strict=True)
    )
    rotary = own.rotary("halves", sizes.head_dim)
    return decoder(
        own,
        pairing="halves",
        rotary=rotary,
        is_partly_rotated=True,
        arrange=partial(Arrangement.pre_norm, factor=residual),
        attention=attention_of(latent_of_keys(read, sizes), rotary.scaling),
        embedding_scale=embedding,
        logit_scale=logits,
    )


def not_in_stock(spec: ModelSpec) -> str | None:
    latent = spec.attentions[0].latent
    if latent is not None and latent.query_rank is None and spec.num_layers not in LITE_LAYERS:
        return "has latents of queries, too, but in models of 26 or 27 layers"
    route = spec.layers[-1].route
    if route is not None and route.groups_by_largest and route.num_groups > 1:
        return "takes groups of experts by their two largest scores, this model by the largest"
    return other_yarn(spec)


COMMON = {"tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu"}
V2 = Family(
    classes=("DeepseekV2ForCausalLM",),
    title="DeepSeek V2",
    graph="deepseek2",
    model_types=("deepseek_v2",),
    read_keys=(*COUNTS, *RANKS),
    plain=PLAIN | {"mlp_bias": False, "scoring_func": "softmax", "moe_layer_freq": 1},
    defaults=COMMON
    | {
        "mlp_bias": False,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "rms_norm_eps": 1e-6,
    },
    rope=Rope(kinds=("default", "yarn")),
    derived=derived,
    keys=keys_of_v2,
    sources=sources,
)
V3 = replace(
    V2,
    classes=("DeepseekV3ForCausalLM",),
    title="DeepSeek V3",
    model_types=("deepseek_v3", "kimi_k2"),
    plain=PLAIN | {"scoring_func": "sigmoid", "moe_layer_freq": 1},
    defaults=COMMON
    | {
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "rms_norm_eps": 1e-6,
        "n_group": 8,
        "topk_group": 4,
        "num_key_value_heads": 128,
    },
    keys=keys_with,
    tensors=lambda read: {CHOICE_BIAS: ()},
)
FAMILIES = (
    V2,
    V3,
    replace(
        V3,
        classes=("Glm4MoeLiteForCausalLM",),
        title="GLM-4.7-Flash",
        model_types=("glm4_moe_lite",),
        defaults=COMMON
        | {
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 20,
        },
        derived=derived_of_glm,
    ),
    replace(
        V3,
        classes=("Mistral4ForCausalLM",),
        title="Mistral Small 4",
        graph="mistral4",
        model_types=("mistral4",),
        plain=PLAIN,
        defaults=COMMON
        | {
            "norm_topk_prob": True,
            "first_k_dense_replace": 0,
            "rms_norm_eps": 1e-6,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 32,
        },
        rope=Rope(kinds=("default", "yarn"), share=0.5),
        derived=derived_of_mistral,
        keys=keys_of_mistral,
        tensors=lambda read: {},
    ),
    Family(
        classes=("MiniCPM3ForCausalLM",),
        title="MiniCPM3",
        graph="minicpm3",
        model_types=("minicpm3",),
        read_keys=(*RANKS, *MINICPM_FACTORS),
        plain=PLAIN | {"mlp_bias": False},
        defaults={
            **COMMON,
            "tie_word_embeddings": True,
            "num_key_value_heads": 40,
            "rms_norm_eps": 1e-5,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        rope=Rope(kinds=("default", "linear", "longrope")),
        derived=derived_of_minicpm,
        keys=keys_of_minicpm,
        sources=lambda spec, read: latent_sources(spec),
    ),
)
DEEPSEEK2 = Architecture(
    name="deepseek2",
    of_keys=of_keys,
    known_keys=(*EXPERT_KEYS, *KEYS, GROWTH_KEY, GROWTH_LENGTH_KEY, "nextn_predict_layers"),
    not_in_stock=not_in_stock,
    apart=latents_apart,
)
GRAPHS = (
    DEEPSEEK2,
    replace(DEEPSEEK2, name="mistral4"),
    Architecture(
        name="minicpm3",
        of_keys=of_minicpm_keys,
        known_keys=(*KEYS, *FACTOR_KEYS),
        not_in_stock=lambda spec: "has keys and values of all heads in one matrix",
        apart=latents_apart,
    ),
)
