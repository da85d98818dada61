"""GLM-4.5 and its like (arXiv 2508.06471): mixtures of experts chosen by sigmoids with a bias,
after some layers without experts, with a rotary embedding of a part of each head."""

from functools import partial

from hotsplit.families.blueprint import Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import (
    COUNTS,
    KEYS,
    expert_keys,
    experts_of_keys,
    with_choice_bias,
)
from hotsplit.families.family import QKV_BIASES, Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.llama import without_windows
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.files.gguf_file import Value
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.route import CHOICE_BIAS, Gating
from hotsplit.model.spec import ModelSpec

# The norm before the neurons, as llama.cpp names it.
SECOND_NORM = "post_attention_norm"
HEAD_NORM = "attn_q_norm.weight"


def derived(read: ConfigReader) -> dict[str, object]:
    """If all layers have experts, the neurons of a layer are an expert's."""
    is_mixed = not read.whole("first_k_dense_replace")
    return {"intermediate_size": read.count("moe_intermediate_size")} if is_mixed else {}


def keys(read: ConfigReader) -> dict[str, Value]:
    return without_windows(read) | router_keys(read)


def router_keys(read: ConfigReader, gating: Gating = "sigmoid") -> dict[str, Value]:
    """The keys of DeepSeek-V3's router."""
    length = read.count("moe_intermediate_size")
    return expert_keys(
        read,
        gating=gating,
        renormalises=read.flag("norm_topk_prob"),
        scale=read.positive("routed_scaling_factor"),
        shared=length * read.count("n_shared_experts"),
        num_dense=read.whole("first_k_dense_replace"),
        groups=(read.count("n_group"), read.count("topk_group")),
    )


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    """A layer beyond the last is left out unless it is a draft block."""
    return Sources(
        renamed=with_choice_bias,
        ignored_prefixes=() if spec.draft else (f"model.layers.{spec.num_layers}.",),
    )


def of_keys(read: KeyReader) -> ModelSpec:
    return decoder(
        read,
        is_partly_rotated=True,
        arrange=partial(Arrangement.pre_norm, second=SECOND_NORM),
        experts=experts_of_keys(read, gating="sigmoid", has_shared=True),
        has_head_norms=f"blk.0.{HEAD_NORM}" in read.tensors,
    )


FAMILIES = (
    Family(
        classes=("Glm4MoeForCausalLM",),
        title="GLM-4.5",
        graph="glm4moe",
        model_types=("glm4_moe",),
        read_keys=COUNTS,
        defaults={
            "tie_word_embeddings": False,
            "attention_bias": False,
            "num_experts_per_tok": 8,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
            "num_key_value_heads": 8,
        },
        flags={"attention_bias": QKV_BIASES, "use_qk_norm": (HEAD_NORM,)},
        rope=Rope(share=0.5),
        derived=derived,
        keys=keys,
        tensors=lambda read: {CHOICE_BIAS: ()},
        sources=sources,
    ),
)
GRAPHS = (
    Architecture(
        name="glm4moe",
        of_keys=of_keys,
        known_keys=(*KEYS, "nextn_predict_layers"),
        options=QKV_BIASES,
        stock_options=QKV_BIASES,
    ),
)
