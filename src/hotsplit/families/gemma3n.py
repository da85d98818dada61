"""Gemma 3n: a Gemma whose hidden state has several planes (AltUp), with a product of low rank
beside attention (LAuReL), an input of its own in each layer, and in its first layers gates that are
cut off by their mean and deviation, so that one neuron in twenty fires."""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import IGNORED, NameOf, Sources
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.decoder_sizes import Sizes, by_layer
from hotsplit.families.family import Architecture, Family, Tensors
from hotsplit.families.key_reader import KeyReader
from hotsplit.families.layer_inputs import INPUTS, input_keys, layer_inputs, rows_of_first
from hotsplit.families.rope_scalings import THETA, Rope, local_theta_key
from hotsplit.families.row_order import matrices_apart, matrices_joined
from hotsplit.families.shared_keys import (
    SHARED,
    reading,
    shared_keys,
    sources_of_keys,
    unused_sources,
    with_unused,
    without_unused,
)
from hotsplit.families.soft_caps import LOGIT_CAP, cap_key, cap_of_keys
from hotsplit.families.windows import KEYS, local_window_keys, windows_of_keys
from hotsplit.files.gguf_file import Value
from hotsplit.files.typed import shown
from hotsplit.model import planes
from hotsplit.model.low_rank import LEFT, LowRank
from hotsplit.model.per_layer import LayerInputs, PerLayer
from hotsplit.model.spec import Add, Attention, LayerSpec, ModelSpec, Neurons, Rotary

PERIOD, LOCAL_THETA = 5, 1e4  # the first is of the layers without a window
WIDTHS = "widths of layers"  # what intermediate_size was, a list perhaps
CUTOFFS, PATTERN = "activation_sparsity_scale", "activation_sparsity_pattern"
SPARSE_LAYERS, SPARSITY = 10, 0.95  # of a config without a pattern that has more layers than that
# llama.cpp's cutoff and the layers that have it, whatever the file says (src/models/models.h), and
# the layers that have keys and values of their own.
STOCK_NUMBERS = 4, 64, 256  # planes, rank beside attention, values of a layer's input
STOCK_CUTOFF, STOCK_OWN_LAYERS = 1.6448533535003662, 20
_OUTER = {"model.altup_projections.": planes.BEGIN, "model.altup_unembed_projections.": planes.END}


def keys(read: ConfigReader) -> dict[str, Value]:
    num_planes, num_layers = read.count("altup_num_inputs"), read.count("num_hidden_layers")
    if not 2 <= num_planes <= planes.MOST_PLANES:
        raise HotsplitError(
            f"{read.path}: altup_num_inputs is {num_planes}, wanted 2 to {planes.MOST_PLANES}"
        )
    windows, widths = local_window_keys(read, PERIOD), _widths(read)
    # So many deviations above the mean are a share of normally distributed gates.
    found = read.values.get(PATTERN)
    if found is None:
        count = SPARSE_LAYERS if num_layers > SPARSE_LAYERS else 0
        found = [SPARSITY] * count + [0.0] * (num_layers - count)
    is_share = isinstance(found, list) and all(
        isinstance(share, int | float) and 0 <= share < 1 for share in found
    )
    if not isinstance(found, list) or not is_share or len(found) != num_layers:
        raise HotsplitError(
            f"{read.path}: {PATTERN} is {shown(found)}, wanted {num_layers} shares below 1"
        )
    cutoffs = [NormalDist().inv_cdf(share) if share else None for share in found]
    return {
        "feed_forward_length": by_layer(widths),
        **windows,
        **local_theta_key(read, LOCAL_THETA, "rope_local_base_freq"),
        **cap_key(read, LOGIT_CAP),
        "altup.active_idx": np.uint32(0),
        "altup.num_inputs": np.uint32(num_planes),
        **shared_keys(read, read.layers_with_window(PERIOD)),
        **input_keys(read),
        CUTOFFS: [-math.inf if cutoff is None else cutoff for cutoff in cutoffs],
    }


def derived(read: ConfigReader) -> dict[str, object]:
    return {"intermediate_size": max(_widths(read)), WIDTHS: read.values.get("intermediate_size")}


def _widths(read: ConfigReader) -> list[int]:
    key, num_layers = "intermediate_size", read.count("num_hidden_layers")
    found = read.values.get(WIDTHS, read.values.get(key))
    if not isinstance(found, list):
        return [read.count(key)] * num_layers
    if len(found) != num_layers:
        raise HotsplitError(
            f"{read.path}: {key} is {shown(found)}, wanted a number or {num_layers} of them"
        )
    return [ConfigReader(read.path, {key: width}).count(key) for width in found]


def _names(name_of: NameOf) -> NameOf:
    """The names; llama.cpp's map lacks those of one plane each, and a suffix of the scale."""

    def name(source: str) -> str | None:
        for prefix, outer in _OUTER.items():
            if source.startswith(prefix):
                return f"{outer}.{source.removeprefix(prefix)}"
        found = name_of(source)
        return f"{found}.weight" if found and found.endswith(planes.SCALE) else found

    return name


def sources(spec: ModelSpec, read: ConfigReader) -> Sources:
    return Sources(
        renamed=_names,
        rows=rows_of_first(read, spec.vocab_size),
        ignored=(*IGNORED, *unused_sources(spec)),
    )


def of_keys(read: KeyReader) -> ModelSpec:
    if read.whole("altup.active_idx", 0):
        raise HotsplitError(
            f"{read.path}: altup.active_idx is not 0: the active plane is the first here"
        )
    num_layers, name, activation = read.count("block_count"), read.graph.name, read.activation()
    whole, theta = read.rotary("halves"), read.positive(f"{name}.{THETA}_swa", LOCAL_THETA)
    local = Rotary(theta=theta, pairing="halves")
    num_planes = min(read.count("altup.num_inputs", 4), planes.MOST_PLANES)
    left = read.tensors.get(f"blk.0.{LEFT}.weight")
    low_rank = LowRank(rank=64 if left is None else left.shape[0])
    own = PerLayer(size=read.count(INPUTS), activation=activation, reads="active")
    windows = windows_of_keys(read, num_layers, period=PERIOD, window=None)
    source_L = sources_of_keys(read, [window is not None for window in windows])
    layers = []
    for index, cutoff in enumerate(_cutoffs_of_keys(read, num_layers)):
        sizes, window = read.of_layer(index, num_layers, {}).sizes(), windows[index]
        rotary = whole if window is None else local
        attention = sizes.attention(rotary, window=window, has_head_norms=True)
        neurons = replace(sizes.neurons(activation), cutoff=cutoff)
        layer = _layer(sizes, attention, neurons, num_planes, low_rank, own)
        layers.append(
            layer.with_attention(scale=1.0, norms_values=True, **reading(source_L[index]))
        )
    spec = sizes.model(name, layers)
    inputs = layer_inputs(spec, own.size, sizes.epsilon, reads="active")
    return replace(
        spec,
        embedding_scale=math.sqrt(sizes.hidden_size),
        logit_cap=cap_of_keys(read, LOGIT_CAP),
        first=(inputs, planes.BeginPlanes(num_planes=num_planes)),
        last=(planes.EndPlanes(num_planes=num_planes),),
    )


def _layer(
    sizes: Sizes,
    attention: Attention,
    neurons: Neurons,
    num_planes: int,
    low_rank: LowRank,
    own: PerLayer,
) -> LayerSpec:
    """Norms before and after each block on the active one of several planes, with a product of low
    rank beside attention; what the layer's own input adds goes to the other planes."""
    norm, out, added = sizes.arrangement().make_norm, low_rank.writes, own.writes
    router_norm = norm(f"{planes.ROUTER}_norm", "active", "active")
    return LayerSpec(
        blocks=(
            planes.PredictPlanes(num_planes=num_planes, norm=router_norm),
            norm("attn_norm", "active", "attn_in"),
            low_rank,
            norm("laurel_post_norm", out, out),
            Add(terms=("attn_in", out), writes=out),
            attention,
            norm("post_attention_norm", "attn_out", "attn_out"),
            Add(terms=("active", "attn_out", out), writes="active", times=math.sqrt(0.5)),
            norm("ffn_norm", "active", "ffn_in"),
            neurons,
            norm("post_ffw_norm", "ffn_out", "ffn_out"),
            Add(terms=("active", "ffn_out"), writes="active"),
            planes.CorrectPlanes(num_planes=num_planes),
            own,
            norm("post_norm", added, added),
            planes.AddToPlanes(num_planes=num_planes, reads=added),
        )
    )


def _cutoffs_of_keys(read: KeyReader, num_layers: int) -> list[float | None]:
    """The cutoffs; without the key those that llama.cpp's graph has."""
    key = f"{read.graph.name}.{CUTOFFS}"
    if key not in read.keys:
        return [STOCK_CUTOFF if layer < SPARSE_LAYERS else None for layer in range(num_layers)]
    found = read.floats(key, num_layers)
    if max(found) == math.inf:
        raise HotsplitError(f"{read.path}: key {key!r} has infinity: no neuron would fire")
    return [None if cutoff == -math.inf else cutoff for cutoff in found]


def not_in_stock(spec: ModelSpec) -> str | None:
    """What llama.cpp's graph has no key for."""
    is_cut_L = [layer.neurons.cutoff is not None for layer in spec.layers]
    inputs, begin = spec.first
    assert isinstance(inputs, LayerInputs) and isinstance(begin, planes.BeginPlanes)
    ranks = {b.rank for layer in spec.layers for b in layer.blocks if isinstance(b, LowRank)}
    numbers = begin.num_planes, max(ranks), inputs.size
    if numbers != STOCK_NUMBERS:
        return f"has {_words(STOCK_NUMBERS)}, this model {_words(numbers)}"
    num_own = sum(attention.source is None for attention in spec.attentions)
    if num_own != min(spec.num_layers, STOCK_OWN_LAYERS):
        return (
            f"has keys and values in the first {STOCK_OWN_LAYERS} layers, this model in {num_own}"
        )
    if is_cut_L != [layer < SPARSE_LAYERS for layer in range(spec.num_layers)]:
        return f"cuts gates off in the first {SPARSE_LAYERS} layers, this model in others"
    if any(abs(x.neurons.cutoff - STOCK_CUTOFF) > 1e-5 for x in spec.layers if x.neurons.cutoff):
        return (
            f"cuts gates off {STOCK_CUTOFF:.4f} deviations above their mean, this model elsewhere"
        )
    return None


def _words(numbers: tuple[int, int, int]) -> str:
    num_planes, rank, inputs = numbers
    return f"{num_planes} planes, a product of rank {rank} and layers' inputs of {inputs} values"


def apart(spec: ModelSpec, tensors: Tensors) -> Tensors:
    return without_unused(spec, matrices_apart(tensors, (planes.BEGIN, planes.END)))


def joined(spec: ModelSpec, tensors: Tensors) -> Tensors:
    return with_unused(spec, matrices_joined(tensors, (planes.BEGIN, planes.END)))


GEMMA3N = Family(
    classes=("Gemma3nForCausalLM",),
    title="Gemma 3n",
    graph="gemma3n",
    model_types=("gemma3n_text",),
    read_keys=(LOGIT_CAP,),
    fields={"hotsplit.ffn.activation": "hidden_activation"},
    plain={
        "use_bidirectional_attention": False,
        "attention_bias": False,
        "altup_active_idx": 0,  # the active plane is the first here
        "altup_correct_scale": True,  # the corrected plane is always scaled here
    },
    rope=Rope(kinds=("default", "linear"), theta=1e6, layers="full_attention"),
    derived=derived,
    keys=keys,
    tensors=lambda read: {f"{LEFT}.weight": (read.count("laurel_rank"),)},
    sources=sources,
    defaults={
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attention_bias": False,
        "sliding_window": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        LOGIT_CAP: 30.0,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 15,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": 64,
    },
)
FAMILIES = (GEMMA3N, GEMMA3N.with_images("Gemma3nForConditionalGeneration", "gemma3n"))
GRAPHS = (
    Architecture(
        name="gemma3n",
        of_keys=of_keys,
        known_keys=(
            LOGIT_CAP,
            CUTOFFS,
            INPUTS,
            SHARED,
            "altup.active_idx",
            "altup.num_inputs",
            *KEYS,
            "rope.freq_base_swa",
        ),
        stock_activations=("gelu_tanh",),
        not_in_stock=not_in_stock,
        apart=apart,
        joined=joined,
    ),
)
