"""Writes predictors in the form that DejaVu, PowerInfer and SparkInfer read.

A folder of model_0.pt, model_1.pt and so on (fc1.weight [2R, D], fc2.weight [F, 2R], ReLU between,
no biases) and a config.json with one sparse_threshold for all layers and our input_layer_offset.

The linear form converts exactly: z = relu(z) - relu(-z), so fc1 = [down; -down] and fc2 = [up,
-up]. The single threshold is met by scaling fc2, which needs thresholds of one sign.

Letters: L layers, D model width, F neurons, R rank."""

import json
import math
from io import BytesIO
from pathlib import Path

import torch

from sparkinfer.errors import SparkinferError
from sparkinfer.files import partial_file
from sparkinfer.predictor_file import Predictors

CONFIG = "config.json"


def dejavu_paths(folder: Path, num_layers: int) -> list[Path]:
    """The files' paths. config.json comes last: a folder without it is incomplete."""
    return [folder / f"model_{layer}.pt" for layer in range(num_layers)] + [folder / CONFIG]


def check_dejavu_output(folder: Path, num_layers: int) -> None:
    """Raises SparkinferError if the folder has .pt or .safetensors files other than those to be
    written."""
    wanted = {path.name for path in dejavu_paths(folder, num_layers)}
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        if path.name not in wanted and path.suffix in (".pt", ".safetensors"):
            raise SparkinferError(
                f"{path}: would be read together with model_0.pt, ...; give an empty folder"
            )


def save_dejavu(predictors: Predictors, folder: Path) -> float:
    """Writes f32 state dicts and config.json; returns the sparse_threshold.

    Raises SparkinferError for what the form cannot express: a bias, a single matrix, a kind other
    than linear, and thresholds that are of both signs, not finite or almost 0."""
    info = predictors.info
    if info.kind != "linear" or 0 in info.rank_L:
        raise SparkinferError(
            f"predictors of kind {info.kind} and ranks {list(info.rank_L)} have no DejaVu form,"
            " which has two matrices and is for models whose neurons are silent by themselves"
        )
    if any(p.up_bias_F is not None or p.down_bias_R is not None for p in predictors.layers):
        raise SparkinferError("predictors with biases have no DejaVu form; train them without")
    threshold = _common_threshold(info.threshold_L)
    for layer, predictor in enumerate(predictors.layers):
        assert predictor.down is not None
        down_RD = torch.from_numpy(predictor.down.values())
        up_FR = torch.from_numpy(predictor.up.values())
        scale = threshold / info.threshold_L[layer]
        state = {
            "fc1.weight": torch.cat([down_RD, -down_RD]),
            "fc2.weight": torch.cat([up_FR, -up_FR], dim=1) * scale,
        }
        with partial_file(folder / f"model_{layer}.pt") as partial:
            data = BytesIO()  # write_bytes reports a full disk, torch.save may not
            torch.save(state, data)
            partial.write_bytes(data.getbuffer())
    config = {"sparse_threshold": threshold, "input_layer_offset": info.input_layer_offset}
    with partial_file(folder / CONFIG) as partial:
        partial.write_text(json.dumps(config, indent=2) + "\n")
    return threshold


def _common_threshold(threshold_L: tuple[float, ...]) -> float:
    """The threshold of largest magnitude, so that matrices are only scaled up: scaled down, values
    could become too small for a reader that converts them to f16.

    Raises SparkinferError unless all are finite, of one sign and not almost 0."""
    signs = {math.copysign(1.0, t) for t in threshold_L}
    if len(signs) > 1 or not all(math.isfinite(t) and abs(t) > 1e-6 for t in threshold_L):
        raise SparkinferError(
            f"thresholds {[round(t, 3) for t in threshold_L]} cannot be made one sparse_threshold,"
            " which needs them finite, of one sign and not 0; train with another --target-contribution"
        )
    return max(threshold_L, key=abs)
