"""Llama, and families with its graph: ReLULLaMA, ProSparse.

Sparse variants differ by the activation: `relu` (ReLULLaMA), `fatrelu` with the threshold from the
config (ProSparse, arXiv 2402.13516)."""

from dataclasses import replace

from hotsplit.families.blueprint import Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.expert_keys import KEYS as EXPERT_KEYS
from hotsplit.families.expert_keys import experts_of_keys, other_in_stock
from hotsplit.families.family import ATTN_BIASES, GATED_BIASES, Architecture, Family
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.plain_decoder import decoder
from hotsplit.families.row_order import rotary_rows
from hotsplit.families.windows import KEYS as WINDOW_KEYS
from hotsplit.families.windows import no_windows_in_stock
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import ModelSpec

BIASES = {"attention_bias": ATTN_BIASES, "mlp_bias": GATED_BIASES}
OPTIONS = (*ATTN_BIASES, *GATED_BIASES)


def adjacent(spec: ModelSpec, read: ConfigReader) -> Sources:
    """The sources of a checkpoint with rotary pairs half a head apart, for one with neighbours."""
    return Sources(rows=rotary_rows(spec))


def without_windows(read: ConfigReader) -> dict[str, Value]:
    read.check_layer_types("full")
    return {}


def of_keys(read: KeyReader) -> ModelSpec:
    """With experts, it is a Mixtral."""
    experts = experts_of_keys(read) if read.whole("expert_count", 0) else None
    return decoder(read, pairing="adjacent", is_partly_rotated=True, experts=experts)


def not_in_stock(spec: ModelSpec) -> str | None:
    attention = spec.attentions[0]
    if attention.num_rotated != attention.head_dim:
        return (
            f"rotates whole heads, this model {attention.num_rotated} of {attention.head_dim}"
            " values"
        )
    return no_windows_in_stock(spec) or other_in_stock(spec, renormalises=True)


LLAMA = Family(
    classes=("LlamaForCausalLM",),
    title="Llama",
    graph="llama",
    defaults={"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    flags=BIASES,
    keys=without_windows,
    sources=adjacent,
)
# Others use the name of its class for other graphs and activations.
PROSPARSE = replace(
    LLAMA,
    classes=("SparseLlamaForCausalLM",),
    title="ProSparse",
    model_types=(),
    activations={"fatrelu": "fatrelu"},
)
FAMILIES = (LLAMA, PROSPARSE)
GRAPHS = (
    Architecture(
        name="llama",
        of_keys=of_keys,
        known_keys=(*EXPERT_KEYS, *WINDOW_KEYS),
        not_in_stock=not_in_stock,
        options=OPTIONS,
        stock_options=OPTIONS,
    ),
)
