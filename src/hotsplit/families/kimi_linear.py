"""Kimi Linear (arXiv 2510.26692): Kimi Delta Attention in most layers, latent attention without
rotary embeddings in the others, and experts chosen as in DeepSeek-V3. llama.cpp's files say by the
number of key heads which layers attend."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import gguf
import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families import deepseek
from hotsplit.families.blueprint import NEGATED_EXP, NameOf, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import (
    COUNTS,
    dense_layers_of_types,
    experts_of_keys,
    with_choice_bias,
)
from hotsplit.families.expert_keys import KEYS as EXPERT_KEYS
from hotsplit.families.family import Architecture, Family, Tensors
from hotsplit.families.glm import router_keys
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.latent_keys import (
    KEYS,
    attention_of,
    latent_keys,
    latent_of_keys,
    latent_sources,
    latents_apart,
    sizes_of_keys,
)
from hotsplit.families.mamba2_keys import MOST_TAPS, with_step_bias
from hotsplit.families.plain_decoder import decoder
from hotsplit.files.gguf_file import TensorEntry, Value
from hotsplit.files.typed import shown
from hotsplit.model.delta_net import CONVS, DECAY, KimiDelta
from hotsplit.model.rope import RopeScaling
from hotsplit.model.route import CHOICE_BIAS
from hotsplit.model.spec import ModelSpec

KEY_HEADS, HEAD_DIM, TAPS = "attention.head_count_kv", "kda.head_dim", "ssm.conv_kernel"
# DeepSeek's names of keys, and those of these configs.
THEIR_NAMES = {
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
# Numbers of the delta nets: in the config, and in the object of published ones that precedes it.
OF_DELTA = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


def derived(read: ConfigReader) -> dict[str, object]:
    own = read.values.get("linear_attn_config") or {}
    if not isinstance(own, dict):
        raise HotsplitError(f"{read.path}: linear_attn_config is {shown(own)}, wanted an object")
    found: dict[str, object] = {name: read.values[theirs] for name, theirs in THEIR_NAMES.items()}
    found |= {name: own[theirs] for name, theirs in OF_DELTA.items() if theirs in own}
    num_layers = read.count("num_hidden_layers")
    if read.values.get("layer_types") is None:
        found["layer_types"] = _layer_types(read, own, num_layers)
    num_dense = dense_layers_of_types(read, read.whole("first_k_dense_replace"))
    found["first_k_dense_replace"] = num_dense
    return found | deepseek.derived(read.with_values(found))


def _layer_types(read: ConfigReader, own: Mapping[str, object], num_layers: int) -> list[str]:
    """By lists of layers, which are numbered from 1, or else as transformers' config class."""
    if not {"full_attn_layers", "kda_layers"} <= own.keys():
        return [
            "full_attention" if layer and layer % 4 == 0 else "linear_attention"
            for layer in range(num_layers)
        ]
    attending, recurrent = own["full_attn_layers"], own["kda_layers"]
    layers = set(range(1, num_layers + 1))
    if (
        not isinstance(attending, list)
        or not isinstance(recurrent, list)
        or len(attending) + len(recurrent) != num_layers
        or {*map(str, attending), *map(str, recurrent)} != set(map(str, layers))
    ):
        raise HotsplitError(
            f"{read.path}: linear_attn_config has full_attn_layers {shown(attending)} and"
            f" kda_layers {shown(recurrent)}, wanted each of 1 to {num_layers} in one of them; this"
            " checkpoint is not supported"
        )
    return [
        "full_attention" if layer in attending else "linear_attention" for layer in sorted(layers)
    ]


def keys(read: ConfigReader) -> dict[str, Value]:
    """llama.cpp's keys have one number of heads for both kinds of layers."""
    heads, width = read.count("num_attention_heads"), read.count("linear_head_dim")
    read.refuse("linear_num_heads", heads, why="no key of a GGUF has another number of heads")
    read.check_size({"the channels of the delta nets": heads * width})
    has_state_L = read.other_layers("linear_attention", "layer_types", 1)
    if all(has_state_L):
        raise HotsplitError(
            f"{read.path}: no layer attends (layer_types), wanted one at least; this checkpoint is"
            " not supported"
        )
    return {
        **latent_keys(read),
        **router_keys(read),
        KEY_HEADS: [int(not has_state) for has_state in has_state_L],
        HEAD_DIM: np.uint32(width),
        TAPS: np.uint32(read.count("linear_conv_kernel_dim")),
    }


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    """transformers saves neurons of layers without experts under the name of the others'."""

    def renamed(name_of: NameOf) -> NameOf:
        known = with_choice_bias(with_step_bias(name_of))

        def name(source: str) -> str | None:
            before, found, last = source.rpartition(".block_sparse_moe.")
            return known(f"{before}.mlp.{last}" if found and "_proj." in last else source)

        return name

    return replace(latent_sources(spec), renamed=renamed, changes={f".{DECAY}": NEGATED_EXP})


def of_keys(read: KeyReader) -> ModelSpec:
    read, attends_L = read.with_one(KEY_HEADS)
    own, sizes = sizes_of_keys(read)
    attends_L = attends_L or [True] * sizes.num_layers
    if len(attends_L) != sizes.num_layers:
        raise HotsplitError(
            f"{read.path}: {read.graph.name}.{KEY_HEADS} is {shown(attends_L)}, wanted"
            f" {sizes.num_layers} numbers: this model is not supported"
        )
    taps, width = read.count(TAPS), read.count(HEAD_DIM)
    if not 2 <= taps <= MOST_TAPS:
        raise HotsplitError(
            f"{read.path}: a convolution of {taps} taps, wanted 2 to {MOST_TAPS}: this model is not"
            " supported"
        )
    delta = KimiDelta(
        num_key_heads=sizes.num_heads,
        num_value_heads=sizes.num_heads,
        key_head_dim=width,
        value_head_dim=width,
        num_taps=taps,
        epsilon=sizes.epsilon,
    )
    latent = latent_of_keys(read, sizes, layer=attends_L.index(True))
    return decoder(
        own,
        rotary=None,
        is_partly_rotated=True,
        mixers=[None if attends else delta for attends in attends_L],
        experts=experts_of_keys(read, gating="sigmoid", has_shared=True),
        attention=attention_of(latent, RopeScaling()),
    )


def apart(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors, with the weights of convolutions as matrices, and decays in one column. Those of
    llama.cpp's converter have further dimensions of 1, and some of its quantiser's."""
    found = latents_apart(spec, tensors)
    for name, entry in found.items():
        large = tuple(size for size in entry.shape if size > 1)
        if name.endswith(CONVS) and len(large) == 2:
            found[name] = _shaped(entry, large)
        elif name.endswith(f".{DECAY}"):
            found[name] = _shaped(entry, (prod(entry.shape), 1))
    return found


def joined(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors, with the shapes of convolutions that llama.cpp's graph wants."""
    return {
        name: _shaped(entry, (entry.shape[0], 1, entry.shape[1])) if name.endswith(CONVS) else entry
        for name, entry in tensors.items()
    }


def _shaped(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """The values of a small tensor in another shape."""

    def read_rows(start: int, stop: int) -> np.ndarray:
        found: np.ndarray = entry.read().reshape(shape)[start:stop]
        return found

    return entry if entry.shape == shape else replace(entry, shape=shape, read_rows=read_rows)


def _not_in_stock(spec: ModelSpec) -> str | None:
    route = spec.layers[-1].route
    if route is None:
        return None
    if not route.has_choice_bias or not route.renormalises:
        return "has a bias for the choice of experts and divides their weights by their sum"
    return None


FAMILIES = (
    Family(
        classes=("KimiLinearForCausalLM",),
        title="Kimi Linear",
        graph="kimi-linear",
        model_types=("kimi_linear",),
        names=gguf.MODEL_ARCH.KIMI_LINEAR,
        read_keys=(*COUNTS, *deepseek.RANKS),
        fields={"context_length": "model_max_length"},
        plain={
            "attention_bias": False,
            "mla_use_nope": True,
            "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid",
        },
        defaults={
            "tie_word_embeddings": False,
            "attention_bias": False,
            "hidden_act": "silu",
            "model_max_length": 1048576,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "num_shared_experts": 1,
            "num_expert_group": 1,
            "topk_group": 1,
            "num_experts_per_token": 8,
            "num_experts": 256,
            "moe_renormalize": True,
            "routed_scaling_factor": 2.446,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
        },
        rope=None,
        derived=derived,
        keys=keys,
        tensors=lambda read: {CHOICE_BIAS: ()},
        sources=sources,
    ),
)
GRAPHS = (
    Architecture(
        name="kimi-linear",
        of_keys=of_keys,
        known_keys=(*EXPERT_KEYS, *KEYS, HEAD_DIM, TAPS),
        not_in_stock=_not_in_stock,
        apart=apart,
        joined=joined,
    ),
)
