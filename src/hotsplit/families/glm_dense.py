"""GLM-4 without experts (arXiv 2406.12793): rotary embeddings of adjacent pairs in a part of each head,
gates and ups in one matrix. Those of 2025 also have norms after attention and feed-forward."""

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

import gguf
import numpy as np

from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.family import PROJECTION_BIASES, Architecture, Family
from hotsplit.families.llama import whole_sizes
from hotsplit.families.row_order import Rows, gates_apart, gates_joined
from hotsplit.families.sizes import Sizes
from hotsplit.model.spec import Activation, ModelSpec, Rotary

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

BIASES = PROJECTION_BIASES[:3]
ARCHES = {"glm4": gguf.MODEL_ARCH.GLM4, "chatglm": gguf.MODEL_ARCH.CHATGLM}


def glm(read: ConfigReader, *, name: str) -> Blueprint:
    """Glm4ForCausalLM is llama.cpp's `glm4`, GlmForCausalLM its `chatglm`."""
    sizes = whole_sizes(read, read.count("max_position_embeddings"))
    sizes, rotary, factors = read.rotary(sizes, "adjacent", ("default",), default_share=0.5)
    neurons, both = np.arange(sizes.num_neurons), 2 * sizes.num_neurons
    parts = {"ffn_gate.weight": neurons, "ffn_up.weight": sizes.num_neurons + neurons}
    return Blueprint(
        spec=glm_spec(
            name,
            sizes,
            rotary,
            read.activation("hidden_act", GATED),
            PROJECTION_BIASES[:3] if read.flag("attention_bias") else (),
        ),
        name_of=gguf_names(ARCHES[name], sizes.num_layers),
        rope_factors=factors,
        rows={
            part: Rows(source="ffn_up.weight", order=order, num_rows=both)
            for part, order in parts.items()
        },
    )


def glm_spec(
    name: str, sizes: Sizes, rotary: Rotary, activation: Activation, options: Collection[str] = ()
) -> ModelSpec:
    arrange = sizes.arrangement()
    arranged = arrange.sandwich if name == "glm4" else arrange.pre_norm
    attention = sizes.attention(rotary, options)
    layer = arranged(attention, sizes.neurons(activation))
    return sizes.model(name, sizes.alike(layer))


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes = read.sizes(is_partly_rotated=True)
    return glm_spec(
        read.graph.name,
        sizes,
        read.rotary("adjacent", sizes.head_dim),
        read.activation(),
        read.options(sizes.num_layers),
    )


DEFAULTS = {
    "tie_word_embeddings": False,
    "attention_bias": True,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
}
GLM4 = Family(
    title="GLM-4", model_types=("glm4",), blueprint=partial(glm, name="glm4"), defaults=DEFAULTS
)
GLM = Family(
    title="GLM-4", model_types=("glm",), blueprint=partial(glm, name="chatglm"), defaults=DEFAULTS
)
GRAPHS = tuple(
    Architecture(
        name=name,
        of_keys=of_keys,
        options=BIASES,
        stock_activations=("silu",),
        stock_options=BIASES,
        apart=gates_apart,
        joined=gates_joined,
    )
    for name in ARCHES
)
