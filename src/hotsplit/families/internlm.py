"""InternLM 2 (arXiv 2403.17297): a Llama whose queries, keys and values are one matrix in
checkpoints, by groups of heads."""

from functools import partial

from hotsplit.families.blueprint import NameOf, Rows, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.falcon import qkv_order
from hotsplit.families.family import Architecture, Family
from hotsplit.families.llama import without_windows
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.rope_scalings import Rope
from hotsplit.families.row_order import adjacent_pairs
from hotsplit.model.spec import ModelSpec

FUSED = "attn_qkv.weight"


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
        rope=Rope(kinds=("default", "linear", "dynamic")),
        keys=without_windows,
        sources=sources,
    ),
)
GRAPHS = (Architecture(name="internlm2", of_keys=partial(decoder, pairing="adjacent")),)
