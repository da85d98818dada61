"""Makes a blueprint from a checkpoint's config: the table of its family turns the config into the
keys of a GGUF, and these become the spec, as those of any GGUF do."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.blueprint import Blueprint, gguf_names
from hotsplit.families.config_reader import ConfigReader
from hotsplit.families.draft_names import has_draft_block, with_draft_names
from hotsplit.families.family import FIELDS, Family
from hotsplit.families.key_reader import DRAFT_LAYERS, KeyReader, prefixed
from hotsplit.families.rope_scalings import rope_keys
from hotsplit.families.table import ARCHITECTURES, FAMILIES
from hotsplit.families.text_models import text_model
from hotsplit.files.gguf_file import TensorEntry, Value
from hotsplit.files.typed import shown
from hotsplit.model.draft_block import JOIN
from hotsplit.model.ngrams import TABLE
from hotsplit.model.tensors import HEAD_BIAS
from hotsplit.model.unsupported import CONFIG_KEYS, elsewhere_as_gguf, why_not_run

COUNTED = ("block_count", "context_length", "embedding_length", "feed_forward_length")
EPSILONS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
ACTIVATION = "hotsplit.ffn.activation"
_NONE = TensorEntry(shape=(), kind="f32", read_rows=lambda start, stop: np.zeros(0))

# llama.cpp's maps of names, by the names of its graphs.
_ARCHES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def read_blueprint(
    path: Path, config: Mapping[str, object], max_rows: int, names: Collection[str] = ()
) -> Blueprint:
    """The blueprint that the config's family derives from it. `names`: those of the checkpoint's
    tensors, which alone say whether there is a draft block. Raises HotsplitError, naming the key,
    for a model that would be computed wrongly, or whose sizes are above the largest dimension of
    the checkpoint's tensors (`max_rows`). Only the config is read: Python code in a checkpoint is
    never run."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        why = why_not_run(name, config) or "is unknown"
        raise HotsplitError(
            f"{path}: architecture {shown(name)}: {why}{elsewhere_as_gguf(name)}; the README has"
            f" the {len({family.title for family in FAMILIES.values()})} families that run"
        )
    notes = _type_notes(path, config.get("model_type"), family, str(name))
    is_beside = bool(family.text_key)
    if is_beside:
        own = config.get(family.text_key, config)  # Qwen2-VL's had one config for both
        if not isinstance(own, dict):
            raise HotsplitError(
                f"{path}: {family.text_key} is {shown(own)}, wanted the text model's config"
            )
        config = own | {key: config[key] for key in family.outer_keys if key in config}
    if family.by_type:
        kind = str(config.get("model_type", next(iter(family.by_type))))
        ConfigReader(path, {"model_type": kind}).refuse("model_type", *family.by_type)
        family = family.by_type[kind]
    read = ConfigReader(path, config, defaults=family.defaults, max_rows=max_rows)
    read.refuse("is_causal", True, why="bidirectional attention is not supported")
    for key, (plain, why) in CONFIG_KEYS.items():
        if key not in family.read_keys:
            read.refuse(key, *plain, why=why)
    for key, value in family.plain.items():
        read.refuse(key, value)
    found = _blueprint(family, read.with_values(family.derived(read)), notes, names)
    return text_model(found) if is_beside else found


def _blueprint(
    family: Family, read: ConfigReader, notes: tuple[str, ...], sources: Collection[str]
) -> Blueprint:
    field = {**FIELDS, **family.fields}
    heads, kv_heads, head_dim = read.heads(
        field["attention.head_count"], field["attention.head_count_kv"]
    )
    counts = {key: read.count(field[key]) for key in COUNTED}
    counts |= {"attention.head_count": heads, "attention.head_count_kv": kv_heads}
    counts |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    vocab_size = read.count("vocab_size")
    read.check_size(
        {
            "hidden_size": counts["embedding_length"],
            "vocab_size": vocab_size,
            "the width of the heads": heads * head_dim,
            "the width of the feed-forward layers": counts["feed_forward_length"],
        }
    )
    epsilon = next(key for key in EPSILONS if key in field)
    keys: dict[str, Value] = {key: np.uint32(count) for key, count in counts.items()}
    keys |= {
        epsilon: np.float32(read.positive(field[epsilon])),
        "vocab_size": np.uint32(vocab_size),
    }
    divisors: Mapping[str, np.ndarray] = {}
    if family.rope is not None:
        rope, divisors = rope_keys(read, family.rope, head_dim, counts["context_length"])
        keys |= rope
    keys |= family.keys(read)
    activation = read.activation(field[ACTIVATION], family.activations)
    graph = str(keys.pop("general.architecture", family.graph))
    num_layers = counts["block_count"]
    # Tensors that say what keys do not: optional ones (names and some shapes), and one a layer.
    flagged = (name for flag, names in family.flags.items() if read.flag(flag) for name in names)
    optional = {"ffn_down.weight": (), **dict.fromkeys(flagged, ()), **family.tensors(read)}
    given = dict.fromkeys(divisors, _NONE) | {
        name if name.startswith(("blk.", HEAD_BIAS, TABLE)) else f"blk.{layer}.{name}": replace(
            _NONE, shape=shape
        )
        for name, shape in optional.items()
        for layer in range(num_layers)
    }
    own_graph = ARCHITECTURES[graph]
    can_draft = DRAFT_LAYERS in own_graph.known_keys and own_graph.runs_draft_block
    if can_draft and has_draft_block(sources, num_layers):
        given[f"blk.{num_layers}.{JOIN}.weight"] = _NONE
        keys |= {"block_count": np.uint32(num_layers + 1), DRAFT_LAYERS: np.uint32(1)}
        for key in ("attention.recurrent_layers", "attention.sliding_window_pattern"):
            if isinstance(has_L := keys.get(key), list):
                keys[key] = [*has_L, False]
        for key in ("attention.head_count_kv", "feed_forward_length"):  # it has both
            if isinstance(count_L := keys.get(key), list):
                keys[key] = [*count_L, max(count_L)]
    named = {"general.architecture": graph, **prefixed(graph, keys | {ACTIVATION: activation})}
    spec, _ = KeyReader(read.path, named, given).model(has_all=False)
    own = family.sources(spec, read)
    names = family.names or _ARCHES[family.graph]
    if isinstance(names, gguf.MODEL_ARCH):
        names = gguf_names(names, num_layers + (spec.draft is not None))
    name_of = own.renamed(names)
    return Blueprint(
        **vars(own),
        spec=spec,
        keys=keys,
        name_of=name_of if spec.draft is None else with_draft_names(name_of, num_layers),
        threshold=read.threshold(activation),
        is_tied=read.is_tied(),
        rope_factors=divisors,
        notes=notes,
    )


def _type_notes(path: Path, said: object, family: Family, name: str) -> tuple[str, ...]:
    """A note on a `model_type` that is not the architecture's."""
    types = (family.graph,) if family.model_types is None else family.model_types
    if said is None or not types or said in types:
        return ()
    return (
        f"{path}: model_type is {shown(said)}, wanted {types[0]!r} beside {name}: the"
        f" model is converted as {name}, which is wrong if it computes anything else",
    )
