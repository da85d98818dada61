"""Mistral AI's models: a Llama with windows in all layers (Mistral 7B v0.1, arXiv 2310.06825), in
some (Ministral 8B), or with queries that grow with the position (Ministral 3)."""

from dataclasses import replace

import numpy as np

from hotsplit.families.blueprint import IGNORED
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import ATTN_BIASES, Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.llama import BIASES, OPTIONS, adjacent
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.windows import KEYS, config_window_keys, no_windows_in_stock
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import ModelSpec

# Predictors inside a TurboSparse checkpoint; their training target is not documented.
INNER_PREDICTOR = (".mlp.predictor.fc1.weight", ".mlp.predictor.fc2.weight")
GROWTH_KEY = "attention.temperature_scale"


def keys_in_all_layers(read: ConfigReader) -> dict[str, Value]:
    """The window is in all layers whatever `layer_types` says."""
    for key in ("attention_bias", "mlp_bias"):
        read.refuse(key, False, why="transformers has no such layer")
    kind = "full" if read.values.get("sliding_window") is None else "sliding"
    read.check_layer_types(kind, why="transformers' Mistral ignores the key, Ministral does not")
    return config_window_keys(read)


def growing_keys(read: ConfigReader) -> dict[str, Value]:
    rope, key, keys = read.rope(), "llama_4_scaling_beta", config_window_keys(read)
    if rope.values.get(key) == 0:  # as in Devstral 2
        return keys
    rope.count("original_max_position_embeddings")
    growth = np.float32(rope.positive(key))
    return {"general.architecture": "mistral3", **keys, GROWTH_KEY: growth}


def of_keys(read: KeyReader) -> ModelSpec:
    growth = {}
    if read.number(f"{read.graph.name}.{GROWTH_KEY}", 0.0):
        length = read.rotary("adjacent").scaling.original_length or read.count("context_length")
        factor = read.positive(f"{read.graph.name}.{GROWTH_KEY}")
        growth = {"growth": factor, "growth_length": length}  # as in llama.cpp
    return decoder(read, pairing="adjacent", attention=growth)


# transformers' Mistral has neither of the keys for biases; `mistral` refuses them.
DEFAULTS = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
MISTRAL = Family(
    classes=("MistralForCausalLM",),
    title="Mistral",
    graph="llama",
    model_types=("mistral",),
    defaults=DEFAULTS,
    keys=keys_in_all_layers,
    sources=adjacent,
)
MINISTRAL3 = replace(
    MISTRAL,
    classes=("Ministral3ForCausalLM",),
    title="Ministral",
    model_types=("ministral3",),
    defaults=DEFAULTS | {"sliding_window": None, "rms_norm_eps": 1e-5, "head_dim": 128},
    flags=BIASES,
    keys=growing_keys,
)
FAMILIES = (
    MISTRAL,
    replace(
        MISTRAL,
        classes=("MinistralForCausalLM",),
        title="Ministral",
        model_types=("ministral",),
        flags=BIASES,
        keys=config_window_keys,
    ),
    MINISTRAL3,
    Family(
        classes=("Mistral3ForConditionalGeneration",),
        title="Mistral",
        model_types=("mistral3",),
        text_key="text_config",
        defaults={"tie_word_embeddings": True},
        by_type={"mistral": MISTRAL, "ministral3": MINISTRAL3},
    ),
    # Also TurboSparse-Mistral: ReLU applies to both gate and up projection.
    replace(
        MISTRAL,
        classes=("BambooForCausalLM",),
        title="Bamboo",
        model_types=(),
        flags=BIASES,
        activations={"relu": "drelu", "drelu": "drelu"},
        keys=config_window_keys,
        sources=lambda spec, read: replace(
            adjacent(spec, read), ignored=(*IGNORED, *INNER_PREDICTOR)
        ),
    ),
)
GRAPHS = (
    Architecture(
        name="mistral3",
        of_keys=of_keys,
        known_keys=(*KEYS, GROWTH_KEY, "rope.scaling.yarn_log_multiplier"),
        options=OPTIONS,
        stock_options=ATTN_BIASES,
        not_in_stock=no_windows_in_stock,
    ),
)
