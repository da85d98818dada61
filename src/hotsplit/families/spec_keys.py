"""The keys of a model file's header that state a spec, as llama.cpp spells them."""

from collections.abc import Iterable

import numpy as np

from hotsplit.families.key_reader import NORM_EPSILON
from hotsplit.families.pooling_key import POOLING
from hotsplit.families.rope_scalings import scaling_keys
from hotsplit.families.table import ARCHITECTURES
from hotsplit.files.gguf_file import Value
from hotsplit.model.spec import ModelSpec


def spec_keys(spec: ModelSpec) -> dict[str, Value]:
    """The keys from which the architecture makes this spec again.

    Raises HotsplitError if it does not write all that differs between layers."""
    attentions = spec.attentions
    norm = next(norm for layer in spec.layers for norm in layer.norms.values())
    keys: dict[str, Value] = {
        "block_count": np.uint32(spec.num_layers),
        "context_length": np.uint32(spec.context_length),
        "embedding_length": np.uint32(spec.hidden_size),
        "feed_forward_length": _neurons(spec),
        "attention.head_count": np.uint32(_same(a.num_heads for a in attentions)),
        "attention.head_count_kv": _by_layer(a.num_kv_heads for a in attentions),
        "attention.key_length": _by_layer(a.head_dim for a in attentions),
        "attention.value_length": _by_layer(a.head_dim for a in attentions),
        NORM_EPSILON[norm.kind]: np.float32(norm.epsilon),
        "vocab_size": np.uint32(spec.vocab_size),
    }
    rotary = spec.rotary
    if rotary is not None:
        rotated = _by_layer(a.num_rotated for a in attentions if a.rotary is not None)
        keys["rope.dimension_count"] = rotated
        keys["rope.freq_base"] = np.float32(rotary.theta)
        keys |= scaling_keys(rotary.scaling)
    graph = ARCHITECTURES[spec.architecture]
    keys |= graph.keys(spec)
    if spec.pooling is not None:
        (number,) = (n for n, name in POOLING.items() if name == spec.pooling)
        keys["pooling_type"] = np.uint32(number)
    own: dict[str, Value] = {} if spec.output_norm else {"hotsplit.is_post_norm": True}
    return {f"{graph.name}.{key}": value for key, value in keys.items()} | own


def _neurons(spec: ModelSpec) -> Value:
    """Neurons of a layer, or of each; if some layers have experts and some do not of one that has none,
    and if all have them of an expert."""
    dense = [layer.neurons.number for layer in spec.layers if layer.route is None]
    if not spec.has_experts:
        return _by_layer(dense)
    return np.uint32(_same(dense or (layer.neurons.of_expert for layer in spec.layers)))


def _same(values: Iterable[int]) -> int:
    """The number that all layers share."""
    (value,) = set(values)
    return value


def _by_layer(values: Iterable[int]) -> Value:
    """The number that all layers share, or a list with each layer's."""
    found = list(values)
    return np.uint32(found[0]) if len(set(found)) == 1 else found
