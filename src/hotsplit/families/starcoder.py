"""StarCoder 2 (arXiv 2402.19173): layer norms, biases everywhere, neurons without gates, and windows in
all layers of the smaller models."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import gguf

from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import UNGATED, ConfigReader
from hotsplit.families.family import PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import whole_sizes
from hotsplit.families.sizes import Sizes
from hotsplit.families.windows import (
    KEYS,
    Windows,
    no_windows_in_stock,
    window_keys,
    windows_of_config,
    windows_of_keys,
)
from hotsplit.model.spec import Activation, ModelSpec, Rotary

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

OPTIONS = (*PROJECTION_BIASES, "ffn_up.bias", "ffn_down.bias")


def starcoder2(read: ConfigReader) -> Blueprint:
    """Starcoder2ForCausalLM."""
    sizes = whole_sizes(read, read.count("max_position_embeddings"), epsilon_key="norm_epsilon")
    sizes, rotary, factors = read.rotary(sizes, "halves", ("default", "linear", "yarn"))
    return Blueprint(
        spec=starcoder2_spec(
            sizes,
            rotary,
            read.activation("hidden_act", UNGATED),
            windows_of_config(read, sizes.num_layers),
            OPTIONS if read.flag("use_bias") else (),
        ),
        name_of=gguf_names(gguf.MODEL_ARCH.STARCODER2, sizes.num_layers),
        rope_factors=factors,
    )


def starcoder2_spec(
    sizes: Sizes,
    rotary: Rotary,
    activation: Activation,
    windows: Windows,
    options: Collection[str] = (),
) -> ModelSpec:
    neurons, arrange = (
        sizes.neurons(activation, options, is_gated=False),
        sizes.arrangement("layer"),
    )
    layers = [
        arrange.pre_norm(sizes.attention(rotary, options, window=window), neurons)
        for window in windows
    ]
    return sizes.model("starcoder2", layers, output_norm="layer")


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes = read.sizes("layer")
    return starcoder2_spec(
        sizes,
        read.rotary("halves"),
        read.activation(),
        windows_of_keys(read, sizes.num_layers),
        read.options(sizes.num_layers),
    )


def not_in_stock(spec: ModelSpec) -> str | None:
    lacks_biases = not spec.layers[0].neurons.biases
    return "has biases, this model none" if lacks_biases else no_windows_in_stock(spec)


STARCODER2 = Family(
    title="StarCoder 2",
    blueprint=starcoder2,
    model_types=("starcoder2",),
    defaults={
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
        "use_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
    },
)
GRAPH = Architecture(
    name="starcoder2",
    of_keys=of_keys,
    keys=window_keys,
    known_keys=KEYS,
    options=OPTIONS,
    stock_activations=("gelu_tanh",),
    stock_options=OPTIONS,
    not_in_stock=not_in_stock,
)
