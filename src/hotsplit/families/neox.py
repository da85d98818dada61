"""GPT-NeoX (arXiv 2204.06745), StableLM (arXiv 2402.17834) and Phi-2 (arXiv 2309.05463): norms
with biases and rotary embeddings of a part of each head; attention and feed-forward run in
parallel, each after a norm (GPT-NeoX) or both after one (Phi-2), or one after the other."""

from collections.abc import Mapping
from functools import partial

from hotsplit.families.blueprint import IGNORED, Rows, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.falcon import NEXT_NORM, qkv_order
from hotsplit.families.family import (
    ATTN_BIASES,
    QKV_BIASES,
    UNGATED,
    UNGATED_BIASES,
    Architecture,
    Family,
)
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.files.gguf_file import Value
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.spec import ModelSpec
from hotsplit.model.tensors import HEAD_BIAS

PARALLEL = "use_parallel_residual"
ALL_BIASES = (*ATTN_BIASES, *UNGATED_BIASES)
FUSED_BIASES = ("attn_qkv.bias", "attn_output.bias")


def derived(read: ConfigReader) -> Mapping[str, object]:
    """Its names of rotary embeddings' parameters."""
    names = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
    return {own: read.values[name] for name, own in names.items() if name in read.values}


def keys(read: ConfigReader) -> dict[str, Value]:
    return {PARALLEL: read.flag(PARALLEL)}


def of_keys(read: KeyReader) -> ModelSpec:
    is_parallel = read.flag(f"{read.graph.name}.{PARALLEL}")
    parallel = partial(Arrangement.parallel, norms=("ffn_norm", "attn_norm"))
    return decoder(
        read,
        norm="layer",
        is_partly_rotated=True,
        arrange=parallel if is_parallel else Arrangement.pre_norm,
        is_gated=False,
        attention={"is_fused": True},
    )


def of_stablelm(read: KeyReader) -> ModelSpec:
    has_second = f"blk.0.{NEXT_NORM[0]}" in read.tensors
    return decoder(
        read,
        norm="layer",
        is_partly_rotated=True,
        arrange=Arrangement.pre_norm if has_second else Arrangement.parallel,
    )


def of_phi(read: KeyReader) -> ModelSpec:
    return decoder(
        read,
        norm="layer",
        is_partly_rotated=True,
        arrange=Arrangement.parallel,
        is_gated=False,
        has_head_bias=HEAD_BIAS in read.tensors,
    )


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    """Rows of queries, keys and values are interleaved by heads; old checkpoints have masks."""
    order = qkv_order(spec.attentions[0])
    fused = ("attn_qkv.weight", "attn_qkv.bias")
    return Sources(
        rows={name: Rows(source=name, order=order, num_rows=len(order)) for name in fused},
        ignored=(*IGNORED, ".attention.bias", ".attention.masked_bias"),
    )


def not_in_neox(spec: ModelSpec) -> str | None:
    return None if spec.attentions[0].biases else "has biases of attention, this model none"


_DEFAULTS: Mapping[str, object] = {"tie_word_embeddings": False, "layer_norm_eps": 1e-5}
FIELDS = {"attention.layer_norm_epsilon": "layer_norm_eps"}
FAMILIES = (
    Family(
        classes=("GPTNeoXForCausalLM",),
        title="GPT-NeoX",
        graph="gptneox",
        model_types=("gpt_neox",),
        defaults={**_DEFAULTS, "hidden_act": "gelu", "attention_bias": True, PARALLEL: True},
        fields=FIELDS,
        flags={"attention_bias": FUSED_BIASES},
        activations=UNGATED,
        rope=Rope(kinds=("default", "linear"), share=0.25),
        derived=derived,
        keys=keys,
        tensors=lambda read: dict.fromkeys(UNGATED_BIASES, ()),
        sources=sources,
    ),
    Family(
        classes=("StableLmForCausalLM",),
        title="StableLM",
        graph="stablelm",
        defaults={
            **_DEFAULTS,
            "hidden_act": "silu",
            "num_key_value_heads": 32,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            PARALLEL: False,
        },
        fields=FIELDS,
        plain={"qk_layernorm": False},
        flags={"use_qkv_bias": QKV_BIASES},
        rope=Rope(kinds=("default", "linear"), share=0.25),
        tensors=lambda read: {} if read.flag(PARALLEL) else dict.fromkeys(NEXT_NORM, ()),
    ),
    Family(
        classes=("PhiForCausalLM",),
        title="Phi-2",
        graph="phi2",
        model_types=("phi",),
        defaults={**_DEFAULTS, "hidden_act": "gelu_new", "qk_layernorm": False},
        fields=FIELDS,
        plain={"qk_layernorm": False},
        activations=UNGATED,
        rope=Rope(kinds=("default", "linear"), share=0.5),
        tensors=lambda read: dict.fromkeys((*ALL_BIASES, HEAD_BIAS), ()),
    ),
)
GRAPHS = (
    Architecture(
        name="gptneox",
        of_keys=of_keys,
        fuses_attention=True,
        known_keys=(PARALLEL,),
        options=(*FUSED_BIASES, *UNGATED_BIASES),
        # llama.cpp computes the tanh form for both, as for Falcon.
        stock_activations=("gelu", "gelu_tanh"),
        stock_options=(*FUSED_BIASES, *UNGATED_BIASES),
        not_in_stock=not_in_neox,
    ),
    Architecture(
        name="stablelm",
        of_keys=of_stablelm,
        options=(*QKV_BIASES, *NEXT_NORM),
        stock_options=(*QKV_BIASES, *NEXT_NORM),
    ),
    Architecture(
        name="phi2",
        of_keys=of_phi,
        options=ALL_BIASES,
        stock_activations=("gelu_tanh",),
        stock_options=ALL_BIASES,
    ),
)
