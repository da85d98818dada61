"""The keys of a model file's header, each read with a check and an error of its own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.families.decoder_sizes import MAX_COUNT, MAX_LAYERS, Sizes
from hotsplit.families.family import Architecture
from hotsplit.families.pooling_key import pooling_of
from hotsplit.families.rope_scalings import SCALING_KEYS, scaling_of_keys
from hotsplit.families.row_order import projections_apart
from hotsplit.files.gguf_file import TensorEntry, Value
from hotsplit.files.typed import other_version, shown
from hotsplit.model.blocks import NormKind
from hotsplit.model.draft_block import JOIN
from hotsplit.model.mode_quality import ModeQuality, SparseMode, read_quality
from hotsplit.model.rope import FREQUENCIES, Pairing
from hotsplit.model.spec import Activation, ModelSpec, Rotary
from hotsplit.model.tensors import draft_shapes, layout_of
from hotsplit.model.unsupported import check_is_model, difference, elsewhere, why_key, why_not_run

VERSION = 1
QUALITY = "hotsplit.quality."
OWN = "hotsplit."
_OF_PREDICTOR = ("kind", "rank", "threshold", "input_layer_offset", "density")
OWN_KEYS = {f"{OWN}{name}" for name in ("version", "model_id", "ffn.activation", "ffn.threshold")}
OWN_KEYS |= {f"{OWN}predictor.{name}" for name in _OF_PREDICTOR}
DRAFT_LAYERS = "nextn_predict_layers"  # layers at the end that predict tokens further ahead
LEAST_F32 = float(np.finfo(np.float32).smallest_subnormal)
MOST_F32 = float(np.finfo(np.float32).max)
NORM_EPSILON = {
    "rms": "attention.layer_norm_rms_epsilon",
    "layer": "attention.layer_norm_epsilon",
    "layer_without_bias": "attention.layer_norm_epsilon",
}
# Keys of an architecture that are accepted with any value, since they change nothing here.
SILENT_KEYS = {"tensor_data_layout", "use_parallel_residual", "rope.scaling.finetuned"}
_OF_ATTENTION = ("head_count", "head_count_kv", "key_length", "value_length", "causal")
KNOWN_KEYS = SILENT_KEYS | {f"attention.{name}" for name in _OF_ATTENTION}
KNOWN_KEYS |= {"block_count", "context_length", "embedding_length", "feed_forward_length"}
KNOWN_KEYS |= {"vocab_size", "pooling_type", "rope.dimension_count", "rope.freq_base"}
KNOWN_KEYS |= {*NORM_EPSILON.values(), *SCALING_KEYS}


class KeyReader:
    def __init__(
        self, path: Path, keys: Mapping[str, Value], tensors: Mapping[str, TensorEntry]
    ) -> None:
        """Raises HotsplitError for an unknown architecture, version or key."""
        self.path, self.keys = path, keys
        check_is_model(path, keys)
        from hotsplit.families.table import ARCHITECTURES  # whose modules read with this class

        found = str(keys.get("general.architecture", "none"))
        if found not in ARCHITECTURES:
            reason = why_not_run(found, keys)
            why = f": {reason}" if reason else difference(tensors, ARCHITECTURES)
            known = ", ".join(ARCHITECTURES)
            raise HotsplitError(
                f"{path}: architecture {shown(found)}{why}{elsewhere(found)}; known: {known}"
            )
        self.graph: Architecture = ARCHITECTURES[found]
        self.block_fault = ""  # why the draft block cannot be run, once `model` has found that
        self.tensors = tensors if self.graph.fuses_attention else projections_apart(tensors)
        version = keys.get("hotsplit.version", np.uint32(VERSION))
        if not isinstance(version, np.integer) or version != VERSION:
            which = other_version(version, VERSION, "convert the checkpoint again")
            raise HotsplitError(f"{path}: format {which}")
        # An unknown key of ours is probably of a later version; one of the architecture that is not
        # zero, false or "none" may change what the graph computes.
        prefix = self.graph.name + "."
        for key, value in self.keys.items():
            is_known = key in (*OWN_KEYS, *self.graph.known_keys) or key.startswith(QUALITY)
            if key.startswith(OWN) and not is_known:
                unknown = f"key {shown(key)} is unknown"
                raise HotsplitError(f"{self.path}: {unknown}; convert the checkpoint again")
            name = key.removeprefix(prefix)
            if (
                key.startswith(prefix)
                and name not in (*KNOWN_KEYS, *self.graph.known_keys)
                and value not in (0, False, "none")
            ):
                why = why_key(name) or (
                    f"the key is unknown, so the graph may differ from the known {self.graph.name}"
                    " graph; this file is not supported"
                )
                raise HotsplitError(
                    f"{self.path}: key {shown(key)} ({shown(value)}): {why}"
                    f"{elsewhere(self.graph.name)}"
                )

    def number(self, key: str, default: float | None = None) -> float:
        value = self.keys.get(key, default)
        if not isinstance(value, int | float | np.number) or isinstance(value, bool):
            raise HotsplitError(f"{self.path}: key {key!r} {_found(value)}, wanted a number")
        if not np.isfinite(value):
            raise HotsplitError(f"{self.path}: key {key!r} is {value}, wanted a finite number")
        return float(value)

    def line(self, key: str) -> str:
        """A one-line string, which errors can quote as it is."""
        value = self.keys.get(key)
        if not isinstance(value, str) or not value.isprintable():
            raise HotsplitError(
                f"{self.path}: key {key!r} {_found(value)}, wanted a one-line string"
            )
        return value

    def flag(self, key: str) -> bool:
        """False if absent."""
        value = self.keys.get(key, False)
        if not isinstance(value, bool):
            raise HotsplitError(f"{self.path}: key {key!r} is {shown(value)}, wanted true or false")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above zero, also as f32, in which conversions write it."""
        value = self.number(key, default)
        if value <= 0:
            raise HotsplitError(f"{self.path}: key {key!r} is {value}, wanted more than 0")
        if not LEAST_F32 <= value <= MOST_F32:
            raise HotsplitError(f"{self.path}: key {key!r} is {value}, beyond the range of f32")
        return value

    def thresholds(self, key: str, count: int) -> tuple[float, ...]:
        """Finite numbers, at least 0; zeros if absent."""
        values = self.floats(key, count, 0.0)
        if not all(0 <= value < np.inf for value in values):
            raise HotsplitError(f"{self.path}: key {key!r} is not all finite and at least 0")
        return values

    def floats(self, key: str, count: int, default: float | None = None) -> tuple[float, ...]:
        values = self.keys.get(key, None if default is None else [default] * count)
        if not isinstance(values, list) or len(values) != count:
            found = f"has {len(values)} values" if isinstance(values, list) else _found(values)
            raise HotsplitError(f"{self.path}: key {key!r} {found}, wanted {count} numbers")
        if not all(isinstance(value, int | float | np.number) for value in values):
            raise HotsplitError(f"{self.path}: key {key!r} holds text, wanted {count} numbers")
        numbers = tuple(float(value) for value in values)
        if np.isnan(numbers).any():
            raise HotsplitError(f"{self.path}: key {key!r} has a NaN")
        for value in numbers:
            if MOST_F32 < abs(value) < np.inf:
                raise HotsplitError(
                    f"{self.path}: key {key!r} has {value}, beyond the range of f32"
                )
        return numbers

    def choice(self, key: str, kind: object, default: str) -> str:
        value = self.keys.get(key, default)
        if value not in get_args(kind):
            raise HotsplitError(
                f"{self.path}: key {key!r} is {shown(value)}, wanted {get_args(kind)}"
            )
        return cast(str, value)

    def activation(self) -> Activation:
        """The activation of all layers; if the key is absent, that of llama.cpp's graph."""
        default = (*self.graph.stock_activations, "")[0]
        return cast(Activation, self.choice("hotsplit.ffn.activation", Activation, default))

    def quality(self) -> dict[SparseMode, ModeQuality]:
        """The quality of each mode recorded in the file."""
        values: dict[str, dict[str, Value]] = {}
        for key, value in self.keys.items():
            if key.startswith(QUALITY):
                mode, _, name = key.removeprefix(QUALITY).partition(".")
                values.setdefault(mode, {})[name] = value
        try:
            return read_quality(values, QUALITY.removesuffix("."))
        except HotsplitError as error:
            raise HotsplitError(f"{self.path}: {error}; profile and convert again") from error

    def count(self, key: str, default: float | None = None) -> int:
        most = MAX_LAYERS if key == "block_count" else MAX_COUNT
        key = f"{self.graph.name}.{key}"
        value = self.number(key, default)
        if not 1 <= value <= most or value != int(value):
            raise HotsplitError(f"{self.path}: {key} is {value}, wanted a count")
        return int(value)

    @property
    def num_skipped(self) -> int:
        """The layers at the end that only predict tokens further ahead."""
        key = DRAFT_LAYERS
        has_some = key in self.graph.known_keys and not self.graph.is_assistant
        count = self.whole(key, 0) if has_some else 0
        if count >= self.count("block_count"):
            raise HotsplitError(
                f"{self.path}: {self.graph.name}.{key} is {count}: no layer is left"
            )
        return count

    @property
    def has_draft_block(self) -> bool:
        """True if the file has the tensors of one such layer, which then are the draft block."""
        block = self.count("block_count") - 1
        can_run = self.num_skipped == 1 and self.graph.runs_draft_block
        return can_run and f"blk.{block}.{JOIN}.weight" in self.tensors

    def own_keys(self, spec: ModelSpec) -> dict[str, Value]:
        """The keys of the architecture, without its prefix and without layers that are skipped."""
        prefix, count = f"{self.graph.name}.", self.count("block_count")
        own = {k.removeprefix(prefix): v for k, v in self.keys.items() if k.startswith(prefix)}
        own |= {key: self.keys[key] for key in self.graph.known_keys if key in self.keys}
        if self.num_skipped and spec.draft is None:
            own = {
                key: cast(Value, value[: spec.num_layers])
                if isinstance(value, list) and len(value) == count
                else value
                for key, value in own.items()
                if key != DRAFT_LAYERS
            } | {"block_count": np.uint32(spec.num_layers)}
        return self.graph.usual_keys(spec, own)

    def model(self, *, has_all: bool = True) -> tuple[ModelSpec, dict[str, TensorEntry]]:
        """The spec, and the file's tensors by the names that a model file of this spec has. A draft
        block that cannot be run is left out (`block_fault`). `has_all`: these are all tensors of a
        file, not some that stand for a checkpoint's.

        Raises HotsplitError for a spec that cannot be, or cannot be run."""
        pooling = pooling_of(self.whole("pooling_type", 0), f"{self.path}: {self.graph.name}")
        spec = replace(self.graph.of_keys(self), pooling=pooling)
        # The tensors without those of layers that are skipped.
        last = self.count("block_count") if self.num_skipped else 0
        skipped = tuple(f"blk.{layer}." for layer in range(last - self.num_skipped, last))
        used = {name: e for name, e in self.tensors.items() if not name.startswith(skipped)}
        if skipped and not any(name.startswith("blk.") for name in used):
            raise HotsplitError(
                f"{self.path}: has only the layers that predict tokens further ahead (multi-token"
                " prediction), which are not supported; give the file of the model itself"
            )
        if self.has_draft_block:
            with_block = self.graph.with_draft(spec)
            try:
                tensors = self.graph.apart(with_block, dict(self.tensors))
                if has_all:
                    _check_draft_block(with_block, tensors)
            except HotsplitError as error:  # without its block, the model is whole
                self.block_fault = str(error)
            else:
                return with_block, tensors
        return spec, self.graph.apart(spec, used)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 0."""
        key = f"{self.graph.name}.{key}"
        value = self.number(key, default)
        if not 0 <= value <= MAX_COUNT or value != int(value):
            raise HotsplitError(f"{self.path}: {key} is {value:g}, wanted a whole number")
        return int(value)

    def sizes(self, norm: NormKind = "rms", *, is_partly_rotated: bool = False) -> Sizes:
        """The numbers that all layers share. `norm` says under which key their epsilon is.
        `is_partly_rotated`: a part of each head may rotate."""
        name, count = self.graph.name, self.count
        heads, hidden_size = count("attention.head_count"), count("embedding_length")
        head_dim = count("attention.key_length", hidden_size // heads)
        rotated = count("rope.dimension_count", head_dim)
        is_whole = rotated == head_dim or (
            is_partly_rotated and rotated < head_dim and rotated % 2 == 0
        )
        value_width = count("attention.value_length", head_dim)
        if not is_whole or value_width != head_dim:
            raise HotsplitError(
                f"{self.path}: attention.key_length is {head_dim}, attention.value_length"
                f" {value_width} and rope.dimension_count {rotated}: rotary embeddings over a part"
                " of a head, or values of another width than keys, are not supported"
            )
        if self.keys.get(f"{name}.attention.causal", True) is not True:
            raise HotsplitError(
                f"{self.path}: attention.causal is not true: bidirectional attention is not"
                " supported"
            )
        kv_heads = count("attention.head_count_kv", heads)
        if heads % kv_heads or head_dim % 2:
            raise HotsplitError(
                f"{self.path}: attention.head_count is {heads}, attention.head_count_kv {kv_heads}"
                f" and attention.key_length {head_dim}; wanted whole groups of heads of even width"
            )
        if count("block_count") > len(self.tensors):
            raise HotsplitError(
                f"{self.path}: {count('block_count')} layers, but {len(self.tensors)} tensors;"
                " convert the checkpoint again"
            )
        embedding = self.tensors.get("token_embd.weight")
        # A file whose layers all have experts need not say more than the neurons of one.
        of_expert_key = f"{name}.expert_feed_forward_length"
        of_expert = self.number(of_expert_key) if of_expert_key in self.keys else None
        return Sizes(
            num_layers=count("block_count") - self.num_skipped,
            hidden_size=hidden_size,
            num_neurons=count("feed_forward_length", of_expert),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=embedding.shape[0] if embedding else count("vocab_size"),
            context_length=count("context_length"),
            epsilon=self.positive(f"{name}.{NORM_EPSILON[norm]}"),
        )

    def options(self, num_layers: int) -> frozenset[str]:
        """The optional tensors of the layers, of those that the architecture has. Raises
        HotsplitError for one that some layers have and others lack; one of attention is wanted in
        the layers that attend."""
        every, output = range(num_layers), "attn_output.weight"
        attend = [layer for layer in every if f"blk.{layer}.{output}" in self.tensors] or every
        found = set()
        for name in self.graph.options:
            layers = attend if name.startswith("attn_") else every
            has_L = [f"blk.{layer}.{name}" in self.tensors for layer in layers]
            if any(has_L) and not all(has_L):
                first, other = layers[0], layers[has_L.index(not has_L[0])]
                raise HotsplitError(
                    f"{self.path}: {name} is in layer {first} or in layer {other}, but not in both;"
                    " convert the checkpoint again"
                )
            if any(has_L):
                found.add(name)
        return frozenset(found)

    def with_one(self, key: str) -> tuple["KeyReader", list[bool] | None]:
        """The reader, with one number where a file lists one for each layer, and whether each has
        it: zeros are of layers that have none. None if the file has no list, or several numbers in
        it."""
        name = f"{self.graph.name}.{key}"
        found = self.keys.get(name)
        numbers = {value for value in found if value} if isinstance(found, list) else set()
        if not isinstance(found, list) or len(numbers) != 1:
            return self, None
        one = KeyReader(self.path, {**self.keys, name: cast(Value, numbers.pop())}, self.tensors)
        return one, [bool(value) for value in found]

    def of_layer(self, layer: int, num_layers: int, own: Mapping[str, Value]) -> "KeyReader":
        """A reader of this layer's numbers, where keys list them, and of `own` keys."""
        keys, prefix = {**self.keys, **own}, f"{self.graph.name}."
        for key, value in keys.items():
            if key.startswith(prefix) and isinstance(value, list) and len(value) == num_layers:
                keys[key] = cast(Value, value[layer])
        return KeyReader(self.path, keys, self.tensors)

    def layers_with_window(self, num_layers: int, period: int) -> list[bool]:
        """Whether each layer has the window."""
        key = "attention.sliding_window_pattern"
        return self.other_layers(num_layers, key, key, period)

    def other_layers(
        self, num_layers: int, list_key: str, period_key: str, period: int
    ) -> list[bool]:
        """Whether each layer is of another kind than the last of a period: by a key with a value
        for each, or by one with the period, or else by `period`."""
        key = f"{self.graph.name}.{list_key}"
        found = self.keys.get(key)
        if isinstance(found, list):
            if len(found) == num_layers + self.num_skipped:  # llama.cpp may say less of the others
                found = found[:num_layers]
            if len(found) != num_layers or not all(isinstance(value, bool) for value in found):
                raise HotsplitError(
                    f"{self.path}: key {key!r} is {shown(found)}, wanted {num_layers} of true or"
                    " false"
                )
            return [bool(value) for value in found]
        period = self.count(period_key, period)
        return [(layer + 1) % period != 0 for layer in range(num_layers)]

    def rotary(self, pairing: Pairing, head_dim: int | None = None) -> Rotary:
        """`head_dim`: of heads of which a part may rotate."""
        rotated = head_dim and self.count("rope.dimension_count", head_dim)
        return Rotary(
            num_values=None if rotated == head_dim else rotated,
            theta=self.positive(f"{self.graph.name}.rope.freq_base", 10000.0),
            pairing=pairing,
            scaling=scaling_of_keys(self),
            has_factors=FREQUENCIES in self.tensors,
        )


def _found(value: object) -> str:
    return "is missing" if value is None else f"is {shown(value)}"


def prefixed(architecture: str, keys: Mapping[str, Value]) -> dict[str, Value]:
    """The keys of a file of this architecture, by those without its prefix."""
    return {k if k.startswith(OWN) else f"{architecture}.{k}": v for k, v in keys.items()}


def _check_draft_block(spec: ModelSpec, tensors: Mapping[str, TensorEntry]) -> None:
    """Raises HotsplitError unless the draft block has all its tensors, in the right shapes."""
    required, optional = draft_shapes(spec, layout_of(tensors))
    wanted, prefix = required | optional, f"blk.{spec.num_layers}."
    if missing := sorted(required.keys() - tensors.keys()):
        raise HotsplitError(f"no tensor {missing[0]!r}")
    for name, entry in tensors.items():
        if name.startswith(prefix) and entry.shape != wanted.get(name):
            shape = f", wanted {list(wanted[name])}" if name in wanted else " and unknown"
            raise HotsplitError(f"{shown(name)} is {entry.kind} {list(entry.shape)}{shape}")
