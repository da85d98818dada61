"""OLMo 2 (arXiv 2501.00656): norms of the outputs of attention and feed-forward, instead of their
inputs, and of all heads of queries, and of keys, together. OLMo 3 (arXiv 2512.13961) adds windows in three
of four layers, where rotary embeddings are not scaled."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import gguf
import numpy as np

from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.family import PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import whole_sizes
from hotsplit.families.sizes import Sizes
from hotsplit.families.windows import KEYS, window_keys
from hotsplit.files.gguf_file import Value
from hotsplit.model.rope import NO_SCALING
from hotsplit.model.spec import Activation, ModelSpec, Rotary

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

PERIOD, THETA = 4, 500000.0


def olmo2(read: ConfigReader) -> Blueprint:
    """Olmo2ForCausalLM."""
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    sizes, rotary, factors = read.rotary(sizes, "halves")
    return _blueprint(read, sizes, (rotary, rotary), [False] * sizes.num_layers, 0, factors)


def olmo3(read: ConfigReader) -> Blueprint:
    """Olmo3ForCausalLM. Without parameters of their own, layers with a window have transformers'
    default theta, whatever that of the others is."""
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    read.refuse("sliding_window_pattern", PERIOD)
    is_local_L = read.layers_with_window(sizes.num_layers, PERIOD)
    types = ("default", "linear", "yarn")
    sizes, whole, _ = read.rotary_of(sizes, "full_attention", "rope_theta", THETA, types)
    _, local, _ = read.rotary_of(sizes, "sliding_attention", "", THETA, ("default",))
    window = read.window_of(is_local_L)
    return _blueprint(read, sizes, (whole, local), is_local_L, window, {})


def _blueprint(
    read: ConfigReader,
    sizes: Sizes,
    rotaries: tuple[Rotary, Rotary],
    is_local_L: Sequence[bool],
    window: int,
    factors: Mapping[str, np.ndarray],
) -> Blueprint:
    return Blueprint(
        spec=olmo_spec(
            sizes,
            rotaries,
            read.activation("hidden_act", GATED),
            is_local_L,
            window,
            PROJECTION_BIASES if read.flag("attention_bias") else (),
        ),
        name_of=gguf_names(gguf.MODEL_ARCH.OLMO2, sizes.num_layers),
        rope_factors=factors,
    )


def olmo_spec(
    sizes: Sizes,
    rotaries: tuple[Rotary, Rotary],
    activation: Activation,
    is_local_L: Sequence[bool],
    window: int,
    options: Collection[str] = (),
) -> ModelSpec:
    """`rotaries`: of layers without a window, and of those with one."""
    neurons, arrange = sizes.neurons(activation, options), sizes.arrangement()
    layers = [
        arrange.output_norms(
            sizes.attention(
                rotaries[is_local],
                options,
                window=window if is_local else None,
                has_head_norms=True,
                norms_all_heads=True,
            ),
            neurons,
        )
        for is_local in is_local_L
    ]
    return sizes.model("olmo2", layers)


def of_keys(read: "KeyReader") -> ModelSpec:
    """A file with a window is an OLMo 3, as in llama.cpp (src/models/olmo2.cpp)."""
    sizes, rotary = read.sizes(), read.rotary("halves")
    window = read.whole("attention.sliding_window", 0)
    is_local_L = [False] * sizes.num_layers
    if window:
        is_local_L = read.layers_with_window(sizes.num_layers, PERIOD)
        rotary = _of_first_files(read, rotary)
    theta = read.positive("olmo2.rope.freq_base_swa", rotary.theta)
    local = replace(rotary, theta=theta, scaling=NO_SCALING)
    return olmo_spec(
        sizes,
        (rotary, local),
        read.activation(),
        is_local_L,
        window,
        read.options(sizes.num_layers),
    )


def _of_first_files(read: "KeyReader", rotary: Rotary) -> Rotary:
    """llama.cpp's converter wrote the whole magnitude of YaRN under `attn_factor` in its first files of
    OLMo 3, which have one theta; its graph takes it for a factor on that magnitude, as we write it."""
    scaling, is_ours = rotary.scaling, "olmo2.rope.freq_base_swa" in read.keys
    if is_ours or scaling.kind != "yarn" or "olmo2.rope.scaling.attn_factor" not in read.keys:
        return rotary
    factor = scaling.attn_factor**2 / scaling.magnitude
    return replace(rotary, scaling=replace(scaling, attn_factor=factor))


def keys(spec: ModelSpec) -> Mapping[str, Value]:
    rotary = next((a.rotary for a in spec.attentions if a.window is not None), None)
    if rotary is None:
        return {}
    return {**window_keys(spec), "rope.freq_base_swa": np.float32(rotary.theta)}


def not_in_stock(spec: ModelSpec) -> str | None:
    """llama.cpp's heads are together as wide as the model, and it reads one theta."""
    size, (theta, *others) = spec.attentions[0].query_size, _thetas(spec)
    if size != spec.hidden_size:
        return f"has heads of {spec.hidden_size} values together, this model of {size}"
    if others:
        return f"rotates with a theta of {theta:g} everywhere, this model with {others[0]:g} in some layers"
    return None


def _thetas(spec: ModelSpec) -> list[float]:
    """The different ones, that of layers without a window first."""
    rotaries = [spec.rotary, *(attention.rotary for attention in spec.attentions)]
    return list(dict.fromkeys(rotary.theta for rotary in rotaries if rotary is not None))


DEFAULTS = {"tie_word_embeddings": False, "attention_bias": False, "rms_norm_eps": 1e-5}
OLMO2 = Family(title="OLMo 2", model_types=("olmo2",), blueprint=olmo2, defaults=DEFAULTS)
OLMO3 = Family(
    title="OLMo 3",
    model_types=("olmo3",),
    blueprint=olmo3,
    defaults=DEFAULTS | {"sliding_window": 4096},
)
GRAPH = Architecture(
    name="olmo2",
    of_keys=of_keys,
    keys=keys,
    known_keys=(*KEYS, "rope.freq_base_swa"),
    options=PROJECTION_BIASES,
    stock_activations=("silu",),
    not_in_stock=not_in_stock,
)
