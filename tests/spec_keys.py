"""The keys of a GGUF from which an architecture makes a spec again, for the specs that tests save:
the inverse of `Architecture.of_keys`."""

from collections.abc import Iterable
from typing import cast

import numpy as np

from hotsplit.families.expert_keys import GATINGS
from hotsplit.families.key_reader import NORM_EPSILON
from hotsplit.families.latent_keys import EPSILON_KEY
from hotsplit.files.gguf_file import Value
from hotsplit.model.blocks import Norm
from hotsplit.model.delta_net import DeltaNet, KimiDelta
from hotsplit.model.mamba2 import Mamba2
from hotsplit.model.ngrams import NgramInputs, NgramRows
from hotsplit.model.rope import RopeScaling
from hotsplit.model.short_conv import ShortConv
from hotsplit.model.spec import ModelSpec
from hotsplit.model.streams import BeginStreams, StreamsToHead


def spec_keys(spec: ModelSpec) -> dict[str, Value]:
    """The keys, without the architecture's prefix; a number that differs between layers is a
    list."""
    attentions = spec.attentions
    of_streams = (block for block in spec.last if isinstance(block, StreamsToHead))
    norms = (norm for layer in spec.layers for norm in layer.norms.values())
    norm = next(of_streams, None) or next(norms)
    kind = norm.kind if isinstance(norm, Norm) else "rms"
    dense = [x.neurons.number for x in spec.layers if x.route is None]
    keys: dict[str, Value] = {
        "block_count": np.uint32(spec.num_layers),
        "context_length": np.uint32(spec.context_length),
        "embedding_length": np.uint32(spec.hidden_size),
        "feed_forward_length": _each(dense or (x.neurons.of_expert for x in spec.layers)),
        "attention.head_count": _each(a.num_heads for a in attentions),
        "attention.head_count_kv": _each(a.num_kv_heads for a in attentions),
        "attention.key_length": _each(a.head_dim for a in attentions),
        "attention.value_length": _each(a.value_width or a.head_dim for a in attentions),
        NORM_EPSILON[kind]: np.float32(norm.epsilon),
        "vocab_size": np.uint32(spec.vocab_size),
    }
    if spec.rotary is not None:
        rotated = _each(a.num_rotated for a in attentions if a.rotary is not None)
        keys |= {"rope.dimension_count": rotated, "rope.freq_base": np.float32(spec.rotary.theta)}
        keys |= _scaling_keys(spec.rotary.scaling)
    keys |= _expert_keys(spec) | _delta_keys(spec) | _conv_keys(spec) | _mamba_keys(spec)
    keys |= _latent_keys(spec) | _stream_keys(spec)
    windows = [a.window for a in attentions]
    if any(windows):
        keys["attention.sliding_window"] = np.uint32(next(filter(None, windows)))
        keys["attention.sliding_window_pattern"] = [window is not None for window in windows]
    return keys if spec.output_norm or spec.last else keys | {"hotsplit.is_post_norm": True}


def _expert_keys(spec: ModelSpec) -> dict[str, Value]:
    layer = spec.layers[-1]
    if (route := layer.route) is None:
        return {}
    keys: dict[str, Value] = {
        "expert_count": np.uint32(route.num_experts),
        "expert_used_count": np.uint32(route.num_used),
        "expert_feed_forward_length": np.uint32(layer.neurons.of_expert),
        "expert_gating_func": np.uint32(next(n for n, g in GATINGS.items() if g == route.gating)),
        "expert_weights_norm": route.renormalises,
        "expert_weights_scale": np.float32(route.scale),
        "leading_dense_block_count": np.uint32(sum(x.route is None for x in spec.layers)),
        "expert_group_count": np.uint32(route.num_groups),
        "expert_group_used_count": np.uint32(route.num_used_groups),
    }
    if layer.shared is not None:
        keys["expert_shared_feed_forward_length"] = np.uint32(layer.shared.number)
    return keys


def _delta_keys(spec: ModelSpec) -> dict[str, Value]:
    mixers = (layer.recurrent for layer in spec.layers)
    delta = next((block for block in mixers if isinstance(block, DeltaNet)), None)
    if delta is None:
        return {}
    if isinstance(delta, KimiDelta):
        return {
            "attention.head_count_kv": _key_heads(spec),
            "kda.head_dim": np.uint32(delta.key_head_dim),
            "ssm.conv_kernel": np.uint32(delta.num_taps),
        }
    return {
        "attention.recurrent_layers": [layer.recurrent is not None for layer in spec.layers],
        "ssm.conv_kernel": np.uint32(delta.num_taps),
        "ssm.state_size": np.uint32(delta.key_head_dim),
        "ssm.group_count": np.uint32(delta.num_key_heads),
        "ssm.time_step_rank": np.uint32(delta.num_value_heads),
        "ssm.inner_size": np.uint32(delta.value_size),
    }


def _conv_keys(spec: ModelSpec) -> dict[str, Value]:
    mixers = (layer.recurrent for layer in spec.layers)
    conv = next((block for block in mixers if isinstance(block, ShortConv)), None)
    if conv is None:
        return {}
    return {
        "attention.head_count_kv": _key_heads(spec),
        "shortconv.l_cache": np.uint32(conv.num_taps),
    }


def _mamba_keys(spec: ModelSpec) -> dict[str, Value]:
    mixers = (layer.recurrent for layer in spec.layers)
    mamba = next((block for block in mixers if isinstance(block, Mamba2)), None)
    if mamba is None:
        return {}
    return {
        "attention.head_count_kv": _key_heads(spec),
        "ssm.conv_kernel": np.uint32(mamba.num_taps),
        "ssm.state_size": np.uint32(mamba.state_size),
        "ssm.group_count": np.uint32(mamba.num_groups),
        "ssm.time_step_rank": np.uint32(mamba.num_heads),
        "ssm.inner_size": np.uint32(mamba.query_size),
    }


def _stream_keys(spec: ModelSpec) -> dict[str, Value]:
    """Those of streams, n-grams and the indexer."""
    indexer = spec.attentions[0].indexer
    if indexer is None:
        return {}
    rows, begin = spec.first
    assert isinstance(rows, NgramRows) and isinstance(begin, BeginStreams)
    (end,) = spec.last
    assert isinstance(end, StreamsToHead)
    own = [any(isinstance(b, NgramInputs) for b in layer.blocks) for layer in spec.layers]
    inputs = spec.layers[own.index(True)].stateful[0]
    assert isinstance(inputs, NgramInputs)
    return {
        "hyper_connection.count": np.uint32(begin.num_streams),
        "hyper_connection.low_rank": np.uint32(end.rank),
        "attention.indexer.head_count": np.uint32(indexer.num_heads),
        "attention.indexer.key_length": np.uint32(indexer.head_dim),
        "attention.indexer.top_k": np.uint32(indexer.budget),
        "attention.compress_ratios": [
            0 if layer.attention is None else indexer.ratio for layer in spec.layers
        ],
        "ple.layers": [own.index(True)],
        "ple.ngram_size": np.uint32(rows.length),
        "ple.heads_per_ngram": np.uint32(rows.per_length),
        "ple.conv_kernel": np.uint32(inputs.num_taps),
        "ple.eos_token_id": np.uint32(rows.end_token),
        "ple.layer_multipliers": list(rows.multipliers),
        "ple.head_offsets": list(rows.offsets),
        "ple.head_vocab_sizes": list(rows.sizes),
        "embedding_length_per_layer_input": np.uint32(rows.width),
    }


def _key_heads(spec: ModelSpec) -> Value:
    heads = [layer.attention.num_kv_heads if layer.attention else 0 for layer in spec.layers]
    return cast(Value, heads)


def _latent_keys(spec: ModelSpec) -> dict[str, Value]:
    own = next((a.latent for a in spec.attentions if a.latent is not None), None)
    if own is None:
        return {}
    keys: dict[str, Value] = {
        "attention.kv_lora_rank": np.uint32(own.size),
        "rope.dimension_count": np.uint32(own.num_rotated),
        "attention.key_length_mla": np.uint32(own.of_query),
        "attention.value_length_mla": np.uint32(own.value_size),
        EPSILON_KEY: np.float32(own.epsilon),
    }
    if own.query_rank is not None:
        keys["attention.q_lora_rank"] = np.uint32(own.query_rank)
    return keys


def _scaling_keys(scaling: RopeScaling) -> dict[str, Value]:
    """The keys that `scaling_of_keys` reads, without YaRN's constants at their default."""
    if scaling.kind == "none":
        return {}
    original: dict[str, Value] = {"original_context_length": np.uint32(scaling.original_length)}
    keys: dict[str, Value] = {"type": scaling.kind}
    if scaling.kind == "longrope":
        keys |= original | {"attn_factor": np.float32(scaling.attn_factor)}
    else:
        keys["factor"] = np.float32(scaling.factor)
    if scaling.kind == "yarn":
        constants = {
            "attn_factor": (scaling.attn_factor, 1.0),
            "yarn_beta_fast": (scaling.beta_fast, 32.0),
            "yarn_beta_slow": (scaling.beta_slow, 1.0),
        }
        keys |= original
        keys |= {n: np.float32(own) for n, (own, plain) in constants.items() if own != plain}
    return {f"rope.scaling.{name}": value for name, value in keys.items()}


def _each(values: Iterable[int]) -> Value:
    found = list(values)
    return np.uint32(found[0]) if len(set(found)) == 1 else cast(Value, found)
