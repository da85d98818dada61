"""Llama, and families with its graph: ReLULLaMA, ProSparse, Mistral, Bamboo.

Sparse variants differ by the activation: `relu` (ReLULLaMA), `fatrelu` with the threshold from the
config (ProSparse, arXiv 2402.13516), `drelu` (TurboSparse, arXiv 2406.05955)."""

from collections.abc import Mapping

import gguf

from hotsplit.convert.blueprint import IGNORED, Blueprint, gguf_names, rotary_rows
from hotsplit.convert.config_reader import GATED, ConfigReader
from hotsplit.convert.families.family import Family
from hotsplit.model.architecture import GATED_BIASES, PROJECTION_BIASES, ModelShape

# Predictors inside a TurboSparse checkpoint; their training target is not documented.
INNER_PREDICTOR = (".mlp.predictor.fc1.weight", ".mlp.predictor.fc2.weight")


def llama(read: ConfigReader) -> Blueprint:
    """LlamaForCausalLM."""
    return _llama(read, GATED)


def prosparse(read: ConfigReader) -> Blueprint:
    """ProSparse's SparseLlamaForCausalLM. Others use the name for other graphs and activations."""
    return _llama(read, {"fatrelu": "fatrelu"})


def mistral(read: ConfigReader) -> Blueprint:
    """MistralForCausalLM."""
    for key in ("attention_bias", "mlp_bias"):
        read.refuse(key, False, why="transformers has no such layer")
    return _llama(read, GATED)


def bamboo(read: ConfigReader) -> Blueprint:
    """BambooForCausalLM (also TurboSparse-Mistral): a Mistral whose `hidden_act`, ReLU, applies to
    both gate and up projection."""
    return _llama(read, {"relu": "drelu", "drelu": "drelu"}, ignored=INNER_PREDICTOR)


def _llama(
    read: ConfigReader, activations: Mapping[str, str], ignored: tuple[str, ...] = ()
) -> Blueprint:
    shape, notes = llama_shape(read)
    shape, factors = read.with_rope(shape)
    activation = read.activation("hidden_act", activations)
    options: tuple[str, ...] = PROJECTION_BIASES if read.flag("attention_bias") else ()
    options += GATED_BIASES if read.flag("mlp_bias") else ()
    return Blueprint(
        architecture="llama",
        shape=shape,
        activation=activation,
        threshold=read.threshold(activation),
        is_tied=read.is_tied(),
        name_of=gguf_names(gguf.MODEL_ARCH.LLAMA, shape.num_layers),
        rope_factors=factors,
        options=options,
        rows=rotary_rows(shape),
        ignored=IGNORED + ignored,
        notes=notes,
    )


def llama_shape(read: ConfigReader, has_window: bool = True) -> tuple[ModelShape, tuple[str, ...]]:
    """The shape, from the keys that Llama's relatives share, and a note if a sliding window cuts
    the context."""
    heads, kv_heads, head_width = read.heads("num_attention_heads")
    context, notes = read.window(read.count("max_position_embeddings"), has_window)
    shape = ModelShape(
        num_layers=read.count("num_hidden_layers"),
        width=read.count("hidden_size"),
        num_neurons=read.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=head_width,
        vocab_size=read.count("vocab_size"),
        context_length=context,
        norm_epsilon=read.positive("rms_norm_eps"),
    )
    return shape, notes


# transformers' Mistral has neither of the keys for biases; `mistral` refuses them.
DEFAULTS = {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
MISTRAL_DEFAULTS = DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096}
LLAMA = Family(blueprint=llama, defaults=DEFAULTS)
PROSPARSE = Family(blueprint=prosparse, defaults=DEFAULTS)
MISTRAL = Family(blueprint=mistral, defaults=MISTRAL_DEFAULTS)
BAMBOO = Family(blueprint=bamboo, defaults=MISTRAL_DEFAULTS)
