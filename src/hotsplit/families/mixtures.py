"""Mixtures of experts with the graph of Llama or Qwen 3 otherwise: Mixtral (arXiv 2401.04088),
OLMoE (arXiv 2409.02060), Qwen's."""

from dataclasses import replace
from functools import partial
from typing import Any

from hotsplit.families.blueprint import Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import (
    COUNTS,
    KEYS,
    dense_layers,
    expert_keys,
    experts_of_keys,
    other_in_stock,
    with_dense_layers,
)
from hotsplit.families.family import ATTN_BIASES, QKV_BIASES, Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.llama import adjacent, without_windows
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.families.windows import KEYS as WINDOW_KEYS
from hotsplit.families.windows import (
    in_all_layers,
    no_windows_in_stock,
    window_keys,
    windows_of_config,
)
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import ModelSpec


def derived(read: ConfigReader) -> dict[str, object]:
    """If all layers have experts, the neurons of a layer are an expert's."""
    return {} if dense_layers(read) else {"intermediate_size": read.count("moe_intermediate_size")}


def keys_of_qwen2(read: ConfigReader) -> dict[str, Value]:
    """Experts that always fire, with a gate, and windows in every other of the first layers."""
    is_used = read.flag("use_sliding_window")
    last = read.whole("max_window_layers") if is_used else 0
    has_window_L = [i % 2 == 0 and i < last for i in range(read.count("num_hidden_layers"))]
    windows = windows_of_config(read, is_used=is_used, has_window_L=has_window_L)
    shared = read.count("shared_expert_intermediate_size")
    experts = qwen_keys(read, renormalises=read.flag("norm_topk_prob"), shared=shared)
    return experts | window_keys(windows)


def keys_of_qwen3(read: ConfigReader) -> dict[str, Value]:
    windows = in_all_layers(read, is_used=read.flag("use_sliding_window"))
    return qwen_keys(read, renormalises=read.flag("norm_topk_prob")) | window_keys(windows)


def qwen_keys(read: ConfigReader, *, renormalises: bool, shared: int = 0) -> dict[str, Value]:
    return expert_keys(read, renormalises=renormalises, shared=shared, num_dense=dense_layers(read))


def with_dense(spec: ModelSpec, read: ConfigReader) -> Sources:
    return Sources(renamed=with_dense_layers(spec.num_layers))


def of_keys(read: KeyReader, *, renormalises: bool, **own: Any) -> ModelSpec:
    return decoder(read, experts=experts_of_keys(read, renormalises=renormalises), **own)


def qwen_of_keys(read: KeyReader, *, has_shared: bool) -> ModelSpec:
    """An expert's neurons are by default a layer's over the experts of a token."""
    num_neurons = read.sizes().num_neurons
    experts = experts_of_keys(
        read,
        renormalises=not has_shared,
        has_shared=has_shared,
        has_shared_gate=has_shared,
        default_length=num_neurons // max(1, read.whole("expert_used_count")),
    )
    if has_shared and not experts.num_shared:  # as in llama.cpp's qwen2moe
        experts = replace(experts, num_shared=num_neurons)
    return decoder(read, experts=experts, has_head_norms=not has_shared)


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
QWEN3_MOE = Family(
    classes=("Qwen3MoeForCausalLM",),
    title="Qwen 3 MoE",
    graph="qwen3moe",
    model_types=("qwen3_moe",),
    read_keys=COUNTS,
    defaults=_QWEN | {"num_experts_per_tok": 8, "num_experts": 128, "num_key_value_heads": 4},
    flags={"attention_bias": ATTN_BIASES},
    derived=derived,
    keys=keys_of_qwen3,
    sources=with_dense,
)
FAMILIES = (
    Family(
        classes=("MixtralForCausalLM",),
        title="Mixtral",
        graph="llama",
        model_types=("mixtral",),
        read_keys=COUNTS,
        defaults={
            "tie_word_embeddings": False,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        rope=Rope(theta=1e6),
        keys=lambda read: (
            expert_keys(read, neurons="intermediate_size") | window_keys(in_all_layers(read))
        ),
        sources=adjacent,
    ),
    Family(
        classes=("OlmoeForCausalLM",),
        title="OLMoE",
        graph="olmoe",
        read_keys=COUNTS,
        defaults=_DEFAULTS | {"num_experts_per_tok": 8, "num_experts": 64},
        flags={"attention_bias": ATTN_BIASES},
        keys=lambda read: (
            without_windows(read)
            | expert_keys(
                read, neurons="intermediate_size", renormalises=read.flag("norm_topk_prob")
            )
        ),
    ),
    Family(
        classes=("Qwen2MoeForCausalLM",),
        title="Qwen 2 MoE",
        graph="qwen2moe",
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
        flags={"qkv_bias": QKV_BIASES},
        derived=derived,
        keys=keys_of_qwen2,
        sources=with_dense,
    ),
    QWEN3_MOE,
)
GRAPHS = (
    Architecture(
        name="olmoe",
        of_keys=partial(
            of_keys, renormalises=False, has_head_norms=True, attention={"norms_all_heads": True}
        ),
        known_keys=KEYS,
        options=ATTN_BIASES,
        not_in_stock=_not_in_olmoe,
    ),
    Architecture(
        name="qwen2moe",
        of_keys=partial(qwen_of_keys, has_shared=True),
        known_keys=(*KEYS, *WINDOW_KEYS),
        options=ATTN_BIASES,
        stock_options=QKV_BIASES,
        not_in_stock=partial(_not_in_qwen, renormalises=False),
    ),
    Architecture(
        name="qwen3moe",
        of_keys=partial(qwen_of_keys, has_shared=False),
        known_keys=(*KEYS, *WINDOW_KEYS),
        options=ATTN_BIASES,
        not_in_stock=partial(_not_in_qwen, renormalises=True),
    ),
)
