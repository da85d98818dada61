"""Layers at a model's end that read the keys and values of earlier ones."""

from collections.abc import Sequence

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.family import Tensors
from hotsplit.families.key_reader import KeyReader
from hotsplit.files.gguf_file import Value
from hotsplit.model.attention import KEY_NORM
from hotsplit.model.spec import ModelSpec

SHARED = "attention.shared_kv_layers"
_SUFFIXES = tuple(f".{name}.weight" for name in ("k_proj", "v_proj", "k_norm"))
_NAMES = tuple(f"{name}.weight" for name in ("attn_k", "attn_v", KEY_NORM))
Readers = Sequence[int | None]  # of each layer: that whose keys and values it reads; None: its own


def shared_keys(read: ConfigReader, is_local_L: Sequence[bool]) -> dict[str, Value]:
    """The key that `sources_of_keys` reads."""
    key = "num_kv_shared_layers"
    count = read.whole(key)
    sources(f"{read.path}: {key}", is_local_L, count)
    return {SHARED: np.uint32(count)}


def sources_of_keys(read: KeyReader, is_local_L: Sequence[bool]) -> Readers:
    return sources(f"{read.path}: {SHARED}", is_local_L, read.whole(SHARED, 0))


def reading(source: int | None) -> dict[str, int]:
    """The attention of a layer that reads the keys and values of this one, if any."""
    return {} if source is None else {"source": source, "num_kv_projections": 0}


def unused_sources(spec: ModelSpec) -> tuple[str, ...]:
    """The ends of the names of what published checkpoints have of layers that read other layers'
    keys and values, though nothing reads it."""
    layers = _sharing(spec)
    return tuple(f".layers.{layer}.self_attn{name}" for layer in layers for name in _SUFFIXES)


def without_unused(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors of a model file without what nothing reads."""
    unused = {f"blk.{layer}.{name}" for layer in _sharing(spec) for name in _NAMES}
    return {name: entry for name, entry in tensors.items() if name not in unused}


def with_unused(spec: ModelSpec, tensors: Tensors) -> Tensors:
    """The tensors with those of read layers, which llama.cpp loads and does not use."""
    found = dict(tensors)
    for layer, source in _sharing(spec).items():
        found |= {f"blk.{layer}.{name}": tensors[f"blk.{source}.{name}"] for name in _NAMES}
    return found


def _sharing(spec: ModelSpec) -> dict[int, int]:
    """The layer whose keys and values each layer without its own reads."""
    sources = enumerate(attention.source for attention in spec.attentions)
    return {layer: source for layer, source in sources if source is not None}


def sources(key: str, is_local_L: Sequence[bool], num_shared: int) -> Readers:
    """The last layer of its kind, with a window or without, that has keys and values of its own,
    for each of the last `num_shared` layers. Raises HotsplitError, which begins with the file and
    its `key`, if there is none."""
    num_own = len(is_local_L) - num_shared
    last = {is_local: layer for layer, is_local in enumerate(is_local_L[: max(0, num_own)])}
    if not {*is_local_L} <= {*last}:
        raise HotsplitError(
            f"{key} is {num_shared}: the last {num_shared} of {len(is_local_L)} layers read the"
            " keys and values of earlier ones, but of those with a window or of those without, none"
            " is before them"
        )
    return [None if layer < num_own else last[kind] for layer, kind in enumerate(is_local_L)]
