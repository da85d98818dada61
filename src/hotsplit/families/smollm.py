"""SmolLM3: a Llama in which every fourth layer has no rotary embedding (NoPE, arXiv 2501.18795)."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import gguf

from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.family import GATED_BIASES, PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import llama_sizes
from hotsplit.families.row_order import rotary_rows
from hotsplit.families.sizes import Sizes
from hotsplit.model.spec import Activation, ModelSpec, Rotary

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

PERIOD = 4  # of the layers without rotary embeddings; llama.cpp knows no other


def smollm3(read: ConfigReader) -> Blueprint:
    """SmolLM3ForCausalLM."""
    sizes, notes = llama_sizes(read, has_window=read.flag("use_sliding_window"))
    sizes, rotary, factors = read.rotary(sizes, "adjacent", default_theta=2e6)
    plain = [int(has) for has in rotates(sizes.num_layers)]
    read.refuse("no_rope_layer_interval", PERIOD)
    read.refuse("no_rope_layers", plain, why="a model file has no key for other layers")
    activation = read.activation("hidden_act", GATED)
    return Blueprint(
        spec=smollm3_spec(sizes, rotary, activation, read.biases()),
        name_of=gguf_names(gguf.MODEL_ARCH.SMOLLM3, sizes.num_layers),
        rope_factors=factors,
        rows=rotary_rows(sizes),
        notes=notes,
    )


def rotates(num_layers: int) -> Sequence[bool]:
    """Whether each layer has a rotary embedding."""
    return [(layer + 1) % PERIOD != 0 for layer in range(num_layers)]


def smollm3_spec(
    sizes: Sizes, rotary: Rotary, activation: Activation, options: Collection[str] = ()
) -> ModelSpec:
    neurons, arrange = sizes.neurons(activation, options), sizes.arrangement()
    layers = [
        arrange.pre_norm(sizes.attention(rotary if has else None, options), neurons)
        for has in rotates(sizes.num_layers)
    ]
    return sizes.model("smollm3", layers)


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes = read.sizes()
    options = read.options(sizes.num_layers)
    return smollm3_spec(sizes, read.rotary("adjacent"), read.activation(), options)


SMOLLM3 = Family(
    model_types=("smollm3",),
    blueprint=smollm3,
    defaults={
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "rms_norm_eps": 1e-6,
    },
)
OPTIONS = (*PROJECTION_BIASES, *GATED_BIASES)
GRAPH = Architecture(
    name="smollm3",
    of_keys=of_keys,
    options=OPTIONS,
    stock_activations=("silu",),
)
