"""Command R and Cohere 2: layer norms without biases, one for attention and feed-forward, which run
in parallel, and logits multiplied by a factor. Command R+ also norms each head of queries and keys
with weights of its own; Cohere 2 rotates only in its layers with windows, which are all but each
fourth. Its mixtures (Command A+, North-Mini) have layers without experts first, which all rotate,
RMS norms if the config has their epsilon, and the average of experts and shared experts."""

from dataclasses import replace
from functools import partial

import gguf
import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import COUNTS, expert_keys, experts_of_keys
from hotsplit.families.expert_keys import KEYS as EXPERT_KEYS
from hotsplit.families.family import ATTN_BIASES, QKV_BIASES, Architecture, Family
from hotsplit.families.key_reader import DRAFT_LAYERS, KeyReader
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.families.windows import (
    KEYS,
    local_window_keys,
    other_head_size,
    periodic_in_stock,
    windows_of_keys,
)
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Arrangement, Mixture
from hotsplit.model.blocks import NormKind
from hotsplit.model.route import Gating
from hotsplit.model.spec import Attention, LayerSpec, ModelSpec, Neurons

NORM: NormKind = "layer_without_bias"
PERIOD, RMS = 4, "attention.layer_norm_rms_epsilon"
EXPERT = "moe_intermediate_size"  # not a key of these configs: see mixture_values
NORMED_FROM = 64  # llama.cpp norms heads in models of so many layers (src/models/command-r.cpp)
HEAD_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")


def trained_length(read: ConfigReader) -> dict[str, object]:
    """The first Command R says 8,192 positions, and that it was trained on 131,072."""
    read.refuse("tie_word_embeddings", True, why="the published models have no other head")
    length = read.values.get("model_max_length")
    return {} if length is None else {"max_position_embeddings": length}


def keys(read: ConfigReader) -> dict[str, Value]:
    return {"logit_scale": np.float32(read.positive("logit_scale"))}


def keys_of_second(read: ConfigReader) -> dict[str, Value]:
    read.refuse("rotary_pct", 1.0, 1)
    return keys(read) | local_window_keys(read, PERIOD)


def head_norms(read: ConfigReader) -> dict[str, tuple[int, ...]]:
    has_norms = read.values.get("use_qk_norm") is not None and read.flag("use_qk_norm")
    return dict.fromkeys(HEAD_NORMS, ()) if has_norms else {}


def of_keys(read: KeyReader, *, has_windows: bool) -> ModelSpec:
    num_layers = read.count("block_count")
    windows = windows_of_keys(read, num_layers, period=PERIOD, window=None) if has_windows else ()
    has_norms = f"blk.0.{HEAD_NORMS[0]}" in read.tensors
    return decoder(
        read,
        pairing="adjacent",
        norm=NORM,
        arrange=Arrangement.parallel,
        windows=windows,
        rotates_L=[window is not None for window in windows],
        has_head_norms=has_norms,
        head_norm=NORM,
        attention={"norms_by_head": has_norms},
        logit_scale=read.positive(f"{read.graph.name}.logit_scale", 1.0),
    )


def mixture_values(read: ConfigReader) -> dict[str, object]:
    """The neurons of experts and of layers without them, of which there are some at the beginning,
    and which layers have windows (transformers, configuration_cohere2_moe.py)."""
    num_dense, each = _num_dense(read), read.count("intermediate_size")
    of_dense = read.values.get("prefix_dense_intermediate_size")
    wide = each if of_dense is None else read.count("prefix_dense_intermediate_size")
    values: dict[str, object] = {EXPERT: each, "intermediate_size": wide if num_dense else each}
    if read.values.get("layer_types") is None:
        periods = {range(num_dense): "prefix_dense_sliding_window_pattern"}
        periods[range(read.count("num_hidden_layers") - num_dense)] = "sliding_window_pattern"
        values["layer_types"] = [
            "full_attention" if (layer + 1) % read.count(key) == 0 else "sliding_attention"
            for layers, key in periods.items()
            for layer in layers
        ]
    return values


def _num_dense(read: ConfigReader) -> int:
    types = read.values.get("mlp_layer_types")
    if types is None:
        return read.whole("first_k_dense_replace")
    count, num_layers = 0, read.count("num_hidden_layers")
    if isinstance(types, list):
        count = types.index("sparse") if "sparse" in types else len(types)
    if types != ["dense"] * count + ["sparse"] * (num_layers - count):
        raise HotsplitError(
            f"{read.path}: mlp_layer_types is {shown(types)}, wanted dense for the first of"
            f" {num_layers} layers and sparse for all others; this checkpoint is not supported"
        )
    return count


def keys_of_mixture(read: ConfigReader) -> dict[str, Value]:
    """Softmax is of the chosen experts, which llama.cpp computes as that of all over their sum."""
    function, num_dense = read.values.get("expert_selection_fn"), _num_dense(read)
    gatings: dict[object, Gating] = {"softmax": "softmax", "sigmoid": "sigmoid"}
    read.refuse("expert_selection_fn", *gatings)
    read.refuse("shared_expert_combination_strategy", "average")
    if num_dense:
        why = "no key of a GGUF says that layers without experts do not rotate"
        read.refuse("prefix_dense_sliding_window_pattern", 1, why=why)
    if function not in gatings:
        raise HotsplitError(f"{read.path}: expert_selection_fn is null, wanted softmax or sigmoid")
    experts = expert_keys(
        read,
        neurons=EXPERT,
        gating=gatings[function],
        renormalises=function == "softmax" or read.flag("norm_topk_prob"),
        shared=read.whole("num_shared_experts") * read.count(EXPERT),
        num_dense=num_dense,
    )
    # llama.cpp wants the number of layers without experts, also if it is 0.
    own: dict[str, Value] = {"leading_dense_block_count": np.uint32(num_dense)}
    if read.values.get("rms_norm_eps") is not None:
        own[RMS] = np.float32(read.positive("rms_norm_eps"))
    return experts | keys(read) | local_window_keys(read, PERIOD) | own


def mixture_of_keys(read: KeyReader) -> ModelSpec:
    """A file with both epsilons has RMS norms, as in llama.cpp."""
    norm: NormKind = "rms" if read.number(f"{read.graph.name}.{RMS}", 0.0) else NORM
    experts = experts_of_keys(read, gating="sigmoid", renormalises=False, has_shared=True)
    if experts.route.gating == "softmax":  # transformers', whose files say no more
        experts = replace(experts, route=replace(experts.route, gating="softmax_of_chosen"))
    num_layers = read.count("block_count") - read.num_skipped
    windows = windows_of_keys(read, num_layers, period=PERIOD, window=None)
    return decoder(
        read,
        pairing="adjacent",
        norm=norm,
        arrange=_averaged,
        windows=windows,
        rotates_L=[
            window is not None or layer < experts.num_dense for layer, window in enumerate(windows)
        ],
        experts=experts,
        logit_scale=read.positive(f"{read.graph.name}.logit_scale", 1.0),
    )


def _averaged(
    arrangement: Arrangement, attention: Attention, neurons: Neurons | Mixture
) -> LayerSpec:
    is_average = isinstance(neurons, Mixture) and neurons.shared is not None
    return arrangement.parallel(attention, neurons, factor=0.5 if is_average else 1.0)


def not_in_stock(spec: ModelSpec) -> str | None:
    if (other := other_head_size(spec)) is not None:
        return other
    if spec.architecture == "cohere2":
        return periodic_in_stock(spec, PERIOD)
    is_normed = spec.attentions[0].head_norm is not None
    if is_normed != (spec.num_layers >= NORMED_FROM):
        return f"norms heads in models of {NORMED_FROM} layers and more, and in no others"
    return None


DEFAULTS = {
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
}
KINDS = ("default", "linear")
FAMILIES = (
    Family(
        classes=("CohereForCausalLM",),
        title="Command R",
        graph="command-r",
        model_types=("cohere",),
        read_keys=("logit_scale",),
        defaults=DEFAULTS | {"use_qk_norm": False},
        fields={"attention.layer_norm_epsilon": "layer_norm_eps"},
        flags={"attention_bias": ATTN_BIASES},
        rope=Rope(kinds=KINDS, theta=500_000.0),
        derived=trained_length,
        keys=keys,
        tensors=head_norms,
    ),
    Family(
        classes=("Cohere2ForCausalLM",),
        title="Cohere 2",
        graph="cohere2",
        read_keys=("logit_scale",),
        defaults=DEFAULTS | {"sliding_window": 4096},
        fields={"attention.layer_norm_epsilon": "layer_norm_eps"},
        flags={"attention_bias": ATTN_BIASES},
        rope=Rope(kinds=KINDS),
        derived=trained_length,
        keys=keys_of_second,
    ),
    Family(
        classes=("Cohere2MoeForCausalLM",),
        title="Cohere 2 MoE",
        graph="cohere2moe",
        names=gguf.MODEL_ARCH.GLM4_MOE,  # gguf has no map for it yet
        model_types=("cohere2_moe",),
        read_keys=("logit_scale", *COUNTS),
        defaults=DEFAULTS
        | {
            "head_dim": 128,
            "sliding_window": 4096,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 0,
            "shared_expert_combination_strategy": "average",
            "expert_selection_fn": "softmax",
            "norm_topk_prob": True,
            "first_k_dense_replace": 0,
            "prefix_dense_sliding_window_pattern": 1,
            "sliding_window_pattern": 4,
        },
        fields={"attention.layer_norm_epsilon": "layer_norm_eps"},
        flags={"attention_bias": ATTN_BIASES},
        rope=Rope(kinds=("default",)),
        derived=mixture_values,
        keys=keys_of_mixture,
    ),
)
GRAPHS = (
    Architecture(
        name="cohere2moe",
        of_keys=mixture_of_keys,
        known_keys=("logit_scale", *KEYS, *EXPERT_KEYS, DRAFT_LAYERS),
        options=ATTN_BIASES,
        stock_options=QKV_BIASES,
    ),
    *(
        Architecture(
            name=name,
            of_keys=partial(of_keys, has_windows=name == "cohere2"),
            known_keys=("logit_scale", *(KEYS if name == "cohere2" else ())),
            options=ATTN_BIASES,
            stock_options=QKV_BIASES,
            not_in_stock=not_in_stock,
        )
        for name in ("command-r", "cohere2")
    ),
)
