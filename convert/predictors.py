"""Predictors, ours or DejaVu's, as tensors of a model file.

DejaVu's form (and PowerInfer's): a folder of model_0.pt, model_1.pt and so on, each a state dict
with fc1.weight [R, D] and fc2.weight [F, R] and ReLU between them, and a config.json that may
hold `sparse_threshold`, which logits are compared with.

Letters: L layers, D model width, F neurons of a layer, R predictor rank."""

import dataclasses
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from sparkinfer.architecture import ModelShape
from sparkinfer.convert.encode import encode
from sparkinfer.convert.json_file import read_object
from sparkinfer.errors import SparkinferError
from sparkinfer.gguf_file import TensorEntry
from sparkinfer.model_file import ModelFile, PredictorInfo
from sparkinfer.predictor_file import FILE_NAME, LayerPredictor, Predictors

LAYER_FILE = re.compile(r"model_(0|[1-9]\d*)\.pt")
# What each array of a state dict is called by LayerPredictor.
PARTS = {
    "fc1.weight": "down_RD",
    "fc2.weight": "up_FR",
    "fc1.bias": "down_bias_R",
    "fc2.bias": "up_bias_F",
}
MARK = ".ffn_pred_"


@dataclass(frozen=True, kw_only=True)
class PredictorSource:
    """Predictors that are read a layer at a time; `path` names them in a refusal."""

    path: Path
    info: PredictorInfo
    read: Callable[[int], LayerPredictor]


def add_predictors(model: ModelFile, folder: Path, kind: str) -> ModelFile:
    """The model with the predictors of `folder` in place of any it has; biases become f32.

    Raises SparkinferError for predictors of another model, and for broken ones."""
    source = _open(folder, model)
    entries = {n: e for n, e in model.tensors.items() if MARK not in n}
    for layer in range(model.shape.num_layers):
        for name, array in source.read(layer).arrays(layer).items():
            array_kind = kind if array.ndim == 2 else "f32"
            read = partial(_read_rows, source, layer, name, array_kind)
            entries[name] = TensorEntry(shape=array.shape, kind=array_kind, read_rows=read)
    return dataclasses.replace(model, predictor=source.info, tensors=entries)


def _read_rows(
    source: PredictorSource, layer: int, name: str, kind: str, start: int, stop: int
) -> np.ndarray:
    array = source.read(layer).arrays(layer)[name][start:stop]
    return encode(array, kind, f"{source.path}: {name}", wider="f32")


def _open(folder: Path, model: ModelFile) -> PredictorSource:
    """Raises SparkinferError unless the folder holds predictors that fit the model."""
    if not folder.is_dir():
        raise SparkinferError(f"{folder}: no such folder; wanted a folder with predictors")
    is_ours, has_layers = (folder / FILE_NAME).exists(), any(folder.glob("*.pt"))
    if is_ours == has_layers:
        found = "both" if is_ours else "neither"
        raise SparkinferError(
            f"{folder}: holds {found} of {FILE_NAME} and model_0.pt, ...; wanted one of the two"
        )
    return _open_ours(folder / FILE_NAME, model) if is_ours else _open_dejavu(folder, model.shape)


def _open_ours(path: Path, model: ModelFile) -> PredictorSource:
    predictors = Predictors.load(path)
    if predictors.model_id not in (None, model.model_id):
        raise SparkinferError(
            f"{path}: made for model {str(predictors.model_id)[:12]}, this is"
            f" {model.model_id[:12]}; train predictors for this model"
        )
    if len(predictors.layers) != model.shape.num_layers:
        raise SparkinferError(
            f"{path}: {len(predictors.layers)} layers, the model has {model.shape.num_layers}"
        )
    for layer, predictor in enumerate(predictors.layers):
        _check_layer(path, layer, predictor, model.shape)
    return PredictorSource(path=path, info=predictors.info, read=predictors.layers.__getitem__)


def _open_dejavu(folder: Path, shape: ModelShape) -> PredictorSource:
    """Reads every layer once to check it; they are read again one by one when they are written."""
    found = {path.name for path in folder.glob("*.pt")}
    wanted = [f"model_{layer}.pt" for layer in range(shape.num_layers)]
    if found != set(wanted):
        name = min(found ^ set(wanted), key=_layer_number)
        what = "is missing" if name in wanted else "is not expected"
        raise SparkinferError(
            f"{folder}: {name} {what}; wanted {wanted[0]} to {wanted[-1]} for"
            f" {shape.num_layers} layers"
        )
    read = partial(_read_dejavu, folder, shape)
    ranks = tuple(read(layer).down_RD.shape[0] for layer in range(shape.num_layers))
    info = PredictorInfo(
        kind="relu", rank_L=ranks, threshold_L=(_dejavu_threshold(folder),) * shape.num_layers
    )
    return PredictorSource(path=folder, info=info, read=read)


def _layer_number(name: str) -> tuple[float, str]:
    match = LAYER_FILE.fullmatch(name)
    return (int(match[1]) if match else math.inf), name


def _dejavu_threshold(folder: Path) -> float:
    if not (folder / "config.json").exists():
        return 0.0
    value = read_object(folder / "config.json", "predictors' config.json").get(
        "sparse_threshold", 0.0
    )
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SparkinferError(f"{folder}: sparse_threshold is {value!r}, wanted a number")
    return float(value)


def _read_dejavu(folder: Path, shape: ModelShape, layer: int) -> LayerPredictor:
    """f32 weights of one layer. A state dict is data: torch.load runs no code of the file."""
    path = folder / f"model_{layer}.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise SparkinferError(
            f"{path}: not a whole state dict ({type(error).__name__}); download it again"
        ) from error
    is_state = isinstance(state, dict) and all(torch.is_tensor(v) for v in state.values())
    if not is_state or not {"fc1.weight", "fc2.weight"} <= state.keys() <= PARTS.keys():
        keys = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise SparkinferError(
            f"{path}: holds {keys}, wanted the tensors fc1.weight, fc2.weight and perhaps"
            " fc1.bias, fc2.bias"
        )
    arrays = {PARTS[name]: tensor.float().numpy() for name, tensor in state.items()}
    predictor = LayerPredictor(**arrays)
    _check_layer(path, layer, predictor, shape)
    return predictor


def _check_layer(path: Path, layer: int, predictor: LayerPredictor, shape: ModelShape) -> None:
    """Raises SparkinferError unless the arrays are finite and fit the model."""
    rank = len(predictor.down_RD)
    prefix = f"blk.{layer}{MARK}"
    wanted = {
        prefix + "down.weight": (rank, shape.width),
        prefix + "up.weight": (shape.num_neurons, rank),
        prefix + "down.bias": (rank,),
        prefix + "up.bias": (shape.num_neurons,),
    }
    for name, array in predictor.arrays(layer).items():
        if array.shape != wanted[name]:
            raise SparkinferError(
                f"{path}: {name} is {list(array.shape)}, wanted {list(wanted[name])} for this model"
            )
        if not np.isfinite(array).all():
            raise SparkinferError(f"{path}: {name} has NaN or infinite values; get it again")
