"""Granite (IBM), dense and mixtures of experts, with and without shared experts: a Llama's graph
whose embeddings, residual sums, scores and logits are multiplied by factors of the config. Most
layers of Granite 4's hybrids have Mamba-2 in place of attention, and so have Bamba's, which has
none of these factors; llama.cpp's files say by the number of key heads which layers attend."""

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
from hotsplit.families.mamba2_keys import CHANGES, mamba2_keys, mamba2_of_keys, with_step_bias
from hotsplit.families.mamba2_keys import KEYS as MAMBA2
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.families.row_order import gate_rows, rotary_rows
from hotsplit.families.windows import other_head_size
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.mamba2 import Mamba2
from hotsplit.model.spec import ModelSpec

# The factors, by their names in a config; and by ours in a GGUF.
FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
KEY_HEADS = "attention.head_count_kv"
FACTOR_KEYS = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")


def factor_keys(read: ConfigReader) -> dict[str, Value]:
    return {key: np.float32(read.positive(n)) for key, n in zip(FACTOR_KEYS, FACTORS, strict=True)}


def keys(read: ConfigReader) -> dict[str, Value]:
    return without_windows(read) | factor_keys(read)


def derived_of_hybrid(read: ConfigReader) -> dict[str, object]:
    """The types of layers under transformers 5's names, and the width of Mamba-2's heads."""
    types = read.values.get("layer_types")
    found: dict[str, object] = {}
    if isinstance(types, list):
        names = {"mamba": "linear_attention", "attention": "full_attention"}
        found["layer_types"] = [names.get(str(name), name) for name in types]
    if read.values["mamba_d_head"] == "auto":
        inner = read.count("mamba_expand") * read.count("hidden_size")
        found["mamba_d_head"] = max(1, inner // read.count("mamba_n_heads"))
    return found


def keys_of_hybrid(read: ConfigReader) -> dict[str, Value]:
    """Its neurons are those that a mixture has beside its experts. If all layers attend, the graph
    is that of the others."""
    has_experts = bool(read.values["num_local_experts"])
    found = _expert_keys(read) if has_experts else {}
    own = "intermediate_size" if has_experts else "shared_intermediate_size"
    found |= factor_keys(read) | {"feed_forward_length": np.uint32(read.count(own))}
    if read.values.get("position_embedding_type") != "rope":
        found["rope.scaling.finetuned"] = False
    has_state_L = read.other_layers("linear_attention", "layer_types", 1)
    if any(has_state_L):
        return found | recurrent_keys(read, has_state_L)
    return found | {"general.architecture": "granitemoe" if has_experts else "granite"}


def recurrent_keys(read: ConfigReader, has_state_L: list[bool]) -> dict[str, Value]:
    heads = read.count("num_key_value_heads", read.count("num_attention_heads"))
    if all(has_state_L):
        raise HotsplitError(
            f"{read.path}: no layer attends (layer_types, attn_layer_indices), wanted one at least;"
            " this checkpoint is not supported"
        )
    return mamba2_keys(read) | {KEY_HEADS: [0 if has else heads for has in has_state_L]}


def keys_of_bamba(read: ConfigReader) -> dict[str, Value]:
    attending = read.values.get("attn_layer_indices") or []
    has_state_L = [
        not isinstance(attending, list) or layer not in attending
        for layer in range(read.count("num_hidden_layers"))
    ]
    return recurrent_keys(read, has_state_L)


def keys_of_mixture(read: ConfigReader) -> dict[str, Value]:
    return without_windows(read) | _expert_keys(read) | factor_keys(read)


def _expert_keys(read: ConfigReader) -> dict[str, Value]:
    has_shared = read.values.get("shared_intermediate_size")
    return expert_keys(
        read,
        neurons="intermediate_size",
        gating="softmax_of_chosen",
        renormalises=False,
        shared=read.count("shared_intermediate_size") if has_shared else 0,
    )


def sources_of_hybrid(spec: ModelSpec, read: ConfigReader) -> Sources:
    if spec.has_experts:
        own = sources_of_mixture(spec, read)
        renamed = own.renamed
        return replace(
            own, renamed=lambda name_of: with_step_bias(renamed(name_of)), changes=CHANGES
        )

    def renamed_of_dense(name_of: NameOf) -> NameOf:
        def name(source: str) -> str | None:
            for theirs, usual in (("input_linear", "up_proj"), ("output_linear", "down_proj")):
                source = source.replace(f".shared_mlp.{theirs}.", f".mlp.{usual}.")
            return name_of(source)

        return with_step_bias(name)

    rows = rotary_rows(spec) | gate_rows(spec.layers[0].neurons.number)
    return Sources(renamed=renamed_of_dense, rows=rows, changes=CHANGES)


def sources_of_bamba(spec: ModelSpec, read: ConfigReader) -> Sources:
    return Sources(renamed=with_step_bias, rows=rotary_rows(spec), changes=CHANGES)


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
    """Without keys a layer is a recurrent one. llama.cpp's converter lists the key heads of a
    Granite 4 without recurrent layers, too."""
    one, has_keys_L = read.with_one(KEY_HEADS)
    is_hybrid = read.graph.name == "granitehybrid"
    read = one if is_hybrid or all(has_keys_L or ()) else read
    name, sizes = read.graph.name, read.sizes(is_partly_rotated=is_hybrid)
    # llama.cpp's graph rotates nothing if this is false (src/models/granite.cpp).
    is_rotated = read.keys.get(f"{name}.rope.scaling.finetuned", True) is not False
    embedding, residual, scores, logits = (
        read.positive(f"{name}.{key}", default)
        for key, default in zip(FACTOR_KEYS, (1.0, 1.0, sizes.head_dim**-0.5, 1.0), strict=True)
    )
    mixers: list[Mamba2 | None] = []
    attends_L = has_keys_L or []
    if is_hybrid:
        if len(attends_L) != sizes.num_layers:
            raise HotsplitError(
                f"{read.path}: {name}.{KEY_HEADS} is {shown(read.keys.get(f'{name}.{KEY_HEADS}'))},"
                f" wanted {sizes.num_layers} numbers, 0 for layers with Mamba-2: this model is not"
                " supported"
            )
        mamba = mamba2_of_keys(read, epsilon=sizes.epsilon)
        mixers = [None if attends else mamba for attends in attends_L]
    has_experts = name == "granitemoe" or (is_hybrid and read.whole("expert_count", 0) > 0)
    return decoder(
        read,
        pairing="adjacent",
        is_partly_rotated=is_hybrid,
        arrange=partial(Arrangement.pre_norm, factor=residual),
        mixers=mixers,
        experts=experts_of_keys(read, has_shared=True) if has_experts else None,
        attention={"scale": scores},
        embedding_scale=embedding,
        logit_scale=1.0 / logits,
        rotary=read.rotary("adjacent", sizes.head_dim) if is_rotated else None,
    )


def not_in_stock(spec: ModelSpec) -> str | None:
    """llama.cpp takes the softmax of all scores, and divides by the sum of the chosen: the same."""
    mixers = (layer.recurrent for layer in spec.layers)
    mamba = next((block for block in mixers if block is not None), None)
    if mamba is not None and mamba.query_size != 2 * spec.hidden_size:
        return (
            f"has {2 * spec.hidden_size} values of Mamba-2's heads, this model {mamba.query_size}"
        )
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
_MAMBA = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_PLAIN = {"mamba_conv_bias": True, "mamba_proj_bias": False}
GRANITE_4 = replace(
    GRANITE,
    classes=("GraniteMoeHybridForCausalLM",),
    title="Granite 4",
    graph="granitehybrid",
    model_types=("granitemoehybrid",),
    read_keys=(*COUNTS, *FACTORS),
    defaults=DEFAULTS
    | _MAMBA
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
    fields={"feed_forward_length": "shared_intermediate_size"},
    flags={"attention_bias": ATTN_BIASES},
    plain=_PLAIN,
    derived=derived_of_hybrid,
    keys=keys_of_hybrid,
    sources=sources_of_hybrid,
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
    GRANITE_4,
    replace(
        GRANITE_4,
        classes=("BambaForCausalLM",),
        title="Bamba",
        model_types=("bamba",),
        read_keys=(),
        fields={},
        defaults=_MAMBA
        | {
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "attn_layer_indices": None,
        },
        plain=_PLAIN | {"mlp_bias": False},
        rope=Rope(share=0.5),
        derived=lambda read: {k: v for k, v in derived_of_hybrid(read).items() if "head" in k},
        keys=keys_of_bamba,
        sources=sources_of_bamba,
    ),
)
GRAPHS = (
    Architecture(
        name="granite",
        of_keys=of_keys,
        # Of hybrids, written for one without recurrent layers too; llama.cpp reads none of them.
        known_keys=(*FACTOR_KEYS, *MAMBA2, "expert_shared_feed_forward_length"),
        options=OPTIONS,
        stock_options=OPTIONS,
        not_in_stock=not_in_stock,
    ),
    Architecture(
        name="granitemoe",
        of_keys=of_keys,
        known_keys=(*KEYS, *FACTOR_KEYS, *MAMBA2),
        options=ATTN_BIASES,
        not_in_stock=not_in_stock,
    ),
    Architecture(
        name="granitehybrid",
        of_keys=of_keys,
        known_keys=(*KEYS, *FACTOR_KEYS, *MAMBA2),
        options=ATTN_BIASES,
        stock_options=ATTN_BIASES,
        not_in_stock=not_in_stock,
    ),
)
