"""Phi-3: a Llama with two fused matrices, one of queries, keys and values and one of gate and up,
which are split here.

The model file is a `llama`, so everything that runs a `llama` runs this too."""

import gguf
import numpy as np

from hotsplit.convert.blueprint import Blueprint, Rows, adjacent_pairs, gguf_names
from hotsplit.convert.config_reader import GATED, ConfigReader
from hotsplit.convert.families.family import Family
from hotsplit.convert.families.llama import llama_shape


def phi3(read: ConfigReader) -> Blueprint:
    """Phi3ForCausalLM with ordinary rotary embeddings (the long-context ones are refused)."""
    read.refuse("attention_bias", False)
    shape, notes = llama_shape(read)
    shape, factors = read.with_rope(shape, ("default",))
    q, kv = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    neurons = np.arange(shape.num_neurons)
    parts = {
        "attn_q.weight": ("attn_qkv.weight", adjacent_pairs(q, shape.num_heads), q + 2 * kv),
        "attn_k.weight": (
            "attn_qkv.weight",
            q + adjacent_pairs(kv, shape.num_kv_heads),
            q + 2 * kv,
        ),
        "attn_v.weight": ("attn_qkv.weight", q + kv + np.arange(kv), q + 2 * kv),
        "ffn_gate.weight": ("ffn_up.weight", neurons, 2 * shape.num_neurons),
        "ffn_up.weight": ("ffn_up.weight", neurons + shape.num_neurons, 2 * shape.num_neurons),
    }
    activation = read.activation("hidden_act", GATED)
    return Blueprint(
        architecture="llama",
        shape=shape,
        activation=activation,
        threshold=read.threshold(activation),
        is_tied=read.is_tied(),
        name_of=gguf_names(gguf.MODEL_ARCH.PHI3, shape.num_layers),
        rope_factors=factors,
        rows={
            name: Rows(source=source, order=order, num_rows=count)
            for name, (source, order, count) in parts.items()
        },
        notes=notes,
    )


PHI3 = Family(blueprint=phi3, defaults={"tie_word_embeddings": False})
