"""Phi-3: a Llama with two fused matrices, one of queries, keys and values and one of gate and up,
which are split here.

The model file is a `llama`, so everything that runs a `llama` runs this too."""

import gguf
import numpy as np

from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.family import Family
from hotsplit.families.llama import llama_sizes, llama_spec
from hotsplit.families.row_order import Rows, adjacent_pairs


def phi3(read: ConfigReader) -> Blueprint:
    """Phi3ForCausalLM with ordinary rotary embeddings (the long-context ones are refused)."""
    read.refuse("attention_bias", False)
    sizes, notes = llama_sizes(read)
    sizes, rotary, factors = read.rotary(sizes, "adjacent", ("default",))
    q, kv = sizes.query_size, sizes.key_size
    neurons = np.arange(sizes.num_neurons)
    parts = {
        "attn_q.weight": ("attn_qkv.weight", adjacent_pairs(q, sizes.num_heads), q + 2 * kv),
        "attn_k.weight": (
            "attn_qkv.weight",
            q + adjacent_pairs(kv, sizes.num_kv_heads),
            q + 2 * kv,
        ),
        "attn_v.weight": ("attn_qkv.weight", q + kv + np.arange(kv), q + 2 * kv),
        "ffn_gate.weight": ("ffn_up.weight", neurons, 2 * sizes.num_neurons),
        "ffn_up.weight": ("ffn_up.weight", neurons + sizes.num_neurons, 2 * sizes.num_neurons),
    }
    activation = read.activation("hidden_act", GATED)
    return Blueprint(
        spec=llama_spec(sizes, rotary, activation),
        name_of=gguf_names(gguf.MODEL_ARCH.PHI3, sizes.num_layers),
        rope_factors=factors,
        rows={
            name: Rows(source=source, order=order, num_rows=count)
            for name, (source, order, count) in parts.items()
        },
        notes=notes,
    )


PHI3 = Family(blueprint=phi3, model_types=("phi3",), defaults={"tie_word_embeddings": False})
