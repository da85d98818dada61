"""gpt-oss (OpenAI, arXiv 2508.10925): experts with biases and a clamped SwiGLU, sinks of attention, a
window in every other layer."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import gguf
import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import Blueprint, NameOf, gguf_names
from hotsplit.families.config_reader import ConfigReader
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
from hotsplit.families.llama import whole_sizes
from hotsplit.families.sizes import Sizes
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.attention import HeadVector
from hotsplit.model.spec import Activation, ModelSpec, Rotary, Route

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

# The norm before the neurons, as llama.cpp names it.
SECOND_NORM = "post_attention_norm"
EXPERT_BIASES = ("ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias")
PERIOD = 2


def gpt_oss(read: ConfigReader) -> Blueprint:
    """GptOssForCausalLM, in bf16 or with experts in MXFP4."""
    read.refuse("swiglu_limit", 7.0, 7)
    read.refuse("swiglu_alpha", 1.702)
    read.refuse("hidden_act", "silu")
    _check_packing(read)
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    experts = Experts(
        route=Route(
            num_experts=config_count(read),
            num_used=read.count("num_experts_per_tok"),
            gating="softmax_of_chosen",
            renormalises=False,
            has_bias=True,
        ),
        num_neurons=sizes.num_neurons,
    )
    check_experts(str(read.path), experts, sizes.num_layers)
    sizes, rotary, factors = read.rotary(
        sizes, "halves", ("default", "yarn"), 150000.0, rounds_borders=False
    )
    biases = PROJECTION_BIASES if read.flag("attention_bias") else ()
    has_window_L = read.layers_with_window(sizes.num_layers, PERIOD)
    return Blueprint(
        spec=gpt_oss_spec(
            sizes,
            rotary,
            "swiglu_oai",
            experts,
            has_window_L,
            read.window_of(has_window_L),
            (*biases, *EXPERT_BIASES),
        ),
        name_of=_with_sinks(gguf_names(gguf.MODEL_ARCH.GPT_OSS, sizes.num_layers)),
        rope_factors=factors,
        expert_form="columns",
    )


def _check_packing(read: ConfigReader) -> None:
    """Raises HotsplitError for packed weights that are not MXFP4."""
    packing = read.values.get("quantization_config")
    method = packing.get("quant_method") if isinstance(packing, dict) else packing
    if method not in (None, "mxfp4"):
        raise HotsplitError(
            f"{read.path}: quant_method is {shown(method)}, wanted 'mxfp4' or none: its weights are"
            " packed; use the original checkpoint"
        )


def _with_sinks(name_of: NameOf) -> NameOf:
    """The names, with that of the sinks, which has no suffix in a checkpoint."""

    def name(source: str) -> str | None:
        place = name_of(source)
        return f"{place}.weight" if source.endswith(".sinks") else place

    return name


def gpt_oss_spec(
    sizes: Sizes,
    rotary: Rotary,
    activation: Activation,
    experts: Experts,
    has_window_L: Sequence[bool],
    window: int,
    options: Collection[str],
) -> ModelSpec:
    mixture, arrange = experts.mixture(activation, options), sizes.arrangement()
    layers = [
        arrange.pre_norm(
            replace(
                sizes.attention(rotary, options, window=window if has_window else None),
                head_sinks=HeadVector("attn_sinks.weight"),
            ),
            mixture,
            second=SECOND_NORM,
        )
        for has_window in has_window_L
    ]
    return sizes.model("gpt-oss", layers)


def of_keys(read: "KeyReader") -> ModelSpec:
    """Borders of YaRN are not rounded, as in transformers; llama.cpp rounds them."""
    sizes, rotary = read.sizes(), read.rotary("halves")
    scaling = replace(rotary.scaling, rounds_borders=rotary.scaling.kind != "yarn")
    return gpt_oss_spec(
        sizes,
        replace(rotary, scaling=scaling),
        read.activation(),
        experts_of_keys(read, gating="softmax_of_chosen", renormalises=False),
        read.layers_with_window(sizes.num_layers, PERIOD),
        read.count("attention.sliding_window"),
        read.options(sizes.num_layers),
    )


def keys(spec: ModelSpec) -> Mapping[str, Value]:
    windows = [attention.window for attention in spec.attentions]
    window = next((each for each in windows if each is not None), spec.context_length)
    return {
        **expert_keys(spec),
        "attention.sliding_window": np.uint32(window),
        "attention.sliding_window_pattern": [each is not None for each in windows],
    }


def not_in_stock(spec: ModelSpec) -> str | None:
    has_window_L = [attention.window is not None for attention in spec.attentions]
    if has_window_L != [(layer + 1) % PERIOD != 0 for layer in range(spec.num_layers)]:
        return "has windows in every other layer, this model in others"
    return None


GPT_OSS = Family(
    title="gpt-oss",
    blueprint=gpt_oss,
    model_types=("gpt_oss",),
    read_keys=(*COUNTS, "quantization_config"),
    defaults={
        "tie_word_embeddings": False,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    },
)
GRAPH = Architecture(
    name="gpt-oss",
    of_keys=of_keys,
    keys=keys,
    known_keys=(*KEYS, "attention.sliding_window", "attention.sliding_window_pattern"),
    options=(*PROJECTION_BIASES, *EXPERT_BIASES),
    stock_activations=("swiglu_oai",),
    stock_options=(*PROJECTION_BIASES, *EXPERT_BIASES),
    not_in_stock=not_in_stock,
)
