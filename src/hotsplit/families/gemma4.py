"""Gemma 4: a Gemma whose layers without a window have wider heads, of which a part rotates
(proportional rotary embeddings), and may take their keys as values; scores are not scaled, values are
normed, and each layer's result is multiplied by a number of its own. Its mixture has experts beside the
neurons that always fire, which llama.cpp calls as those of a dense layer. In its E-models each layer has an
input of its own, from the token, and the last layers read the keys and values of earlier ones."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import gguf
import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import IGNORED, Blueprint, NameOf, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.experts import (
    COUNTS,
    KEYS,
    Experts,
    check_experts,
    config_count,
    expert_keys,
    experts_of_keys,
    other_in_stock,
)
from hotsplit.families.family import Architecture, Family, Tensors
from hotsplit.families.gemma import LOGIT_CAP, cap_of, key_cap
from hotsplit.families.llama import whole_sizes
from hotsplit.families.sizes import Sizes
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Mixture
from hotsplit.model.per_layer import LayerInputs, PerLayer
from hotsplit.model.spec import KEY_NORM, Activation, ModelSpec, Neurons, Rotary, Route
from hotsplit.model.tensors import OWN_SCALES, ROUTER

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

PERIOD, LOCAL_THETA = 6, 1e4
FULL = "full_attention"
SCALE, INPUTS = "layer_output_scale", "embedding_length_per_layer_input"
SHARED = "attention.shared_kv_layers"
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_THETA},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
# The models for images and sound, beside the one for text.
LEFT_OUT = (
    "model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.",
)  # fmt: skip
# Vectors of a router in a checkpoint, and their names in a layer of a model file.
_SCALES = {"scale": f"{ROUTER}.scale", "per_expert_scale": OWN_SCALES}
_DENSE = re.compile(r"(\.ffn_(?:gate|up|down))\.")
# Keys of a GGUF of which layers with a window have their own.
_OF_WINDOWS = ("attention.key_length", "attention.value_length", "rope.dimension_count",
               "rope.freq_base")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The attention of a layer. `window`: None without one."""

    sizes: Sizes  # those of its heads
    rotary: Rotary
    window: int | None
    values_are_keys: bool
    source: int | None  # the layer whose keys and values it reads; None: its own


def gemma4(read: ConfigReader) -> Blueprint:
    """Gemma4ForCausalLM, and the text model of Gemma4ForConditionalGeneration."""
    read.refuse("use_bidirectional_attention", "vision", why="attention over text is always causal")
    read.refuse("attention_bias", False, why="its attention has no biases here")
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    is_local_L = _are_local(read, sizes.num_layers)
    local, whole = _sizes_by_type(read, sizes, is_local_L)
    ropes = read.values.get("rope_parameters") or ROPE
    of_ropes = ConfigReader(
        read.path, {**read.said, "rope_parameters": ropes}, max_rows=read.max_rows
    )
    _, wide, factors = of_ropes.rotary_of(whole, FULL, "", 1e6, ("proportional",))
    _, narrow, _ = of_ropes.rotary_of(local, "sliding_attention", "", LOCAL_THETA)
    window, are_keys = read.count("sliding_window"), read.flag("attention_k_eq_v")
    sources_L = sources(read.path, is_local_L, read.whole("num_kv_shared_layers"))
    factor_L = [1 + (read.flag("use_double_wide_mlp") and s is not None) for s in sources_L]
    heads = [
        Heads(
            sizes=replace(own, num_neurons=factor * own.num_neurons), source=source,
            rotary=narrow if is_local else wide, window=window if is_local else None,
            values_are_keys=are_keys and not is_local,
        )
        for is_local, source, factor in zip(is_local_L, sources_L, factor_L, strict=True)
        for own in [local if is_local else whole]
    ]  # fmt: skip
    experts = _experts(read, sizes) if read.flag("enable_moe_block") else None
    activation = read.activation("hidden_activation", GATED)
    spec = gemma4_spec(
        sizes, heads, activation, cap_of(read, LOGIT_CAP), (SCALE,), experts, own_inputs(read)
    )
    return Blueprint(
        spec=spec,
        name_of=_names(gguf_names(gguf.MODEL_ARCH.GEMMA4, sizes.num_layers), experts is not None),
        rope_factors=factors,
        ignored=(
            *IGNORED,
            *unused(spec, ".layers.{}.self_attn.{}.weight", ("k_proj", "v_proj", "k_norm")),
        ),
        ignored_prefixes=LEFT_OUT,
    )


def own_inputs(read: ConfigReader) -> int:
    """The values of each layer's own input; 0 without. Raises HotsplitError if tokens lack one."""
    key, of_tokens = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
    if read.values.get(key) in (None, 0):
        return 0
    if read.count(of_tokens) != read.count("vocab_size"):
        raise HotsplitError(
            f"{read.path}: {of_tokens} is {read.count(of_tokens)}, wanted vocab_size"
            f" ({read.count('vocab_size')}): every token needs a row of the embeddings of layers"
        )
    return read.count(key)


def sources(path: Path, is_local_L: Sequence[bool], num_shared: int) -> list[int | None]:
    """The layer whose keys and values each of the last `num_shared` layers reads: the last of its kind,
    with a window or without, that has its own; None for those that have.

    Raises HotsplitError if there is none."""
    num_own = len(is_local_L) - num_shared
    last = {is_local: layer for layer, is_local in enumerate(is_local_L[: max(0, num_own)])}
    if not {*is_local_L} <= {*last}:
        raise HotsplitError(
            f"{path}: the last {num_shared} of {len(is_local_L)} layers read the keys and values of earlier"
            " ones, but of those with a window or of those without, none is before them"
        )
    return [None if layer < num_own else last[kind] for layer, kind in enumerate(is_local_L)]


def _are_local(read: ConfigReader, num_layers: int) -> list[bool]:
    """Whether each layer has a window; the last has none (transformers, configuration_gemma4.py)."""
    found = read.layers_with_window(num_layers, PERIOD)
    if read.values.get("layer_types") is None:
        return [*found[:-1], False]
    if found[-1]:
        raise HotsplitError(
            f"{read.path}: layer_types ends with 'sliding_attention', wanted {FULL!r}, which"
            " transformers makes of it: correct the config"
        )
    return found


def _sizes_by_type(
    read: ConfigReader, sizes: Sizes, is_local_L: Sequence[bool]
) -> tuple[Sizes, Sizes]:
    """The sizes of layers with a window and without: by `per_layer_config`, which transformers 5
    writes, or by the keys of published configs.

    Raises HotsplitError for a `per_layer_config` in which other layers differ."""
    key = "per_layer_config"
    given = read.values.get(key)
    own: dict[str, object] = {"head_dim": read.values.get("global_head_dim", 512)}
    if given is None:
        if read.flag("attention_k_eq_v"):
            own["num_key_value_heads"] = read.values.get("num_global_key_value_heads")
    else:
        wanted = {str(layer) for layer, is_local in enumerate(is_local_L) if not is_local}
        each = list(given.values()) if isinstance(given, dict) and set(given) == wanted else [None]
        known = {"head_dim", "num_key_value_heads"}
        if not isinstance(each[0], dict) or not set(each[0]) <= known or each[1:] != each[:-1]:
            raise HotsplitError(
                f"{read.path}: {key} is {shown(given)}, wanted the same head_dim and"
                f" num_key_value_heads for each of the layers of full attention ({len(wanted)})"
            )
        own = each[0]
    own = {name: value for name, value in own.items() if value is not None}
    other = ConfigReader(
        read.path, {**read.values, **own}, max_rows=read.max_rows, prefix=f"{FULL}: "
    )
    _, kv_heads, head_dim = other.heads("num_attention_heads")
    return sizes, replace(sizes, num_kv_heads=kv_heads, head_dim=head_dim)


def _experts(read: ConfigReader, sizes: Sizes) -> Experts:
    route = Route(num_experts=config_count(read), num_used=read.count("top_k_experts"))
    experts = Experts(route=route, num_neurons=read.count("moe_intermediate_size"))
    return check_experts(str(read.path), experts, sizes.num_layers)


def _names(name_of: NameOf, has_experts: bool) -> NameOf:
    """The names, also where models for images and sound are beside, with those of scales, which have
    no suffix, and of neurons beside experts."""

    def name(source: str) -> str | None:
        stem, _, scale = source.replace("model.language_model.", "model.").partition(".router.")
        if scale in _SCALES:
            return f"{name_of(f'{stem}.router.proj')}"[: -len(ROUTER)] + _SCALES[scale]
        found = name_of(f"{stem}.router.{scale}" if scale else stem)
        if found and found.endswith(SCALE):
            return f"{found}.weight"
        return shared_name(found) if found and has_experts else found

    return name


def shared_name(name: str) -> str:
    """The name of a tensor of neurons beside experts, by that in a dense layer."""
    return _DENSE.sub(r"\1_shexp.", name)


def unused(spec: ModelSpec, form: str, names: Sequence[str]) -> tuple[str, ...]:
    """The names of what published files have of layers that read other layers' keys and values, though
    nothing reads it; `form`: of a name, by the layer's index and the tensor's own."""
    layers = [i for i, a in enumerate(spec.attentions) if a.source is not None]
    return tuple(form.format(layer, name) for layer in layers for name in names)


def apart(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors with the names of neurons beside experts, without those that nothing reads."""
    left_out = unused(spec, "blk.{}.{}.weight", ("attn_k", "attn_v", KEY_NORM))
    named = shared_name if spec.has_experts else str
    return {named(name): e for name, e in tensors.items() if name not in left_out}


def joined(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors with llama.cpp's names."""
    return {name.replace("_shexp.", "."): entry for name, entry in tensors.items()}


def gemma4_spec(
    sizes: Sizes, heads_L: Sequence[Heads], activation: Activation, logit_cap: float | None,
    options: Collection[str], experts: Experts | None, inputs: int,
) -> ModelSpec:  # fmt: skip
    """`inputs`: values of each layer's own; 0 without."""
    arrange = sizes.arrangement()
    layers = [
        arrange.sandwich(
            replace(
                heads.sizes.attention(
                    heads.rotary, window=heads.window, scale=1.0, has_head_norms=True,
                    norms_values=True, values_are_keys=heads.values_are_keys,
                ),
                source=heads.source,
            ),
            _feed_forward(heads.sizes, activation, experts),
            scale=SCALE if SCALE in options else "",
            own=PerLayer(size=inputs, activation=activation) if inputs else None,
        )
        for heads in heads_L
    ]  # fmt: skip
    scale = math.sqrt(sizes.hidden_size)
    spec = sizes.model("gemma4", layers, embedding_scale=scale, logit_cap=logit_cap)
    return replace(spec, first=(layer_inputs(spec, inputs, sizes.epsilon),)) if inputs else spec


def layer_inputs(spec: ModelSpec, size: int, epsilon: float, *, reads: str = "x") -> LayerInputs:
    """What makes the layers' own inputs, of `size` values each."""
    return LayerInputs(
        size=size,
        epsilon=epsilon,
        num_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        reads=reads,
    )


def _feed_forward(
    sizes: Sizes, activation: Activation, experts: Experts | None
) -> Neurons | Mixture:
    neurons = sizes.neurons(activation)
    if experts is None:
        return neurons
    shared = replace(neurons, suffix="_shexp", reads="shared_in", writes="shared_out")
    route = replace(experts.route, reads="route_in", has_own_scales=True)
    return replace(experts.mixture(activation), shared=shared, route=route)


def of_layer(
    read: "KeyReader", layer: int, num_layers: int, own: Mapping[str, Value]
) -> "KeyReader":
    """A reader of this layer's numbers, where keys have one for each layer, and of `own` keys."""
    keys, prefix = {**read.keys, **own}, f"{read.graph.name}."
    for key, value in keys.items():
        if key.startswith(prefix) and isinstance(value, list) and len(value) == num_layers:
            keys[key] = cast(Value, value[layer])
    return type(read)(read.path, keys, read.tensors)


def of_keys(read: "KeyReader") -> ModelSpec:
    num_layers, name = read.count("block_count"), read.graph.name
    is_local_L = read.layers_with_window(num_layers, PERIOD)
    own: dict[str, Value] = {f"{name}.rope.freq_base": np.float32(LOCAL_THETA)}
    for key in _OF_WINDOWS:
        if f"{name}.{key}_swa" in read.keys:
            own[f"{name}.{key}"] = read.keys[f"{name}.{key}_swa"]
    heads, sources_L = [], sources(read.path, is_local_L, read.whole(SHARED, 0))
    for index, (is_local, source) in enumerate(zip(is_local_L, sources_L, strict=True)):
        own_read = of_layer(read, index, num_layers, own if is_local else {})
        rotary = own_read.rotary("halves")
        heads.append(
            Heads(
                sizes=own_read.sizes(),
                rotary=replace(rotary, has_factors=False) if is_local else rotary,
                window=read.count("attention.sliding_window") if is_local else None,
                values_are_keys=f"blk.{index if source is None else source}.attn_v.weight"
                not in read.tensors,
                source=source,
            )
        )
    options = {option.removesuffix(".weight") for option in read.options(num_layers)}
    experts = experts_of_keys(read) if read.whole("expert_count", 0) else None
    cap = key_cap(read, f"{name}.{LOGIT_CAP}", 0.0)
    inputs = read.whole(INPUTS, 0)
    return gemma4_spec(heads[-1].sizes, heads, read.activation(), cap, options, experts, inputs)


def keys(spec: ModelSpec) -> Mapping[str, Value]:
    """llama.cpp's keys for layers without a window, and its others for those with one."""
    attentions = spec.attentions
    local = next((a for a in attentions if a.window is not None), attentions[-1])
    whole = next((a for a in attentions if a.window is None), attentions[-1])
    assert local.rotary is not None
    found: dict[str, Value] = {
        "attention.sliding_window": np.uint32(local.window or spec.context_length),
        "attention.sliding_window_pattern": [a.window is not None for a in attentions],
        "rope.freq_base_swa": np.float32(local.rotary.theta),
        LOGIT_CAP: np.float32(spec.logit_cap or 0.0),
        SHARED: np.uint32(sum(a.source is not None for a in attentions)),
        INPUTS: np.uint32(
            max((each.size for each in spec.first if isinstance(each, LayerInputs)), default=0)
        ),
    }
    for a, suffix in ((whole, ""), (local, "_swa")):
        found[f"attention.key_length{suffix}"] = np.uint32(a.head_dim)
        found[f"attention.value_length{suffix}"] = np.uint32(a.head_dim)
        found[f"rope.dimension_count{suffix}"] = np.uint32(a.num_rotated)
    beside = [layer.shared.number for layer in spec.layers if layer.shared is not None]
    if beside:
        is_same = len(set(beside)) == 1
        found["feed_forward_length"] = np.uint32(beside[0]) if is_same else cast(Value, beside)
    of_shared = ("expert_shared_feed_forward_length", "expert_shared_count")
    return found | {k: v for k, v in expert_keys(spec).items() if k not in of_shared}


GEMMA4 = Family(
    title="Gemma 4",
    model_types=("gemma4_text",),
    blueprint=gemma4,
    read_keys=(*COUNTS, LOGIT_CAP),
    defaults={
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "attention_k_eq_v": False,
        "sliding_window": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "num_experts": None,
    },
)
GEMMA4_WITH_IMAGES = replace(GEMMA4, model_types=("gemma4",), text_key="text_config")
GRAPH = Architecture(
    name="gemma4",
    of_keys=of_keys,
    keys=keys,
    known_keys=(
        *KEYS, LOGIT_CAP, INPUTS, SHARED, "attention.sliding_window", "attention.sliding_window_pattern",
        *(f"{key}_swa" for key in _OF_WINDOWS),
    ),
    options=(f"{SCALE}.weight",),
    stock_activations=("gelu_tanh",),
    stock_options=(f"{SCALE}.weight",),
    not_in_stock=partial(other_in_stock, renormalises=True),
    apart=apart,
    joined=joined,
)  # fmt: skip
