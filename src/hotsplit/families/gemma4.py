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
from hotsplit.families.layer_inputs import (
    INPUTS,
    input_keys,
    inputs_of_config,
    layer_inputs,
    refuse_without_rows,
)
from hotsplit.families.llama import whole_sizes
from hotsplit.families.shared_keys import (
    SHARED,
    reading,
    shared_keys,
    sources_of_config,
    sources_of_keys,
    unused_sources,
    without_unused,
)
from hotsplit.families.sizes import Sizes
from hotsplit.families.soft_caps import LOGIT_CAP, cap_of_config, cap_of_keys
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Mixture
from hotsplit.model.per_layer import PerLayer
from hotsplit.model.route import OWN_SCALES, ROUTER
from hotsplit.model.spec import Activation, ModelSpec, Neurons, Rotary, Route

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

PERIOD, LOCAL_THETA = 6, 1e4
FULL = "full_attention"
SCALE = "layer_output_scale"
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_THETA},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
# Vectors of a router in a checkpoint, and their names in a layer of a model file.
_SCALES = {"scale": f"{ROUTER}.scale", "per_expert_scale": OWN_SCALES}
_DENSE = re.compile(r"(\.ffn_(?:gate|up|down))\.")
# Keys of a GGUF of which layers with a window have their own.
THETA = "rope.freq_base"
_OF_WINDOWS = ("attention.key_length", "attention.value_length", "rope.dimension_count")


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
    window, are_keys = read.window_of(is_local_L), read.flag("attention_k_eq_v")
    sources_L = sources_of_config(read, is_local_L)
    factor_L = [1 + (read.flag("use_double_wide_mlp") and s is not None) for s in sources_L]
    heads = [
        Heads(
            sizes=replace(own, num_neurons=factor * own.num_neurons),
            source=source,
            rotary=narrow if is_local else wide,
            window=window if is_local else None,
            values_are_keys=are_keys and not is_local,
        )
        for is_local, source, factor in zip(is_local_L, sources_L, factor_L, strict=True)
        for own in [local if is_local else whole]
    ]
    experts = _experts(read, sizes) if read.flag("enable_moe_block") else None
    activation = read.activation("hidden_activation", GATED)
    if inputs := inputs_of_config(read):
        refuse_without_rows(read)
    spec = gemma4_spec(
        sizes, heads, activation, cap_of_config(read, LOGIT_CAP), (SCALE,), experts, inputs
    )
    return Blueprint(
        spec=spec,
        name_of=_names(gguf_names(gguf.MODEL_ARCH.GEMMA4, sizes.num_layers), experts is not None),
        rope_factors=factors,
        ignored=(*IGNORED, *unused_sources(spec)),
    )


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
    writes, with zeros before short indices, and empty if they do not differ, or by the keys of
    published configs.

    Raises HotsplitError for a `per_layer_config` in which other layers differ."""
    key = "per_layer_config"
    given = read.values.get(key)
    own: dict[str, object] = {"head_dim": read.values.get("global_head_dim", 512)}
    if given is None:
        if read.flag("attention_k_eq_v"):
            own["num_key_value_heads"] = read.values.get("num_global_key_value_heads")
    elif given == {}:
        own = {}
    else:
        wanted = {str(layer) for layer, is_local in enumerate(is_local_L) if not is_local}
        layers = [k.lstrip("0") or "0" for k in given] if isinstance(given, dict) else []
        is_whole = isinstance(given, dict) and {*layers} == wanted and len(layers) == len(wanted)
        each = list(given.values()) if isinstance(given, dict) and is_whole else [None]
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
    """The names, with those of scales, which have no suffix, and of neurons beside experts."""

    def name(source: str) -> str | None:
        stem, _, scale = source.partition(".router.")
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


def apart(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors with the names of neurons beside experts, without those that nothing reads."""
    named = shared_name if spec.has_experts else str
    return {named(name): entry for name, entry in without_unused(spec, tensors).items()}


def joined(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors with llama.cpp's names."""
    return {name.replace("_shexp.", "."): entry for name, entry in tensors.items()}


def gemma4_spec(
    sizes: Sizes,
    heads_L: Sequence[Heads],
    activation: Activation,
    logit_cap: float | None,
    options: Collection[str],
    experts: Experts | None,
    inputs: int,
) -> ModelSpec:
    """`inputs`: values of each layer's own; 0 without."""
    arrange = sizes.arrangement()
    layers = [
        arrange.sandwich(
            heads.sizes.attention(
                heads.rotary, window=heads.window, scale=1.0, has_head_norms=True
            ),
            _feed_forward(heads.sizes, activation, experts),
            scale=SCALE if SCALE in options else "",
            own=PerLayer(size=inputs, activation=activation) if inputs else None,
        )
        .with_attention(norms_values=True, num_kv_projections=1 if heads.values_are_keys else 2)
        .with_attention(**reading(heads.source))
        for heads in heads_L
    ]
    scale = math.sqrt(sizes.hidden_size)
    spec = sizes.model("gemma4", layers, embedding_scale=scale)
    first = (layer_inputs(spec, inputs, sizes.epsilon),) if inputs else ()
    return replace(spec, logit_cap=logit_cap, first=first)


def _feed_forward(
    sizes: Sizes, activation: Activation, experts: Experts | None
) -> Neurons | Mixture:
    neurons = sizes.neurons(activation)
    if experts is None:
        return neurons
    shared = replace(neurons, suffix="_shexp", reads="shared_in", writes="shared_out")
    route = replace(experts.route, reads="route_in", has_own_scales=True)
    return replace(experts.mixture(activation), shared=shared, route=route)


def of_keys(read: "KeyReader") -> ModelSpec:
    num_layers, name = read.count("block_count"), read.graph.name
    is_local_L = read.layers_with_window(num_layers, PERIOD)
    theta = np.float32(read.positive(f"{name}.{THETA}_swa", LOCAL_THETA))
    own: dict[str, Value] = {f"{name}.{THETA}": theta}
    for key in _OF_WINDOWS:
        if f"{name}.{key}_swa" in read.keys:
            own[f"{name}.{key}"] = np.uint32(read.count(f"{key}_swa"))
    heads, sources_L = [], sources_of_keys(read, is_local_L)
    for index, (is_local, source) in enumerate(zip(is_local_L, sources_L, strict=True)):
        own_read = read.of_layer(index, num_layers, own if is_local else {})
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
    cap = cap_of_keys(read, LOGIT_CAP)
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
        **shared_keys(spec),
        **input_keys(spec),
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
        *KEYS,
        LOGIT_CAP,
        INPUTS,
        SHARED,
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        *(f"{key}_swa" for key in (*_OF_WINDOWS, THETA)),
    ),
    options=(f"{SCALE}.weight",),
    stock_activations=("gelu_tanh",),
    stock_options=(f"{SCALE}.weight",),
    not_in_stock=partial(other_in_stock, renormalises=True),
    apart=apart,
    joined=joined,
)
