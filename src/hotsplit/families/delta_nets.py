"""Models whose layers have gated delta nets in three of four places, and gated attention with a
rotary embedding of a part of each head in the fourth: Qwen3-Next, a mixture, and Qwen 3.5 and 3.6,
dense and mixtures. Their norms multiply by 1 + weight; a model file has that sum.

A checkpoint has the value heads of a key head side by side. llama.cpp's files of Qwen 3.5 have the
first of each key head before the second of each (DeltaNet.is_grouped)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import ADD_ONE, NEGATED_EXP, SAME, NameOf, Rows, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.decoder_sizes import Sizes
from hotsplit.families.expert_keys import (
    COUNTS,
    KEYS,
    dense_layers,
    expert_keys,
    experts_of_keys,
    other_in_stock,
    with_dense_layers,
)
from hotsplit.families.family import Architecture, Family, Tensors
from hotsplit.families.glm import SECOND_NORM
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope, rotated_values
from hotsplit.files.gguf_file import Value, chosen_rows
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.delta_net import DeltaNet
from hotsplit.model.spec import LayerSpec, ModelSpec

PERIOD, MOST_TAPS = 4, 16
# Layers that only predict tokens further ahead.
LEFT_OUT = ("mtp.", "model.mtp.")
SHARE = 0.25  # of the values of a head that rotate


def keys(read: ConfigReader, *, name: str) -> dict[str, Value]:
    """Which layers attend is said as llama.cpp says it, by a period where there is one."""
    experts: dict[str, Value] = {}
    if name != "qwen35":
        is_next = name == "qwen3next"
        experts = expert_keys(
            read,
            renormalises=read.flag("norm_topk_prob") if is_next else True,
            shared=read.count("shared_expert_intermediate_size"),
            num_dense=dense_layers(read) if is_next else 0,
        )
    has_state_L = read.other_layers("linear_attention", "full_attention_interval", PERIOD)
    attends_L = [not has_state for has_state in has_state_L]
    period = attends_L.index(True) + 1 if any(attends_L) else 0
    is_periodic = attends_L == [
        (layer + 1) % max(1, period) == 0 for layer in range(len(attends_L))
    ]
    found: dict[str, Value] = {"attention.recurrent_layers": has_state_L}
    if is_periodic and period:
        found = {"full_attention_interval": np.uint32(period)}
    if any(has_state_L):
        keys, values = (read.count(f"linear_num_{which}_heads") for which in ("key", "value"))
        key_dim, value_dim = (read.count(f"linear_{which}_head_dim") for which in ("key", "value"))
        read.check_size({"the channels of the delta nets": 2 * keys * key_dim + values * value_dim})
        found |= {
            "ssm.conv_kernel": np.uint32(read.count("linear_conv_kernel_dim")),
            "ssm.state_size": np.uint32(key_dim),
            "ssm.group_count": np.uint32(keys),
            "ssm.time_step_rank": np.uint32(values),
            "ssm.inner_size": np.uint32(values * value_dim),
        }
    if name != "qwen3next":
        # Pairs that rotate by a place in time, two in an image, and none; llama.cpp wants the key.
        pairs = rotated_values(read, read.rope(), read.count("head_dim"), SHARE) // 2
        found["rope.dimension_sections"] = [*((pairs + more) // 3 for more in (2, 1, 0)), 0]
    return {**experts, **found}


def derived(read: ConfigReader, *, name: str) -> dict[str, object]:
    """If all layers have experts, the neurons of a layer are an expert's."""
    if name == "qwen3next" and dense_layers(read):
        return {}
    return {"intermediate_size": read.count("moe_intermediate_size")}


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    delta = _net_of(spec)
    rows, columns = dict[str, Rows](), dict[str, np.ndarray]()
    if delta is not None:
        rows = _joined_rows(delta) if delta.is_grouped else _tiled_rows(delta)
    if delta is not None and not delta.is_grouped:
        columns = {"ssm_out.weight": _value_order(delta, delta.value_head_dim)}
    return Sources(
        renamed=partial(_renamed, spec),
        rows=rows,
        columns=columns,
        changes={"ssm_norm.weight": SAME, "norm.weight": ADD_ONE, ".ssm_a": NEGATED_EXP},
        ignored_prefixes=LEFT_OUT,
    )


def _net_of(spec: ModelSpec) -> DeltaNet | None:
    mixers = (layer.recurrent for layer in spec.layers)
    return next((block for block in mixers if isinstance(block, DeltaNet)), None)


def _renamed(spec: ModelSpec, name_of: NameOf) -> NameOf:
    """The names, with that of the bias of decays, whose name is no tensor's with a suffix."""
    if spec.has_experts:
        name_of = with_dense_layers(spec.num_layers)(name_of)

    def name(source: str) -> str | None:
        stem, found, _ = source.partition(".dt_bias")
        return name_of(f"{stem}.dt_proj.bias" if found else source)

    return name


def _value_order(delta: DeltaNet, width: int) -> np.ndarray:
    """The order of rows, `width` for each value head, in llama.cpp's files of Qwen 3.5."""
    rows_GRW = np.arange(delta.num_value_heads * width).reshape(delta.num_key_heads, -1, width)
    return rows_GRW.swapaxes(0, 1).reshape(-1)


def _tiled_rows(delta: DeltaNet) -> dict[str, Rows]:
    keys, one = np.arange(2 * delta.key_size), _value_order(delta, 1)
    values = _value_order(delta, delta.value_head_dim)
    channels = np.concatenate([keys, len(keys) + values])
    orders = {
        "attn_qkv.weight": channels,
        "ssm_conv1d.weight": channels,
        "attn_gate.weight": values,
        "ssm_beta.weight": one,
        "ssm_alpha.weight": one,
        "ssm_a": one,
        "ssm_dt.bias": one,
    }
    return {n: Rows(source=n, order=order, num_rows=len(order)) for n, order in orders.items()}


def _joined_rows(delta: DeltaNet) -> dict[str, Rows]:
    """Rows of queries, keys, values and gates in one tensor that has each key head's in turn."""
    of_values = delta.value_size // delta.num_key_heads
    sizes = (delta.key_head_dim, delta.key_head_dim, of_values, of_values)
    rows_GR = np.arange(delta.num_key_heads * sum(sizes)).reshape(delta.num_key_heads, -1)
    query, key, value, gate = np.split(rows_GR, np.cumsum(sizes)[:-1], axis=1)
    orders = {"attn_qkv.weight": (query, key, value), "attn_gate.weight": (gate,)}
    return {
        name: Rows(
            source="ssm_in.weight",
            num_rows=rows_GR.size,
            order=np.concatenate([part.reshape(-1) for part in parts]),
        )
        for name, parts in orders.items()
    }


def apart(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors, with the rows of `ssm_in`, which llama.cpp's converter wrote for Qwen3-Next
    before 2026, as two matrices. One of another height stays, and is refused as unknown."""
    found = dict(tensors)
    for layer, delta in enumerate(layer.recurrent for layer in spec.layers):
        if not isinstance(delta, DeltaNet) or not delta.is_grouped:
            continue
        for name, rows in _joined_rows(delta).items():
            entry = tensors.get(source := f"blk.{layer}.{rows.source}")
            if entry is not None and entry.shape[0] == rows.num_rows:
                found.pop(source, None)
                found[f"blk.{layer}.{name}"] = chosen_rows(entry, rows.order)
    return found


_PRE_NORM = partial(Arrangement.pre_norm, second=SECOND_NORM)


def of_keys(
    read: KeyReader,
    *,
    has_experts: bool,
    arrange: Callable[..., LayerSpec] = _PRE_NORM,
    has_sigmoid_gates: bool = False,
    attention: Mapping[str, Any] | None = None,
    **model: Any,
) -> ModelSpec:
    """`arrange`, `attention`: as for `decoder_spec`; `model`: further fields of the spec."""
    kv_heads = "attention.head_count_kv"
    read, has_keys_L = read.with_one(kv_heads)  # ollama lists it, with zeros for delta nets
    sizes, name = read.sizes(is_partly_rotated=True), read.graph.name
    has_state_L = read.other_layers(
        sizes.num_layers, "attention.recurrent_layers", "full_attention_interval", PERIOD
    )
    attends_L = [not has_state for has_state in has_state_L]
    if not any(attends_L):
        raise HotsplitError(
            f"{read.path}: none of {sizes.num_layers} layers has attention: this model is not"
            " supported"
        )
    if has_keys_L is not None and has_keys_L[: sizes.num_layers] != attends_L:
        raise HotsplitError(
            f"{read.path}: {name}.{kv_heads} has key heads in other layers than those that attend"
            " by its other keys: get the file again"
        )
    for key, wanted in (("ssm.v_head_reordered", name != "qwen3next"), ("norm_top_k_prob", True)):
        if read.keys.get(f"{name}.{key}", wanted) is not wanted:  # ollama's
            raise HotsplitError(
                f"{read.path}: {name}.{key} is {shown(read.keys[f'{name}.{key}'])}, wanted"
                f" {str(wanted).lower()}: this file is not supported"
            )
    experts = None
    if has_experts:
        experts = experts_of_keys(read, has_shared=True, has_shared_gate=True)
        if not experts.num_shared:  # as in llama.cpp
            experts = replace(experts, num_shared=sizes.num_neurons)
    delta = None
    if not all(attends_L):
        delta = replace(_delta_of_keys(read, sizes), has_sigmoid_gates=has_sigmoid_gates)
    return decoder(
        read,
        is_partly_rotated=True,
        arrange=arrange,
        mixers=[None if attends else delta for attends in attends_L],
        experts=experts,
        has_head_norms=True,
        attention={"is_gated": True, **(attention or {})},
        **model,
    )


def _delta_of_keys(read: KeyReader, sizes: Sizes) -> DeltaNet:
    name, heads = read.graph.name, read.count("ssm.time_step_rank")
    inner, key_heads, taps = (
        read.count(f"ssm.{key}") for key in ("inner_size", "group_count", "conv_kernel")
    )
    if inner % heads:
        raise HotsplitError(
            f"{read.path}: {name}.ssm.inner_size is {inner}, which does not divide among {heads}"
            " heads"
        )
    if heads % key_heads:
        raise HotsplitError(
            f"{read.path}: {heads} value heads of delta nets do not divide among {key_heads} key"
            " heads: no such model; get the model again"
        )
    if not 2 <= taps <= MOST_TAPS:
        raise HotsplitError(
            f"{read.path}: a convolution of {taps} taps, wanted 2 to {MOST_TAPS}: this model is not"
            " supported"
        )
    return DeltaNet(
        num_key_heads=key_heads,
        num_value_heads=heads,
        key_head_dim=read.count("ssm.state_size"),
        value_head_dim=inner // heads,
        num_taps=taps,
        epsilon=sizes.epsilon,
        is_grouped=name == "qwen3next",
    )


def _not_in_stock(spec: ModelSpec) -> str | None:
    delta = _net_of(spec)
    if delta is None:
        return "has delta nets in some layers, this model in none"
    if delta.key_head_dim != delta.value_head_dim:
        return (
            f"has values of {delta.key_head_dim} in delta nets, as wide as keys, this model of"
            f" {delta.value_head_dim}"
        )
    return other_in_stock(spec, renormalises=True)


_LINEAR = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MIXTURE = _LINEAR | {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QWEN3_5 = Family(
    classes=("Qwen3_5ForCausalLM",),
    title="Qwen 3.5 and 3.6",
    graph="qwen35",
    model_types=("qwen3_5_text",),
    defaults=_LINEAR | {"num_key_value_heads": 4},
    plain={"attention_bias": False},
    activations={"silu": "silu"},
    rope=Rope(share=SHARE),
    keys=partial(keys, name="qwen35"),
    sources=sources,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    classes=("Qwen3_5MoeForCausalLM",),
    title="Qwen 3.5 and 3.6 MoE",
    graph="qwen35moe",
    model_types=("qwen3_5_moe_text",),
    read_keys=COUNTS,
    defaults=_MIXTURE | {"num_experts_per_tok": 8, "num_experts": 256},
    derived=partial(derived, name="qwen35moe"),
    keys=partial(keys, name="qwen35moe"),
)
FAMILIES = (
    replace(
        QWEN3_5_MOE,
        classes=("Qwen3NextForCausalLM",),
        title="Qwen3-Next",
        graph="qwen3next",
        model_types=("qwen3_next",),
        defaults=_MIXTURE
        | {
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
        derived=partial(derived, name="qwen3next"),
        keys=partial(keys, name="qwen3next"),
    ),
    QWEN3_5,
    QWEN3_5_MOE,
    # The text models of checkpoints with images.
    QWEN3_5.with_images("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    QWEN3_5_MOE.with_images("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
)
KEYS_OF_GRAPH = (
    "full_attention_interval",
    "attention.recurrent_layers",
    "nextn_predict_layers",
    "rope.dimension_sections",
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "ssm.inner_size",
    # Of ollama's files; how places in an image rotate changes nothing in a text.
    "ssm.v_head_reordered",
    "norm_top_k_prob",
    "mrope_sections",
    "rope.mrope_section",
    "rope.mrope_interleaved",
)
GRAPHS = tuple(
    Architecture(
        name=name,
        of_keys=partial(of_keys, has_experts=name != "qwen35"),
        known_keys=KEYS_OF_GRAPH if name == "qwen35" else (*KEYS, *KEYS_OF_GRAPH),
        not_in_stock=_not_in_stock,
        apart=apart,
    )
    for name in ("qwen3next", "qwen35", "qwen35moe")
)
