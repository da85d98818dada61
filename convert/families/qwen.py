"""Qwen2, with biases on queries, keys and values, and Qwen3, with norms on queries and keys."""

import gguf

from hotsplit.convert.blueprint import Blueprint, gguf_names
from hotsplit.convert.config_reader import GATED, ConfigReader
from hotsplit.convert.families.family import Family
from hotsplit.convert.families.llama import llama_shape
from hotsplit.model.architecture import PROJECTION_BIASES


def qwen2(read: ConfigReader) -> Blueprint:
    """Qwen2ForCausalLM: Qwen 2 and 2.5, and sparse ones such as SparseQwen2 with `drelu`."""
    return _qwen(read, "qwen2", gguf.MODEL_ARCH.QWEN2, PROJECTION_BIASES[:3])


def qwen3(read: ConfigReader) -> Blueprint:
    """Qwen3ForCausalLM."""
    options = PROJECTION_BIASES if read.flag("attention_bias") else ()
    return _qwen(read, "qwen3", gguf.MODEL_ARCH.QWEN3, options)


def _qwen(
    read: ConfigReader, architecture: str, arch: gguf.MODEL_ARCH, options: tuple[str, ...]
) -> Blueprint:
    shape, notes = llama_shape(read, has_window=read.flag("use_sliding_window"))
    shape, factors = read.with_rope(shape)
    activation = read.activation("hidden_act", GATED)
    return Blueprint(
        architecture=architecture,
        shape=shape,
        activation=activation,
        threshold=read.threshold(activation),
        is_tied=read.is_tied(),
        name_of=gguf_names(arch, shape.num_layers),
        rope_factors=factors,
        options=options,
        notes=notes,
    )


DEFAULTS = {
    "tie_word_embeddings": False,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
QWEN2 = Family(blueprint=qwen2, defaults=DEFAULTS)
QWEN3 = Family(blueprint=qwen3, defaults=DEFAULTS | {"head_dim": 128, "attention_bias": False})
