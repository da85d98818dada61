"""Llama, and families with its graph: ReLULLaMA, ProSparse, Mistral, Bamboo.

Sparse variants differ by the activation: `relu` (ReLULLaMA), `fatrelu` with the threshold from the
config (ProSparse, arXiv 2402.13516), `drelu` (TurboSparse, arXiv 2406.05955)."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import gguf
import numpy as np

from hotsplit.families.blueprint import IGNORED, Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.experts import KEYS as EXPERT_KEYS
from hotsplit.families.experts import Experts, expert_keys, experts_of_keys, other_in_stock
from hotsplit.families.family import GATED_BIASES, PROJECTION_BIASES, Architecture, Family
from hotsplit.families.row_order import rotary_rows
from hotsplit.families.sizes import Sizes
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import Activation, ModelSpec, Rotary

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader

WINDOW = "attention.sliding_window"
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
    sizes, notes = llama_sizes(read)
    sizes, rotary, factors = read.rotary(sizes, "adjacent")
    activation = read.activation("hidden_act", activations)
    return Blueprint(
        spec=llama_spec(sizes, rotary, activation, read.biases()),
        name_of=gguf_names(gguf.MODEL_ARCH.LLAMA, sizes.num_layers),
        rope_factors=factors,
        rows=rotary_rows(sizes),
        ignored=IGNORED + ignored,
        notes=notes,
    )


def llama_sizes(read: ConfigReader, has_window: bool = True) -> tuple[Sizes, tuple[str, ...]]:
    """The sizes, from the keys that Llama's relatives share, and a note if a sliding window cuts
    the context."""
    context, notes = read.window(read.count("max_position_embeddings"), has_window)
    return whole_sizes(read, context), notes


def whole_sizes(
    read: ConfigReader, context_length: int, neurons_key: str = "intermediate_size"
) -> Sizes:
    """The sizes, from the keys that Llama's relatives share, but for the context. `neurons_key`: of the
    neurons of a layer, or of an expert if all layers have experts."""
    heads, kv_heads, head_dim = read.heads("num_attention_heads")
    return Sizes(
        num_layers=read.count("num_hidden_layers"),
        hidden_size=read.count("hidden_size"),
        num_neurons=read.count(neurons_key),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=read.count("vocab_size"),
        context_length=context_length,
        epsilon=read.positive("rms_norm_eps"),
    )


def llama_spec(
    sizes: Sizes, rotary: Rotary, activation: Activation, options: Collection[str] = (),
    *, architecture: str = "llama", has_head_norms: bool = False, experts: Experts | None = None,
    norms_all_heads: bool = False, window: int | None = None,
) -> ModelSpec:  # fmt: skip
    """RMS norms before attention and feed-forward, in layers that are all alike but for the first of
    a mixture, which may have no experts."""
    attention = sizes.attention(
        rotary, options, has_head_norms=has_head_norms, norms_all_heads=norms_all_heads,
        window=window,
    )  # fmt: skip
    arrange, neurons = sizes.arrangement(), sizes.neurons(activation, options)
    num_dense = sizes.num_layers if experts is None else experts.num_dense
    layers = [arrange.pre_norm(attention, neurons)] * num_dense
    if experts is not None:
        mixed = arrange.pre_norm(attention, experts.mixture(activation, options))
        layers += [mixed] * (sizes.num_layers - num_dense)
    return sizes.model(architecture, layers)


def of_keys(read: "KeyReader") -> ModelSpec:
    """With experts, it is a Mixtral."""
    sizes = read.sizes(is_partly_rotated=True)
    options = read.options(sizes.num_layers)
    experts = experts_of_keys(read) if read.whole("expert_count", 0) else None
    return llama_spec(
        sizes, read.rotary("adjacent", sizes.head_dim), read.activation(), options, experts=experts,
        window=read.whole(WINDOW, 0) or None,
    )  # fmt: skip


def keys(spec: ModelSpec) -> Mapping[str, Value]:
    window = spec.attentions[0].window
    own: dict[str, Value] = {} if window is None else {WINDOW: np.uint32(window)}
    return {**expert_keys(spec), **own}


def not_in_stock(spec: ModelSpec) -> str | None:
    attention = spec.attentions[0]
    if attention.num_rotated != attention.head_dim:
        return f"rotates whole heads, this model {attention.num_rotated} of {attention.head_dim} values"
    if (attention.window or spec.context_length) < spec.context_length:
        return (
            f"attends to all of a text, this model to {attention.window:,} tokens of up to"
            f" {spec.context_length:,}"
        )
    return other_in_stock(spec, renormalises=True)


# transformers' Mistral has neither of the keys for biases; `mistral` refuses them.
DEFAULTS = {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
MISTRAL_DEFAULTS = DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096}
LLAMA = Family(blueprint=llama, model_types=("llama",), defaults=DEFAULTS)
PROSPARSE = Family(blueprint=prosparse, defaults=DEFAULTS)
MISTRAL = Family(blueprint=mistral, model_types=("mistral",), defaults=MISTRAL_DEFAULTS)
BAMBOO = Family(blueprint=bamboo, defaults=MISTRAL_DEFAULTS)

OPTIONS = (*PROJECTION_BIASES, *GATED_BIASES)
GRAPH = Architecture(
    name="llama",
    of_keys=of_keys,
    keys=keys,
    known_keys=(*EXPERT_KEYS, WINDOW),
    not_in_stock=not_in_stock,
    options=OPTIONS,
    stock_activations=("silu",),
    stock_options=OPTIONS,
)
