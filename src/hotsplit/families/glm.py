"""GLM-4.5 and its like (arXiv 2508.06471): mixtures of experts chosen by sigmoids with a bias, after
some layers without experts, with a rotary embedding of a part of each head."""

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import gguf

from hotsplit.families.blueprint import Blueprint, NameOf, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.experts import (
    COUNTS,
    KEYS,
    Experts,
    check_experts,
    config_count,
    expert_keys,
    experts_of_keys,
)
from hotsplit.families.family import PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import llama_sizes
from hotsplit.families.sizes import Sizes
from hotsplit.model.spec import Activation, ModelSpec, Rotary, Route

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

# The norm before the neurons, as llama.cpp names it.
SECOND_NORM = "post_attention_norm"


def glm4(read: ConfigReader) -> Blueprint:
    """Glm4MoeForCausalLM. Layers beyond the last, which only predict tokens further ahead, are left
    out."""
    sizes = llama_sizes(read)
    length = read.count("moe_intermediate_size")
    route = Route(
        num_experts=config_count(read),
        num_used=read.count("num_experts_per_tok"),
        gating="sigmoid",
        renormalises=read.flag("norm_topk_prob"),
        scale=read.positive("routed_scaling_factor"),
        has_choice_bias=True,
        num_groups=read.count("n_group"),
        num_used_groups=read.count("topk_group"),
    )
    experts = Experts(
        route=route,
        num_neurons=length,
        num_shared=length * read.count("n_shared_experts"),
        num_dense=read.whole("first_k_dense_replace"),
    )
    check_experts(str(read.path), experts, sizes.num_layers)
    if not experts.num_dense:
        sizes = replace(sizes, num_neurons=length)
    sizes, rotary, factors = read.rotary(sizes, "halves", default_share=0.5)
    return Blueprint(
        spec=glm4_spec(
            sizes,
            rotary,
            read.activation("hidden_act", GATED),
            experts,
            PROJECTION_BIASES[:3] if read.flag("attention_bias") else (),
            has_head_norms=read.flag("use_qk_norm"),
        ),
        name_of=_with_choice_bias(gguf_names(gguf.MODEL_ARCH.GLM4_MOE, sizes.num_layers)),
        rope_factors=factors,
        ignored_prefixes=(f"model.layers.{sizes.num_layers}.",),
    )


def _with_choice_bias(name_of: NameOf) -> NameOf:
    """The names, with that of the bias of the choice, whose name is no tensor's with a suffix."""

    def name(source: str) -> str | None:
        bias = ".e_score_correction_bias"
        if source.endswith(bias):
            layer = source.removesuffix(".mlp.gate" + bias).rpartition(".")[2]
            return f"blk.{layer}.exp_probs_b.bias"
        return name_of(source)

    return name


def glm4_spec(
    sizes: Sizes,
    rotary: Rotary,
    activation: Activation,
    experts: Experts,
    options: Collection[str] = (),
    *,
    has_head_norms: bool,
) -> ModelSpec:
    attention = sizes.attention(rotary, options, has_head_norms=has_head_norms)
    arrange = sizes.arrangement()
    dense = arrange.pre_norm(attention, sizes.neurons(activation), second=SECOND_NORM)
    mixed = arrange.pre_norm(attention, experts.mixture(activation), second=SECOND_NORM)
    num_mixed = sizes.num_layers - experts.num_dense
    return sizes.model("glm4moe", [*[dense] * experts.num_dense, *[mixed] * num_mixed])


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes = read.sizes(is_partly_rotated=True)
    return glm4_spec(
        sizes,
        read.rotary("halves", sizes.head_dim),
        read.activation(),
        experts_of_keys(read, gating="sigmoid", has_shared=True),
        read.options(sizes.num_layers),
        has_head_norms="blk.0.attn_q_norm.weight" in read.tensors,
    )


GLM4 = Family(
    title="GLM-4.5",
    blueprint=glm4,
    model_types=("glm4_moe",),
    read_keys=COUNTS,
    defaults={
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_experts_per_tok": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "num_key_value_heads": 8,
    },
)
GRAPH = Architecture(
    name="glm4moe",
    of_keys=of_keys,
    keys=expert_keys,
    known_keys=(*KEYS, "nextn_predict_layers"),
    options=PROJECTION_BIASES[:3],
    stock_activations=("silu",),
    stock_options=PROJECTION_BIASES[:3],
)
