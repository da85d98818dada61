"""limits.safetensors: limits on the gates of each layer, a form of sparsity that can do without
training.

A neuron whose activated gate has a magnitude at or below its limit is silent, and its rows of up
and down need not be read. NaN counts as above its limit. Specified in docs/formats.md.

Letters: F neurons."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hotsplit.errors import HotsplitError, about
from hotsplit.files.safetensors_file import load_arrays, save_arrays
from hotsplit.files.typed import Fields, shown
from hotsplit.model.mode_quality import ModeQuality, SparseMode, quality_values, read_quality
from hotsplit.model.spec import ModelSpec

FORMAT = "hotsplit.limits"
VERSION = 1
# The name under which `convert` looks for limits in a checkpoint's folder.
FILE_NAME = "hotsplit_limits.safetensors"
MAX_LAYERS = 1 << 12
GATE = "ffn_gate.limit"  # the tensor of a layer's limits in a model file


@dataclass(frozen=True, kw_only=True)
class LayerLimits:
    """Limits of one layer: f32, finite and at least 0; None is no limit. In models without gates
    (Falcon) gate_F applies to |act(up)|."""

    gate_F: np.ndarray | None = None  # a neuron is silent where |act(gate_j)| <= limit_j


@dataclass(frozen=True, kw_only=True)
class Limits:
    model_id: str | None  # None: for the checkpoint in whose folder the file is
    layers: tuple[LayerLimits, ...]
    # True if the weights were trained to run with these limits, which are then part of the model.
    is_trained: bool = False
    quality: Mapping[SparseMode, ModeQuality] = field(default_factory=dict)  # {}: unknown

    def __bool__(self) -> bool:
        """True if there is any limit."""
        return any(layer.gate_F is not None for layer in self.layers)

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
        names, optional = {"model_id", "num_layers"}, {"is_trained", "quality"}
        metadata, arrays = load_arrays(path, FORMAT, VERSION, names, optional=optional)
        with about(path, "; make the limits again"):
            read = Fields(metadata)
            count = read.count("num_layers", least=1, most=MAX_LAYERS)
            gates = (arrays.pop(f"blk.{layer}.{GATE}", None) for layer in range(count))
            layers = tuple(LayerLimits(gate_F=gate_F) for gate_F in gates)
            if arrays:
                raise HotsplitError(f"unknown array {shown(min(arrays))}")
            limits = cls(
                model_id=read.line_or_none("model_id"),
                layers=layers,
                is_trained="is_trained" in metadata and read.flag("is_trained"),
                quality=read_quality(metadata.get("quality", {}), "quality"),
            )
            limits.validate()
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
        return {
            f"blk.{number}.{GATE}": layer.gate_F
            for number, layer in enumerate(self.layers)
            if layer.gate_F is not None
        }

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

    def check_shape(self, spec: ModelSpec, source: str) -> None:
        """Raises HotsplitError, which quotes `source`, unless the limits fit this model."""
        if len(self.layers) != spec.num_layers:
            raise HotsplitError(
                f"{source}: limits of {len(self.layers)} layers, the model has {spec.num_layers};"
                " make them for this model"
            )
        for number, layer in enumerate(self.layers):
            limit_F, count = layer.gate_F, spec.layers[number].neurons.number
            if limit_F is not None and limit_F.shape != (count,):
                raise HotsplitError(
                    f"{source}: blk.{number}.{GATE} is {list(limit_F.shape)}, wanted [{count}]; make"
                    " the limits for this model"
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
