"""predictors.safetensors: small networks that say which neurons will fire.

Specified in docs/formats.md; their arithmetic stands at model_file.PredictorInfo. `profile`
writes them, `convert` puts them into a model file. What this module does not know: training."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from sparkinfer.architecture import PredictorKind
from sparkinfer.errors import SparkinferError
from sparkinfer.model_file import PredictorInfo
from sparkinfer.safetensors_file import load_arrays, save_arrays

FORMAT = "sparkinfer.predictors"
VERSION = 1
FILE_NAME = "predictors.safetensors"


@dataclass(frozen=True, kw_only=True)
class LayerPredictor:
    """f32 weights of one layer: down [R, D], up [F, R], optional biases [R] and [F]."""

    down_RD: np.ndarray
    up_FR: np.ndarray
    down_bias_R: np.ndarray | None = None
    up_bias_F: np.ndarray | None = None

    def arrays(self, layer: int) -> dict[str, np.ndarray]:
        """By their names in a model file."""
        named = {
            "ffn_pred_down.weight": self.down_RD,
            "ffn_pred_up.weight": self.up_FR,
            "ffn_pred_down.bias": self.down_bias_R,
            "ffn_pred_up.bias": self.up_bias_F,
        }
        return {f"blk.{layer}.{name}": a for name, a in named.items() if a is not None}


@dataclass(frozen=True, kw_only=True)
class Predictors:
    model_id: str | None  # None: made by others, nothing to compare with
    info: PredictorInfo
    layers: tuple[LayerPredictor, ...]

    @classmethod
    def load(cls, path: Path) -> "Predictors":
        """Raises SparkinferError for anything but a whole, valid file."""
        metadata, arrays = load_arrays(path, FORMAT, VERSION, {"model_id", "info"})
        try:
            info = _info(**metadata["info"])
            layers = []
            for layer in range(len(info.rank_L)):
                prefix = f"blk.{layer}.ffn_pred_"
                layers.append(
                    LayerPredictor(
                        down_RD=arrays.pop(prefix + "down.weight"),
                        up_FR=arrays.pop(prefix + "up.weight"),
                        down_bias_R=arrays.pop(prefix + "down.bias", None),
                        up_bias_F=arrays.pop(prefix + "up.bias", None),
                    )
                )
            if arrays:
                raise SparkinferError(f"unknown array {min(arrays)!r}")
            predictors = cls(model_id=metadata["model_id"], info=info, layers=tuple(layers))
            predictors.validate()
        except (SparkinferError, TypeError, KeyError) as error:
            raise SparkinferError(f"{path}: {error}; train the predictors again") from error
        return predictors

    def save(self, path: Path) -> None:
        self.validate()
        arrays: dict[str, np.ndarray] = {}
        for layer, predictor in enumerate(self.layers):
            arrays |= predictor.arrays(layer)
        metadata = {"model_id": self.model_id, "info": asdict(self.info)}
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
        for layer, (p, rank) in enumerate(zip(self.layers, self.info.rank_L, strict=True)):
            width, neurons = p.down_RD.shape[-1], p.up_FR.shape[0]
            wanted = {
                "ffn_pred_down.weight": (rank, width),
                "ffn_pred_up.weight": (neurons, rank),
                "ffn_pred_down.bias": (rank,),
                "ffn_pred_up.bias": (neurons,),
            }
            for name, array in p.arrays(layer).items():
                shape = wanted[name.split(".", 2)[2]]
                if array.shape != shape or array.dtype != np.float32:
                    raise SparkinferError(
                        f"{name} is {array.dtype} {array.shape}, wanted float32 {shape}"
                    )
                if not np.isfinite(array).all():
                    raise SparkinferError(f"{name} has NaN or infinite values")


def _info(
    *,
    kind: PredictorKind,
    rank_L: list[int],
    threshold_L: list[float],
    input_layer_offset: int,
    density_L: list[float],
) -> PredictorInfo:
    return PredictorInfo(
        kind=kind,
        rank_L=tuple(rank_L),
        threshold_L=tuple(threshold_L),
        input_layer_offset=input_layer_offset,
        density_L=tuple(density_L),
    )
