"""predictors.safetensors: small networks that predict which neurons will fire.

Specified in docs/formats.md; model_file.PredictorInfo describes their arithmetic. `profile`
writes them, `convert` puts them into a model file."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from hotsplit.artifacts.model_file import PredictorInfo
from hotsplit.errors import HotsplitError, about
from hotsplit.files.declared import Line, read_declared
from hotsplit.files.gguf_file import TensorEntry, array_entry, type_of
from hotsplit.files.safetensors_file import load_arrays, save_arrays
from hotsplit.files.typed import shown
from hotsplit.model.mode_quality import ModeQuality, SparseMode, quality_values
from hotsplit.model.weight_types import PREDICTOR_NAMES, PredictorTypeName

FORMAT = "hotsplit.predictors"
VERSION = 1
FILE_NAME = "predictors.safetensors"
CHECKED_VALUES = 1 << 22  # values unpacked and checked at a time


_FLOATS = {"f32": np.float32, "f16": np.float16}
STORED = {name: _FLOATS.get(name, np.uint8) for name in ("f32", *PREDICTOR_NAMES)}


@dataclass(frozen=True)
class PredictorMatrix:
    """Rows as stored in a model file: f32 or f16 values, or the bytes of whole blocks."""

    data: np.ndarray
    kind: str

    @classmethod
    def of(cls, values: np.ndarray, kind: str) -> "PredictorMatrix":
        """f32 values, rounded to the type. The width must be a whole number of its blocks."""
        if kind in ("f32", "f16"):
            return cls(values.astype(STORED[kind]), kind)
        return cls(quantize(np.ascontiguousarray(values, np.float32), type_of(kind)), kind)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the values."""
        block, size = GGML_QUANT_SIZES[type_of(self.kind)]
        row_bytes = self.data.shape[1] * self.data.itemsize
        return self.data.shape[0], row_bytes // size * block

    def values(self) -> np.ndarray:
        """The stored values as f32, without rounding."""
        if self.kind in ("f32", "f16"):
            return self.data.astype(np.float32)
        return dequantize(self.data, type_of(self.kind))

    def entry(self) -> TensorEntry:
        return TensorEntry(shape=self.shape, kind=self.kind, read_rows=lambda a, b: self.data[a:b])

    def check(self, name: str) -> None:
        """Raises HotsplitError unless it is a finite matrix of its type, not empty."""
        block, size = GGML_QUANT_SIZES[type_of(self.kind)]
        data, dtype = self.data, STORED[self.kind]
        if data.dtype != dtype or data.ndim != 2 or not data.size:
            raise HotsplitError(
                f"{name} is {data.dtype} {data.shape}, wanted a matrix of {np.dtype(dtype)}"
            )
        if data.shape[1] * data.itemsize % size:
            raise HotsplitError(
                f"{name} has rows of {data.shape[1] * data.itemsize} bytes, not whole blocks of"
                f" {self.kind} ({size} bytes for {block} values)"
            )
        rows = max(1, CHECKED_VALUES // self.shape[1])
        for start in range(0, len(data), rows):
            piece = PredictorMatrix(data[start : start + rows], self.kind).values()
            if not np.isfinite(piece).all():
                raise HotsplitError(f"{name} has NaN or infinite values")


@dataclass(frozen=True, kw_only=True)
class LayerPredictor:
    """Weights of one layer's predictor: down [R, D] and up [F, R] of the same type, and optional
    f32 biases [R] and [F]. If `down` is None, `up` is [F, D]."""

    down: PredictorMatrix | None
    up: PredictorMatrix
    down_bias_R: np.ndarray | None = None
    up_bias_F: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        *,
        down_RD: np.ndarray | None,
        up_FR: np.ndarray,
        down_bias_R: np.ndarray | None = None,
        up_bias_F: np.ndarray | None = None,
        kind: str = "f32",
    ) -> "LayerPredictor":
        """A predictor from f32 weights, rounded to the type."""
        return cls(
            down=None if down_RD is None else PredictorMatrix.of(down_RD, kind),
            up=PredictorMatrix.of(up_FR, kind),
            down_bias_R=down_bias_R,
            up_bias_F=up_bias_F,
        )

    @property
    def matrix_kind(self) -> str | None:
        """The type that the matrices must have in a model file, because the threshold was chosen
        for the rounded values; None (f32 weights) leaves the type to the writer of that file."""
        return None if self.up.kind == "f32" else self.up.kind

    @property
    def rank(self) -> int:
        return 0 if self.down is None else self.down.shape[0]

    @property
    def width(self) -> int:
        """D, the width of the input."""
        return (self.up if self.down is None else self.down).shape[1]

    def matrices(self, layer: int) -> dict[str, PredictorMatrix]:
        """The matrices by their names in a model file."""
        named = {"ffn_pred_down.weight": self.down, "ffn_pred_up.weight": self.up}
        return {f"blk.{layer}.{name}": m for name, m in named.items() if m is not None}

    def biases(self, layer: int) -> dict[str, np.ndarray]:
        """The biases by their names in a model file."""
        named = {"ffn_pred_down.bias": self.down_bias_R, "ffn_pred_up.bias": self.up_bias_F}
        return {f"blk.{layer}.{name}": a for name, a in named.items() if a is not None}

    def entries(self, layer: int) -> dict[str, TensorEntry]:
        """The tensors by their names in a model file."""
        found = {name: matrix.entry() for name, matrix in self.matrices(layer).items()}
        return found | {n: array_entry(a, "f32") for n, a in self.biases(layer).items()}

    def arrays(self, layer: int) -> dict[str, np.ndarray]:
        """f32 values, by their names in a model file."""
        return {n: m.values() for n, m in self.matrices(layer).items()} | self.biases(layer)

    def wanted_shapes(self, num_neurons: int, width: int) -> dict[str, tuple[int, ...]]:
        """The shape of each array, by name within the layer."""
        up_width = width if self.down is None else self.rank
        up = {"ffn_pred_up.weight": (num_neurons, up_width), "ffn_pred_up.bias": (num_neurons,)}
        down = {"ffn_pred_down.weight": (self.rank, width), "ffn_pred_down.bias": (self.rank,)}
        return up if self.down is None else down | up


@dataclass(frozen=True, kw_only=True)
class PredictorsHeader:
    model_id: Line | None  # None: unknown, for predictors from elsewhere
    info: PredictorInfo
    # The quality of mode predicted with these predictors, and of mode exact; {}: unknown.
    quality: Mapping[SparseMode, ModeQuality] = field(default_factory=dict)
    arithmetic: str | None = None  # in which they were trained; None: unknown


@dataclass(frozen=True, kw_only=True)
class _Metadata(PredictorsHeader):
    """The metadata of the file."""

    matrix_kind_L: tuple[Literal["f32", PredictorTypeName] | None, ...]


@dataclass(frozen=True, kw_only=True)
class Predictors(PredictorsHeader):
    layers: tuple[LayerPredictor, ...]

    @classmethod
    def load(cls, path: Path) -> "Predictors":
        """Raises HotsplitError for anything but a whole, valid file."""
        metadata, arrays = load_arrays(path, FORMAT, VERSION)
        with about(path, "; train the predictors again"):
            header = vars(read_declared(_Metadata, metadata))
            kinds = header.pop("matrix_kind_L")
            layers = tuple(_take(arrays, layer, kind) for layer, kind in enumerate(kinds))
            if arrays:
                raise HotsplitError(f"unknown array {shown(min(arrays))}")
            predictors = cls(**header, layers=layers)
            predictors.validate()
        return predictors

    def save(self, path: Path) -> None:
        self.validate()
        arrays: dict[str, np.ndarray] = {}
        for layer, predictor in enumerate(self.layers):
            arrays |= {n: m.data for n, m in predictor.matrices(layer).items()}
            arrays |= predictor.biases(layer)
        metadata: dict[str, object] = {
            "model_id": self.model_id,
            "info": asdict(self.info),
            "matrix_kind_L": [predictor.matrix_kind for predictor in self.layers],
        }
        if self.quality:
            metadata["quality"] = quality_values(self.quality)
        if self.arithmetic is not None:
            metadata["arithmetic"] = self.arithmetic
        read_declared(_Metadata, metadata)
        save_arrays(path, FORMAT, VERSION, metadata, arrays)

    def validate(self) -> None:
        """Raises HotsplitError unless weights are finite and fit each other and `info`."""
        info, num_layers = self.info, len(self.layers)
        if not num_layers == len(info.rank_L) == len(info.threshold_L):
            raise HotsplitError(
                f"{num_layers} predictors, {len(info.rank_L)} ranks, {len(info.threshold_L)}"
                " thresholds; wanted one of each per layer"
            )
        if len(info.density_L) not in (0, num_layers):
            raise HotsplitError(
                f"densities for {len(info.density_L)} of {num_layers} layers, wanted none or all"
            )
        for layer, (predictor, rank) in enumerate(zip(self.layers, info.rank_L, strict=True)):
            for name, matrix in predictor.matrices(layer).items():
                matrix.check(name)
            if predictor.rank != rank:
                raise HotsplitError(
                    f"layer {layer} has a {info.kind} predictor of rank {predictor.rank},"
                    f" and its stated rank is {rank}"
                )
            if rank == 0 and info.kind == "relu":
                raise HotsplitError(
                    f"layer {layer} has a relu predictor of rank 0, wanted 1 or more"
                )
            _check(layer, predictor)


def _take(arrays: dict[str, np.ndarray], layer: int, kind: str | None) -> LayerPredictor:
    stored, prefix = kind or "f32", f"blk.{layer}.ffn_pred_"
    down, up = arrays.pop(prefix + "down.weight", None), arrays.pop(prefix + "up.weight", None)
    if up is None:
        raise HotsplitError(f"array {prefix}up.weight is missing")
    return LayerPredictor(
        down=None if down is None else PredictorMatrix(down, stored),
        up=PredictorMatrix(up, stored),
        down_bias_R=arrays.pop(prefix + "down.bias", None),
        up_bias_F=arrays.pop(prefix + "up.bias", None),
    )


def _check(layer: int, predictor: LayerPredictor) -> None:
    wanted = predictor.wanted_shapes(predictor.up.shape[0], predictor.width)
    for name, matrix in predictor.matrices(layer).items():
        shape = wanted[name.split(".", 2)[2]]
        if matrix.shape != shape:
            raise HotsplitError(f"{name} is {matrix.shape}, wanted {shape}")
    for name, bias in predictor.biases(layer).items():
        bias_shape = wanted.get(name.split(".", 2)[2])
        if bias.shape != bias_shape or bias.dtype != np.float32:
            raise HotsplitError(f"{name} is {bias.dtype} {bias.shape}, wanted float32 {bias_shape}")
        if not np.isfinite(bias).all():
            raise HotsplitError(f"{name} has NaN or infinite values")
