"""Gemma 4: a Gemma whose layers without a window have wider heads, of which a part rotates
(proportional rotary embeddings), and may take their keys as values; scores are not scaled, values
are normed, and each layer's result is multiplied by a number of its own. Its mixture has experts
beside the neurons that always fire, which llama.cpp calls as those of a dense layer. In its
E-models each layer has an input of its own, from the token, and the last layers read the keys and
values of earlier ones."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import IGNORED, NameOf, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.decoder_sizes import Sizes, by_layer
from hotsplit.families.expert_keys import (
    COUNTS,
    KEYS,
    Experts,
    expert_keys,
    experts_of_keys,
    other_in_stock,
)
from hotsplit.families.family import Architecture, Family, Tensors
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.layer_inputs import INPUTS, input_keys, layer_inputs, refuse_without_rows
from hotsplit.families.rope_scalings import THETA, Rope, local_theta_key
from hotsplit.families.shared_keys import (
    SHARED,
    Readers,
    reading,
    shared_keys,
    sources,
    sources_of_keys,
    unused_sources,
    without_unused,
)
from hotsplit.families.soft_caps import LOGIT_CAP, cap_key, cap_of_keys
from hotsplit.families.windows import KEYS as WINDOW_KEYS
from hotsplit.families.windows import windows_of_keys
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Mixture
from hotsplit.model.per_layer import PerLayer
from hotsplit.model.route import OWN_SCALES, ROUTER
from hotsplit.model.spec import Activation, ModelSpec, Neurons

PERIOD, LOCAL_THETA = 6, 1e4
FULL, LOCAL = "full_attention", "sliding_attention"
SCALE = "layer_output_scale"
ROPE = {
    LOCAL: {"rope_type": "default", "rope_theta": LOCAL_THETA},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
# Vectors of a router in a checkpoint, and their names in a layer of a model file.
_SCALES = {"scale": f"{ROUTER}.scale", "per_expert_scale": OWN_SCALES}
# Keys of a GGUF of which layers with a window have their own.
_OF_WINDOWS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_DENSE = re.compile(r"(\.ffn_(?:gate|up|down))\.")
# Values of the config, by other names, of layers with a window; those without have the usual ones.
LOCAL_DIM, LOCAL_KV_HEADS = f"{LOCAL}: head_dim", f"{LOCAL}: num_key_value_heads"


def derived(read: ConfigReader) -> dict[str, object]:
    """The heads of layers without a window as those of the model, and the published rotary
    embeddings without a key for them."""
    kv_heads, head_dim = _heads_without_window(read, _are_local(read))
    return {
        "head_dim": head_dim,
        "num_key_value_heads": kv_heads,
        LOCAL_DIM: read.count("head_dim"),
        LOCAL_KV_HEADS: read.count("num_key_value_heads"),
        "rope_parameters": read.values.get("rope_parameters") or ROPE,
    }


def _are_local(read: ConfigReader) -> list[bool]:
    """Whether layers have windows; the last has none (transformers, configuration_gemma4.py)."""
    found = read.layers_with_window(PERIOD)
    if read.values.get("layer_types") is None:
        return [*found[:-1], False]
    if found[-1]:
        raise HotsplitError(
            f"{read.path}: layer_types ends with {LOCAL!r}, wanted {FULL!r}, which transformers"
            " makes of it: correct the config"
        )
    return found


def _heads_without_window(read: ConfigReader, is_local_L: Sequence[bool]) -> tuple[int, int]:
    """(key-value heads, width of a head) of layers without a window: by `per_layer_config`, which
    transformers 5 writes, with zeros before short indices, and empty if they do not differ, or by
    the keys of published configs. Raises HotsplitError for a `per_layer_config` in which other
    layers differ."""
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
    other = read.with_values({name: value for name, value in own.items() if value is not None})
    _, kv_heads, head_dim = other.heads("num_attention_heads", "num_key_value_heads")
    return kv_heads, head_dim


def keys(read: ConfigReader) -> dict[str, Value]:
    """llama.cpp's keys for layers without a window, and its others for those with one."""
    is_local_L, shared = _are_local(read), "num_kv_shared_layers"
    source_L = sources(f"{read.path}: {shared}", is_local_L, read.whole(shared))
    width, kv_heads = read.count("intermediate_size"), read.count("num_key_value_heads")
    is_wide, local_kv_heads = read.flag("use_double_wide_mlp"), read.count(LOCAL_KV_HEADS)
    widths = [width * (1 + (is_wide and source is not None)) for source in source_L]
    local_dim = np.uint32(read.count(LOCAL_DIM))
    window = read.count("sliding_window" if any(is_local_L) else "max_position_embeddings")
    if (inputs := input_keys(read))[INPUTS]:
        refuse_without_rows(read)
    found: dict[str, Value] = {
        "feed_forward_length": by_layer(widths),
        "attention.head_count_kv": by_layer(
            [local_kv_heads if is_local else kv_heads for is_local in is_local_L]
        ),
        WINDOW_KEYS[0]: np.uint32(window),
        WINDOW_KEYS[1]: is_local_L,
        **local_theta_key(read, LOCAL_THETA),
        **cap_key(read, LOGIT_CAP),
        **shared_keys(read, is_local_L),
        **inputs,
        **{f"{key}_swa": local_dim for key in _OF_WINDOWS},
    }
    if read.flag("enable_moe_block"):
        found |= expert_keys(read, used="top_k_experts")
    return found


def given_tensors(read: ConfigReader) -> Mapping[str, tuple[int, ...]]:
    """Layers without a window may take their keys as values."""
    are_keys = read.flag("attention_k_eq_v")
    values = [i for i, is_local in enumerate(_are_local(read)) if is_local or not are_keys]
    return dict.fromkeys((f"{SCALE}.weight", *(f"blk.{i}.attn_v.weight" for i in values)), ())


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


def _feed_forward(
    sizes: Sizes, activation: Activation, experts: Experts | None
) -> Neurons | Mixture:
    neurons = sizes.neurons(activation)
    if experts is None:
        return neurons
    shared = replace(neurons, suffix="_shexp", reads="shared_in", writes="shared_out")
    route = replace(experts.route, reads="route_in", has_own_scales=True)
    return replace(experts.mixture(activation), shared=shared, route=route)


def of_keys(read: KeyReader) -> ModelSpec:
    return spec_of(read, sources_of_keys)


def spec_of(
    read: KeyReader, sources_of: Callable[[KeyReader, Sequence[bool]], Readers]
) -> ModelSpec:
    """`sources_of`: the source of each layer's keys and values, by whether layers have windows."""
    num_layers, name, activation = read.count("block_count"), read.graph.name, read.activation()
    windows = windows_of_keys(read, num_layers, period=PERIOD, window=None)
    theta = np.float32(read.positive(f"{name}.{THETA}_swa", LOCAL_THETA))
    local: dict[str, Value] = {f"{name}.{THETA}": theta}
    for key in _OF_WINDOWS:
        if f"{name}.{key}_swa" in read.keys:
            local[f"{name}.{key}"] = np.uint32(read.count(f"{key}_swa"))
    source_L = sources_of(read, [window is not None for window in windows])
    experts = experts_of_keys(read) if read.whole("expert_count", 0) else None
    inputs, layers = read.whole(INPUTS, 0), []
    scale = SCALE if f"{SCALE}.weight" in read.options(num_layers) else ""
    for index, (window, source) in enumerate(zip(windows, source_L, strict=True)):
        own = read.of_layer(index, num_layers, {} if window is None else local)
        sizes, rotary = own.sizes(), own.rotary("halves")
        if window is not None:
            rotary = replace(rotary, has_factors=False)
        has_values = f"blk.{index if source is None else source}.attn_v.weight" in read.tensors
        layer = sizes.arrangement().sandwich(
            sizes.attention(rotary, window=window, has_head_norms=True),
            _feed_forward(sizes, activation, experts),
            scale=scale,
            own=PerLayer(size=inputs, activation=activation) if inputs else None,
        )
        layer = layer.with_attention(
            scale=1.0, norms_values=True, num_kv_projections=1 + has_values
        )
        layers.append(layer.with_attention(**reading(source)))
    spec = sizes.model(name, layers)
    return replace(
        spec,
        embedding_scale=math.sqrt(sizes.hidden_size),
        logit_cap=cap_of_keys(read, LOGIT_CAP),
        first=(layer_inputs(spec, inputs, sizes.epsilon),) if inputs else (),
    )


GEMMA4 = Family(
    classes=("Gemma4ForCausalLM",),
    title="Gemma 4",
    graph="gemma4",
    model_types=("gemma4_text",),
    read_keys=(*COUNTS, LOGIT_CAP),
    fields={"hotsplit.ffn.activation": "hidden_activation"},
    plain={"use_bidirectional_attention": "vision", "attention_bias": False},
    rope=Rope(kinds=("proportional",), theta=1e6, layers=FULL, theta_key=""),
    derived=derived,
    keys=keys,
    tensors=given_tensors,
    sources=lambda spec, read: Sources(
        renamed=partial(_names, has_experts=spec.has_experts),
        ignored=(*IGNORED, *unused_sources(spec)),
    ),
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
FAMILIES = (GEMMA4, GEMMA4.with_images("Gemma4ForConditionalGeneration", "gemma4"))
GRAPHS = (
    Architecture(
        name="gemma4",
        of_keys=of_keys,
        known_keys=(
            *KEYS,
            LOGIT_CAP,
            INPUTS,
            SHARED,
            *WINDOW_KEYS,
            *(f"{key}_swa" for key in (*_OF_WINDOWS, THETA)),
        ),
        options=(f"{SCALE}.weight",),
        stock_activations=("gelu_tanh",),
        stock_options=(f"{SCALE}.weight",),
        not_in_stock=partial(other_in_stock, renormalises=True),
        apart=apart,
        joined=joined,
    ),
)
