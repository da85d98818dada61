"""Measures what training for sparsity gains: trained checkpoints compared with the untrained model.

    hotsplit sparsify MODEL --corpus TRAIN ... --save-checkpoint OUT --json > run.json
    python benchmarks/sparsify.py DENSE OUT-60 OUT-75 --corpus TRAIN --text HELD-OUT --text CODE

DENSE is the dense checkpoint's folder or model file. Untrained is the same dense model with limits
for the same share, measured on the first windows of the corpus as `sparsify` does before its first
step. KL is that from the dense model, a mean over tokens in nats, with a 95 % interval over
windows. `--run` takes the output of `sparsify --json`, for the curve over tokens; from the part
with a constant share, the tokens needed for a smaller KL are extrapolated by a fitted power law
(not measured)."""

import argparse
import json
import math
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from machine import machine, processor, slug
from torch import Tensor

from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.files.atomic import partial_file
from hotsplit.profile.corpus.corpus import read_windows
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.sparsify.config import SparsifyConfig
from hotsplit.sparsify.feed_forward import matrix_names, put_matrices
from hotsplit.sparsify.quality import Quality, evaluate
from hotsplit.sparsify.schedule import Schedule
from hotsplit.sparsify.source import as_checkpoint
from hotsplit.sparsify.student import Student, dtype_of, load_student
from hotsplit.sparsify.texts import HELD_OUT_WINDOW, codec_of, read_texts, up_to
from hotsplit.sparsify.trained_checkpoint import read_trained
from hotsplit.sparsify.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
GOALS = (0.25, 0.2, 0.12)  # KL, for the extrapolation


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="sparsify-") as name:
        folder = as_checkpoint(arguments.dense, Path(name) / "dense")
        result = _measure(folder, arguments)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with partial_file(arguments.output) as unfinished:
        unfinished.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dense", type=Path)
    parser.add_argument("trained", type=Path, nargs="+")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of the first text")
    parser.add_argument(
        "--other-tokens",
        type=int,
        default=4_096,
        help="tokens of the other texts, and for untrained models",
    )
    parser.add_argument(
        "--f32-tokens", type=int, default=2_048, help="tokens of the first text in f32"
    )
    parser.add_argument("--run", type=Path, action="append", default=[])
    results = ROOT / f"benchmarks/results/sparsify-smollm2-{slug(processor())}.json"
    parser.add_argument("--output", type=Path, default=results)
    return parser.parse_args()


def _measure(folder: Path, arguments: argparse.Namespace) -> dict:
    runs = [json.loads(path.read_text()) for path in arguments.run]
    codec = codec_of(folder)
    texts = {
        path.name: read_windows(
            [path], codec, context_length=HELD_OUT_WINDOW, max_tokens=arguments.tokens, seed=0
        ).ids
        for path in arguments.text
    }
    dtype = dtype_of("auto", "cpu")
    student = load_student(folder, "threshold", dtype, "cpu")
    names = matrix_names(student.layers)
    checkpoint = Checkpoint.open(folder)
    dense = {name: checkpoint.read(name).float() for name in names}
    trainer, measured = _trainer(student, folder, arguments.corpus)
    rows = []
    for path in arguments.trained:
        matrices, limit_LF = read_trained(path, names)
        put_matrices(student.layers, matrices)
        _set_limits(student, limit_LF)
        found = _qualities(student, texts, arguments.tokens, arguments.other_tokens)
        share = next(iter(found.values())).silent_share
        put_matrices(student.layers, dense)
        trainer.set_share(share, measured)
        untrained = _qualities(student, texts, arguments.other_tokens, arguments.other_tokens)
        rows.append({"checkpoint": path.name, "share": share, "trained": _rows(found),
                     "untrained": _rows(untrained)})  # fmt: skip
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    del student, trainer
    for row, path in zip(rows, arguments.trained, strict=True):
        row["trained_f32"] = _in_f32(folder, path, next(iter(texts.values())), arguments.f32_tokens)
    return {
        "benchmark": "sparsify",
        "machine": machine(),
        "load_1_5_15_min": os.getloadavg(),
        "products": str(dtype),
        "rows": rows,
        "runs": runs,
        "extrapolated": [found for run in runs for found in _extrapolated(run)],
    }


def _trainer(student: Student, folder: Path, corpus: Path) -> tuple[Trainer, tuple[Tensor, ...]]:
    """A trainer that has measured the neurons' weights, as before its first step; and the windows
    that it measured them on."""
    config = SparsifyConfig(model=folder, corpora=(corpus,), output=Path("none"))
    schedule = Schedule(shares=(0.6,), steps_of_share=1, learning_rate=1.0, warmup_steps=0)
    trainer = Trainer(config, student, schedule, Ranks())
    measured = read_texts(config, folder).measured
    trainer.measure(measured)
    return trainer, measured


def _set_limits(student: Student, limit_LF: Tensor) -> None:
    for layer, limit_F in zip(student.layers, limit_LF, strict=True):
        layer.limit_F = limit_F


def _qualities(
    student: Student, texts: dict[str, tuple[Tensor, ...]], first: int, others: int
) -> dict[str, Quality]:
    found = {}
    for name, windows in texts.items():
        count = others if found else first
        found[name] = _quality(student, up_to(windows, count))
        print(name, found[name].line, file=sys.stderr, flush=True)
    return found


def _quality(student: Student, windows: tuple[Tensor, ...]) -> Quality:
    return evaluate(student.model, student.layers, student.head_VD, windows, Ranks(), student.dtype)


def _rows(found: dict[str, Quality]) -> dict[str, dict]:
    return {name: asdict(quality) | {"silent_share": quality.silent_share}
            for name, quality in found.items()}  # fmt: skip


def _in_f32(folder: Path, trained: Path, windows: tuple[Tensor, ...], num_tokens: int) -> dict:
    """The trained checkpoint's quality on fewer tokens, with products in f32 and, on the same
    tokens, in the type of the other rows (bf16 if the CPU has it)."""
    found = {}
    for dtype in (torch.float32, dtype_of("auto", "cpu")):
        student = load_student(folder, "threshold", dtype, "cpu")
        matrices, limit_LF = read_trained(trained, matrix_names(student.layers))
        put_matrices(student.layers, matrices)
        _set_limits(student, limit_LF)
        found[str(dtype)] = asdict(_quality(student, up_to(windows, num_tokens)))
    return found


def _extrapolated(run: dict) -> list[dict]:
    """Fits KL = a tokens^b to the points of each share that was held at three points or more."""
    points = [p for p in run["record"]["curve"] if p["quality"]["kl"] > 0]
    found = []
    for share in sorted({p["wanted_share"] for p in points}):
        held = [p for p in points if p["wanted_share"] == share]
        if len(held) < 3:
            continue
        x = torch.tensor([[1.0, math.log(p["tokens"])] for p in held])
        y = torch.tensor([math.log(p["quality"]["kl"]) for p in held])
        a, slope = torch.linalg.lstsq(x, y[:, None]).solution.flatten().tolist()
        goals = {f"{kl}": math.exp((math.log(kl) - a) / slope) for kl in GOALS} if slope < 0 else {}
        found.append({"share": share, "points": len(held), "exponent": slope, "tokens_for": goals})
    return found


if __name__ == "__main__":
    main()
