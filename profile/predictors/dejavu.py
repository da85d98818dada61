"""Writes predictors in the form that DejaVu, PowerInfer and SparkInfer read.

The output is a folder with model_0.pt, model_1.pt and so on (fc1.weight [2R, D], fc2.weight [F,
2R], ReLU between, no biases) and a config.json with one sparse_threshold for all layers and our
input_layer_offset.

The linear form converts exactly: z = relu(z) - relu(-z), so fc1 = [down; -down] and fc2 = [up,
-up]. Scaling each layer's fc2 makes one threshold fit all layers, provided that all thresholds have
the same sign.

Letters: L layers, D model width, F neurons, R rank."""

import json
import math
import re
from io import BytesIO
from pathlib import Path

import torch

from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_folder

CONFIG = "config.json"
F16_MAX = torch.finfo(torch.float16).max  # PowerInfer and SparkInfer may convert to f16


def dejavu_paths(folder: Path, num_layers: int) -> list[Path]:
    return [folder / f"model_{layer}.pt" for layer in range(num_layers)] + [folder / CONFIG]


def is_dejavu_file(name: str) -> bool:
    return name == CONFIG or re.fullmatch(r"model_\d+\.pt", name) is not None


def save_dejavu(predictors: Predictors, folder: Path) -> float:
    """Writes `folder` (f32 state dicts and config.json), whole or not at all, replacing an existing
    one; returns the sparse_threshold.

    Raises HotsplitError for predictors that the form cannot express (of a kind other than linear,
    with a single matrix in a layer, with biases), and for thresholds that are of both signs, not
    finite, almost 0, or so far apart that scaled values exceed f16."""
    info = predictors.info
    if info.kind != "linear" or 0 in info.rank_L:
        raise HotsplitError(
            f"predictors of kind {info.kind} and ranks {list(info.rank_L)} cannot be written in"
            " DejaVu's form, wanted kind linear and two matrices a layer; leave --predictor-format"
            " out"
        )
    if any(p.up_bias_F is not None or p.down_bias_R is not None for p in predictors.layers):
        raise HotsplitError("predictors with biases have no DejaVu form; train them without")
    threshold = _common_threshold(info.threshold_L)
    config = {"sparse_threshold": threshold, "input_layer_offset": info.input_layer_offset}
    with partial_folder(folder) as partial:
        for layer, own_threshold in enumerate(info.threshold_L):
            state = _state(predictors, layer, threshold / own_threshold)
            data = BytesIO()  # write_bytes reports a full disk, torch.save may not
            torch.save(state, data)
            (partial / f"model_{layer}.pt").write_bytes(data.getbuffer())
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return threshold


def _state(predictors: Predictors, layer: int, scale: float) -> dict[str, torch.Tensor]:
    """The state dict of a layer, with fc2 scaled. Raises HotsplitError for values beyond f16."""
    predictor = predictors.layers[layer]
    assert predictor.down is not None
    down_RD = torch.from_numpy(predictor.down.values())
    up_FR = torch.from_numpy(predictor.up.values()) * scale
    largest = max(float(down_RD.abs().max()), float(up_FR.abs().max()))
    if not largest <= F16_MAX:
        raise HotsplitError(
            f"the predictor of layer {layer} has a value of {largest:.3g} once its threshold is the"
            f" largest layer's, wanted at most {F16_MAX:g}, f16's largest number; train with"
            " another --target-contribution, or leave --predictor-format out"
        )
    return {
        "fc1.weight": torch.cat([down_RD, -down_RD]),
        "fc2.weight": torch.cat([up_FR, -up_FR], dim=1),
    }


def _common_threshold(threshold_L: tuple[float, ...]) -> float:
    """The threshold of largest magnitude, so that matrices are only scaled up: scaled down, values
    could become too small for a reader that converts them to f16.

    Raises HotsplitError unless all are finite, of one sign and not almost 0."""
    signs = {math.copysign(1.0, t) for t in threshold_L}
    if len(signs) > 1 or not all(math.isfinite(t) and abs(t) > 1e-6 for t in threshold_L):
        raise HotsplitError(
            f"thresholds {[round(t, 3) for t in threshold_L]} cannot be made one sparse_threshold,"
            " which needs them finite, of one sign and not 0; train with another --target-contribution"
        )
    return max(threshold_L, key=abs)
