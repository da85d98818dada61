"""SmallThinker (arXiv 2507.20984): experts of ReLU neurons, so that most neurons of a chosen expert are
silent, too. The router reads the layer's input, before attention and without a norm."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import gguf

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.experts import KEYS, Experts, check_experts, expert_keys, experts_of_keys
from hotsplit.families.family import Architecture, Family
from hotsplit.families.sizes import Sizes
from hotsplit.families.windows import KEYS as WINDOW_KEYS
from hotsplit.families.windows import window_keys
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.spec import Activation, ModelSpec, Rotary, Route

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

# What llama.cpp's graph has whatever a file says (src/models/smallthinker.cpp): a window of this
# length in all layers but the first of each period.
STOCK_WINDOW, PERIOD = 4096, 4


def smallthinker(read: ConfigReader) -> Blueprint:
    """SmallThinkerForCausalLM. transformers does not have it: its own code is for older versions."""
    for key in ("moe_enable_secondary_experts", "moe_shared_primary_experts"):
        read.refuse(key, False, 0, why="the published models have no such experts")
    read.refuse("hidden_act", "relu")
    heads, kv_heads, head_dim = read.heads("num_attention_heads")
    length, num_layers = read.count("moe_ffn_hidden_size"), read.count("num_hidden_layers")
    _check_all(read, "moe_layer_layout", num_layers, "layers without experts are not supported")
    sizes = Sizes(
        num_layers=num_layers,
        hidden_size=read.count("hidden_size"),
        num_neurons=length,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=read.count("vocab_size"),
        context_length=read.count("max_position_embeddings"),
        epsilon=read.positive("rms_norm_eps"),
    )
    experts = Experts(
        route=Route(
            num_experts=read.count("moe_num_primary_experts"),
            num_used=read.count("moe_num_active_primary_experts"),
            gating="softmax" if read.flag("moe_primary_router_apply_softmax") else "sigmoid",
            reads="x",
        ),
        num_neurons=length,
    )
    check_experts(str(read.path), experts, num_layers)
    has_window_L = _layout(read, "sliding_window_layout", num_layers, default=0)
    rotates_L = _layout(read, "rope_layout", num_layers, default=1)
    if rotates_L not in (has_window_L, [True] * num_layers):
        raise HotsplitError(
            f"{read.path}: rope_layout is {shown(read.values.get('rope_layout'))}, wanted rotary"
            " embeddings in all layers, or in those with a window; this checkpoint is not supported"
        )
    sizes, rotary, factors = read.rotary(sizes, "halves")
    window = read.count("sliding_window_size") if any(has_window_L) else None
    return Blueprint(
        spec=smallthinker_spec(sizes, rotary, "relu", experts, window, has_window_L, rotates_L),
        name_of=gguf_names(gguf.MODEL_ARCH.SMALLTHINKER, num_layers),
        rope_factors=factors,
    )


def _layout(read: ConfigReader, key: str, num_layers: int, *, default: int) -> list[bool]:
    """A 0 or 1 for each layer."""
    values = read.values.get(key)
    values = [default] * num_layers if values is None else values
    if not isinstance(values, list) or len(values) != num_layers or set(values) - {0, 1}:
        raise HotsplitError(f"{read.path}: {key} is {shown(values)}, wanted {num_layers} of 0 or 1")
    return [bool(value) for value in values]


def _check_all(read: ConfigReader, key: str, num_layers: int, why: str) -> None:
    if not all(_layout(read, key, num_layers, default=1)):
        raise HotsplitError(f"{read.path}: {key} is {shown(read.values[key])}: {why}")


def smallthinker_spec(
    sizes: Sizes,
    rotary: Rotary,
    activation: Activation,
    experts: Experts,
    window: int | None,
    has_window_L: Sequence[bool],
    rotates_L: Sequence[bool],
) -> ModelSpec:
    mixture, arrange = experts.mixture(activation), sizes.arrangement()
    layers = [
        arrange.pre_norm(
            sizes.attention(rotary if rotates else None, window=window if has_window else None),
            mixture,
        )
        for has_window, rotates in zip(has_window_L, rotates_L, strict=True)
    ]
    return sizes.model("smallthinker", layers)


def of_keys(read: "KeyReader") -> ModelSpec:
    """Layers without a window do not rotate if others have one, as in llama.cpp."""
    sizes = read.sizes()
    window = read.whole("attention.sliding_window", 0) or None
    has_window_L = [False] * sizes.num_layers
    if window is not None:
        key = f"{read.graph.name}.attention.sliding_window_pattern"
        has_window_L = [layer % PERIOD != 0 for layer in range(sizes.num_layers)]
        if isinstance(read.keys.get(key), list):
            has_window_L = read.layers_with_window(sizes.num_layers, PERIOD)
    rotates_L = [True] * sizes.num_layers if window is None else has_window_L
    return smallthinker_spec(
        sizes,
        read.rotary("halves"),
        read.activation(),
        experts_of_keys(read, gating="softmax", reads="x"),
        window,
        has_window_L,
        rotates_L,
    )


def keys(spec: ModelSpec) -> Mapping[str, Value]:
    return {**expert_keys(spec), **window_keys(spec)}


def not_in_stock(spec: ModelSpec) -> str | None:
    windows = [attention.window for attention in spec.attentions]
    if not any(windows):
        return None
    wanted = [STOCK_WINDOW if layer % PERIOD else None for layer in range(spec.num_layers)]
    if windows != wanted:
        return (
            f"has windows of {STOCK_WINDOW} in all layers but each {PERIOD}th from the first, this"
            " model others"
        )
    return None


SMALLTHINKER = Family(
    title="SmallThinker",
    blueprint=smallthinker,
    defaults={"tie_word_embeddings": False, "moe_primary_router_apply_softmax": False},
)
GRAPH = Architecture(
    name="smallthinker",
    of_keys=of_keys,
    keys=keys,
    known_keys=(*KEYS, *WINDOW_KEYS),
    stock_activations=("relu",),
    not_in_stock=not_in_stock,
)
