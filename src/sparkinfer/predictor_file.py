"""predictors.safetensors: small networks that say which neurons will fire.

Specified in docs/formats.md; their arithmetic stands at model_file.PredictorInfo. `profile`
writes them, `convert` puts them into a model file. What this module does not know: training."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import cast, get_args

import numpy as np

from sparkinfer.architecture import PredictorKind
from sparkinfer.errors import SparkinferError
from sparkinfer.gguf_file import is_whole_blocks
from sparkinfer.model_file import KINDS, PredictorInfo
from sparkinfer.safetensors_file import load_arrays, save_arrays
from sparkinfer.typed import Fields

FORMAT = "sparkinfer.predictors"
VERSION = 2
FILE_NAME = "predictors.safetensors"


@dataclass(frozen=True, kw_only=True)
class LayerPredictor:
    """f32 weights of one layer: down [R, D], up [F, R], optional biases [R] and [F].

    Without `down` there is one matrix, up [F, D]. `matrix_kind` is the type that the matrices
    are to have in a model file, and to which their values are rounded already; None leaves it to
    whoever writes that file."""

    down_RD: np.ndarray | None
    up_FR: np.ndarray
    down_bias_R: np.ndarray | None = None
    up_bias_F: np.ndarray | None = None
    matrix_kind: str | None = None

    @property
    def rank(self) -> int:
        return 0 if self.down_RD is None else self.down_RD.shape[0]

    @property
    def width(self) -> int:
        """D, of the input."""
        return (self.up_FR if self.down_RD is None else self.down_RD).shape[1]

    def arrays(self, layer: int) -> dict[str, np.ndarray]:
        """By their names in a model file."""
        named = {
            "ffn_pred_down.weight": self.down_RD,
            "ffn_pred_up.weight": self.up_FR,
            "ffn_pred_down.bias": self.down_bias_R,
            "ffn_pred_up.bias": self.up_bias_F,
        }
        return {f"blk.{layer}.{name}": a for name, a in named.items() if a is not None}

    def wanted_shapes(self, num_neurons: int, width: int) -> dict[str, tuple[int, ...]]:
        """What each array's shape must be, by its name within the layer."""
        if self.down_RD is None:
            return {"ffn_pred_up.weight": (num_neurons, width), "ffn_pred_up.bias": (num_neurons,)}
        return {
            "ffn_pred_down.weight": (self.rank, width),
            "ffn_pred_up.weight": (num_neurons, self.rank),
            "ffn_pred_down.bias": (self.rank,),
            "ffn_pred_up.bias": (num_neurons,),
        }


@dataclass(frozen=True, kw_only=True)
class Predictors:
    model_id: str | None  # None: made by others, nothing to compare with
    info: PredictorInfo
    layers: tuple[LayerPredictor, ...]

    @classmethod
    def load(cls, path: Path) -> "Predictors":
        """Raises SparkinferError for anything but a whole, valid file."""
        keys = {"model_id", "info", "matrix_kind_L"}
        metadata, arrays = load_arrays(path, FORMAT, VERSION, keys)
        try:
            read = Fields(metadata)
            info = _info(read.part("info", {field.name for field in fields(PredictorInfo)}))
            kinds = read.items("matrix_kind_L")
            if len(kinds) != len(info.rank_L):
                raise SparkinferError("matrix_kind_L is not a list with one type a layer")
            layers = [
                replace(_take(arrays, layer), matrix_kind=None if kind is None else str(kind))
                for layer, kind in enumerate(kinds)
            ]
            if arrays:
                raise SparkinferError(f"unknown array {min(arrays)!r}")
            predictors = cls(
                model_id=read.text_or_none("model_id"), info=info, layers=tuple(layers)
            )
            predictors.validate()
        except (SparkinferError, KeyError) as error:  # KeyError: a layer has no predictor
            raise SparkinferError(f"{path}: {error}; train the predictors again") from error
        return predictors

    def save(self, path: Path) -> None:
        self.validate()
        arrays: dict[str, np.ndarray] = {}
        for layer, predictor in enumerate(self.layers):
            arrays |= predictor.arrays(layer)
        metadata = {
            "model_id": self.model_id,
            "info": asdict(self.info),
            "matrix_kind_L": [predictor.matrix_kind for predictor in self.layers],
        }
        save_arrays(path, FORMAT, VERSION, metadata, arrays)

    def validate(self) -> None:
        """Raises SparkinferError unless every layer has finite weights of fitting shapes."""
        if not len(self.layers) == len(self.info.rank_L) == len(self.info.threshold_L):
            raise SparkinferError(
                f"{len(self.layers)} predictors, {len(self.info.rank_L)} ranks,"
                f" {len(self.info.threshold_L)} thresholds; wanted one of each a layer"
            )
        if self.info.kind not in get_args(PredictorKind) or self.info.input_layer_offset not in (
            0,
            1,
        ):
            raise SparkinferError(
                f"kind {self.info.kind!r} and input layer offset {self.info.input_layer_offset},"
                f" wanted one of {get_args(PredictorKind)} and 0 or 1"
            )
        if np.isnan(self.info.threshold_L).any():
            raise SparkinferError("a threshold is NaN")
        if len(self.info.density_L) not in (0, len(self.layers)):
            raise SparkinferError(f"{len(self.info.density_L)} densities, wanted none or all")
        for layer, (predictor, rank) in enumerate(zip(self.layers, self.info.rank_L, strict=True)):
            if predictor.rank != rank or (rank == 0 and self.info.kind == "relu"):
                raise SparkinferError(
                    f"layer {layer} has a {self.info.kind} predictor of rank {predictor.rank},"
                    f" and its stated rank is {rank}"
                )
            _check(layer, predictor)


def _take(arrays: dict[str, np.ndarray], layer: int) -> LayerPredictor:
    """Removes the arrays of a layer; KeyError where there is no predictor."""
    prefix = f"blk.{layer}.ffn_pred_"
    return LayerPredictor(
        down_RD=arrays.pop(prefix + "down.weight", None),
        up_FR=arrays.pop(prefix + "up.weight"),
        down_bias_R=arrays.pop(prefix + "down.bias", None),
        up_bias_F=arrays.pop(prefix + "up.bias", None),
    )


def _check(layer: int, predictor: LayerPredictor) -> None:
    """Raises SparkinferError unless shapes, types and values of one layer are right."""
    first = predictor.up_FR if predictor.down_RD is None else predictor.down_RD
    wanted = predictor.wanted_shapes(predictor.up_FR.shape[0], first.shape[-1])
    kind = predictor.matrix_kind
    if kind is not None and kind not in KINDS:
        raise SparkinferError(f"layer {layer}: matrix kind {str(kind)[:40]!r} is not of {KINDS}")
    for name, array in predictor.arrays(layer).items():
        shape = wanted.get(name.split(".", 2)[2])
        if array.shape != shape or array.dtype != np.float32 or not array.size:
            raise SparkinferError(f"{name} is {array.dtype} {array.shape}, wanted float32 {shape}")
        if not np.isfinite(array).all():
            raise SparkinferError(f"{name} has NaN or infinite values")
        if kind is not None and array.ndim == 2 and not is_whole_blocks(array.shape[1], kind):
            raise SparkinferError(f"{name} has rows of {array.shape[1]}, no whole blocks of {kind}")


def _info(read: Fields) -> PredictorInfo:
    return PredictorInfo(
        kind=cast(PredictorKind, read.choice("kind", get_args(PredictorKind))),
        rank_L=tuple(read.counts("rank_L")),
        threshold_L=tuple(read.numbers("threshold_L", may_be_infinite=True)),
        input_layer_offset=read.count("input_layer_offset", most=1),
        density_L=tuple(read.numbers("density_L")),
    )
