"""Granite's mixtures of experts (IBM), with and without shared experts: a Llama's graph whose
embeddings, residual sums, scores and logits are multiplied by factors of the config."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import gguf
import numpy as np

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
    other_in_stock,
)
from hotsplit.families.family import PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import llama_sizes
from hotsplit.families.row_order import Rows, rotary_rows
from hotsplit.families.sizes import Sizes
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import Activation, Add, ModelSpec, Rotary, Route

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

# The factors, by their names in a config; and by ours in a GGUF.
FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
FACTOR_KEYS = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
Factors = tuple[float, float, float, float]


def granite(read: ConfigReader) -> Blueprint:
    """GraniteMoeForCausalLM, GraniteMoeSharedForCausalLM."""
    sizes, notes = llama_sizes(read, has_window=False)
    shared = read.values.get("shared_intermediate_size") or 0
    experts = Experts(
        route=Route(
            num_experts=config_count(read), num_used=read.count("num_experts_per_tok"),
            gating="softmax_of_chosen", renormalises=False,
        ),
        num_neurons=sizes.num_neurons,
        num_shared=read.count("shared_intermediate_size") if shared else 0,
    )  # fmt: skip
    check_experts(str(read.path), experts, sizes.num_layers)
    sizes, rotary, factors = read.rotary(sizes, "adjacent")
    embedding, residual, scores, logits = (read.positive(name) for name in FACTORS)
    names = gguf_names(gguf.MODEL_ARCH.GRANITE_MOE, sizes.num_layers)
    return Blueprint(
        spec=granite_spec(
            sizes, rotary, read.activation("hidden_act", GATED), experts,
            (embedding, residual, scores, logits),
            PROJECTION_BIASES if read.flag("attention_bias") else (),
        ),
        name_of=_with_shared(names),
        rope_factors=factors,
        rows=rotary_rows(sizes) | _shared_rows(experts.num_shared),
        notes=notes,
    )  # fmt: skip


def _with_shared(name_of: NameOf) -> NameOf:
    """The names, with that of the gates and ups of shared experts, which are one matrix."""

    def name(source: str) -> str | None:
        joined = ".shared_mlp.input_linear.weight"
        if source.endswith(joined):
            layer = source.removesuffix(joined).rpartition(".")[2]
            return f"blk.{layer}.ffn_up_shexp.weight"
        return name_of(source.replace(".router.weight", ".router.layer.weight"))

    return name


def _shared_rows(count: int) -> dict[str, Rows]:
    if not count:
        return {}
    order = {"ffn_gate_shexp": np.arange(count), "ffn_up_shexp": count + np.arange(count)}
    return {
        f"{name}.weight": Rows(source="ffn_up_shexp.weight", order=rows, num_rows=2 * count)
        for name, rows in order.items()
    }


def granite_spec(
    sizes: Sizes, rotary: Rotary | None, activation: Activation, experts: Experts, factors: Factors,
    options: Collection[str] = (),
) -> ModelSpec:  # fmt: skip
    """`factors`: in the order of FACTORS."""
    embedding, residual, scores, logits = factors
    attention = sizes.attention(rotary, options, scale=scores)
    mixture = experts.mixture(activation, options)
    layer = sizes.arrangement().pre_norm(attention, mixture, factor=residual)
    return sizes.model(
        "granitemoe", sizes.alike(layer), embedding_scale=embedding, logit_scale=1.0 / logits
    )


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes = read.sizes()
    experts = experts_of_keys(read, has_shared=True)
    # llama.cpp's graph rotates nothing if this is false (src/models/granite.cpp).
    is_rotated = read.keys.get("granitemoe.rope.scaling.finetuned", True) is not False
    embedding, residual, scores, logits = (
        read.positive(f"granitemoe.{name}", default)
        for name, default in zip(FACTOR_KEYS, (1.0, 1.0, sizes.head_dim**-0.5, 1.0), strict=True)
    )
    return granite_spec(
        sizes, read.rotary("adjacent") if is_rotated else None, read.activation(), experts,
        (embedding, residual, scores, logits), read.options(sizes.num_layers),
    )  # fmt: skip


def keys(spec: ModelSpec) -> Mapping[str, Value]:
    layer = spec.layers[0]
    residual = next(block.factor for block in layer.blocks if isinstance(block, Add))
    values = (
        spec.embedding_scale, residual, spec.attentions[0].score_scale, 1.0 / spec.logit_scale,
    )  # fmt: skip
    own = {name: np.float32(v) for name, v in zip(FACTOR_KEYS, values, strict=True)}
    finetuned = {} if spec.attentions[0].rotary else {"rope.scaling.finetuned": False}
    return {**expert_keys(spec), **own, **finetuned}


def not_in_stock(spec: ModelSpec) -> str | None:
    """llama.cpp takes the softmax of all scores, and divides by the sum of the chosen: the same."""
    return other_in_stock(spec, renormalises=False)


GRANITE = Family(
    blueprint=granite,
    model_types=("granitemoe", "granitemoeshared"),
    read_keys=(*COUNTS, *FACTORS),
    defaults={
        "tie_word_embeddings": False, "attention_bias": False, "num_experts_per_tok": 2,
        "num_local_experts": 8, "shared_intermediate_size": 0, "rms_norm_eps": 1e-6,
        **dict.fromkeys(FACTORS, 1.0),
    },
)  # fmt: skip
GRAPH = Architecture(
    name="granitemoe",
    of_keys=of_keys,
    keys=keys,
    known_keys=(*KEYS, *FACTOR_KEYS),
    options=PROJECTION_BIASES,
    stock_activations=("silu",),
    not_in_stock=not_in_stock,
)
