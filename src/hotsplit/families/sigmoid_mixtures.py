"""Mixtures of experts with DeepSeek-V3's router (arXiv 2412.19437), or with its sigmoids, beside
attention as in Qwen 3 or OLMoE: dots.llm1, Hunyuan 3, EXAONE MoE, Solar Open, MiniMax M2, Ling and
Ring 2."""

from collections.abc import Mapping

import gguf
import numpy as np

from hotsplit.families import exaone
from hotsplit.families.blueprint import Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import (
    COUNTS,
    KEYS,
    dense_layers_of_types,
    expert_keys,
    experts_of_keys,
    plain_weights_in_stock,
    with_choice_bias,
)
from hotsplit.families.family import ATTN_BIASES, QKV_BIASES, Architecture, Family, Tensors
from hotsplit.families.glm import derived, keys, router_keys, sources
from hotsplit.families.key_reader import DRAFT_LAYERS, KeyReader
from hotsplit.families.llama import without_windows
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.families.windows import KEYS as WINDOW_KEYS
from hotsplit.families.windows import (
    no_windows_in_stock,
    other_head_size,
    window_keys,
    windows_of_config,
    windows_of_keys,
)
from hotsplit.files.gguf_file import TensorEntry, Value
from hotsplit.model.route import CHOICE_BIAS
from hotsplit.model.spec import ModelSpec

THEIR_BIAS = f".{CHOICE_BIAS.removesuffix('.bias')}"  # of Hunyuan 3 in llama.cpp's files


def keys_of_dots(read: ConfigReader) -> dict[str, Value]:
    """Windows in the layers behind the first `max_window_layers`."""
    first, num_layers = read.whole("max_window_layers"), read.count("num_hidden_layers")
    windows = windows_of_config(read, has_window_L=[i >= first for i in range(num_layers)])
    return window_keys(windows) | router_keys(read)


def keys_of_exaone(read: ConfigReader) -> dict[str, Value]:
    return exaone.keys(read) | router_keys(read)


def keys_of_minimax(read: ConfigReader) -> dict[str, Value]:
    experts = expert_keys(read, neurons="intermediate_size", gating="sigmoid")
    return without_windows(read) | experts


def derived_of_exaone(read: ConfigReader) -> dict[str, object]:
    """The names of GLM-4.5's configs."""
    num_dense = dense_layers_of_types(read, read.whole("first_k_dense_replace"))
    found = {
        "first_k_dense_replace": num_dense,
        "n_shared_experts": read.values["num_shared_experts"],
    }
    return found | derived(read.with_values(found))


def derived_of_hunyuan(read: ConfigReader) -> dict[str, object]:
    """The same; of one group of experts."""
    found = {
        "first_k_dense_replace": dense_layers_of_types(read, 1),
        "n_shared_experts": read.values["num_shared_experts"],
        "routed_scaling_factor": read.values["router_scaling_factor"],
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
    }
    return found | derived(read.with_values(found))


def derived_of_solar(read: ConfigReader) -> dict[str, object]:
    """All layers have experts."""
    found = {"first_k_dense_replace": 0}
    return found | derived(read.with_values(found))


def derived_of_minimax(read: ConfigReader) -> Mapping[str, object]:
    """Published configs have the number of values that rotate."""
    if "rotary_dim" not in read.values:
        return {}
    return {"partial_rotary_factor": read.count("rotary_dim") / read.count("head_dim")}


def derived_of_bailing(read: ConfigReader) -> dict[str, object]:
    """The names of GLM-4.5's configs."""
    length = read.values.get("moe_intermediate_size")
    read.refuse("num_shared_experts", 1)
    read.refuse("moe_shared_expert_intermediate_size", length)
    found: dict[str, object] = {"n_shared_experts": 1}
    return found | derived(read.with_values(found))


def of_bailing(read: KeyReader) -> ModelSpec:
    return decoder(
        read,
        is_partly_rotated=True,
        experts=experts_of_keys(read, gating="sigmoid", renormalises=False, has_shared=True),
        has_head_norms=True,
        attention={"is_fused": True},
    )


def bailing_sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    return Sources(renamed=with_choice_bias, ignored_prefixes=(f"model.layers.{spec.num_layers}.",))


def of_keys(read: KeyReader) -> ModelSpec:
    return decoder(
        read,
        experts=experts_of_keys(read, gating="sigmoid", renormalises=False, has_shared=True),
        has_head_norms=True,
    )


def of_hunyuan(read: KeyReader) -> ModelSpec:
    """llama.cpp's converter does not write how many layers have no experts, and names the bias
    otherwise."""
    num_layers = read.count("block_count") - read.num_skipped
    names = (f"blk.{layer}.ffn_gate.weight" for layer in range(num_layers))
    own = {
        "hy_v3.leading_dense_block_count": np.uint32(sum(name in read.tensors for name in names)),
        **read.keys,
    }
    return of_keys(KeyReader(read.path, own, bias_apart(read.tensors)))


def bias_apart(tensors: Mapping[str, TensorEntry]) -> Tensors:
    return {
        name + ".bias" if name.endswith(THEIR_BIAS) else name: entry
        for name, entry in tensors.items()
    }


def bias_joined(tensors: Mapping[str, TensorEntry]) -> Tensors:
    return {
        name.removesuffix(".bias") if name.endswith(f".{CHOICE_BIAS}") else name: entry
        for name, entry in tensors.items()
    }


def of_exaone(read: KeyReader) -> ModelSpec:
    """Layers without a window do not rotate if others have one."""
    num_layers = read.count("block_count") - read.num_skipped
    windows = windows_of_keys(read, num_layers, period=exaone.PERIOD)
    return decoder(
        read,
        windows=windows,
        rotates_L=[window is not None or not any(windows) for window in windows],
        experts=experts_of_keys(read, gating="sigmoid", renormalises=False, has_shared=True),
        has_head_norms=True,
    )


def of_minimax(read: KeyReader) -> ModelSpec:
    return decoder(
        read,
        is_partly_rotated=True,
        experts=experts_of_keys(read, gating="sigmoid"),
        has_head_norms=True,
        attention={"norms_all_heads": True},
    )


def not_in_dots(spec: ModelSpec) -> str | None:
    """llama.cpp's matrices of keys are as wide as those of queries (src/models/dots1.cpp)."""
    attention = spec.attentions[0]
    if attention.num_kv_heads != attention.num_heads:
        return f"has {attention.num_heads} heads of keys, this model {attention.num_kv_heads}"
    return no_windows_in_stock(spec)


def not_in_exaone(spec: ModelSpec) -> str | None:
    if not any(attention.window for attention in spec.attentions):
        return "rotates in layers with a window alone, and this model has none"
    return None


_DEFAULTS: Mapping[str, object] = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "hidden_act": "silu",
}
BAILING = Family(
    classes=("BailingMoeV2ForCausalLM",),
    title="Ling and Ring 2",
    graph="bailingmoe2",
    model_types=(),
    read_keys=COUNTS,
    defaults={"tie_word_embeddings": False, "hidden_act": "silu", "norm_topk_prob": True},
    plain={
        "use_bias": False,
        "use_qkv_bias": False,
        "use_qk_norm": True,
        "use_rmsnorm": True,
        "norm_head": False,
        "use_sliding_window": False,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    rope=Rope(kinds=("default", "linear", "yarn"), share=0.5),
    derived=derived_of_bailing,
    keys=keys,
    tensors=lambda read: {CHOICE_BIAS: ()},
    sources=bailing_sources,
)
FAMILIES = (
    Family(
        classes=("MiniMaxM2ForCausalLM",),
        title="MiniMax M2",
        graph="minimax-m2",
        model_types=("minimax_m2",),
        read_keys=COUNTS,
        defaults={
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
        },
        plain={
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
        },
        rope=Rope(theta=5e6, share=1.0),
        derived=derived_of_minimax,
        keys=keys_of_minimax,
        tensors=lambda read: {CHOICE_BIAS: ()},
        sources=lambda spec, read: Sources(renamed=with_choice_bias),
    ),
    Family(
        classes=("Dots1ForCausalLM",),
        title="dots.llm1",
        graph="dots1",
        read_keys=COUNTS,
        defaults={
            **_DEFAULTS,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        flags={"attention_bias": ATTN_BIASES},
        derived=derived,
        keys=keys_of_dots,
        tensors=lambda read: {CHOICE_BIAS: ()},
        sources=sources,
    ),
    Family(
        classes=("HYV3ForCausalLM",),
        title="Hunyuan 3",
        graph="hy_v3",
        names=gguf.MODEL_ARCH.DOTS1,  # gguf's own map is of later versions
        read_keys=COUNTS,
        defaults={
            "tie_word_embeddings": False,
            "attention_bias": False,
            "num_experts_per_tok": 8,
            "hidden_act": "silu",
            "num_experts": 192,
            "num_shared_experts": 1,
            "router_scaling_factor": 2.826,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
        },
        plain={"mlp_bias": False, "route_norm": True},
        flags={"attention_bias": ATTN_BIASES},
        rope=Rope(theta=11_158_840.0),
        derived=derived_of_hunyuan,
        keys=keys,
        tensors=lambda read: {CHOICE_BIAS: ()},
        sources=sources,
    ),
    Family(
        classes=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
        title="EXAONE MoE",
        graph="exaone-moe",
        model_types=("exaone_moe",),
        read_keys=COUNTS,
        defaults={
            **_DEFAULTS,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "num_shared_experts": 1,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
        plain={"attention_bias": False},
        derived=derived_of_exaone,
        keys=keys_of_exaone,
        tensors=lambda read: {CHOICE_BIAS: ()},
        sources=lambda spec, read: Sources(renamed=with_choice_bias, ignored_prefixes=("mtp.",)),
    ),
    Family(
        classes=("SolarOpenForCausalLM",),
        title="Solar Open",
        graph="glm4moe",
        model_types=("solar_open",),
        read_keys=COUNTS,
        defaults={
            **_DEFAULTS,
            "num_experts_per_tok": 8,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
        },
        plain={"first_k_dense_replace": 0, "use_qk_norm": False},
        flags={"attention_bias": QKV_BIASES},
        rope=Rope(theta=1e6, share=1.0),
        derived=derived_of_solar,
        keys=keys,
        tensors=lambda read: {CHOICE_BIAS: ()},
        sources=sources,
    ),
    BAILING,
)
GRAPHS = (
    Architecture(
        name="minimax-m2", of_keys=of_minimax, known_keys=KEYS, not_in_stock=plain_weights_in_stock
    ),
    Architecture(
        name="dots1",
        of_keys=of_keys,
        known_keys=(*KEYS, *WINDOW_KEYS),
        options=ATTN_BIASES,
        stock_options=QKV_BIASES,
        not_in_stock=not_in_dots,
    ),
    Architecture(
        name="hy_v3",
        of_keys=of_hunyuan,
        apart=lambda spec, tensors: bias_apart(tensors),
        joined=lambda spec, tensors: bias_joined(tensors),
        known_keys=(*KEYS, DRAFT_LAYERS),
        options=ATTN_BIASES,
        stock_options=QKV_BIASES,
    ),
    Architecture(
        name="exaone-moe",
        of_keys=of_exaone,
        known_keys=(*KEYS, *WINDOW_KEYS, DRAFT_LAYERS),
        # The layer is dense, and which of its kind it is stands nowhere.
        runs_draft_block=False,
        not_in_stock=not_in_exaone,
    ),
    Architecture(
        name="bailingmoe2",
        of_keys=of_bailing,
        fuses_attention=True,
        known_keys=(*KEYS, DRAFT_LAYERS),
        runs_draft_block=False,  # it has a norm more, which no graph at hand computes
        not_in_stock=other_head_size,
    ),
)
