"""Compares our predictors with the published recipe, on the same model and text.

The recipe is DejaVu's (arXiv 2310.17157), which PowerInfer and SparkInfer follow: two matrices of a
fixed rank with ReLU between, trained on whether a neuron fires by plain binary cross entropy, AdamW
at 1e-3, 20 epochs over stored activations, f16. Both are measured on the same held-out text, by the
same code, with the threshold that loses the same share of the norm of a layer's output.

    python benchmarks/predictors.py build/demo/base.gguf build/demo/predictors \
        --train build/corpus/train.txt --held-out build/corpus/held-out.txt \
        -o benchmarks/results/predictors.json

Letters: T tokens, D model width, F neurons, R rank."""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import torch
from machine import machine
from torch import Tensor, nn
from torch.nn import functional as F

from hotsplit.artifacts.predictor_file import FILE_NAME, Predictors
from hotsplit.costs.budget import LayerBytes, layer_bytes
from hotsplit.files.atomic import partial_file
from hotsplit.profile.corpus.corpus import read_windows
from hotsplit.profile.predictors.layer_trainer import row_norms
from hotsplit.profile.predictors.options import Target
from hotsplit.profile.predictors.output import with_predictors
from hotsplit.profile.predictors.rounding import rounded
from hotsplit.profile.predictors.selection import Candidate, Quality, Tally
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.model.feed_forward import Gate, NeuronBlock, Predictor
from hotsplit.runtime.model.loader import load_predictors
from hotsplit.runtime.weights.matrix import Linear

EPOCHS, LEARNING_RATE, BATCH = 20, 1e-3, 512


@dataclass(frozen=True, kw_only=True)
class Activity:
    """One layer on one text."""

    x_TD: Tensor
    fires_TF: Tensor
    given_TF: Tensor  # |h_j| |down_j|
    output_square: float


@torch.inference_mode(False)
def activities(engine: Engine, text: Path, max_tokens: int) -> list[Activity]:
    windows = read_windows(
        [text], engine.codec, context_length=engine.context_length, max_tokens=max_tokens, seed=1
    )
    inputs: dict[int, list[Tensor]] = {}
    with engine.observe(
        lambda name, layer, x_TD: inputs.setdefault(layer or 0, []).append(x_TD.clone()),
        lambda name, layer: name == "ffn_norm",
    ):
        for ids in windows.ids:
            engine.hidden(ids)
    gates = engine.model.threshold_L
    return [
        activity(torch.cat(inputs[i]), layer.ffn.blocks[0], Gate(
            activation=engine.model.activation, threshold=gates[i]))
        for i, layer in enumerate(engine.layers)
    ]  # fmt: skip


@torch.no_grad()
def activity(x_TD: Tensor, block: NeuronBlock, gate: Gate) -> Activity:
    x_TD = x_TD.clone()
    activated_TF, fires_TF = gate.act(block.gate.apply(x_TD), is_dense=False)
    up_TF = None if block.up is None else block.up.apply(x_TD)
    hidden_TF = gate.hidden(activated_TF, up_TF)
    return Activity(
        x_TD=x_TD,
        fires_TF=fires_TF,
        given_TF=hidden_TF.abs() * row_norms(block.down),
        output_square=block.down.combine_many(hidden_TF).double().square().sum().item(),
    )


def train_published(data: Activity, rank: int, gate: Gate) -> Predictor:
    torch.manual_seed(0)
    width, neurons = data.x_TD.shape[1], data.fires_TF.shape[1]
    network = nn.Sequential(
        nn.Linear(width, rank, bias=False), nn.ReLU(), nn.Linear(rank, neurons, bias=False)
    )
    optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(data.x_TD)).split(BATCH):
            loss = F.binary_cross_entropy_with_logits(
                network(data.x_TD[index]), data.fires_TF[index].float()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    fc1, fc2 = (p.detach() for p in network.parameters())
    return Predictor(kind="relu", down=Linear(weight=rounded(fc1, "f16")), gate=gate,
                     up=Linear(weight=rounded(fc2, "f16")), threshold=0.0)  # fmt: skip


@torch.no_grad()
def measured(predictor: Predictor, data: Activity, target: Target, sizes: LayerBytes) -> Quality:
    score_TF = predictor.scores(data.x_TD)
    candidate = Candidate(predictor=predictor, is_trained=True)
    tally = Tally(candidate, score_TF.std().item(), score_TF.device)
    tally.add(score_TF, data.fires_TF, data.given_TF, data.output_square)
    return tally.quality(target, sizes)


def mean(qualities: list[Quality]) -> dict[str, float]:
    names = ("num_bytes", "density", "predicted_density", "recall", "precision", "contribution",
             "lost_norm", "bytes_per_token")  # fmt: skip
    return {n: sum(getattr(q, n) for q in qualities) / len(qualities) for n in names}


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("predictors", type=click.Path(path_type=Path))
@click.option("--train", type=click.Path(path_type=Path), required=True)
@click.option("--held-out", type=click.Path(path_type=Path), required=True)
@click.option("--ranks", default="64,128", show_default=True)
@click.option("--tokens", default=32_768, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(
    model: Path, predictors: Path, train: Path, held_out: Path, ranks: str, tokens: int,
    output: Path,
) -> None:  # fmt: skip
    """The last line on stdout is one JSON object."""
    ours = Predictors.load(predictors / FILE_NAME)
    with Engine.load(model, mode="dense") as engine:
        gates = tuple(
            Gate(activation=engine.model.activation, threshold=t) for t in engine.model.threshold_L
        )
        sizes = [layer_bytes(engine.model, i) for i in range(len(gates))]
        seen = activities(engine, train, tokens)
        unseen = activities(engine, held_out, 8192)
        loaded = load_predictors(with_predictors(engine.model, gates, ours), engine.device)
        # In memory ours are f32; their bytes are those of the declared type.
        loaded = tuple(
            replace(
                p,
                down=p.down and Linear(weight=rounded(p.down.weight.data, kind),
                                       bias_N=p.down.bias_N),
                up=Linear(weight=rounded(p.up.weight.data, kind), bias_N=p.up.bias_N),
            )
            for p, kind in zip(loaded, [layer.matrix_kind or "f32" for layer in ours.layers],
                               strict=True)
        )  # fmt: skip
        results = {}
        for lost in (0.02, 0.03, 0.04):
            target = Target(contribution=1e-6, lost_norm=lost)
            results[f"ours, lost norm {lost}"] = mean(
                [measured(p, d, target, s)
                 for p, d, s in zip(loaded, unseen, sizes, strict=True)]
            )  # fmt: skip
        for rank in map(int, ranks.split(",")):
            began = time.perf_counter()
            trained = [train_published(d, rank, g) for d, g in zip(seen, gates, strict=True)]
            seconds = time.perf_counter() - began
            for lost in (0.02, 0.03, 0.04):
                target = Target(contribution=1e-6, lost_norm=lost)
                found = [measured(p, d, target, s)
                         for p, d, s in zip(trained, unseen, sizes, strict=True)]  # fmt: skip
                results[f"published, rank {rank}, lost norm {lost}"] = {
                    **mean(found), "seconds": seconds
                }  # fmt: skip
    report = {
        "benchmark": "predictors", "model": model.name, "tokens": tokens, "machine": machine(),
        "ffn_bytes_per_layer": len(gates) and sizes[0].neuron * engine.model.spec.most_neurons,
        "target": asdict(Target()), "results": results,
    }  # fmt: skip
    with partial_file(output) as partial:
        partial.write_text(json.dumps(report, indent=1) + "\n")
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
