"""EXAONE 4 (arXiv 2507.11407): norms of the outputs of attention and feed-forward, instead of their inputs,
and of each head of queries and keys. Where there are windows, all but each fourth layer have one, and these
alone rotate."""

from typing import TYPE_CHECKING

import gguf

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.family import Architecture, Family
from hotsplit.families.llama import whole_sizes
from hotsplit.families.sizes import Sizes
from hotsplit.families.windows import KEYS, Windows, window_keys, windows_of_config
from hotsplit.model.spec import Activation, ModelSpec, Rotary

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

PERIOD = 4
# llama.cpp has windows in models of so many layers, by default of so many tokens (src/models/exaone4.cpp).
STOCK_LAYERS, STOCK_WINDOW = 64, 4096


def exaone4(read: ConfigReader) -> Blueprint:
    """Exaone4ForCausalLM."""
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    sizes, rotary, factors = read.rotary(sizes, "halves")
    has_window_L = None
    if (window := read.values.get("sliding_window")) is not None:
        has_window_L = read.layers_with_window(sizes.num_layers, PERIOD)
    windows = windows_of_config(read, sizes.num_layers, has_window_L=has_window_L)
    if window is not None and not any(windows):
        raise HotsplitError(
            f"{read.path}: sliding_window is {window}, but no layer has it, so none would rotate; wanted"
            " null for a model without windows"
        )
    return Blueprint(
        spec=exaone4_spec(sizes, rotary, read.activation("hidden_act", GATED), windows),
        name_of=gguf_names(gguf.MODEL_ARCH.EXAONE4, sizes.num_layers),
        rope_factors=factors,
    )


def exaone4_spec(
    sizes: Sizes, rotary: Rotary, activation: Activation, windows: Windows
) -> ModelSpec:
    """If some layers have windows, the others do not rotate."""
    neurons, arrange = sizes.neurons(activation), sizes.arrangement()
    layers = [
        arrange.output_norms(
            sizes.attention(
                rotary if window or not any(windows) else None, window=window, has_head_norms=True
            ),
            neurons,
        )
        for window in windows
    ]
    return sizes.model("exaone4", layers)


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes = read.sizes()
    window = read.whole(KEYS[0], STOCK_WINDOW if sizes.num_layers == STOCK_LAYERS else 0)
    windows: list[int | None] = [None] * sizes.num_layers
    if window:
        has_window_L = read.layers_with_window(sizes.num_layers, PERIOD)
        windows = [window if has_window else None for has_window in has_window_L]
    return exaone4_spec(sizes, read.rotary("halves"), read.activation(), windows)


def not_in_stock(spec: ModelSpec) -> str | None:
    width, is_deep = spec.attentions[0].query_size, spec.num_layers == STOCK_LAYERS
    if width != spec.hidden_size:
        return f"has heads of {spec.hidden_size} values together, this model of {width}"
    has_window_L = [each.window is not None for each in spec.attentions]
    if has_window_L != [is_deep and (i + 1) % PERIOD != 0 for i in range(spec.num_layers)]:
        return f"has windows in models of {STOCK_LAYERS} layers, in all but each {PERIOD}th, and in no others"
    return None


EXAONE4 = Family(
    title="EXAONE 4",
    model_types=("exaone4",),
    blueprint=exaone4,
    defaults={
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
)
GRAPH = Architecture(
    name="exaone4",
    of_keys=of_keys,
    keys=window_keys,
    known_keys=KEYS,
    stock_activations=("silu",),
    not_in_stock=not_in_stock,
)
