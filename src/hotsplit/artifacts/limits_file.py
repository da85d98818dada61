"""limits.safetensors: limits on the values of each layer, a form of sparsity that can do without
training.

A value whose magnitude is at or below its limit counts as zero, and the weights that only such
values would be multiplied by need not be read. NaN counts as above its limit. The first token of a
text is exempt from limits on inputs. Specified in docs/formats.md.

Letters: D model width, F neurons, H values of all heads together."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, array_entry
from hotsplit.files.safetensors_file import load_arrays, save_arrays
from hotsplit.files.typed import Fields, shown
from hotsplit.model.architecture import Architecture, ModelShape
from hotsplit.model.mode_quality import ModeQuality, SparseMode, quality_values, read_quality

FORMAT = "hotsplit.artifacts.limits_file"
VERSION = 1
# The name under which `convert` looks for limits in a checkpoint's folder.
FILE_NAME = "hotsplit_limits.safetensors"
MAX_LAYERS = 1 << 12


class Place(NamedTuple):
    """A limit's tensor in a layer of a model file, and the value compared with it."""

    tensor: str
    of: str


# Keyed by the fields of LayerLimits.
PLACES = {
    "gate_F": Place("ffn_gate.limit", "|act(gate)|"),
    "hidden_F": Place("ffn_down.limit", "|act(gate) * up|"),
    "qkv_D": Place("attn_qkv.limit", "|input of query, key and value|"),
    "output_H": Place("attn_output.limit", "|input of the output projection|"),
    "ffn_D": Place("ffn_input.limit", "|input of gate and up|"),
}


@dataclass(frozen=True, kw_only=True)
class LayerLimits:
    """Limits of one layer: f32, finite and at least 0; None is no limit. In models without gates
    (Falcon) gate_F applies to |act(up)|, as does hidden_F."""

    gate_F: np.ndarray | None = None  # a neuron is silent where |act(gate_j)| <= limit_j
    hidden_F: np.ndarray | None = None  # a neuron's row of down is not read where |h_j| <= limit_j
    qkv_D: np.ndarray | None = None  # an input of query, key and value is 0 where |x_i| <= limit_i
    output_H: np.ndarray | None = None  # likewise of attention's output projection
    ffn_D: np.ndarray | None = None  # likewise of the feed-forward layer

    @property
    def present(self) -> dict[str, np.ndarray]:
        """The limits present, by field."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def has_inputs(self) -> bool:
        """True if inputs are silenced, not only neurons."""
        return any(limit is not None for limit in (self.qkv_D, self.output_H, self.ffn_D))

    @property
    def has_neurons(self) -> bool:
        """True if neurons are silenced: their gates, or their hidden values."""
        return self.gate_F is not None or self.hidden_F is not None

    def arrays(self, layer: int) -> dict[str, np.ndarray]:
        """A layer's limits by their names in a model file."""
        return {f"blk.{layer}.{PLACES[name].tensor}": v for name, v in self.present.items()}


@dataclass(frozen=True, kw_only=True)
class Limits:
    model_id: str | None  # None: for the checkpoint in whose folder the file is
    layers: tuple[LayerLimits, ...]
    # True if the weights were trained to run with these limits, which are then part of the model.
    is_trained: bool = False
    quality: Mapping[SparseMode, ModeQuality] = field(default_factory=dict)  # {}: unknown

    def __bool__(self) -> bool:
        """True if there is any limit."""
        return any(layer.present for layer in self.layers)

    @property
    def has_inputs(self) -> bool:
        return any(layer.has_inputs for layer in self.layers)

    @property
    def has_neurons(self) -> bool:
        return any(layer.has_neurons for layer in self.layers)

    @property
    def sha256(self) -> str | None:
        """Digest of the limits' names and values, in the order of names; None if there are none."""
        found = hashlib.sha256()
        for name, limit in sorted(self.arrays().items()):
            found.update(f"{name} {len(limit)}\n".encode())
            found.update(limit.astype("<f4").tobytes())
        return found.hexdigest() if self else None

    @classmethod
    def load(cls, path: Path) -> "Limits":
        """Raises HotsplitError for anything but a whole, valid file."""
        names, optional = {"model_id", "num_layers"}, frozenset({"is_trained", "quality"})
        metadata, arrays = load_arrays(path, FORMAT, VERSION, names, optional=optional)
        try:
            read = Fields(metadata)
            count = read.count("num_layers", least=1, most=MAX_LAYERS)
            layers = tuple(_take(arrays, layer) for layer in range(count))
            if arrays:
                raise HotsplitError(f"unknown array {shown(min(arrays))}")
            limits = cls(
                model_id=read.line_or_none("model_id"),
                layers=layers,
                is_trained="is_trained" in metadata and read.flag("is_trained"),
                quality=read_quality(metadata.get("quality", {}), "quality"),
            )
            limits.validate()
        except HotsplitError as error:
            raise HotsplitError(f"{path}: {error}; make the limits again") from error
        return limits

    def save(self, path: Path) -> None:
        self.validate()
        metadata: dict[str, object] = {
            "model_id": self.model_id,
            "num_layers": len(self.layers),
            "is_trained": self.is_trained,
        }
        if self.quality:
            metadata["quality"] = quality_values(self.quality)
        save_arrays(path, FORMAT, VERSION, metadata, self.arrays())

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of all layers, by their names in a model file."""
        found: dict[str, np.ndarray] = {}
        for number, layer in enumerate(self.layers):
            found |= layer.arrays(number)
        return found

    def validate(self) -> None:
        """Raises HotsplitError unless there are layers, and each limit is a vector of f32, not
        empty, finite and at least 0."""
        if not self.layers:
            raise HotsplitError("limits of no layers")
        for name, limit in self.arrays().items():
            if limit.dtype != np.float32 or limit.ndim != 1 or not limit.size:
                raise HotsplitError(
                    f"{name} is {limit.dtype} {list(limit.shape)}, wanted a vector of float32"
                )
            if not (np.isfinite(limit) & (limit >= 0)).all():
                raise HotsplitError(f"{name} is not all finite and at least 0")

    def check_shape(self, shape: ModelShape, source: str) -> None:
        """Raises HotsplitError, which quotes `source`, unless the limits fit a model of this
        shape."""
        if len(self.layers) != shape.num_layers:
            raise HotsplitError(
                f"{source}: limits of {len(self.layers)} layers, the model has {shape.num_layers};"
                " make them for this model"
            )
        wanted = limit_shapes(shape)
        for name, limit in self.arrays().items():
            size = wanted[name.split(".", 2)[2]]
            if limit.shape != size:
                raise HotsplitError(
                    f"{source}: {name} is {list(limit.shape)}, wanted {list(size)}; make the"
                    " limits for this model"
                )


def check_made_with(
    sha256: str | None, path: Path, limits: Limits, source: Path, again: str
) -> None:
    """Raises HotsplitError unless `sha256`, which an artifact at `path` names (None: no limits),
    is that of the limits of the model file at `source`; `again` tells the user what to do."""
    if sha256 == limits.sha256:
        return
    made = "without limits" if sha256 is None else f"with limits {sha256[:12]}"
    has = f"limits {str(limits.sha256)[:12]}" if limits else "no limits"
    raise HotsplitError(f"{path}: made {made}, but {source} has {has}; {again}")


def limit_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's possible limits, by name within the layer."""
    sizes = {
        "gate_F": shape.num_neurons,
        "hidden_F": shape.num_neurons,
        "qkv_D": shape.width,
        "output_H": shape.num_heads * shape.head_width,
        "ffn_D": shape.width,
    }
    return {PLACES[name].tensor: (size,) for name, size in sizes.items()}


def _take(arrays: dict[str, np.ndarray], layer: int) -> LayerLimits:
    """Takes the limits of a layer out of `arrays`."""
    found = {
        name: arrays.pop(f"blk.{layer}.{place.tensor}", None) for name, place in PLACES.items()
    }
    return LayerLimits(**found)


def limits_in(tensors: Mapping[str, TensorEntry], model_id: str, num_layers: int) -> Limits:
    """The limits in a model file. Raises HotsplitError like `Limits.validate`."""
    arrays = {
        name: entry.read()
        for layer in range(num_layers)
        for place in PLACES.values()
        if (entry := tensors.get(name := f"blk.{layer}.{place.tensor}")) is not None
    }
    layers = tuple(_take(arrays, layer) for layer in range(num_layers))
    limits = Limits(model_id=model_id, layers=layers)
    limits.validate()
    return limits


def limit_entries(limits: Limits) -> dict[str, TensorEntry]:
    """The limits as tensors of a model file."""
    return {name: array_entry(limit, "f32") for name, limit in limits.arrays().items()}


def base_name(name: str) -> str:
    """The name that a matrix has in a model file if it is not transposed."""
    return name.removesuffix("_t.weight") + ".weight" if name.endswith("_t.weight") else name


def transposed_name(name: str) -> str:
    return name.removesuffix(".weight") + "_t.weight"


def transposed_by(limits: Limits, graph: Architecture) -> frozenset[str]:
    """The matrices whose inputs have limits, by their untransposed names."""
    return frozenset(
        f"blk.{number}.{name}.weight"
        for number, layer in enumerate(limits.layers)
        for field, names in transposable(graph).items()
        for name in names
        if field in layer.present
    )


def transposable(graph: Architecture) -> dict[str, tuple[str, ...]]:
    """The matrices whose inputs a limit silences, by the limit's field: if they are stored with a
    row for each input (`NAME_t.weight`), the weights of silent inputs need not be read."""
    return {
        "qkv_D": ("attn_qkv",) if graph.has_fused_qkv else ("attn_q", "attn_k", "attn_v"),
        "output_H": ("attn_output",),
        "ffn_D": ("ffn_gate", "ffn_up") if graph.is_gated else ("ffn_up",),
    }
