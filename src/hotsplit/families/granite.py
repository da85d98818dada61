"""Granite (IBM), dense and mixtures of experts, with and without shared experts: a Llama's graph whose
embeddings, residual sums, scores and logits are multiplied by factors of the config."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import gguf
import numpy as np

from hotsplit.errors import HotsplitError
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
from hotsplit.families.family import GATED_BIASES, PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import llama_sizes, whole_sizes
from hotsplit.families.row_order import Rows, rotary_rows
from hotsplit.families.sizes import Sizes
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Mixture
from hotsplit.model.spec import Add, ModelSpec, Neurons, Rotary, Route

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

# The factors, by their names in a config; and by ours in a GGUF.
FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
FACTOR_KEYS = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
# Of hybrids, written for a Granite 4 without recurrent layers too; its graph reads none of them.
HYBRID_KEYS = (
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.time_step_rank",
    "expert_shared_feed_forward_length",
)
Factors = tuple[float, float, float, float]


def granite(read: ConfigReader) -> Blueprint:
    """GraniteForCausalLM."""
    sizes = llama_sizes(read)
    sizes, rotary, factors = read.rotary(sizes, "adjacent")
    activation, biases = read.activation("hidden_act", GATED), read.biases()
    return Blueprint(
        spec=granite_spec(
            "granite", sizes, rotary, sizes.neurons(activation, biases), _factors(read), biases
        ),
        name_of=gguf_names(gguf.MODEL_ARCH.GRANITE, sizes.num_layers),
        rope_factors=factors,
        rows=rotary_rows(sizes),
    )


def granite_of_hybrids(read: ConfigReader) -> Blueprint:
    """GraniteMoeHybridForCausalLM without recurrent layers and experts: Granite 4's micro and smaller
    ones. Its neurons are those that a mixture has beside its experts."""
    types = read.values.get("layer_types")
    if not isinstance(types, list) or not set(map(str, types)) <= {"attention", "full_attention"}:
        raise HotsplitError(
            f"{read.path}: layer_types is {shown(types)}, wanted 'attention' for each layer: recurrent"
            " layers (Mamba) are not supported; this checkpoint is not supported"
        )
    sizes = whole_sizes(read, read.count("max_position_embeddings"), "shared_intermediate_size")
    sizes, rotary, factors = read.rotary(sizes, "adjacent")
    biases = PROJECTION_BIASES if read.flag("attention_bias") else ()
    is_rotated = read.values.get("position_embedding_type") == "rope"
    return Blueprint(
        spec=granite_spec(
            "granite",
            sizes,
            rotary if is_rotated else None,
            sizes.neurons(read.activation("hidden_act", GATED)),
            _factors(read),
            biases,
        ),
        name_of=_as_neurons(gguf_names(gguf.MODEL_ARCH.GRANITE, sizes.num_layers)),
        rope_factors=factors,
        rows=rotary_rows(sizes) | _joined_rows(sizes.num_neurons, ""),
    )


def _as_neurons(name_of: NameOf) -> NameOf:
    """The names, with those of neurons beside experts for all neurons."""

    def name(source: str) -> str | None:
        for theirs, usual in (("input_linear", "up_proj"), ("output_linear", "down_proj")):
            source = source.replace(f".shared_mlp.{theirs}.", f".mlp.{usual}.")
        return name_of(source)

    return name


def _factors(read: ConfigReader) -> Factors:
    embedding, residual, scores, logits = (read.positive(name) for name in FACTORS)
    return embedding, residual, scores, logits


def granite_moe(read: ConfigReader) -> Blueprint:
    """GraniteMoeForCausalLM, GraniteMoeSharedForCausalLM."""
    sizes = llama_sizes(read)
    shared = read.values.get("shared_intermediate_size") or 0
    experts = Experts(
        route=Route(
            num_experts=config_count(read),
            num_used=read.count("num_experts_per_tok"),
            gating="softmax_of_chosen",
            renormalises=False,
        ),
        num_neurons=sizes.num_neurons,
        num_shared=read.count("shared_intermediate_size") if shared else 0,
    )
    check_experts(str(read.path), experts, sizes.num_layers)
    sizes, rotary, factors = read.rotary(sizes, "adjacent")
    biases = PROJECTION_BIASES if read.flag("attention_bias") else ()
    activation = read.activation("hidden_act", GATED)
    names = gguf_names(gguf.MODEL_ARCH.GRANITE_MOE, sizes.num_layers)
    return Blueprint(
        spec=granite_spec(
            "granitemoe", sizes, rotary, experts.mixture(activation, biases), _factors(read), biases
        ),
        name_of=_with_shared(names),
        rope_factors=factors,
        rows=rotary_rows(sizes) | _joined_rows(experts.num_shared, "_shexp"),
    )


def _with_shared(name_of: NameOf) -> NameOf:
    """The names, with that of the gates and ups of shared experts, which are one matrix."""

    def name(source: str) -> str | None:
        joined = ".shared_mlp.input_linear.weight"
        if source.endswith(joined):
            layer = source.removesuffix(joined).rpartition(".")[2]
            return f"blk.{layer}.ffn_up_shexp.weight"
        return name_of(source.replace(".router.weight", ".router.layer.weight"))

    return name


def _joined_rows(count: int, suffix: str) -> dict[str, Rows]:
    """The rows of gates and ups, which are one matrix."""
    if not count:
        return {}
    order = {"ffn_gate": np.arange(count), "ffn_up": count + np.arange(count)}
    return {
        f"{name}{suffix}.weight": Rows(
            source=f"ffn_up{suffix}.weight", order=rows, num_rows=2 * count
        )
        for name, rows in order.items()
    }


def granite_spec(
    name: str,
    sizes: Sizes,
    rotary: Rotary | None,
    neurons: Neurons | Mixture,
    factors: Factors,
    options: Collection[str] = (),
) -> ModelSpec:
    """`factors`: in the order of FACTORS."""
    embedding, residual, scores, logits = factors
    attention = sizes.attention(rotary, options, scale=scores)
    layer = sizes.arrangement().pre_norm(attention, neurons, factor=residual)
    return sizes.model(
        name, sizes.alike(layer), embedding_scale=embedding, logit_scale=1.0 / logits
    )


def of_keys(read: "KeyReader") -> ModelSpec:
    """llama.cpp's converter lists the key heads of layers of a Granite 4 without recurrent layers, which it
    takes for one of the hybrids that its class has."""
    one, has_keys_L = read.with_one("attention.head_count_kv")
    read = one if all(has_keys_L or ()) else read  # without keys a layer is a recurrent one
    sizes, name = read.sizes(), read.graph.name
    activation, options = read.activation(), read.options(sizes.num_layers)
    neurons: Neurons | Mixture = sizes.neurons(activation, options)
    if name == "granitemoe":
        neurons = experts_of_keys(read, has_shared=True).mixture(activation, options)
    # llama.cpp's graph rotates nothing if this is false (src/models/granite.cpp).
    is_rotated = read.keys.get(f"{name}.rope.scaling.finetuned", True) is not False
    embedding, residual, scores, logits = (
        read.positive(f"{name}.{key}", default)
        for key, default in zip(FACTOR_KEYS, (1.0, 1.0, sizes.head_dim**-0.5, 1.0), strict=True)
    )
    return granite_spec(
        name,
        sizes,
        read.rotary("adjacent") if is_rotated else None,
        neurons,
        (embedding, residual, scores, logits),
        options,
    )


def keys(spec: ModelSpec) -> Mapping[str, Value]:
    layer = spec.layers[0]
    residual = next(block.factor for block in layer.blocks if isinstance(block, Add))
    values = (
        spec.embedding_scale,
        residual,
        spec.attentions[0].score_scale,
        1.0 / spec.logit_scale,
    )
    own = {name: np.float32(v) for name, v in zip(FACTOR_KEYS, values, strict=True)}
    finetuned = {} if spec.attentions[0].rotary else {"rope.scaling.finetuned": False}
    return {**expert_keys(spec), **own, **finetuned}


def not_in_stock(spec: ModelSpec) -> str | None:
    """llama.cpp takes the softmax of all scores, and divides by the sum of the chosen: the same."""
    if spec.has_experts:
        return other_in_stock(spec, renormalises=False)
    attention = spec.attentions[0]
    if attention.query_size != spec.hidden_size:
        return (
            f"has heads of {spec.hidden_size} values together, this model of {attention.query_size}"
        )
    return None


DEFAULTS = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    **dict.fromkeys(FACTORS, 1.0),
}
GRANITE = Family(
    title="Granite",
    blueprint=granite,
    model_types=("granite",),
    read_keys=FACTORS,
    defaults=DEFAULTS | {"mlp_bias": False},
)
GRANITE_OF_HYBRIDS = Family(
    title="Granite",
    blueprint=granite_of_hybrids,
    model_types=("granitemoehybrid",),
    read_keys=FACTORS,
    defaults=DEFAULTS | {"num_local_experts": 8, "shared_intermediate_size": 1024},
)
GRANITE_MOE = Family(
    title="Granite MoE",
    blueprint=granite_moe,
    model_types=("granitemoe", "granitemoeshared"),
    read_keys=(*COUNTS, *FACTORS),
    defaults=DEFAULTS
    | {"num_experts_per_tok": 2, "num_local_experts": 8, "shared_intermediate_size": 0},
)
GRAPHS = (
    Architecture(
        name="granite",
        of_keys=of_keys,
        keys=keys,
        known_keys=(*FACTOR_KEYS, *HYBRID_KEYS),
        options=(*PROJECTION_BIASES, *GATED_BIASES),
        stock_activations=("silu",),
        stock_options=(*PROJECTION_BIASES, *GATED_BIASES),
        not_in_stock=not_in_stock,
    ),
    Architecture(
        name="granitemoe",
        of_keys=of_keys,
        keys=keys,
        known_keys=(*KEYS, *FACTOR_KEYS),
        options=PROJECTION_BIASES,
        stock_activations=("silu",),
        not_in_stock=not_in_stock,
    ),
)
