"""A random Llama whose feed-forward layers are sparse by construction, its predictors, and its SiLU
twin for engines without ReLU. Everything in it is synthetic: it answers nonsense.

Every token's embedding contains one common direction u, which stays in the hidden state because
attention and feed-forward layers add little. Let A [256, D] have orthonormal rows, the first of
which is u. The gates are

    gate_j = b_j A + rest_j,      scaled so that gate_j . x is normal with mean -t_j and variance 1

over normed hidden states x. Neuron j fires with probability P(normal > t_j), which falls as a power
of the neuron's rank by frequency; a predictor of rank 256 (b and A) cannot see `rest_j`. Neurons
are shuffled within their layer.

    python planted_checkpoint.py FOLDER [NUM_LAYERS]

writes FOLDER/relu, FOLDER/silu (the same weights) and FOLDER/predictors.

Letters: D model width, F neurons, R predictor rank."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from random_checkpoint import TINYLLAMA, make_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from hotsplit.artifacts.model_file import PredictorInfo
from hotsplit.artifacts.predictor_file import FILE_NAME, LayerPredictor, Predictors
from hotsplit.families.decoder_sizes import Sizes

RANK = 256
DENSITY = 0.1  # mean share of the neurons that fire
EXPONENT = 0.8  # of the power law
COMMON = 0.5  # size of the common direction in an embedding, relative to the rest
# Normed hidden states have a mean of COMMON / WHOLE sqrt(D) along u, and a standard deviation of
# 1 / WHOLE along any direction.
WHOLE = (1 + COMMON**2) ** 0.5
UNSEEN = 0.15  # standard deviation of rest_j . x, unseen by the predictor; that of gate_j . x is 1
MARGIN = 0.3  # a neuron is named if its score is above minus this


def make_planted(folder: Path, shape: Sizes) -> None:
    """Writes the two checkpoints and the predictors; see the module."""
    make_checkpoint(folder / "silu", shape, layers_a_file=1)
    generator = torch.Generator().manual_seed(1)
    common_D = torch.nn.functional.normalize(
        torch.randn(shape.hidden_size, generator=generator), dim=0
    )
    predictors: dict[int, LayerPredictor] = {}
    for path in sorted((folder / "silu").glob("*.safetensors")):
        tensors = load_file(path)
        for name in list(tensors):
            _plant(name, tensors, common_D, shape, generator, predictors)
        save_file(tensors, path, metadata={"format": "pt"})
    _write_relu(folder)
    info = PredictorInfo(
        kind="linear", rank_L=(RANK,) * shape.num_layers, threshold_L=(-MARGIN,) * shape.num_layers
    )
    layers = tuple(predictors[layer] for layer in range(shape.num_layers))
    (folder / "predictors").mkdir(exist_ok=True)
    Predictors(model_id=None, info=info, layers=layers).save(folder / "predictors" / FILE_NAME)


def _plant(
    name: str,
    tensors: dict[str, Tensor],
    common_D: Tensor,
    shape: Sizes,
    generator: torch.Generator,
    predictors: dict[int, LayerPredictor],
) -> None:
    """Replaces or scales the random values of a tensor, if it is to be planted; for gates, adds
    their predictor."""
    if name == "model.embed_tokens.weight":
        values = torch.randn(tensors[name].shape, generator=generator)
        values += COMMON * shape.hidden_size**0.5 * common_D
        tensors[name] = values.bfloat16()
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        tensors[name] = tensors[name] * 0.05
    elif name.endswith("gate_proj.weight"):
        gate_FD, predictor = _gate(common_D, shape, generator)
        tensors[name] = gate_FD.bfloat16()
        predictors[int(name.split(".")[2])] = predictor


def _gate(
    common_D: Tensor, shape: Sizes, generator: torch.Generator
) -> tuple[Tensor, LayerPredictor]:
    """Gates [F, D], and the predictor that sees all of each gate except `rest`."""
    start_DR = torch.randn(shape.hidden_size, RANK, generator=generator)
    up_FR = torch.randn(shape.num_neurons, RANK, generator=generator)
    firing_F = torch.from_numpy(planted_frequencies(shape.num_neurons, generator))
    down_RD = plant_factors(start_DR, up_FR, torch.special.ndtri(firing_F).float(), common_D)
    rest_FD = torch.randn(shape.num_neurons, shape.hidden_size, generator=generator)
    predictor = LayerPredictor.of(down_RD=down_RD.numpy(), up_FR=up_FR.numpy(), kind="q8_0")
    return gate_rows(up_FR, down_RD, rest_FD), predictor


def plant_factors(start_DR: Tensor, up_FR: Tensor, mean_F: Tensor, common_D: Tensor) -> Tensor:
    """Returns the seen part's down factor [R, D], and scales its random up factor in place, so that
    gate . x has the mean `mean_F`. `start_DR` is random, and overwritten."""
    start_DR[:, 0] = common_D
    down_RD = torch.linalg.qr(start_DR).Q.T.contiguous()
    down_RD[0] = common_D
    up_FR *= WHOLE * (1 - UNSEEN**2) ** 0.5 / up_FR[:, 1:].norm(dim=1, keepdim=True)
    up_FR[:, 0] = mean_F / (COMMON / WHOLE * len(common_D) ** 0.5)
    return down_RD


def gate_rows(up_NR: Tensor, down_RD: Tensor, rest_ND: Tensor) -> Tensor:
    """Gates [N, D] from their seen part and a random `rest_ND`, which is overwritten by the part
    that the predictor does not see."""
    rest_ND -= (rest_ND @ down_RD.T) @ down_RD
    rest_ND *= UNSEEN * WHOLE / rest_ND.norm(dim=1, keepdim=True)
    return up_NR @ down_RD + rest_ND


def planted_frequencies(num_neurons: int, generator: torch.Generator) -> np.ndarray:
    """Probabilities f64 [F] that fall as a power of the rank and have the wanted mean, shuffled."""
    firing_F = np.arange(1, num_neurons + 1) ** -EXPONENT
    for _ in range(20):  # each pass raises the others by what is clipped at 0.9
        firing_F = np.clip(firing_F * DENSITY / firing_F.mean(), 1e-4, 0.9)
    return firing_F[torch.randperm(num_neurons, generator=generator).numpy()]


def _write_relu(folder: Path) -> None:
    """Links the files of `silu` into `relu`, with another activation in config.json."""
    relu = folder / "relu"
    relu.mkdir(exist_ok=True)
    for path in (folder / "silu").iterdir():
        if path.name == "config.json":
            config = json.loads(path.read_text()) | {"hidden_act": "relu"}
            (relu / path.name).write_text(json.dumps(config, indent=2))
        else:
            (relu / path.name).unlink(missing_ok=True)
            os.link(path, relu / path.name)


if __name__ == "__main__":
    count = int(sys.argv[2]) if len(sys.argv) > 2 else TINYLLAMA.num_layers
    make_planted(Path(sys.argv[1]), replace(TINYLLAMA, num_layers=count))
