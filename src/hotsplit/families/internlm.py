"""InternLM 2 (arXiv 2403.17297), a Llama whose queries, keys and values are one matrix in
checkpoints, by groups of heads; and InternLM 3, a Llama whose config has other names of biases."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from hotsplit.families.blueprint import NameOf, Rows, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.falcon import qkv_order
from hotsplit.families.family import Architecture, Family
from hotsplit.families.llama import LLAMA, without_windows
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.families.row_order import adjacent_pairs
from hotsplit.model.spec import ModelSpec

FUSED = "attn_qkv.weight"
# The names of biases in published configs of InternLM 3, and those of Llama.
BIASES = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
KINDS = ("default", "linear", "dynamic")


def derived(read: ConfigReader) -> Mapping[str, object]:
    """transformers runs InternLM 3 as a Llama, and only if all matrices have biases or none has
    (configuration_internlm3.py); `qkv_bias` is for three of them, `bias` for the others."""
    every = read.values.get("bias", False)
    read.refuse("qkv_bias", every, why="biases of some matrices alone are not supported")
    return {own: read.values[name] for name, own in BIASES.items() if name in read.values}


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    attention = spec.attentions[0]
    order, q, kv = qkv_order(attention), attention.query_size, attention.key_size
    orders = {
        "attn_q": order[:q][adjacent_pairs(q, attention.num_heads)],
        "attn_k": order[q : q + kv][adjacent_pairs(kv, attention.num_kv_heads)],
        "attn_v": order[q + kv :],
    }
    return Sources(
        renamed=_renamed,
        rows={
            f"{name}.weight": Rows(source=FUSED, order=own, num_rows=len(order))
            for name, own in orders.items()
        },
    )


def _renamed(known: NameOf) -> NameOf:
    """gguf's map, and the fused matrix, which llama.cpp's converter divides."""

    def name_of(source: str) -> str | None:
        prefix, is_fused, _ = source.partition(".attention.wqkv.")
        if is_fused:
            return f"blk.{prefix.removeprefix('model.layers.')}.{FUSED}"
        return known(source)

    return name_of


FAMILIES = (
    Family(
        classes=("InternLM2ForCausalLM",),
        title="InternLM 2",
        graph="internlm2",
        model_types=(),  # transformers has no such class
        defaults={"tie_word_embeddings": False, "hidden_act": "silu"},
        plain={"bias": False},
        rope=Rope(kinds=KINDS),
        keys=without_windows,
        sources=sources,
    ),
    replace(
        LLAMA,
        classes=("InternLM3ForCausalLM",),
        title="InternLM 3",
        model_types=("internlm3",),
        defaults={**LLAMA.defaults, "num_key_value_heads": 2, "head_dim": 128},
        rope=Rope(kinds=KINDS),
        derived=derived,
    ),
)
GRAPHS = (Architecture(name="internlm2", of_keys=partial(decoder, pairing="adjacent")),)
