"""Falcon (arXiv 2311.16867): layer norms, and one key-value head (7B), a few (40B), or as many
as query heads. Attention and feed-forward run in parallel, after one shared norm (7B) or a norm
each (40B), or in sequence."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import gguf
import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import Blueprint, NameOf, gguf_names
from hotsplit.families.config_reader import UNGATED, ConfigReader
from hotsplit.families.family import Architecture, Family
from hotsplit.families.row_order import Rows
from hotsplit.families.sizes import Sizes
from hotsplit.files.typed import shown
from hotsplit.model.spec import Activation, ModelSpec, Rotary

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

OWN_NORM = ("attn_norm_2.weight", "attn_norm_2.bias")
NEXT_NORM = ("ffn_norm.weight", "ffn_norm.bias")
BIASES = ("attn_qkv.bias", "attn_output.bias", "ffn_up.bias", "ffn_down.bias")
# Keys for which transformers takes null as false, where other families refuse it.
FLAGS = ("alibi", "bias", "multi_query", "new_decoder_architecture", "parallel_attn")
OLD_KEYS = {
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_head_kv": "num_kv_heads",
}


def falcon(read: ConfigReader) -> Blueprint:
    """FalconForCausalLM, and RWForCausalLM, its name in older files."""
    said = {OLD_KEYS.get(key, key): value for key, value in read.said.items()}
    said |= {key: False for key in FLAGS if key in said and said[key] is None}
    read = ConfigReader(read.path, said, defaults=FALCON.defaults, max_rows=read.max_rows)
    sizes, rotary, factors = read.rotary(_sizes(read), "halves")
    activation = read.activation("activation", UNGATED)
    options = (*_norms(read), *(BIASES if read.flag("bias") else ()))
    order = qkv_order(sizes)
    rows = {
        name: Rows(source=name, order=order, num_rows=len(order))
        for name in ("attn_qkv.weight", "attn_qkv.bias")
    }
    return Blueprint(
        spec=falcon_spec(sizes, rotary, activation, options),
        name_of=_names(sizes.num_layers),
        rope_factors=factors,
        rows=rows,
    )


def falcon_spec(
    sizes: Sizes, rotary: Rotary, activation: Activation, options: Collection[str] = ()
) -> ModelSpec:
    """`options`: biases, and the norms of a layer besides its first."""
    attention = sizes.attention(rotary, options, is_fused=True)
    neurons = sizes.neurons(activation, options, is_gated=False)
    arrange = sizes.arrangement("layer")
    if NEXT_NORM[0] in options:
        layer = arrange.pre_norm(attention, neurons)
    else:
        layer = arrange.parallel(attention, neurons, num_norms=1 + (OWN_NORM[0] in options))
    return sizes.model("falcon", sizes.alike(layer), output_norm="layer")


def of_keys(read: "KeyReader") -> ModelSpec:
    sizes = read.sizes("layer")
    options = read.options(sizes.num_layers)
    if {OWN_NORM[0], NEXT_NORM[0]} <= options:
        raise HotsplitError(
            f"{read.path}: attn_norm_2 and ffn_norm exclude each other; convert it again"
        )
    return falcon_spec(sizes, read.rotary("halves"), read.activation(), options)


def qkv_order(sizes: Sizes) -> np.ndarray:
    """The order of the fused rows. A checkpoint interleaves them: the queries of a key-value head,
    its key, its value, then the next head. A model file has all queries, then all keys, then all
    values (llama.cpp, conversion/falcon.py)."""
    per_group = sizes.num_heads // sizes.num_kv_heads + 2
    count = sizes.num_kv_heads * per_group * sizes.head_dim
    groups = np.arange(count).reshape(sizes.num_kv_heads, per_group, sizes.head_dim)
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return np.concatenate([part.reshape(-1) for part in parts])


def _sizes(read: ConfigReader) -> Sizes:
    is_new, has_one_key = read.flag("new_decoder_architecture"), read.flag("multi_query")
    kv_heads = read.count("num_kv_heads", read.count("num_attention_heads"))
    if not is_new and has_one_key:
        kv_heads = 1
    heads, kv_heads, head_dim = read.heads("num_attention_heads", kv_heads)
    width = read.count("hidden_size")
    return Sizes(
        num_layers=read.count("num_hidden_layers"),
        hidden_size=width,
        num_neurons=read.count("ffn_hidden_size", 4 * width),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=read.count("vocab_size"),
        context_length=read.count("max_position_embeddings"),
        epsilon=read.positive("layer_norm_epsilon"),
    )


def _norms(read: ConfigReader) -> tuple[str, ...]:
    """The norms of a layer besides its first (transformers, FalconDecoderLayer)."""
    is_new, is_parallel = read.flag("new_decoder_architecture"), read.flag("parallel_attn")
    num_norms = read.values.get("num_ln_in_parallel_attn")
    if num_norms not in (None, 1, 2) or (num_norms == 2 and not is_new):
        raise HotsplitError(
            f"{read.path}: num_ln_in_parallel_attn is {shown(num_norms)} and new_decoder_architecture"
            f" {is_new}; transformers has no such layer; this checkpoint is not supported"
        )
    if not is_new and not is_parallel:
        return NEXT_NORM
    if not is_parallel:
        raise HotsplitError(
            f"{read.path}: new_decoder_architecture with parallel_attn false; transformers has no"
            " such layer; this checkpoint is not supported"
        )
    return OWN_NORM if is_new and num_norms != 1 else ()


def _names(num_layers: int) -> NameOf:
    """gguf's map, plus the norm of sequential blocks, which it lacks."""
    known = gguf_names(gguf.MODEL_ARCH.FALCON, num_layers)

    def name_of(source: str) -> str | None:
        prefix, found, part = source.partition(".post_attention_layernorm.")
        if found and prefix.startswith("transformer.h."):
            return f"blk.{prefix.removeprefix('transformer.h.')}.ffn_norm.{part}"
        return known(source)

    return name_of


FALCON = Family(
    title="Falcon",
    model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
    blueprint=falcon,
    defaults={
        "tie_word_embeddings": True,
        "activation": "gelu",
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "bias": False,
    },
)
GRAPH = Architecture(
    name="falcon",
    of_keys=of_keys,
    fuses_attention=True,
    options=(*BIASES, *OWN_NORM, *NEXT_NORM),
    # llama.cpp computes the tanh form for both; transformers computes gelu exactly.
    stock_activations=("gelu", "gelu_tanh"),
    stock_options=OWN_NORM,
)
