"""Phi-3, Phi-3.5 and Phi-4-mini: a Llama with two fused matrices, one of queries, keys and values
and one of gate and up, which are split here, and with longrope in those for long contexts.

The model file is a `llama`, so everything that runs a `llama` runs this too; llama.cpp's phi3
becomes one when it is read."""

from collections.abc import Mapping

import gguf
import numpy as np

from hotsplit.families.blueprint import Rows, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import Architecture, Family, Tensors
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.families.row_order import adjacent_pairs, gate_rows
from hotsplit.families.windows import KEYS, Windows, window_keys
from hotsplit.files.gguf_file import Value, chosen_rows
from hotsplit.model.spec import ModelSpec


def keys(read: ConfigReader) -> dict[str, Value]:
    window = None if read.values.get("sliding_window") is None else read.count("sliding_window")
    length = read.count("max_position_embeddings")
    return window_keys(_windows(read.count("num_hidden_layers"), window, length))


def _windows(num_layers: int, window: int | None, length: int) -> Windows:
    return [window if (window or length) < length else None] * num_layers


def _split_rows(spec: ModelSpec) -> Mapping[str, Rows]:
    """The rows of the fused matrices in each of ours."""
    attention = spec.attentions[0]
    q, kv, rotated = attention.query_size, attention.key_size, attention.num_rotated
    orders = {
        "attn_q.weight": adjacent_pairs(q, attention.num_heads, rotated),
        "attn_k.weight": q + adjacent_pairs(kv, attention.num_kv_heads, rotated),
        "attn_v.weight": q + kv + np.arange(kv),
    }
    source, num_rows = "attn_qkv.weight", q + 2 * kv
    rows = {n: Rows(source=source, order=order, num_rows=num_rows) for n, order in orders.items()}
    return rows | gate_rows(spec.layers[0].neurons.number)


def of_keys(read: KeyReader) -> ModelSpec:
    """llama.cpp ignores the window, transformers does not."""
    length, window = read.count("context_length"), read.whole(KEYS[0], 0) or None
    windows = _windows(read.count("block_count"), window, length)
    return decoder(
        read, pairing="adjacent", is_partly_rotated=True, windows=windows, architecture="llama"
    )


def as_llama(spec: ModelSpec, keys: dict[str, Value]) -> dict[str, Value]:
    others = {key: value for key, value in keys.items() if key not in KEYS}
    return others | window_keys([attention.window for attention in spec.attentions])


def apart(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors, with fused matrices split. One of another height is refused as unknown."""
    found = dict(tensors)
    split = _split_rows(spec)
    for layer in range(spec.num_layers):
        for name, rows in split.items():
            entry = tensors.get(source := f"blk.{layer}.{rows.source}")
            if entry is None or entry.shape[0] != rows.num_rows:
                continue
            if rows.source not in split:
                found.pop(source, None)
            found[f"blk.{layer}.{name}"] = chosen_rows(entry, rows.order)
    return found


FAMILIES = (
    Family(
        classes=("Phi3ForCausalLM",),
        title="Phi-3 and 4-mini",
        graph="llama",
        names=gguf.MODEL_ARCH.PHI3,
        model_types=("phi3",),
        defaults={"tie_word_embeddings": False, "original_max_position_embeddings": 4096},
        plain={"attention_bias": False},
        rope=Rope(kinds=("default", "longrope"), share=1.0),
        keys=keys,
        sources=lambda spec, read: Sources(rows=_split_rows(spec)),
    ),
)
GRAPHS = (
    Architecture(
        name="phi3",
        of_keys=of_keys,
        fuses_attention=True,
        known_keys=KEYS[:1],
        apart=apart,
        usual_keys=as_llama,
    ),
)
