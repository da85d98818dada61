"""Phi-3, Phi-3.5 and Phi-4-mini: a Llama with two fused matrices, one of queries, keys and values and
one of gate and up, which are split here, and with longrope in those for long contexts.

The model file is a `llama`, so everything that runs a `llama` runs this too; llama.cpp's phi3 becomes
one when it is read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import gguf
import numpy as np

from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.family import Architecture, Family, Tensors
from hotsplit.families.llama import llama_spec, whole_sizes
from hotsplit.families.row_order import Rows, adjacent_pairs
from hotsplit.families.sizes import Sizes, sizes_of
from hotsplit.families.windows import KEYS, Windows
from hotsplit.files.gguf_file import chosen_rows
from hotsplit.model.spec import ModelSpec

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader


def phi3(read: ConfigReader) -> Blueprint:
    """Phi3ForCausalLM."""
    read.refuse("attention_bias", False)
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    sizes, rotary, factors = read.rotary(
        sizes, "adjacent", ("default", "longrope"), default_share=1.0
    )
    window = None if read.values.get("sliding_window") is None else read.count("sliding_window")
    activation = read.activation("hidden_act", GATED)
    return Blueprint(
        spec=llama_spec(sizes, rotary, activation, windows=_windows(sizes, window)),
        name_of=gguf_names(gguf.MODEL_ARCH.PHI3, sizes.num_layers),
        rope_factors=factors,
        rows=_split_rows(sizes, rotary.num_values),
    )


def _windows(sizes: Sizes, window: int | None) -> Windows:
    """The window of each layer, none if no text of the model is longer."""
    is_used = (window or sizes.context_length) < sizes.context_length
    return [window if is_used else None] * sizes.num_layers


def _split_rows(sizes: Sizes, num_rotated: int | None) -> Mapping[str, Rows]:
    """The rows of the fused matrices in each of ours."""
    q, kv = sizes.query_size, sizes.key_size
    keys = q + adjacent_pairs(kv, sizes.num_kv_heads, num_rotated)
    neurons = np.arange(sizes.num_neurons)
    parts = {
        "attn_q.weight": ("attn_qkv.weight", adjacent_pairs(q, sizes.num_heads, num_rotated)),
        "attn_k.weight": ("attn_qkv.weight", keys),
        "attn_v.weight": ("attn_qkv.weight", q + kv + np.arange(kv)),
        "ffn_gate.weight": ("ffn_up.weight", neurons),
        "ffn_up.weight": ("ffn_up.weight", neurons + sizes.num_neurons),
    }
    counts = {"attn_qkv.weight": q + 2 * kv, "ffn_up.weight": 2 * sizes.num_neurons}
    return {
        name: Rows(source=source, order=order, num_rows=counts[source])
        for name, (source, order) in parts.items()
    }


def of_keys(read: "KeyReader") -> ModelSpec:
    """llama.cpp ignores the window, transformers does not."""
    sizes = read.sizes(is_partly_rotated=True)
    windows = _windows(sizes, read.whole(KEYS[0], 0) or None)
    rotary = read.rotary("adjacent", sizes.head_dim)
    return llama_spec(sizes, rotary, read.activation(), windows=windows)


def apart(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors, with fused matrices split. One of another height stays, and is refused as
    unknown."""
    found = dict(tensors)
    assert spec.rotary is not None
    split = _split_rows(sizes_of(spec), spec.rotary.num_values)
    for layer in range(spec.num_layers):
        for name, rows in split.items():
            entry = tensors.get(source := f"blk.{layer}.{rows.source}")
            if entry is None or entry.shape[0] != rows.num_rows:
                continue
            if rows.source not in split:
                found.pop(source, None)
            found[f"blk.{layer}.{name}"] = chosen_rows(entry, rows.order)
    return found


PHI3 = Family(
    title="Phi-3 and 4-mini",
    blueprint=phi3,
    model_types=("phi3",),
    defaults={"tie_word_embeddings": False, "original_max_position_embeddings": 4096},
)
GRAPH = Architecture(
    name="phi3",
    of_keys=of_keys,
    fuses_attention=True,
    known_keys=KEYS[:1],
    stock_activations=("silu",),
    apart=apart,
)
