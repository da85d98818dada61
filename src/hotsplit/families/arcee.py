"""Arcee's foundation models (AFM): a Llama without gates under ReLU squared, so that most neurons are
silent."""

from typing import TYPE_CHECKING

import gguf

from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import UNGATED, ConfigReader
from hotsplit.families.family import PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import llama_spec, whole_sizes
from hotsplit.families.row_order import rotary_rows
from hotsplit.model.spec import ModelSpec

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

OPTIONS = (*PROJECTION_BIASES, "ffn_up.bias", "ffn_down.bias")


def arcee(read: ConfigReader) -> Blueprint:
    """ArceeForCausalLM."""
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    sizes, rotary, factors = read.rotary(sizes, "adjacent")
    attention = PROJECTION_BIASES if read.flag("attention_bias") else ()
    neurons = OPTIONS[4:] if read.flag("mlp_bias") else ()
    return Blueprint(
        spec=llama_spec(
            sizes,
            rotary,
            read.activation("hidden_act", UNGATED),
            (*attention, *neurons),
            architecture="arcee",
            is_gated=False,
        ),
        name_of=gguf_names(gguf.MODEL_ARCH.ARCEE, sizes.num_layers),
        rope_factors=factors,
        rows=rotary_rows(sizes),
    )


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes = read.sizes()
    return llama_spec(
        sizes,
        read.rotary("adjacent"),
        read.activation(),
        read.options(sizes.num_layers),
        architecture="arcee",
        is_gated=False,
    )


ARCEE = Family(
    title="Arcee",
    blueprint=arcee,
    model_types=("arcee",),
    defaults={
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
    },
)
GRAPH = Architecture(
    name="arcee",
    of_keys=of_keys,
    options=OPTIONS,
    stock_activations=("relu2",),
    stock_options=PROJECTION_BIASES[:3],
)
