"""Nemotron and Minitron (arXiv 2402.16819, 2407.14679): layer norms, a rotary embedding of half of each
head, and neurons without gates under ReLU squared, so that most of them are silent."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import gguf

from hotsplit.families.blueprint import ADD_ONE, Blueprint, gguf_names
from hotsplit.families.config_reader import UNGATED, ConfigReader
from hotsplit.families.family import PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import whole_sizes
from hotsplit.families.sizes import Sizes
from hotsplit.model.spec import Activation, ModelSpec, Rotary

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

OPTIONS = (*PROJECTION_BIASES, "ffn_up.bias", "ffn_down.bias")
SHARE = 0.5  # of a head's values that rotate


def nemotron(read: ConfigReader) -> Blueprint:
    """NemotronForCausalLM. Its norms multiply by 1 + weight; a model file has that sum."""
    sizes = whole_sizes(read, read.count("max_position_embeddings"), epsilon_key="norm_eps")
    sizes, rotary, factors = read.rotary(
        sizes, "halves", ("default", "linear"), default_share=SHARE
    )
    attention = PROJECTION_BIASES if read.flag("attention_bias") else ()
    neurons = OPTIONS[4:] if read.flag("mlp_bias") else ()
    return Blueprint(
        spec=nemotron_spec(
            sizes, rotary, read.activation("hidden_act", UNGATED), (*attention, *neurons)
        ),
        name_of=gguf_names(gguf.MODEL_ARCH.NEMOTRON, sizes.num_layers),
        rope_factors=factors,
        changes={"norm.weight": ADD_ONE},
    )


def nemotron_spec(
    sizes: Sizes, rotary: Rotary, activation: Activation, options: Collection[str] = ()
) -> ModelSpec:
    neurons = sizes.neurons(activation, options, is_gated=False)
    layer = sizes.arrangement("layer").pre_norm(sizes.attention(rotary, options), neurons)
    return sizes.model("nemotron", sizes.alike(layer), output_norm="layer")


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes = read.sizes("layer", is_partly_rotated=True)
    return nemotron_spec(
        sizes,
        read.rotary("halves", sizes.head_dim),
        read.activation(),
        read.options(sizes.num_layers),
    )


def not_in_stock(spec: ModelSpec) -> str | None:
    width = spec.attentions[0].query_size
    if width == spec.hidden_size:
        return None
    return f"has heads of {spec.hidden_size} values together, this model of {width}"


NEMOTRON = Family(
    title="Nemotron",
    blueprint=nemotron,
    model_types=("nemotron",),
    defaults={
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
    },
)
GRAPH = Architecture(
    name="nemotron",
    of_keys=of_keys,
    options=OPTIONS,
    stock_activations=("relu2",),
    stock_options=OPTIONS,
    not_in_stock=not_in_stock,
)
