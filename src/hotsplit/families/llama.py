"""Llama, and families with its graph: ReLULLaMA, ProSparse.

Sparse variants differ by the activation: `relu` (ReLULLaMA), `fatrelu` with the threshold from the
config (ProSparse, arXiv 2402.13516)."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import gguf

from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import GATED, ConfigReader
from hotsplit.families.experts import KEYS as EXPERT_KEYS
from hotsplit.families.experts import Experts, expert_keys, experts_of_keys, other_in_stock
from hotsplit.families.family import GATED_BIASES, PROJECTION_BIASES, Architecture, Family
from hotsplit.families.row_order import rotary_rows
from hotsplit.families.sizes import Sizes
from hotsplit.families.windows import KEYS as WINDOW_KEYS
from hotsplit.families.windows import Windows, no_windows_in_stock, window_keys, windows_of_keys
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import Activation, ModelSpec, Rotary

if TYPE_CHECKING:
    from hotsplit.families.key_reader import KeyReader


def llama(read: ConfigReader) -> Blueprint:
    """LlamaForCausalLM."""
    return _llama(read, GATED)


def prosparse(read: ConfigReader) -> Blueprint:
    """ProSparse's SparseLlamaForCausalLM. Others use the name for other graphs and activations."""
    return _llama(read, {"fatrelu": "fatrelu"})


def _llama(read: ConfigReader, activations: Mapping[str, str]) -> Blueprint:
    sizes = llama_sizes(read)
    sizes, rotary, factors = read.rotary(sizes, "adjacent")
    activation = read.activation("hidden_act", activations)
    return Blueprint(
        spec=llama_spec(sizes, rotary, activation, read.biases()),
        name_of=gguf_names(gguf.MODEL_ARCH.LLAMA, sizes.num_layers),
        rope_factors=factors,
        rows=rotary_rows(sizes),
    )


def llama_sizes(read: ConfigReader) -> Sizes:
    """The sizes of a model without windows, from the keys that Llama's relatives share."""
    read.check_layer_types("full")
    return whole_sizes(read, read.count("max_position_embeddings"))


def whole_sizes(
    read: ConfigReader,
    context_length: int,
    neurons_key: str = "intermediate_size",
    epsilon_key: str = "rms_norm_eps",
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
        epsilon=read.positive(epsilon_key),
    )


def llama_spec(
    sizes: Sizes,
    rotary: Rotary,
    activation: Activation,
    options: Collection[str] = (),
    *,
    architecture: str = "llama",
    has_head_norms: bool = False,
    experts: Experts | None = None,
    norms_all_heads: bool = False,
    is_gated: bool = True,
    windows: Windows = (),
) -> ModelSpec:
    """RMS norms before attention and feed-forward, in layers that are all alike but for their windows
    and the first of a mixture, which may have no experts."""
    neurons = sizes.neurons(activation, options, is_gated=is_gated)
    mixture = None if experts is None else experts.mixture(activation, options)
    num_dense = sizes.num_layers if experts is None else experts.num_dense
    layers = [
        sizes.arrangement().pre_norm(
            sizes.attention(
                rotary,
                options,
                window=window,
                has_head_norms=has_head_norms,
                norms_all_heads=norms_all_heads,
            ),
            neurons if mixture is None or index < num_dense else mixture,
        )
        for index, window in enumerate(windows or [None] * sizes.num_layers)
    ]
    return sizes.model(architecture, layers)


def of_keys(read: "KeyReader") -> ModelSpec:
    """With experts, it is a Mixtral."""
    sizes = read.sizes(is_partly_rotated=True)
    options = read.options(sizes.num_layers)
    experts = experts_of_keys(read) if read.whole("expert_count", 0) else None
    return llama_spec(
        sizes,
        read.rotary("adjacent", sizes.head_dim),
        read.activation(),
        options,
        experts=experts,
        windows=windows_of_keys(read, sizes.num_layers),
    )


def keys(spec: ModelSpec) -> Mapping[str, Value]:
    return {**expert_keys(spec), **window_keys(spec)}


def not_in_stock(spec: ModelSpec) -> str | None:
    attention = spec.attentions[0]
    if attention.num_rotated != attention.head_dim:
        return f"rotates whole heads, this model {attention.num_rotated} of {attention.head_dim} values"
    return no_windows_in_stock(spec) or other_in_stock(spec, renormalises=True)


DEFAULTS = {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
LLAMA = Family(title="Llama", blueprint=llama, model_types=("llama",), defaults=DEFAULTS)
PROSPARSE = Family(title="ProSparse", blueprint=prosparse, defaults=DEFAULTS)

OPTIONS = (*PROJECTION_BIASES, *GATED_BIASES)
GRAPH = Architecture(
    name="llama",
    of_keys=of_keys,
    keys=keys,
    known_keys=(*EXPERT_KEYS, *WINDOW_KEYS),
    not_in_stock=not_in_stock,
    options=OPTIONS,
    stock_activations=("silu",),
    stock_options=OPTIONS,
)
