"""Gemma (arXiv 2403.08295): norms by 1 + weight, and embeddings scaled by sqrt(D). Gemma 2 (arXiv
2408.00118): windows in every second layer, norms before and after each block, soft caps of scores
and logits. Gemma 3 (arXiv 2503.19786): windows in five of six layers, with a rotary base of their
own, and norms of heads instead of caps of scores."""

import math

import gguf
import numpy as np

from hotsplit.families.blueprint import ADD_ONE, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import ATTN_BIASES, GATED, Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.llama import without_windows
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope, local_theta_key
from hotsplit.families.soft_caps import LOGIT_CAP, SCORE_CAP, cap_key, cap_of_keys
from hotsplit.families.windows import KEYS, local_window_keys, periodic_in_stock, windows_of_keys
from hotsplit.files.gguf_file import Value
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.spec import ModelSpec, Rotary

LOCAL_THETA = 10000.0
# Of Gemma 2 and 3: the period of the layers without a window, and the layers of the model of 27B.
PERIODS, LAYERS_OF_27B = {"gemma2": 2, "gemma3": 6}, {"gemma2": 46, "gemma3": 62}
# llama.cpp's caps and window where a file has no key, as the first ones of Gemma 2; 0 means none.
STOCK_CAPS = {"gemma2": (50.0, 30.0), "gemma3": (0.0, 0.0)}
STOCK_WINDOWS = {"gemma2": 4096, "gemma3": 0}


def keys_of_second(read: ConfigReader) -> dict[str, Value]:
    read.refuse("sliding_window_pattern", PERIODS["gemma2"])
    return _keys(read, "gemma2") | cap_key(read, SCORE_CAP) | cap_key(read, LOGIT_CAP)


def keys_of_third(read: ConfigReader) -> dict[str, Value]:
    theta = local_theta_key(read, LOCAL_THETA, "rope_local_base_freq")
    return _keys(read, "gemma3") | cap_key(read, LOGIT_CAP) | theta


def _keys(read: ConfigReader, name: str) -> dict[str, Value]:
    windows = local_window_keys(read, PERIODS[name])
    scale = np.float32(read.positive("query_pre_attn_scalar") ** -0.5)
    return {"attention.scale": scale, KEYS[1]: windows[KEYS[1]], KEYS[0]: windows[KEYS[0]]}


def of_keys(read: KeyReader) -> ModelSpec:
    sizes, name = read.sizes(), read.graph.name
    local = None
    if name == "gemma3":
        theta = read.positive("gemma3.rope.freq_base_swa", LOCAL_THETA)
        local = Rotary(theta=theta, pairing="halves")
    score_cap, logit_cap = STOCK_CAPS[name]
    scale = _stock_scale(name, sizes.num_layers, sizes.hidden_size, sizes.num_heads, sizes.head_dim)
    window, period = STOCK_WINDOWS[name], PERIODS[name]
    return decoder(
        read,
        arrange=Arrangement.sandwich,
        windows=windows_of_keys(read, sizes.num_layers, period=period, window=window),
        local=local,
        has_head_norms=name == "gemma3",
        attention={
            "scale": read.positive(f"{name}.attention.scale", scale),
            "score_cap": cap_of_keys(read, SCORE_CAP, score_cap),
        },
        embedding_scale=math.sqrt(sizes.hidden_size),
        logit_cap=cap_of_keys(read, LOGIT_CAP, logit_cap),
    )


def _stock_scale(
    name: str, num_layers: int, hidden_size: int, num_heads: int, head_dim: int
) -> float:
    """The scale of scores that llama.cpp assumes (src/models/gemma2.cpp, gemma3.cpp)."""
    is_27b = num_layers == LAYERS_OF_27B[name]
    return 1.0 / math.sqrt(hidden_size // num_heads if is_27b else head_dim)


def not_in_stock(spec: ModelSpec) -> str | None:
    """What llama.cpp has no key for."""
    name, attention = spec.architecture, spec.attentions[-1]
    if (other := periodic_in_stock(spec, PERIODS[name])) is not None:
        return other
    if name == "gemma2" and not (attention.score_cap and spec.logit_cap):
        return "caps scores and logits, this model not both"
    stock = _stock_scale(
        name, spec.num_layers, spec.hidden_size, attention.num_heads, attention.head_dim
    )
    if not math.isclose(attention.score_scale, stock, rel_tol=1e-6):
        return f"multiplies scores by {stock:g}, this model by {attention.score_scale:g}"
    return None


GEMMA2_DEFAULTS = {
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    SCORE_CAP: 50.0,
    LOGIT_CAP: 30.0,
}
# The norms of a checkpoint multiply by 1 + weight; a model file has that sum.
ONE_MORE = Sources(changes={"norm.weight": ADD_ONE})
FAMILIES = (
    Family(
        classes=("GemmaForCausalLM",),
        title="Gemma",
        graph="gemma",
        names=gguf.MODEL_ARCH.LLAMA,  # the map of Gemma lacks a head that is not the embedding
        defaults={
            "tie_word_embeddings": True,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "attention_bias": False,
            "hidden_act": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
        },
        plain={"use_bidirectional_attention": False},
        flags={"attention_bias": ATTN_BIASES},
        # The published configs say gelu and mean its tanh form, as transformers knows.
        activations={**GATED, "gelu": "gelu_tanh"},
        keys=without_windows,
        sources=lambda spec, read: ONE_MORE,
    ),
    Family(
        classes=("Gemma2ForCausalLM",),
        title="Gemma 2",
        graph="gemma2",
        names=gguf.MODEL_ARCH.GEMMA3,  # its map of Gemma 2 lacks a head that is not the embedding
        read_keys=(SCORE_CAP, LOGIT_CAP),
        defaults=GEMMA2_DEFAULTS,
        fields={"hotsplit.ffn.activation": "hidden_activation"},
        plain={"use_bidirectional_attention": False},
        flags={"attention_bias": ATTN_BIASES},
        keys=keys_of_second,
        sources=lambda spec, read: ONE_MORE,
    ),
    Family(
        classes=("Gemma3ForCausalLM",),
        title="Gemma 3",
        graph="gemma3",
        model_types=("gemma3_text",),
        read_keys=(LOGIT_CAP,),
        defaults=GEMMA2_DEFAULTS
        | {SCORE_CAP: None, LOGIT_CAP: None, "use_bidirectional_attention": False},
        fields={"hotsplit.ffn.activation": "hidden_activation"},
        plain={"use_bidirectional_attention": False},
        flags={"attention_bias": ATTN_BIASES},
        rope=Rope(kinds=("default", "linear"), theta=1e6, layers="full_attention"),
        keys=keys_of_third,
        sources=lambda spec, read: ONE_MORE,
    ),
)
COMMON_KEYS = (
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    LOGIT_CAP,
)
KNOWN_KEYS = {"gemma2": (*COMMON_KEYS, SCORE_CAP), "gemma3": (*COMMON_KEYS, "rope.freq_base_swa")}


def of_first(read: KeyReader) -> ModelSpec:
    return decoder(read, embedding_scale=math.sqrt(read.count("embedding_length")))


FIRST = Architecture(
    name="gemma", of_keys=of_first, options=ATTN_BIASES, stock_activations=("gelu_tanh",)
)
GRAPHS = (
    FIRST,
    *(
        Architecture(
            name=name,
            of_keys=of_keys,
            known_keys=known_keys,
            options=ATTN_BIASES,
            stock_activations=("gelu_tanh",),
            not_in_stock=not_in_stock,
        )
        for name, known_keys in KNOWN_KEYS.items()
    ),
)
