"""Mixtures of experts with the graph of Llama or Qwen 3 otherwise: Mixtral (arXiv 2401.04088), OLMoE
(arXiv 2409.02060), Qwen's."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import gguf

from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.experts import (
    COUNTS,
    KEYS,
    Experts,
    check_experts,
    config_count,
    dense_layers,
    expert_keys,
    experts_of_keys,
    other_in_stock,
    with_dense_layers,
)
from hotsplit.families.family import PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import keys as llama_keys
from hotsplit.families.llama import llama_sizes, llama_spec, whole_sizes
from hotsplit.families.row_order import rotary_rows
from hotsplit.families.sizes import Sizes
from hotsplit.families.windows import KEYS as WINDOW_KEYS
from hotsplit.families.windows import (
    Windows,
    no_windows_in_stock,
    windows_of_config,
    windows_of_keys,
)
from hotsplit.model.spec import ModelSpec, Route

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

_LENGTH = "moe_intermediate_size"


def mixtral(read: ConfigReader) -> Blueprint:
    """MixtralForCausalLM: a Llama's graph, of which `intermediate_size` neurons are an expert's."""
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    experts = _experts(read, sizes, sizes.num_neurons, renormalises=True)
    windows = _in_all_layers(read, sizes.num_layers)
    sizes, rotary, factors = read.rotary(sizes, "adjacent", default_theta=1e6)
    return Blueprint(
        spec=llama_spec(
            sizes, rotary, read.activation("hidden_act", GATED), experts=experts, windows=windows
        ),
        name_of=gguf_names(gguf.MODEL_ARCH.LLAMA, sizes.num_layers),
        rope_factors=factors,
        rows=rotary_rows(sizes),
    )


def olmoe(read: ConfigReader) -> Blueprint:
    """OlmoeForCausalLM: norms of all heads of queries, and of keys, together."""
    sizes = llama_sizes(read)
    experts = _experts(read, sizes, sizes.num_neurons, renormalises=read.flag("norm_topk_prob"))
    sizes, rotary, factors = read.rotary(sizes, "halves")
    return Blueprint(
        spec=llama_spec(
            sizes,
            rotary,
            read.activation("hidden_act", GATED),
            PROJECTION_BIASES if read.flag("attention_bias") else (),
            architecture="olmoe",
            has_head_norms=True,
            norms_all_heads=True,
            experts=experts,
        ),
        name_of=gguf_names(gguf.MODEL_ARCH.OLMOE, sizes.num_layers),
        rope_factors=factors,
    )


def qwen2(read: ConfigReader) -> Blueprint:
    """Qwen2MoeForCausalLM: experts that always fire, too, with a gate."""
    biases = PROJECTION_BIASES[:3] if read.flag("qkv_bias") else ()
    return _qwen(read, "qwen2moe", gguf.MODEL_ARCH.QWEN2MOE, biases)


def qwen3(read: ConfigReader) -> Blueprint:
    """Qwen3MoeForCausalLM."""
    biases = PROJECTION_BIASES if read.flag("attention_bias") else ()
    return _qwen(read, "qwen3moe", gguf.MODEL_ARCH.QWEN3MOE, biases)


def _qwen(
    read: ConfigReader, name: str, arch: gguf.MODEL_ARCH, options: tuple[str, ...]
) -> Blueprint:
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    num_dense, is_qwen2 = dense_layers(read, sizes.num_layers), name == "qwen2moe"
    is_used = read.flag("use_sliding_window")
    if is_qwen2:  # in every other layer, up to a number of them
        last = read.whole("max_window_layers") if is_used else 0
        has_window_L = [layer % 2 == 0 and layer < last for layer in range(sizes.num_layers)]
        windows = windows_of_config(
            read, sizes.num_layers, is_used=is_used, has_window_L=has_window_L
        )
    else:
        windows = _in_all_layers(read, sizes.num_layers, is_used=is_used)
    experts = _experts(
        read,
        sizes,
        read.count(_LENGTH),
        renormalises=read.flag("norm_topk_prob"),
        num_dense=num_dense,
        num_shared=read.count("shared_expert_intermediate_size") if is_qwen2 else 0,
    )
    if not num_dense:
        sizes = replace(sizes, num_neurons=experts.num_neurons)
    sizes, rotary, factors = read.rotary(sizes, "halves")
    return Blueprint(
        spec=llama_spec(
            sizes,
            rotary,
            read.activation("hidden_act", GATED),
            options,
            architecture=name,
            has_head_norms=not is_qwen2,
            experts=experts,
            windows=windows,
        ),
        name_of=with_dense_layers(gguf_names(arch, sizes.num_layers), sizes.num_layers),
        rope_factors=factors,
    )


def _in_all_layers(read: ConfigReader, num_layers: int, *, is_used: bool = True) -> Windows:
    """The windows of a model that has them in all layers, whatever `layer_types` says."""
    has_windows = is_used and read.values.get("sliding_window") is not None
    read.check_layer_types("sliding" if has_windows else "full", why="transformers ignores the key")
    return windows_of_config(read, num_layers, is_used=is_used)


def _experts(
    read: ConfigReader,
    sizes: Sizes,
    num_neurons: int,
    *,
    renormalises: bool,
    num_dense: int = 0,
    num_shared: int = 0,
) -> Experts:
    route = Route(
        num_experts=config_count(read),
        num_used=read.count("num_experts_per_tok"),
        renormalises=renormalises,
    )
    experts = Experts(
        route=route,
        num_neurons=num_neurons,
        num_dense=num_dense,
        num_shared=num_shared,
        has_shared_gate=num_shared > 0,
    )
    return check_experts(str(read.path), experts, sizes.num_layers)


def _of_keys(
    read: "KeyReader",
    *,
    renormalises: bool,
    has_shared: bool = False,
    has_head_norms: bool = False,
    norms_all_heads: bool = False,
    is_divided: bool = False,
) -> ModelSpec:
    """`is_divided`: without a key for it, the neurons of an expert are those of a layer over the
    experts of a token."""
    sizes = read.sizes()
    used = max(1, read.whole("expert_used_count"))
    experts = experts_of_keys(
        read,
        renormalises=renormalises,
        has_shared=has_shared,
        has_shared_gate=has_shared,
        default_length=sizes.num_neurons // used if is_divided else None,
    )
    if has_shared and not experts.num_shared:  # as in llama.cpp's qwen2moe
        experts = replace(experts, num_shared=sizes.num_neurons)
    return llama_spec(
        sizes,
        read.rotary("halves"),
        read.activation(),
        read.options(sizes.num_layers),
        architecture=read.graph.name,
        has_head_norms=has_head_norms,
        norms_all_heads=norms_all_heads,
        experts=experts,
        windows=windows_of_keys(read, sizes.num_layers),
    )


def _not_in_qwen(spec: ModelSpec, *, renormalises: bool) -> str | None:
    return other_in_stock(spec, renormalises=renormalises) or no_windows_in_stock(spec)


def _not_in_olmoe(spec: ModelSpec) -> str | None:
    """llama.cpp's norm of keys has the hidden size."""
    attention = spec.attentions[0]
    if attention.key_size != spec.hidden_size:
        return f"has norms of {spec.hidden_size} keys, this model of {attention.key_size}"
    return other_in_stock(spec, renormalises=False)


_DEFAULTS = {"tie_word_embeddings": False, "attention_bias": False, "norm_topk_prob": False}
_QWEN = _DEFAULTS | {"use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1}
MIXTRAL = Family(
    title="Mixtral",
    blueprint=mixtral,
    model_types=("mixtral",),
    read_keys=COUNTS,
    defaults={
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
)
OLMOE = Family(
    title="OLMoE",
    blueprint=olmoe,
    model_types=("olmoe",),
    read_keys=COUNTS,
    defaults=_DEFAULTS | {"num_experts_per_tok": 8, "num_experts": 64},
)
QWEN2 = Family(
    title="Qwen 2 MoE",
    blueprint=qwen2,
    model_types=("qwen2_moe",),
    read_keys=COUNTS,
    defaults=_QWEN
    | {
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "qkv_bias": True,
        "num_key_value_heads": 16,
        "max_window_layers": 28,
    },
)
QWEN3 = Family(
    title="Qwen 3 MoE",
    blueprint=qwen3,
    model_types=("qwen3_moe",),
    read_keys=COUNTS,
    defaults=_QWEN | {"num_experts_per_tok": 8, "num_experts": 128, "num_key_value_heads": 4},
)
OLMOE_GRAPH = Architecture(
    name="olmoe",
    of_keys=partial(_of_keys, renormalises=False, has_head_norms=True, norms_all_heads=True),
    keys=expert_keys,
    known_keys=KEYS,
    options=PROJECTION_BIASES,
    stock_activations=("silu",),
    not_in_stock=_not_in_olmoe,
)
QWEN2_GRAPH = Architecture(
    name="qwen2moe",
    of_keys=partial(_of_keys, renormalises=False, has_shared=True, is_divided=True),
    keys=llama_keys,
    known_keys=(*KEYS, *WINDOW_KEYS),
    options=PROJECTION_BIASES,
    stock_activations=("silu",),
    stock_options=PROJECTION_BIASES[:3],
    not_in_stock=partial(_not_in_qwen, renormalises=False),
)
QWEN3_GRAPH = Architecture(
    name="qwen3moe",
    of_keys=partial(_of_keys, renormalises=True, has_head_norms=True, is_divided=True),
    keys=llama_keys,
    known_keys=(*KEYS, *WINDOW_KEYS),
    options=PROJECTION_BIASES,
    stock_activations=("silu",),
    not_in_stock=partial(_not_in_qwen, renormalises=True),
)
