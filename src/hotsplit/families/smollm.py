"""SmolLM3: a Llama in which every fourth layer has no rotary embedding (NoPE, arXiv 2501.18795)."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import gguf

from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.family import GATED_BIASES, PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import whole_sizes
from hotsplit.families.row_order import rotary_rows
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

PERIOD = 4  # of the layers without rotary embeddings; llama.cpp knows no other


def smollm3(read: ConfigReader) -> Blueprint:
    """SmolLM3ForCausalLM."""
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    sizes, rotary, factors = read.rotary(sizes, "adjacent", default_theta=2e6)
    plain = [int(has) for has in rotates(sizes.num_layers)]
    read.refuse("no_rope_layer_interval", PERIOD)
    read.refuse("no_rope_layers", plain, why="a model file has no key for other layers")
    activation = read.activation("hidden_act", GATED)
    windows = windows_of_config(
        read,
        sizes.num_layers,
        is_used=read.flag("use_sliding_window"),
        has_window_L=[not has for has in plain],
    )
    return Blueprint(
        spec=smollm3_spec(sizes, rotary, activation, windows, read.biases()),
        name_of=gguf_names(gguf.MODEL_ARCH.SMOLLM3, sizes.num_layers),
        rope_factors=factors,
        rows=rotary_rows(sizes),
    )


def rotates(num_layers: int) -> Sequence[bool]:
    """Whether each layer has a rotary embedding."""
    return [(layer + 1) % PERIOD != 0 for layer in range(num_layers)]


def smollm3_spec(
    sizes: Sizes,
    rotary: Rotary,
    activation: Activation,
    windows: Windows,
    options: Collection[str] = (),
) -> ModelSpec:
    neurons, arrange = sizes.neurons(activation, options), sizes.arrangement()
    layers = [
        arrange.pre_norm(sizes.attention(rotary if has else None, options, window=window), neurons)
        for has, window in zip(rotates(sizes.num_layers), windows, strict=True)
    ]
    return sizes.model("smollm3", layers)


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes = read.sizes()
    options = read.options(sizes.num_layers)
    windows = windows_of_keys(read, sizes.num_layers)
    return smollm3_spec(sizes, read.rotary("adjacent"), read.activation(), windows, options)


SMOLLM3 = Family(
    title="SmolLM3",
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
    keys=window_keys,
    known_keys=KEYS,
    not_in_stock=no_windows_in_stock,
    options=OPTIONS,
    stock_activations=("silu",),
)
