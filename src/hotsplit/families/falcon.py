"""Falcon (arXiv 2311.16867): layer norms, and one key-value head (7B), a few (40B), or as many
as query heads. Attention and feed-forward run in parallel, after one shared norm (7B) or a norm
each (40B), or in sequence."""

from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import NameOf, Rows, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import UNGATED, Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.plain_decoder import decoder
from hotsplit.files.typed import shown
from hotsplit.model.arrangements import Arrangement
from hotsplit.model.spec import Attention, LayerSpec, ModelSpec

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


def derived(read: ConfigReader) -> Mapping[str, object]:
    """The keys of older files (RWForCausalLM) as those of newer ones, and derived sizes."""
    new = {OLD_KEYS.get(key, key): value for key, value in read.said.items()}
    new |= {key: False for key in FLAGS if key in new and new[key] is None}
    read = read.with_values(new)
    if read.values.get("num_kv_heads") is None:
        new["num_kv_heads"] = read.values.get("num_attention_heads")
    if not read.flag("new_decoder_architecture") and read.flag("multi_query"):
        new["num_kv_heads"] = 1
    if read.values.get("ffn_hidden_size") is None:
        new["ffn_hidden_size"] = 4 * read.count("hidden_size")
    return new


def of_keys(read: KeyReader) -> ModelSpec:
    """Optional tensors of layers are biases, and the norms besides the first."""
    options = read.options(read.count("block_count"))
    if {OWN_NORM[0], NEXT_NORM[0]} <= options:
        raise HotsplitError(
            f"{read.path}: attn_norm_2 and ffn_norm exclude each other; convert it again"
        )
    return decoder(
        read,
        norm="layer",
        arrange=arrangement_with(options),
        is_gated=False,
        attention={"is_fused": True},
    )


def arrangement_with(options: Collection[str]) -> Callable[..., LayerSpec]:
    """The arrangement of a layer with these norms besides its first."""
    if NEXT_NORM[0] in options:
        return Arrangement.pre_norm
    own = ("attn_norm_2",) if OWN_NORM[0] in options else ()
    return partial(Arrangement.parallel, norms=("attn_norm", *own))


def qkv_order(attention: Attention) -> np.ndarray:
    """The order of the fused rows. A checkpoint interleaves them: the queries of a key-value head,
    its key, its value, then the next head. A model file has all queries, then all keys, then all
    values (llama.cpp, conversion/falcon.py)."""
    per_group = attention.num_heads // attention.num_kv_heads + 2
    groups = np.arange(attention.qkv_size).reshape(attention.num_kv_heads, per_group, -1)
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return np.concatenate([part.reshape(-1) for part in parts])


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    order = qkv_order(spec.attentions[0])
    fused = ("attn_qkv.weight", "attn_qkv.bias")
    return Sources(
        renamed=_renamed,
        rows={name: Rows(source=name, order=order, num_rows=len(order)) for name in fused},
    )


def _renamed(known: NameOf) -> NameOf:
    """gguf's map, plus the norm of sequential blocks, which it lacks."""

    def name_of(source: str) -> str | None:
        prefix, found, part = source.partition(".post_attention_layernorm.")
        if found and prefix.startswith("transformer.h."):
            return f"blk.{prefix.removeprefix('transformer.h.')}.ffn_norm.{part}"
        return known(source)

    return name_of


def norms(read: ConfigReader) -> Mapping[str, tuple[int, ...]]:
    """The norms of a layer besides its first (transformers, FalconDecoderLayer)."""
    is_new, is_parallel = read.flag("new_decoder_architecture"), read.flag("parallel_attn")
    num_norms = read.values.get("num_ln_in_parallel_attn")
    if num_norms not in (None, 1, 2) or (num_norms == 2 and not is_new):
        raise HotsplitError(
            f"{read.path}: num_ln_in_parallel_attn is {shown(num_norms)} and"
            f" new_decoder_architecture {is_new}; transformers has no such layer; this checkpoint"
            " is not supported"
        )
    if not is_new and not is_parallel:
        return dict.fromkeys(NEXT_NORM, ())
    if not is_parallel:
        raise HotsplitError(
            f"{read.path}: new_decoder_architecture with parallel_attn false; transformers has no"
            " such layer; this checkpoint is not supported"
        )
    return dict.fromkeys(OWN_NORM, ()) if is_new and num_norms != 1 else {}


FAMILIES = (
    Family(
        classes=("FalconForCausalLM", "RWForCausalLM"),
        title="Falcon",
        graph="falcon",
        model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
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
        fields={
            "feed_forward_length": "ffn_hidden_size",
            "attention.head_count_kv": "num_kv_heads",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "hotsplit.ffn.activation": "activation",
        },
        flags={"bias": BIASES},
        activations=UNGATED,
        derived=derived,
        tensors=norms,
        sources=sources,
    ),
)
GRAPHS = (
    Architecture(
        name="falcon",
        of_keys=of_keys,
        fuses_attention=True,
        options=(*BIASES, *OWN_NORM, *NEXT_NORM),
        # llama.cpp computes the tanh form for both; transformers computes gelu exactly.
        stock_activations=("gelu", "gelu_tanh"),
        stock_options=OWN_NORM,
    ),
)
