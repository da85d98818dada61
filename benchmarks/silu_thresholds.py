"""Measures what thresholds cost a SiLU model: FFN sparsity against perplexity on held-out text.

    python benchmarks/silu_thresholds.py [CHECKPOINT]     # the bundled twin by default

Histograms and the greedy search see the training text of examples/tiny-relu/corpus.py; results are
measured on its held-out modules, dense and sparse in one run. The same mean sparsity is divided in
three ways: equally among the layers (`uniform`), as the greedy search finds (`greedy`), and as it
finds, but with weighted neurons (`weighed`): these are silenced by |act(gate_j)| times the mean
|up_j x| times |down_j|, an estimate of a neuron's contribution. Limits (docs/rules.md) can express
the last, thresholds cannot.

FFN sparsity is the share of silent neurons, whose rows of up and down are not read in mode exact.
All rows of the gate are read, so the bytes of the feed-forward layers fall by 2/3 of it."""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from machine import machine, processor, slug
from torch import Tensor

from hotsplit import Engine
from hotsplit.artifacts.profile_file import EDGES, NUM_BINS
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.files.atomic import partial_file
from hotsplit.measure.evaluate.quality import ShareCounter
from hotsplit.profile.corpus.corpus import read_windows
from hotsplit.profile.sparsity.thresholds import (
    TUNE_TOKENS,
    Allocation,
    Meter,
    greedy,
    magnitudes,
    thresholds_for,
    up_to,
)

ROOT = Path(__file__).resolve().parent.parent
TARGETS = (0.25, 0.4, 0.5, 0.65)
TINY = 1e-4  # activations up to this are too small to divide by


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="silu-thresholds-") as name:
        folder = Path(name)
        for part in ("train", "held-out"):
            corpus = [ROOT / "examples/tiny-relu/corpus.py", "--part", part, "-o", folder / part]
            subprocess.run([sys.executable, *map(str, corpus)], check=True)
        path = folder / "model.gguf"
        convert(ConvertConfig(source=arguments.checkpoint, output=path))
        with Engine.load(path, mode="exact") as engine, torch.inference_mode():
            result = _measure(engine, folder, arguments)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with partial_file(arguments.output) as unfinished:
        unfinished.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "examples/tiny-silu"
    parser.add_argument("checkpoint", type=Path, nargs="?", default=default)
    results = ROOT / f"benchmarks/results/silu-thresholds-{slug(processor())}.json"
    parser.add_argument("--output", type=Path, default=results)
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of held-out text")
    parser.add_argument("--histogram-tokens", type=int, default=16_384)
    return parser.parse_args()


def _measure(engine: Engine, folder: Path, arguments: argparse.Namespace) -> dict:
    train = _windows(engine, folder / "train", arguments.histogram_tokens)
    held_out = _windows(engine, folder / "held-out", arguments.tokens)
    histogram_LB = magnitudes(engine, train)
    weights_LF = _neuron_weights(engine, train)
    weighed_LB = _weighed_magnitudes(engine, train, weights_LF)
    meter = Meter(engine, histogram_LB, up_to(train, TUNE_TOKENS))
    path = _path(meter, len(histogram_LB))
    checker = Meter(engine, histogram_LB, held_out)
    rows = []
    for target, found in path.items():
        for name in ("uniform", "greedy", "weighed"):
            uniform_L = (found.mean_sparsity,) * len(histogram_LB)
            sparsity_L = uniform_L if name == "uniform" else found.sparsity_L
            if name == "weighed":
                _set_weighed(engine, thresholds_for(weighed_LB, sparsity_L), weights_LF)
            else:
                engine.set_thresholds(thresholds_for(histogram_LB, sparsity_L))
            rows.append({"target": target, "thresholds": name} | _row(checker, sparsity_L))
            print(rows[-1], file=sys.stderr, flush=True)
    return {
        "benchmark": "silu_thresholds",
        "machine": machine(),
        "load_1_5_15_min": os.getloadavg(),
        "model_id": engine.model.model_id,
        "dense_perplexity": math.exp(checker.dense_loss),
        "tokens": checker.num_tokens,
        "histogram_tokens": sum(len(ids_T) for ids_T in train),
        "search": {
            "measurements": meter.num_runs,
            "tokens": meter.num_tokens,
            "seconds": meter.seconds,
        },
        "rows": rows,
    }


def _windows(engine: Engine, path: Path, num_tokens: int) -> tuple[Tensor, ...]:
    context = engine.context_length
    return read_windows(
        [path], engine.codec, context_length=context, max_tokens=num_tokens, seed=0
    ).ids


def _path(meter: Meter, num_layers: int) -> dict[float, Allocation]:
    """The greedy allocation of each target: the last whose mean is not above it."""
    found: dict[float, Allocation] = {}
    for allocation in greedy(meter, num_layers):
        if allocation.mean_sparsity > max(TARGETS) + 1e-9:
            break
        found |= {t: allocation for t in TARGETS if allocation.mean_sparsity <= t + 1e-9}
    return found


def _row(checker: Meter, sparsity_L: tuple[float, ...]) -> dict:
    """Measures the current thresholds on the held-out text."""
    counter = ShareCounter(checker.engine.model)
    with checker.engine.observe(counter.observe, counter.wants):
        cost = checker.run()
    silent_L = [1 - share for share in counter.hidden_share_L]
    return {
        "asked_L": [round(share, 2) for share in sparsity_L],
        "ffn_sparsity_L": [round(share, 4) for share in silent_L],
        "ffn_sparsity": round(sum(silent_L) / len(silent_L), 4),
        "perplexity": math.exp(cost.loss),
        "perplexity_increase": checker.increase(cost),
        "kl": cost.divergence,
    }


class UpSizes:
    """An observer that sums |up_j x| of every neuron in mode exact with thresholds of 0: act(gate)
    is known, and the hidden value is its product with up_j x."""

    def __init__(self, engine: Engine) -> None:
        self.gates = [layer.ffn.gate for layer in engine.layers]
        size = (engine.model.spec.num_layers, engine.model.spec.most_neurons)
        self.sum_LF, self.count_LF = torch.zeros(size), torch.zeros(size)
        self.activated_TF = torch.empty(0)

    def wants(self, name: str, layer: int | None) -> bool:
        return name in ("ffn_gate", "ffn_hidden")

    def observe(self, name: str, layer: int, tensor_TF: Tensor) -> None:
        if name == "ffn_gate":
            self.activated_TF, _ = self.gates[layer].act(tensor_TF, is_dense=True)
            return
        is_known_TF = self.activated_TF.abs() > TINY
        ratio_TF = (tensor_TF / self.activated_TF).abs().where(is_known_TF, torch.tensor(0.0))
        self.sum_LF[layer] += ratio_TF.sum(dim=0)
        self.count_LF[layer] += is_known_TF.sum(dim=0)


def _neuron_weights(engine: Engine, windows: tuple[Tensor, ...]) -> Tensor:
    """f32 [L, F]: mean |up_j x| times |down_j|, scaled to a mean of 1 in each layer."""
    engine.set_thresholds((0.0,) * engine.model.spec.num_layers)
    sizes = UpSizes(engine)
    with engine.observe(sizes.observe, sizes.wants):
        for ids_T in windows:
            engine.hidden(ids_T)
    weights = []
    for layer, mean_F in zip(
        engine.layers, sizes.sum_LF / sizes.count_LF.clamp(min=1), strict=True
    ):
        (block,) = layer.ffn.blocks  # an engine without a plan has one block per layer
        weights.append(mean_F * block.down.rows(block.id_N).norm(dim=1))
    weights_LF = torch.stack(weights)
    return weights_LF / weights_LF.mean(dim=1, keepdim=True)


def _weighed_magnitudes(
    engine: Engine, windows: tuple[Tensor, ...], weights_LF: Tensor
) -> np.ndarray:
    """int64 [L, B]: the histogram of |act(gate_j)| times the weight of neuron j."""
    edges = torch.from_numpy(EDGES).float()
    histogram_LB = torch.zeros((len(weights_LF), NUM_BINS), dtype=torch.int64)

    def observe(name: str, layer: int, gate_TF: Tensor) -> None:
        value_TF, _ = engine.layers[layer].ffn.gate.act(gate_TF, is_dense=True)
        bins = torch.bucketize(value_TF.abs() * weights_LF[layer], edges, right=True) - 1
        histogram_LB[layer] += torch.bincount(bins.flatten(), minlength=NUM_BINS)

    with engine.observe(observe, lambda name, layer: name == "ffn_gate"):
        for ids_T in windows:
            engine.hidden(ids_T)
    return histogram_LB.numpy()


def _set_weighed(engine: Engine, threshold_L: tuple[float, ...], weights_LF: Tensor) -> None:
    """Sets a threshold for each neuron, only in this experiment: the layer's divided by the
    neuron's weight."""
    layers = tuple(
        replace(layer, ffn=replace(layer.ffn, gate=replace(layer.ffn.gate, threshold=value / w_F)))
        for layer, value, w_F in zip(engine.layers, threshold_L, weights_LF, strict=True)
    )
    decoder = engine._live
    engine._decoder = replace(decoder, weights=replace(decoder.weights, layers=layers))


if __name__ == "__main__":
    main()
