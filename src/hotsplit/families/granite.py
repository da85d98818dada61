"""Granite (IBM), dense and mixtures of experts, with and without shared experts: a Llama's graph
whose embeddings, residual sums, scores and logits are multiplied by factors of the config."""

from dataclasses import replace
from functools import partial

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import NameOf, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import COUNTS, KEYS, expert_keys, experts_of_keys, other_in_stock
from hotsplit.families.family import ATTN_BIASES, Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.llama import BIASES, OPTIONS, adjacent, without_windows
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.row_order import gate_rows, rotary_rows
from hotsplit.families.windows import other_head_size
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.spec import ModelSpec

# The factors, by their names in a config; and by ours in a GGUF.
FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
FACTOR_KEYS = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
# Of hybrids, written for a Granite 4 without recurrent layers too; its graph reads none of them.
HYBRID_KEYS = (
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.time_step_rank",
    "expert_shared_feed_forward_length",
)


def factor_keys(read: ConfigReader) -> dict[str, Value]:
    return {key: np.float32(read.positive(n)) for key, n in zip(FACTOR_KEYS, FACTORS, strict=True)}


def keys(read: ConfigReader) -> dict[str, Value]:
    return without_windows(read) | factor_keys(read)


def refuse_recurrent(read: ConfigReader) -> dict[str, object]:
    """Raises HotsplitError for a hybrid; Granite 4's small ones of its class are none."""
    types = read.values.get("layer_types")
    if not isinstance(types, list) or not set(map(str, types)) <= {"attention", "full_attention"}:
        raise HotsplitError(
            f"{read.path}: layer_types is {shown(types)}, wanted 'attention' for each layer:"
            " recurrent layers (Mamba) are not supported; this checkpoint is not supported"
        )
    return {}


def keys_of_hybrid(read: ConfigReader) -> dict[str, Value]:
    is_rotated = read.values.get("position_embedding_type") == "rope"
    return factor_keys(read) | ({} if is_rotated else {"rope.scaling.finetuned": False})


def keys_of_mixture(read: ConfigReader) -> dict[str, Value]:
    has_shared = read.values.get("shared_intermediate_size")
    shared = read.count("shared_intermediate_size") if has_shared else 0
    experts = expert_keys(
        read,
        neurons="intermediate_size",
        gating="softmax_of_chosen",
        renormalises=False,
        shared=shared,
    )
    return without_windows(read) | experts | factor_keys(read)


def sources_of_hybrid(spec: ModelSpec, read: ConfigReader) -> Sources:
    """Its neurons are those that a mixture has beside its experts."""

    def renamed(name_of: NameOf) -> NameOf:
        def name(source: str) -> str | None:
            for theirs, usual in (("input_linear", "up_proj"), ("output_linear", "down_proj")):
                source = source.replace(f".shared_mlp.{theirs}.", f".mlp.{usual}.")
            return name_of(source)

        return name

    rows = rotary_rows(spec) | gate_rows(spec.layers[0].neurons.number)
    return Sources(renamed=renamed, rows=rows)


def sources_of_mixture(spec: ModelSpec, read: ConfigReader) -> Sources:
    """Gates and ups of shared experts are one matrix."""

    def renamed(name_of: NameOf) -> NameOf:
        def name(source: str) -> str | None:
            joined = ".shared_mlp.input_linear.weight"
            if source.endswith(joined):
                layer = source.removesuffix(joined).rpartition(".")[2]
                return f"blk.{layer}.ffn_up_shexp.weight"
            return name_of(source.replace(".router.weight", ".router.layer.weight"))

        return name

    shared = spec.layers[0].shared
    rows = {} if shared is None else gate_rows(shared.number, "_shexp")
    return Sources(renamed=renamed, rows=rotary_rows(spec) | rows)


def of_keys(read: KeyReader) -> ModelSpec:
    """llama.cpp's converter lists the key heads of layers of a Granite 4 without recurrent layers,
    which it takes for one of the hybrids that its class has."""
    one, has_keys_L = read.with_one("attention.head_count_kv")
    read = one if all(has_keys_L or ()) else read  # without keys a layer is a recurrent one
    name = read.graph.name
    # llama.cpp's graph rotates nothing if this is false (src/models/granite.cpp).
    is_rotated = read.keys.get(f"{name}.rope.scaling.finetuned", True) is not False
    embedding, residual, scores, logits = (
        read.positive(f"{name}.{key}", default)
        for key, default in zip(
            FACTOR_KEYS, (1.0, 1.0, read.sizes().head_dim ** -0.5, 1.0), strict=True
        )
    )
    return decoder(
        read,
        pairing="adjacent",
        arrange=partial(Arrangement.pre_norm, factor=residual),
        experts=experts_of_keys(read, has_shared=True) if name == "granitemoe" else None,
        attention={"scale": scores},
        embedding_scale=embedding,
        logit_scale=1.0 / logits,
        rotary=read.rotary("adjacent") if is_rotated else None,
    )


def not_in_stock(spec: ModelSpec) -> str | None:
    """llama.cpp takes the softmax of all scores, and divides by the sum of the chosen: the same."""
    if spec.has_experts:
        return other_in_stock(spec, renormalises=False)
    return other_head_size(spec)


DEFAULTS = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    **dict.fromkeys(FACTORS, 1.0),
}
GRANITE = Family(
    classes=("GraniteForCausalLM",),
    title="Granite",
    graph="granite",
    read_keys=FACTORS,
    defaults=DEFAULTS | {"mlp_bias": False},
    flags=BIASES,
    keys=keys,
    sources=adjacent,
)
FAMILIES = (
    GRANITE,
    replace(
        GRANITE,
        classes=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        title="Granite MoE",
        graph="granitemoe",
        model_types=("granitemoe", "granitemoeshared"),
        read_keys=(*COUNTS, *FACTORS),
        defaults=DEFAULTS
        | {"num_experts_per_tok": 2, "num_local_experts": 8, "shared_intermediate_size": 0},
        flags={"attention_bias": ATTN_BIASES},
        keys=keys_of_mixture,
        sources=sources_of_mixture,
    ),
    replace(
        GRANITE,
        classes=("GraniteMoeHybridForCausalLM",),
        model_types=("granitemoehybrid",),
        defaults=DEFAULTS | {"num_local_experts": 8, "shared_intermediate_size": 1024},
        fields={"feed_forward_length": "shared_intermediate_size"},
        flags={"attention_bias": ATTN_BIASES},
        derived=refuse_recurrent,
        keys=keys_of_hybrid,
        sources=sources_of_hybrid,
    ),
)
GRAPHS = (
    Architecture(
        name="granite",
        of_keys=of_keys,
        known_keys=(*FACTOR_KEYS, *HYBRID_KEYS),
        options=OPTIONS,
        stock_options=OPTIONS,
        not_in_stock=not_in_stock,
    ),
    Architecture(
        name="granitemoe",
        of_keys=of_keys,
        known_keys=(*KEYS, *FACTOR_KEYS),
        options=ATTN_BIASES,
        not_in_stock=not_in_stock,
    ),
)
