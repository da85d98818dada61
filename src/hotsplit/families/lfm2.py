"""LFM2 and its mixture (arXiv 2511.23404): gated short convolutions in most layers, and attention
with norms of heads in the others. llama.cpp's files say by the number of key heads which layers
attend, and have the output norm under the name of one after the embedding."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import NameOf, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import (
    COUNTS,
    KEYS,
    expert_keys,
    experts_of_keys,
    plain_weights_in_stock,
    with_choice_bias,
)
from hotsplit.families.family import Architecture, Family, Tensors
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.route import CHOICE_BIAS
from hotsplit.model.short_conv import ShortConv
from hotsplit.model.spec import ModelSpec

KEY_HEADS, TAPS, MOST_TAPS = "attention.head_count_kv", "shortconv.l_cache", 16
NORM, THEIR_NORM = "output_norm.weight", "token_embd_norm.weight"


def derived(read: ConfigReader) -> dict[str, object]:
    """Values under transformers' older names, and the neurons of a layer, which the config's number
    only bounds (transformers, modeling_lfm2.py)."""
    values, found = read.values, dict[str, object](hidden_act="silu")
    if "tie_embedding" in values:
        found["tie_word_embeddings"] = values["tie_embedding"]
    attending = values.get("full_attn_idxs")
    if values.get("layer_types") is None and isinstance(attending, list):
        found["layer_types"] = [
            "full_attention" if layer in attending else "conv"
            for layer in range(read.count("num_hidden_layers"))
        ]
    return found


def derived_dense(read: ConfigReader) -> dict[str, object]:
    neurons = read.count("block_ff_dim" if "block_ff_dim" in read.values else "intermediate_size")
    if read.flag("block_auto_adjust_ff_dim"):
        neurons = int(read.positive("block_ffn_dim_multiplier") * int(2 * neurons / 3))
        step = read.count("block_multiple_of")
        neurons = -(-neurons // step) * step
    return derived(read) | {"intermediate_size": neurons}


def keys(read: ConfigReader) -> dict[str, Value]:
    if read.values.get("layer_types") is None:
        raise HotsplitError(f"{read.path}: layer_types is missing, wanted each layer's")
    is_conv_L = read.other_layers("conv", "layer_types", 1)
    key_heads = read.count("num_key_value_heads")
    return {
        KEY_HEADS: [0 if is_conv else key_heads for is_conv in is_conv_L],
        TAPS: np.uint32(read.count("conv_L_cache")),
    }


def keys_of_mixture(read: ConfigReader) -> dict[str, Value]:
    return keys(read) | expert_keys(
        read,
        gating="sigmoid",
        renormalises=read.flag("norm_topk_prob"),
        scale=read.positive("routed_scaling_factor"),
        num_dense=read.whole("num_dense_layers"),
    )


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    def renamed(name_of: NameOf) -> NameOf:
        own = {"model.embedding_norm.weight": NORM, "lm_head.weight": "output.weight"}
        name = with_choice_bias(name_of)
        return lambda source: own.get(source) or name(source)

    return Sources(renamed=renamed)


def of_keys(read: KeyReader, *, has_experts: bool) -> ModelSpec:
    read, has_keys_L = read.with_one(KEY_HEADS)
    sizes = read.sizes()
    attends_L = has_keys_L or [True] * sizes.num_layers
    if len(attends_L) != sizes.num_layers:
        raise HotsplitError(
            f"{read.path}: {read.graph.name}.{KEY_HEADS} is {shown(has_keys_L)}, wanted"
            f" {sizes.num_layers} numbers: this model is not supported"
        )
    taps = read.count(TAPS)
    if taps > MOST_TAPS:
        raise HotsplitError(
            f"{read.path}: a convolution of {taps} taps, wanted 1 to {MOST_TAPS}: this model is not"
            " supported"
        )
    conv = ShortConv(size=sizes.hidden_size, num_taps=taps)
    return decoder(
        read,
        mixers=[None if attends else conv for attends in attends_L],
        experts=experts_of_keys(read, gating="sigmoid") if has_experts else None,
        has_head_norms=True,
    )


def _not_in_stock(spec: ModelSpec) -> str | None:
    """llama.cpp's graph reads neither of the router's keys."""
    if (other := plain_weights_in_stock(spec)) is not None:
        return other
    route = spec.layers[-1].route
    if route is not None and not route.has_choice_bias:
        return "has a bias for the choice of experts, this model none"
    return None


def _under(mine: str, other: str, spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors, with the output norm under the name `mine`."""
    return {mine if name == other else name: entry for name, entry in tensors.items()}


_DEFAULTS: Mapping[str, object] = {
    "tie_word_embeddings": True,
    "norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
}
LFM2 = Family(
    classes=("Lfm2ForCausalLM",),
    title="LFM2",
    graph="lfm2",
    fields={"attention.layer_norm_rms_epsilon": "norm_eps"},
    defaults={
        **_DEFAULTS,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    plain={"conv_bias": False},
    activations={"silu": "silu"},
    rope=Rope(theta=1e6),
    derived=derived_dense,
    keys=keys,
    sources=sources,
)
FAMILIES = (
    LFM2,
    replace(
        LFM2,
        classes=("Lfm2MoeForCausalLM",),
        title="LFM2-MoE",
        graph="lfm2moe",
        model_types=("lfm2_moe",),
        read_keys=COUNTS,
        defaults={
            **_DEFAULTS,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "num_experts": 32,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        flags={"use_expert_bias": (CHOICE_BIAS,)},
        derived=derived,
        keys=keys_of_mixture,
    ),
)
GRAPHS = tuple(
    Architecture(
        name=name,
        of_keys=partial(of_keys, has_experts=name == "lfm2moe"),
        known_keys=(TAPS, *KEYS) if name == "lfm2moe" else (TAPS,),
        not_in_stock=_not_in_stock,
        apart=partial(_under, NORM, THEIR_NORM),
        joined=partial(_under, THEIR_NORM, NORM),
    )
    for name in ("lfm2", "lfm2moe")
)
