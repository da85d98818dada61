"""Qwen2, with biases on queries, keys and values, and Qwen3, with norms on queries and keys."""

from functools import partial
from typing import TYPE_CHECKING

import gguf

from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.family import GATED_BIASES, PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import llama_spec, whole_sizes
from hotsplit.families.windows import (
    KEYS,
    no_windows_in_stock,
    window_keys,
    windows_of_config,
    windows_of_keys,
)
from hotsplit.model.spec import ModelSpec

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

ARCHES = {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}


def qwen2(read: ConfigReader) -> Blueprint:
    """Qwen2ForCausalLM: Qwen 2 and 2.5, and sparse ones such as SparseQwen2 with `drelu`."""
    return _qwen(read, "qwen2", PROJECTION_BIASES[:3])


def qwen3(read: ConfigReader) -> Blueprint:
    """Qwen3ForCausalLM."""
    return _qwen(read, "qwen3", PROJECTION_BIASES if read.flag("attention_bias") else ())


def _qwen(read: ConfigReader, architecture: str, options: tuple[str, ...]) -> Blueprint:
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    is_used = read.flag("use_sliding_window")
    first = read.whole("max_window_layers") if is_used else sizes.num_layers
    windows = windows_of_config(
        read,
        sizes.num_layers,
        is_used=is_used,
        has_window_L=[layer >= first for layer in range(sizes.num_layers)],
    )
    sizes, rotary, factors = read.rotary(sizes, "halves")
    activation = read.activation("hidden_act", GATED)
    return Blueprint(
        spec=llama_spec(
            sizes,
            rotary,
            activation,
            options,
            architecture=architecture,
            has_head_norms=architecture == "qwen3",
            windows=windows,
        ),
        name_of=gguf_names(ARCHES[architecture], sizes.num_layers),
        rope_factors=factors,
    )


def of_keys(read: "KeyReader", *, has_head_norms: bool) -> ModelSpec:
    sizes = read.sizes()
    return llama_spec(
        sizes,
        read.rotary("halves"),
        read.activation(),
        read.options(sizes.num_layers),
        architecture=read.graph.name,
        has_head_norms=has_head_norms,
        windows=windows_of_keys(read, sizes.num_layers),
    )


DEFAULTS = {
    "tie_word_embeddings": False,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN2 = Family(title="Qwen 2", blueprint=qwen2, model_types=("qwen2",), defaults=DEFAULTS)
QWEN3 = Family(
    title="Qwen 3",
    blueprint=qwen3,
    model_types=("qwen3",),
    defaults=DEFAULTS | {"head_dim": 128, "attention_bias": False},
)
OPTIONS = (*PROJECTION_BIASES, *GATED_BIASES)
QWEN2_GRAPH = Architecture(
    name="qwen2",
    of_keys=partial(of_keys, has_head_norms=False),
    keys=window_keys,
    known_keys=KEYS,
    not_in_stock=no_windows_in_stock,
    options=OPTIONS,
    stock_activations=("silu",),
    stock_options=PROJECTION_BIASES[:3],
)
QWEN3_GRAPH = Architecture(
    name="qwen3",
    of_keys=partial(of_keys, has_head_norms=True),
    keys=window_keys,
    known_keys=KEYS,
    not_in_stock=no_windows_in_stock,
    options=OPTIONS,
    stock_activations=("silu",),
)
