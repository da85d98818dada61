"""Command R and Cohere 2: layer norms without biases, one for attention and feed-forward, which run in
parallel, and logits multiplied by a factor. Command R+ also norms each head of queries and keys with
weights of its own; Cohere 2 rotates only in its layers with windows, which are all but each fourth."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

import gguf
import numpy as np

from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.family import PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import whole_sizes
from hotsplit.families.sizes import Sizes
from hotsplit.families.windows import KEYS, Windows, window_keys
from hotsplit.files.gguf_file import Value
from hotsplit.model.blocks import NormKind
from hotsplit.model.spec import Activation, ModelSpec, Rotary

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

NORM: NormKind = "layer_without_bias"
PERIOD = 4
NORMED_FROM = 64  # llama.cpp norms heads in models of so many layers (src/models/command-r.cpp)


def command_r(read: ConfigReader) -> Blueprint:
    """CohereForCausalLM."""
    sizes, rotary, factors = _sizes(read, default_theta=500_000.0)
    return _blueprint(
        read,
        sizes,
        rotary,
        factors,
        [None] * sizes.num_layers,
        has_head_norms=read.values.get("use_qk_norm") is not None and read.flag("use_qk_norm"),
    )


def cohere2(read: ConfigReader) -> Blueprint:
    """Cohere2ForCausalLM."""
    read.refuse("rotary_pct", 1.0, 1)
    sizes, rotary, factors = _sizes(read)
    has_window_L = read.layers_with_window(sizes.num_layers, PERIOD)
    window = read.window_of(has_window_L)
    windows = [window if has_window else None for has_window in has_window_L]
    return _blueprint(read, sizes, rotary, factors, windows, is_second=True)


def _sizes(
    read: ConfigReader, default_theta: float = 10_000.0
) -> tuple[Sizes, Rotary, Mapping[str, np.ndarray]]:
    read.refuse("tie_word_embeddings", True, why="the published models have no other head")
    # The first Command R says 8,192 positions, and that it was trained on 131,072.
    length = read.count("model_max_length", read.count("max_position_embeddings"))
    sizes = whole_sizes(read, length, epsilon_key="layer_norm_eps")
    return read.rotary(sizes, "adjacent", ("default", "linear"), default_theta)


def _blueprint(
    read: ConfigReader,
    sizes: Sizes,
    rotary: Rotary,
    factors: Mapping[str, np.ndarray],
    windows: Windows,
    *,
    is_second: bool = False,
    has_head_norms: bool = False,
) -> Blueprint:
    arch = gguf.MODEL_ARCH.COHERE2 if is_second else gguf.MODEL_ARCH.COMMAND_R
    return Blueprint(
        spec=cohere_spec(
            gguf.MODEL_ARCH_NAMES[arch],
            sizes,
            rotary,
            read.activation("hidden_act", GATED),
            read.positive("logit_scale"),
            windows,
            PROJECTION_BIASES if read.flag("attention_bias") else (),
            has_head_norms=has_head_norms,
        ),
        name_of=gguf_names(arch, sizes.num_layers),
        rope_factors=factors,
    )


def cohere_spec(
    name: str,
    sizes: Sizes,
    rotary: Rotary,
    activation: Activation,
    logit_scale: float,
    windows: Windows,
    options: Collection[str] = (),
    *,
    has_head_norms: bool = False,
) -> ModelSpec:
    """Layers of Cohere 2 without a window do not rotate."""
    neurons, arrange = sizes.neurons(activation), sizes.arrangement(NORM)
    layers = [
        arrange.parallel(
            sizes.attention(
                rotary if window or name != "cohere2" else None,
                options,
                window=window,
                has_head_norms=has_head_norms,
                head_norm=NORM,
            ),
            neurons,
            num_norms=1,
        ).with_attention(norms_by_head=has_head_norms)
        for window in windows
    ]
    return sizes.model(name, layers, output_norm=NORM, logit_scale=logit_scale)


def of_keys(read: "KeyReader", *, has_windows: bool) -> ModelSpec:
    sizes = read.sizes(NORM)
    windows: list[int | None] = [None] * sizes.num_layers
    if has_windows:
        window = read.count(KEYS[0])
        has_window_L = read.layers_with_window(sizes.num_layers, PERIOD)
        windows = [window if has_window else None for has_window in has_window_L]
    return cohere_spec(
        read.graph.name,
        sizes,
        read.rotary("adjacent"),
        read.activation(),
        read.positive(f"{read.graph.name}.logit_scale", 1.0),
        windows,
        read.options(sizes.num_layers),
        has_head_norms="blk.0.attn_q_norm.weight" in read.tensors,
    )


def keys(spec: ModelSpec) -> Mapping[str, Value]:
    found: dict[str, Value] = {"logit_scale": np.float32(spec.logit_scale), **window_keys(spec)}
    if (
        spec.architecture == "cohere2" and KEYS[0] not in found
    ):  # it has windows unless it says otherwise
        found |= {KEYS[0]: np.uint32(spec.context_length), KEYS[1]: [False] * spec.num_layers}
    return found


def not_in_stock(spec: ModelSpec) -> str | None:
    attention, width = spec.attentions[0], spec.attentions[0].query_size
    if width != spec.hidden_size:
        return f"has heads of {spec.hidden_size} values together, this model of {width}"
    if spec.architecture == "command-r":
        is_deep = spec.num_layers >= NORMED_FROM
        if (attention.head_norm is not None) != is_deep:
            return f"norms heads in models of {NORMED_FROM} layers and more, and in no others"
        return None
    has_window_L = [each.window is not None for each in spec.attentions]
    if has_window_L != [(layer + 1) % PERIOD != 0 for layer in range(spec.num_layers)]:
        return f"has windows in all layers but each {PERIOD}th, this model in others"
    return None


DEFAULTS = {
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
}
COMMAND_R = Family(
    title="Command R",
    blueprint=command_r,
    model_types=("cohere",),
    read_keys=("logit_scale",),
    defaults=DEFAULTS | {"use_qk_norm": False},
)
COHERE2 = Family(
    title="Cohere 2",
    blueprint=cohere2,
    model_types=("cohere2",),
    read_keys=("logit_scale",),
    defaults=DEFAULTS | {"sliding_window": 4096},
)
GRAPHS = tuple(
    Architecture(
        name=name,
        of_keys=partial(of_keys, has_windows=name == "cohere2"),
        keys=keys,
        known_keys=("logit_scale", *(KEYS if name == "cohere2" else ())),
        options=PROJECTION_BIASES,
        stock_activations=("silu",),
        stock_options=PROJECTION_BIASES[:3],
        not_in_stock=not_in_stock,
    )
    for name in ("command-r", "cohere2")
)
