"""Command R and Cohere 2: layer norms without biases, one for attention and feed-forward, which run
in parallel, and logits multiplied by a factor. Command R+ also norms each head of queries and keys
with weights of its own; Cohere 2 rotates only in its layers with windows, which are all but each
fourth."""

from functools import partial

import numpy as np

from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import ATTN_BIASES, QKV_BIASES, Architecture, Family
from hotsplit.families.key_reader import KeyReader
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
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.blocks import NormKind
from hotsplit.model.spec import ModelSpec

NORM: NormKind = "layer_without_bias"
PERIOD = 4
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
        arrange=partial(Arrangement.parallel, num_norms=1),
        windows=windows,
        rotates_L=[window is not None for window in windows],
        has_head_norms=has_norms,
        head_norm=NORM,
        attention={"norms_by_head": has_norms},
        logit_scale=read.positive(f"{read.graph.name}.logit_scale", 1.0),
    )


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
)
GRAPHS = tuple(
    Architecture(
        name=name,
        of_keys=partial(of_keys, has_windows=name == "cohere2"),
        known_keys=("logit_scale", *(KEYS if name == "cohere2" else ())),
        options=ATTN_BIASES,
        stock_options=QKV_BIASES,
        not_in_stock=not_in_stock,
    )
    for name in ("command-r", "cohere2")
)
