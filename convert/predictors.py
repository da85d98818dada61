"""Predictors, ours or DejaVu's, as tensors of a model file.

DejaVu's form (and PowerInfer's): a folder of model_0.pt, model_1.pt and so on, each a state dict
with fc1.weight [R, D] and fc2.weight [F, R], optionally biases, and ReLU between them; and perhaps
a config.json with `sparse_threshold`, the threshold of logits, and our `input_layer_offset`.

Letters: L layers, D model width, F neurons of a layer, R predictor rank."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import cast

import numpy as np

from hotsplit.artifacts.model_file import ModelFile, PredictorInfo
from hotsplit.artifacts.predictor_file import FILE_NAME, LayerPredictor, Predictors
from hotsplit.convert.checkpoint import DTYPES
from hotsplit.convert.encode import encode
from hotsplit.convert.weight_files import read_state_dict
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.files.json_file import read_object
from hotsplit.model.mode_quality import ModeQuality, SparseMode
from hotsplit.model.spec import ModelSpec

LAYER_FILE = re.compile(r"model_(0|[1-9]\d*)\.pt")
# A state dict's names of the arrays, and LayerPredictor's.
PARTS = {
    "fc1.weight": "down_RD",
    "fc2.weight": "up_FR",
    "fc1.bias": "down_bias_R",
    "fc2.bias": "up_bias_F",
}
MARK = ".ffn_pred_"
OFFSET_OPTION = "--input-layer-offset"


@dataclass(frozen=True, kw_only=True)
class PredictorSource:
    """Predictors that are read layer by layer; errors quote `path`."""

    path: Path
    info: PredictorInfo
    read: Callable[[int], LayerPredictor]
    notes: tuple[str, ...] = ()
    quality: Mapping[SparseMode, ModeQuality] = field(default_factory=dict)


def add_predictors(
    model: ModelFile, folder: Path, kind: str, input_layer_offset: int | None = None
) -> tuple[ModelFile, tuple[str, ...]]:
    """The model with the predictors of `folder` in place of its own, and notes for the user.
    Matrices get the type that the predictors declare, and `kind` if they declare none; biases
    become f32. `input_layer_offset` is what the user stated, or None. Raises HotsplitError for
    predictors of another model, for broken ones, and if the user and the folder contradict each
    other."""
    model.refuse_predictors(f"leave {folder} out")
    source = _open(folder, model, input_layer_offset)
    entries = {n: e for n, e in model.tensors.items() if MARK not in n}
    for layer in range(model.spec.num_layers):
        predictor = source.read(layer)
        if predictor.matrix_kind is not None:
            entries |= predictor.entries(layer)
            continue
        for name, array in predictor.arrays(layer).items():
            array_kind = kind if array.ndim == 2 else "f32"
            read = partial(_read_rows, source, layer, name, array_kind)
            entries[name] = TensorEntry(shape=array.shape, kind=array_kind, read_rows=read)
    model = dataclasses.replace(
        model, predictor=source.info, tensors=entries, quality=dict(source.quality)
    )
    return model, source.notes


def _read_rows(
    source: PredictorSource, layer: int, name: str, kind: str, start: int, stop: int
) -> np.ndarray:
    array = source.read(layer).arrays(layer)[name][start:stop]
    return encode(array, kind, f"{source.path}: {name}", wider="f32")


def _open(folder: Path, model: ModelFile, stated: int | None) -> PredictorSource:
    """Opens the predictors in a folder, or in the file predictors.safetensors itself. Raises
    HotsplitError unless it holds predictors that fit the model."""
    if folder.is_file():
        return _open_ours(folder, model, stated)
    if not folder.is_dir():
        raise HotsplitError(f"{folder}: no such folder; wanted a folder with predictors")
    is_ours, has_layers = (folder / FILE_NAME).exists(), any(folder.glob("*.pt"))
    if is_ours == has_layers:
        found = "both" if is_ours else "neither"
        and_or = "and" if is_ours else "nor"
        raise HotsplitError(
            f"{folder}: has {found} {FILE_NAME} {and_or} model_0.pt, ...; wanted one of the two"
        )
    if is_ours:
        return _open_ours(folder / FILE_NAME, model, stated)
    return _open_dejavu(folder, model.bare_spec, stated)


def _open_ours(path: Path, model: ModelFile, stated: int | None) -> PredictorSource:
    predictors = Predictors.load(path)
    offset = predictors.info.input_layer_offset
    if stated not in (None, offset):
        raise HotsplitError(
            f"{path}: input_layer_offset is {offset}, but {stated} was asked for; leave out"
            f" {OFFSET_OPTION}"
        )
    if predictors.model_id not in (None, model.model_id):
        raise HotsplitError(
            f"{path}: made for model {str(predictors.model_id)[:12]}, this is"
            f" {model.model_id[:12]}; train predictors for this model"
        )
    if len(predictors.layers) != model.spec.num_layers:
        raise HotsplitError(
            f"{path}: has {len(predictors.layers)} layers, but the model {model.spec.num_layers}"
        )
    for layer, predictor in enumerate(predictors.layers):
        _check_layer(path, layer, predictor, model.spec)
    return PredictorSource(
        path=path,
        info=predictors.info,
        read=predictors.layers.__getitem__,
        quality=predictors.quality,
    )


def _open_dejavu(folder: Path, spec: ModelSpec, stated: int | None) -> PredictorSource:
    """Reads every layer to check it, and again to write it; only the last read stays in memory."""
    found = {path.name for path in folder.glob("*.pt")}
    wanted = [f"model_{layer}.pt" for layer in range(spec.num_layers)]
    if found != set(wanted):
        name = next((name for name in wanted if name not in found), None)
        name = name or min(found - set(wanted))
        what = "is missing" if name in wanted else "is not expected"
        raise HotsplitError(
            f"{folder}: {name} {what}; wanted {wanted[0]} to {wanted[-1]} for"
            f" {spec.num_layers} layers"
        )
    path = folder / "config.json"
    config = read_object(path, "predictors' config.json") if path.exists() else {}
    value = config.get("sparse_threshold", 0.0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(cast(float, value)) < 1e30:  # excludes NaN
        raise HotsplitError(f"{path}: sparse_threshold is {str(value)[:60]}, wanted a number")
    threshold = float(cast(float, value))
    offset, notes = _dejavu_offset(path, config, stated)
    read = lru_cache(maxsize=1)(partial(_read_dejavu, folder, spec))
    ranks = tuple(read(layer).rank for layer in range(spec.num_layers))
    info = PredictorInfo(
        kind="relu",
        rank_L=ranks,
        threshold_L=(threshold,) * spec.num_layers,
        input_layer_offset=offset,
    )
    return PredictorSource(path=folder, info=info, read=read, notes=notes)


def _dejavu_offset(
    path: Path, config: dict[str, object], stated: int | None
) -> tuple[int, tuple[str, ...]]:
    """The input layer offset (0 or 1), and a note if nobody states it, so that 0 is assumed.
    Predictors of DejaVu and PowerInfer read the input of their own layer, those of SparkInfer that
    of the layer before. Their files look alike."""
    written = config.get("input_layer_offset")
    if written not in (None, 0, 1) or isinstance(written, bool | float):
        raise HotsplitError(f"{path}: input_layer_offset is {str(written)[:60]}, wanted 0 or 1")
    if stated is not None and written is not None and stated != written:
        raise HotsplitError(
            f"{path}: input_layer_offset is {written}, but {stated} was asked for; leave out"
            f" {OFFSET_OPTION}, or correct the file"
        )
    if stated is None and written is None:
        note = (
            f"predictors of {path.parent}: assumed to read their own layer's input (offset 0);"
            f" state it with {OFFSET_OPTION}"
        )
        return 0, (note,)
    return int(cast(int, written if stated is None else stated)), ()


def _read_dejavu(folder: Path, spec: ModelSpec, layer: int) -> LayerPredictor:
    path = folder / f"model_{layer}.pt"
    state = read_state_dict(path)
    if not {"fc1.weight", "fc2.weight"} <= state.keys() <= PARTS.keys():
        found = ", ".join(sorted(state))
        raise HotsplitError(
            f"{path}: holds {found[:100]}, wanted the tensors fc1.weight, fc2.weight and optionally"
            " fc1.bias, fc2.bias"
        )
    rank = state["fc1.weight"].shape[0] if state["fc1.weight"].shape else 0
    for name, tensor in state.items():
        if tensor.dtype not in DTYPES:
            raise HotsplitError(
                f"{path}: {name} is {tensor.dtype}, wanted one of {', '.join(DTYPES)}"
            )
        f, d = spec.layers[layer].neurons.number, spec.hidden_size
        wanted = dict(zip(PARTS, ((rank, d), (f, rank), (rank,), (f,)), strict=True))[name]
        if tensor.shape != wanted:
            raise _wrong_shape(path, _name(layer, name), tensor.shape, wanted)
    arrays = {PARTS[name]: tensor.read().float().numpy() for name, tensor in state.items()}
    predictor = LayerPredictor.of(
        down_RD=arrays["down_RD"],
        up_FR=arrays["up_FR"],
        down_bias_R=arrays.get("down_bias_R"),
        up_bias_F=arrays.get("up_bias_F"),
    )
    _check_layer(path, layer, predictor, spec)
    return predictor


def _name(layer: int, part: str) -> str:
    matrix, _, kind = part.partition(".")
    return f"blk.{layer}{MARK}{'down' if matrix == 'fc1' else 'up'}.{kind}"


def _wrong_shape(
    path: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]
) -> HotsplitError:
    return HotsplitError(f"{path}: {name} is {list(found)}, wanted {list(wanted)} for this model")


def _check_layer(path: Path, layer: int, predictor: LayerPredictor, spec: ModelSpec) -> None:
    if predictor.down is not None and not predictor.down.data.size:
        raise HotsplitError(f"{path}: the predictor has rank 0; download it again")
    number = spec.layers[layer].neurons.number
    wanted = predictor.wanted_shapes(number, spec.hidden_size)
    for name, array in predictor.arrays(layer).items():
        of_name = wanted[name.split(".", 2)[2]]
        if array.shape != of_name:
            raise _wrong_shape(path, name, array.shape, of_name)
        if not np.isfinite(array).all():
            raise HotsplitError(f"{path}: {name} has NaN or infinite values; download it again")
