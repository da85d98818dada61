"""Nemotron-H and Nemotron 3 (arXiv 2504.03624, 2512.20848): each layer is one block after a norm:
Mamba-2, attention without rotary embeddings, or neurons without gates under ReLU squared, in
Nemotron 3 those of experts, so that most neurons are silent; in Super and Ultra these read a latent
(model/latent_experts.py). llama.cpp's files say by the numbers of key heads and of neurons what a
layer has."""

from dataclasses import replace
from typing import cast

import gguf
import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import NameOf, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import COUNTS, KEYS, expert_keys, experts_of_keys
from hotsplit.families.family import UNGATED, Architecture, Family
from hotsplit.families.key_reader import DRAFT_LAYERS, NORM_EPSILON, KeyReader
from hotsplit.families.mamba2_keys import CHANGES, mamba2_keys, mamba2_of_keys, with_step_bias
from hotsplit.families.mamba2_keys import KEYS as MAMBA2
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Mixture
from hotsplit.model.draft_block import with_draft_block
from hotsplit.model.mamba2 import Mamba2
from hotsplit.model.route import CHOICE_BIAS
from hotsplit.model.spec import Attention, LayerSpec, ModelSpec, Neurons, Norm

KEY_HEADS, NEURONS = "attention.head_count_kv", "feed_forward_length"
MIXTURES = ("nemotron_h_moe",)
LATENT_SIZE = "moe_latent_size"  # of configs and keys alike
_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_OLD = {"mamba": "linear_attention", "attention": "full_attention"}
# A draft block that is not run: of a Nemotron-H without experts, or not the only one.
LEFT_OUT = ("mtp.",)


def derived(read: ConfigReader) -> dict[str, object]:
    """The layers under transformers 5's names, whose number is not said otherwise."""
    types = read.values.get("layers_block_type")
    pattern = read.values.get("hybrid_override_pattern")
    if types is None and isinstance(pattern, str):
        types = [_PATTERN.get(letter, letter) for letter in pattern]
    known = set(_PATTERN.values())
    types = [_OLD.get(str(name), name) for name in types] if isinstance(types, list) else []
    if not types or not known.issuperset(types) or {"mlp", "moe"} <= set(types):
        raise HotsplitError(
            f"{read.path}: layers_block_type is {shown(types)}, wanted one of"
            f" {', '.join(sorted(known))} for each layer, and not mlp beside moe; this checkpoint"
            " is not supported"
        )
    if "full_attention" not in types or not {"mlp", "moe"} & set(types):
        raise HotsplitError(
            f"{read.path}: layers_block_type is {shown(types)}, wanted attention and neurons in one"
            " layer each at least; this checkpoint is not supported"
        )
    found: dict[str, object] = {"layers_block_type": types, "num_hidden_layers": len(types)}
    if "moe" in types:
        found["intermediate_size"] = read.count("moe_intermediate_size")
    return found


def keys(read: ConfigReader) -> dict[str, Value]:
    types = cast(list[str], read.values["layers_block_type"])
    heads, neurons = read.count("num_key_value_heads"), read.count("intermediate_size")
    found: dict[str, Value] = {
        KEY_HEADS: [heads * (name == "full_attention") for name in types],
        NEURONS: [neurons * (name in ("mlp", "moe")) for name in types],
        NORM_EPSILON["layer"]: np.float32(read.positive("layer_norm_epsilon")),
        **mamba2_keys(
            read,
            heads="mamba_num_heads",
            head_dim="mamba_head_dim",
            groups="n_groups",
            state="ssm_state_size",
            taps="conv_kernel",
            activation="mamba_hidden_act",
        ),
    }
    if "moe" not in types:
        return found
    if read.values.get(LATENT_SIZE) is not None:
        found[LATENT_SIZE] = np.uint32(read.count(LATENT_SIZE))
    return {
        "general.architecture": "nemotron_h_moe",
        **found,
        **expert_keys(
            read,
            gating="sigmoid",
            renormalises=read.flag("norm_topk_prob"),
            scale=read.positive("routed_scaling_factor"),
            shared=read.count("moe_shared_expert_intermediate_size"),
            groups=(read.count("n_group"), read.count("topk_group")),
        ),
    }


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    def renamed(name_of: NameOf) -> NameOf:
        name = with_step_bias(name_of)

        def own(source: str) -> str | None:
            source = source.replace("e_score_correction_bias", "e_score_correction.bias")
            return name(source.replace("model.layers.", "backbone.layers.", 1))

        return own

    return Sources(renamed=renamed, changes=CHANGES, ignored_prefixes=LEFT_OUT)


def of_keys(read: KeyReader) -> ModelSpec:
    name, layer_norm = read.graph.name, f"{read.graph.name}.{NORM_EPSILON['layer']}"
    has_experts = name == "nemotron_h_moe"
    own = dict(read.keys)
    # Nothing rotates, but llama.cpp's converter writes how many values would, without head_dim.
    own.pop(f"{name}.rope.dimension_count", None)
    if layer_norm in own:  # that of its norms, in files that lack the other
        own.setdefault(f"{name}.{NORM_EPSILON['rms']}", own[layer_norm])
    read = KeyReader(read.path, own, read.tensors)
    read, has_keys_L = read.with_one(KEY_HEADS)
    read, has_neurons_L = read.with_one(NEURONS)
    sizes = read.sizes()
    for key, found in ((KEY_HEADS, has_keys_L), (NEURONS, has_neurons_L)):
        if found is None or len(found) < sizes.num_layers:
            raise HotsplitError(
                f"{read.path}: {name}.{key} is not one number for each of {sizes.num_layers}"
                " layers, 0 or the same: this model is not supported"
            )
    assert has_keys_L is not None and has_neurons_L is not None
    if all(has_keys_L[layer] or not has_neurons_L[layer] for layer in range(sizes.num_layers)):
        raise HotsplitError(
            f"{read.path}: no layer has neurons and no keys ({name}.{NEURONS}, {KEY_HEADS}), wanted"
            " one at least: this model is not supported"
        )
    mamba = mamba2_of_keys(read, epsilon=sizes.epsilon)
    attention, activation = sizes.attention(None), read.activation()
    feed_forward: Neurons | Mixture = sizes.neurons(activation, is_gated=False)
    if has_experts:
        experts = experts_of_keys(read, gating="sigmoid", has_shared=True)
        has_bias = any(tensor.endswith(CHOICE_BIAS) for tensor in read.tensors)
        route = replace(experts.route, has_choice_bias=has_bias)
        mixture = replace(experts, route=route, is_gated=False).mixture(activation)
        feed_forward = replace(mixture, latent_size=_latent_size(read, sizes.hidden_size))

    def block(layer: int) -> Mamba2 | Attention | Neurons | Mixture:
        if has_keys_L[layer]:
            return attention
        return feed_forward if has_neurons_L[layer] else mamba

    arrangement = sizes.arrangement()
    layers = [arrangement.single(block(layer)) for layer in range(sizes.num_layers)]
    return sizes.model(name, layers)


def _latent_size(read: KeyReader, hidden_size: int) -> int | None:
    """Values of what experts read, if it is not the hidden state."""
    size = read.whole(LATENT_SIZE, 0)
    if not 0 <= size < hidden_size:
        raise HotsplitError(
            f"{read.path}: key '{read.graph.name}.{LATENT_SIZE}' is {size}, wanted fewer values"
            f" than the hidden state's {hidden_size}: this model is not supported"
        )
    return size or None


def with_draft(spec: ModelSpec) -> ModelSpec:
    """The model with its draft block, a layer of attention and experts, each after a norm, and a
    layer norm without a bias (src/models/nemotron-h.cpp of llama.cpp)."""
    attends = next(layer for layer in reversed(spec.layers) if layer.attention is not None)
    experts = next(layer for layer in spec.layers if layer.route is not None)
    norm, *others = experts.blocks
    assert isinstance(norm, Norm)
    second = replace(norm, name="post_attention_norm")
    layer = LayerSpec(blocks=(*attends.blocks, second, *others))
    return with_draft_block(spec, layer, "layer_without_bias")


def _not_in_stock(spec: ModelSpec) -> str | None:
    route = next((layer.route for layer in spec.layers if layer.route is not None), None)
    if route is not None and not route.has_choice_bias:
        return "has a bias for the choice of experts, this model none"
    if route is not None and route.num_groups > 1:
        return "chooses among all experts, this model among groups of them"
    return None


FAMILIES = (
    Family(
        classes=("NemotronHForCausalLM",),
        title="Nemotron-H",
        graph="nemotron_h",
        model_types=("nemotron_h",),
        names=gguf.MODEL_ARCH.NEMOTRON_H_MOE,
        read_keys=COUNTS,
        fields={
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
            "hotsplit.ffn.activation": "mlp_hidden_act",
        },
        defaults={
            "tie_word_embeddings": False,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": 1e-5,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        plain={
            "attention_bias": False,
            "mlp_bias": False,
            "use_bias": False,
            "mamba_proj_bias": False,
            "use_conv_bias": True,
            "sliding_window": None,
        },
        activations=UNGATED,
        rope=None,
        derived=derived,
        keys=keys,
        tensors=lambda read: (
            {CHOICE_BIAS: ()} if "moe" in cast(list[str], read.values["layers_block_type"]) else {}
        ),
        sources=sources,
    ),
)
GRAPHS = tuple(
    Architecture(
        name=name,
        of_keys=of_keys,
        known_keys=(*MAMBA2, DRAFT_LAYERS, *((*KEYS, LATENT_SIZE) if name in MIXTURES else ())),
        stock_activations=("relu2",),
        not_in_stock=_not_in_stock,
        runs_draft_block=name in MIXTURES,
        with_draft=with_draft,
    )
    for name in ("nemotron_h", *MIXTURES)
)
