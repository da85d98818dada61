"""gpt-oss (OpenAI, arXiv 2508.10925): experts with biases and a clamped SwiGLU, sinks of attention,
a window in every other layer."""

from dataclasses import replace
from functools import partial

from hotsplit.families.blueprint import Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import COUNTS, KEYS, expert_keys, experts_of_keys
from hotsplit.families.family import ATTN_BIASES, Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.families.windows import KEYS as WINDOW_KEYS
from hotsplit.families.windows import local_window_keys, windows_of_keys
from hotsplit.files.gguf_file import Value
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.attention import HeadVector
from hotsplit.model.route import ROUTER
from hotsplit.model.spec import ModelSpec

EXPERT_BIASES = ("ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias")
PERIOD = 2


def keys(read: ConfigReader) -> dict[str, Value]:
    experts = expert_keys(
        read, neurons="intermediate_size", gating="softmax_of_chosen", renormalises=False
    )
    return experts | local_window_keys(read, PERIOD)


def of_keys(read: KeyReader) -> ModelSpec:
    """Borders of YaRN are not rounded, as in transformers; llama.cpp rounds them."""
    rotary = read.rotary("halves")
    scaling = replace(rotary.scaling, rounds_borders=rotary.scaling.kind != "yarn")
    return decoder(
        read,
        rotary=replace(rotary, scaling=scaling),
        arrange=partial(Arrangement.pre_norm, second="post_attention_norm"),
        experts=experts_of_keys(read, gating="softmax_of_chosen", renormalises=False),
        windows=windows_of_keys(read, read.count("block_count"), period=PERIOD, window=None),
        attention={"head_sinks": HeadVector("attn_sinks.weight")},
    )


def not_in_stock(spec: ModelSpec) -> str | None:
    has_window_L = [attention.window is not None for attention in spec.attentions]
    if has_window_L != [(layer + 1) % PERIOD != 0 for layer in range(spec.num_layers)]:
        return "has windows in every other layer, this model in others"
    return None


FAMILIES = (
    Family(
        classes=("GptOssForCausalLM",),
        title="gpt-oss",
        graph="gpt-oss",
        model_types=("gpt_oss",),
        read_keys=COUNTS,
        defaults={
            "tie_word_embeddings": False,
            "attention_bias": True,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
        },
        plain={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        flags={"attention_bias": ATTN_BIASES},
        activations={"silu": "swiglu_oai"},
        rope=Rope(kinds=("default", "yarn"), theta=150000.0, rounds_borders=False),
        keys=keys,
        tensors=lambda read: dict.fromkeys((*EXPERT_BIASES, f"{ROUTER}.bias"), ()),
        # A checkpoint's sinks have no suffix.
        sources=lambda spec, read: Sources(
            renamed=lambda name_of: (
                lambda source: (
                    f"{name_of(source)}.weight" if source.endswith(".sinks") else name_of(source)
                )
            ),
            expert_form="columns",
        ),
    ),
)
GRAPHS = (
    Architecture(
        name="gpt-oss",
        of_keys=of_keys,
        known_keys=(*KEYS, *WINDOW_KEYS),
        options=(*ATTN_BIASES, *EXPERT_BIASES),
        stock_activations=("swiglu_oai",),
        stock_options=(*ATTN_BIASES, *EXPERT_BIASES),
        not_in_stock=not_in_stock,
    ),
)
