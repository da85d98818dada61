"""Mistral AI's models: a Llama with windows in all layers (Mistral 7B v0.1, arXiv 2310.06825), in those
that the config names (Ministral 8B), or with queries that grow with the position (Ministral 3)."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import gguf
import numpy as np

from hotsplit.families.blueprint import IGNORED, Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.family import PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import OPTIONS, llama_spec, whole_sizes
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
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import Activation, ModelSpec, Rotary

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

# Predictors inside a TurboSparse checkpoint; their training target is not documented.
INNER_PREDICTOR = (".mlp.predictor.fc1.weight", ".mlp.predictor.fc2.weight")
GROWTH_KEY = "attention.temperature_scale"
Growth = tuple[float, int]  # of queries: `growth` and `growth_length` of Attention


def mistral(read: ConfigReader) -> Blueprint:
    """MistralForCausalLM, which has its window in all layers whatever `layer_types` says."""
    for key in ("attention_bias", "mlp_bias"):
        read.refuse(key, False, why="transformers has no such layer")
    kind = "full" if read.values.get("sliding_window") is None else "sliding"
    read.check_layer_types(kind, why="transformers' Mistral ignores the key, Ministral does not")
    return _mistral(read, GATED)


def bamboo(read: ConfigReader) -> Blueprint:
    """BambooForCausalLM (also TurboSparse-Mistral): a Mistral whose `hidden_act`, ReLU, applies to
    both gate and up projection."""
    return _mistral(read, {"relu": "drelu", "drelu": "drelu"}, ignored=INNER_PREDICTOR)


def ministral(read: ConfigReader) -> Blueprint:
    """MinistralForCausalLM."""
    return _mistral(read, GATED)


def ministral3(read: ConfigReader) -> Blueprint:
    """Ministral3ForCausalLM."""
    rope, key, growth = read.rope(), "llama_4_scaling_beta", None
    if rope.values.get(key) != 0:  # as in Devstral 2
        growth = rope.positive(key), rope.count("original_max_position_embeddings")
    return _mistral(read, GATED, growth=growth)


def with_images(read: ConfigReader) -> Blueprint:
    """The text model of Mistral3ForConditionalGeneration."""
    known = {"mistral": MISTRAL, "ministral3": MINISTRAL3}
    kind = str(read.values.get("model_type", "mistral"))
    if kind not in known:
        read.refuse("model_type", *known)
    own = ConfigReader(read.path, read.said, defaults=known[kind].defaults, max_rows=read.max_rows)
    return known[kind].blueprint(own)


def _mistral(
    read: ConfigReader,
    activations: Mapping[str, str],
    ignored: tuple[str, ...] = (),
    growth: Growth | None = None,
) -> Blueprint:
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    sizes, rotary, factors = read.rotary(sizes, "adjacent")
    return Blueprint(
        spec=_spec(
            sizes,
            rotary,
            read.activation("hidden_act", activations),
            read.biases(),
            architecture="mistral3" if growth else "llama",
            windows=windows_of_config(read, sizes.num_layers),
            growth=growth,
        ),
        name_of=gguf_names(gguf.MODEL_ARCH.LLAMA, sizes.num_layers),
        rope_factors=factors,
        rows=rotary_rows(sizes),
        ignored=IGNORED + ignored,
    )


def _spec(
    sizes: Sizes,
    rotary: Rotary,
    activation: Activation,
    options: Collection[str],
    *,
    architecture: str,
    windows: Windows,
    growth: Growth | None,
) -> ModelSpec:
    spec = llama_spec(
        sizes, rotary, activation, options, architecture=architecture, windows=windows
    )
    factor, length = growth or (None, None)
    return spec.with_layers(
        [layer.with_attention(growth=factor, growth_length=length) for layer in spec.layers]
    )


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes, rotary = read.sizes(), read.rotary("adjacent")
    growth = None
    if read.number(f"{read.graph.name}.{GROWTH_KEY}", 0.0):
        length = rotary.scaling.original_length or sizes.context_length  # as in llama.cpp
        growth = read.positive(f"{read.graph.name}.{GROWTH_KEY}"), length
    return _spec(
        sizes,
        rotary,
        read.activation(),
        read.options(sizes.num_layers),
        architecture="mistral3",
        windows=windows_of_keys(read, sizes.num_layers),
        growth=growth,
    )


def keys(spec: ModelSpec) -> Mapping[str, Value]:
    growth = spec.attentions[0].growth
    own: dict[str, Value] = {GROWTH_KEY: np.float32(growth)} if growth else {}
    return {**window_keys(spec), **own}


# transformers' Mistral has neither of the keys for biases; `mistral` refuses them.
DEFAULTS = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
MISTRAL = Family(title="Mistral", blueprint=mistral, model_types=("mistral",), defaults=DEFAULTS)
BAMBOO = Family(title="Bamboo", blueprint=bamboo, defaults=DEFAULTS)
MINISTRAL = Family(
    title="Ministral", blueprint=ministral, model_types=("ministral",), defaults=DEFAULTS
)
MINISTRAL3 = Family(
    title="Ministral",
    blueprint=ministral3,
    model_types=("ministral3",),
    defaults=DEFAULTS | {"sliding_window": None, "rms_norm_eps": 1e-5, "head_dim": 128},
)
MISTRAL3 = Family(
    title="Mistral",
    blueprint=with_images,
    model_types=("mistral3",),
    text_key="text_config",
    defaults={"tie_word_embeddings": True},
)
GRAPH = Architecture(
    name="mistral3",
    of_keys=of_keys,
    keys=keys,
    known_keys=(*KEYS, GROWTH_KEY, "rope.scaling.yarn_log_multiplier"),
    options=OPTIONS,
    stock_activations=("silu",),
    stock_options=PROJECTION_BIASES,
    not_in_stock=no_windows_in_stock,
)
