"""ERNIE 4.5 without experts: a Llama whose rotary pairs are neighbours in checkpoints, too."""

from typing import TYPE_CHECKING

import gguf

from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.family import GATED_BIASES, PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import llama_sizes, llama_spec
from hotsplit.model.spec import ModelSpec

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

OPTIONS = (*PROJECTION_BIASES, *GATED_BIASES)


def ernie4_5(read: ConfigReader) -> Blueprint:
    """Ernie4_5ForCausalLM. llama.cpp's graph reads no divisors of frequencies, as Llama 3's scaling has."""
    kinds = ("default", "linear", "yarn")
    sizes, rotary, _ = read.rotary(llama_sizes(read), "adjacent", kinds, default_theta=500_000.0)
    return Blueprint(
        spec=llama_spec(
            sizes,
            rotary,
            read.activation("hidden_act", GATED),
            OPTIONS if read.flag("use_bias") else (),
            architecture="ernie4_5",
        ),
        name_of=gguf_names(gguf.MODEL_ARCH.ERNIE4_5, sizes.num_layers),
    )


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes = read.sizes()
    return llama_spec(
        sizes,
        read.rotary("adjacent"),
        read.activation(),
        read.options(sizes.num_layers),
        architecture="ernie4_5",
    )


ERNIE4_5 = Family(
    title="ERNIE 4.5",
    model_types=("ernie4_5",),
    blueprint=ernie4_5,
    defaults={
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "use_bias": False,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
)
GRAPH = Architecture(
    name="ernie4_5",
    of_keys=of_keys,
    options=OPTIONS,
    stock_activations=("silu",),
    stock_options=PROJECTION_BIASES[:3],
)
