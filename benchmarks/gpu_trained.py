"""Measures models as a user runs them: `hotsplit run` at three budgets, on the CPU alone and on the
card alone.

    python benchmarks/gpu_trained.py MODEL.gguf ... [--output FILE.json] [--seconds 150] [--device
    cuda]

A model that does not exist is reported; if none exists, random weights of SmolLM2's shape stand in,
whose speed is that of the real ones, and the tables name them. A case whose command had to prepare
something runs it again, and the second is measured. Everything is made anew in the folder of FILE,
so that a plan comes from this machine's calibration. Results are saved case by case; cases with a
result in FILE are not repeated."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_model import Planted, write_dense
from gpu_sections import Sections, SectionTable, page_of

from hotsplit.artifacts.split_file import Split
from hotsplit.families.decoder_sizes import Sizes
from hotsplit.run.housekeeping import list_cache

SHARES = (0.3, 0.6, 0.9)  # of the file
CPU, CARD = "the CPU alone", "the card alone"
CONTEXT, TOKENS = 1024, 96
SMOLLM2 = Sizes(
    num_layers=30,
    hidden_size=576,
    num_neurons=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49_152,
    context_length=2048,
)
TEXT = (
    "The following is a short account of the history of the steam engine, from the first"
    " atmospheric pumps to the turbines of power stations. In 1712 Thomas Newcomen built an engine"
    " that pumped water out of a mine in Staffordshire. It burned a great deal of coal, and"
)
COLUMNS = ("model", "tokens/s", "ms a token", "predicted", "prompt, ms", "MiB of budget")


class CommandError(Exception):
    """`hotsplit run` failed; the message is its last line."""


@dataclass(frozen=True, kw_only=True)
class TrainedCase:
    """One way to run a model. `vram_bytes`: None for a device's own choice."""

    model: Path
    name: str
    vram_bytes: int | None

    @property
    def title(self) -> str:
        return f"{self.model.parent.name}/{self.model.name}: {self.name}"


def cases_of(model: Path) -> list[TrainedCase]:
    """The two processors alone, then the budgets."""
    size = model.stat().st_size
    plans = [
        TrainedCase(model=model, name=f"a plan for {share:.0%}", vram_bytes=int(share * size))
        for share in SHARES
    ]
    return [
        TrainedCase(model=model, name=CPU, vram_bytes=0),
        TrainedCase(model=model, name=CARD, vram_bytes=None),
        *plans,
    ]


def measure(case: TrainedCase, device: str, cache: Path, tokens: int) -> list[SectionTable]:
    report = run(case, device, cache, tokens)
    if report["run"]["made"]:
        report = run(case, device, cache, tokens)
    predicted = predicted_s(cache, case.vram_bytes)
    peak = sum(each["peak_reserved"] for each in report["memory"])
    memory = f"{peak / 2**20:.0f}" if report["memory"] else "-"
    if case.vram_bytes:
        memory += f" of {case.vram_bytes / 2**20:.0f}"
    rate = report["decode_per_s"]
    row = [
        case.title,
        f"{rate:.1f}",
        f"{1e3 / rate:.2f}",
        "-" if predicted is None else f"{1e3 * predicted:.2f}",
        f"{1e3 * report['prefill_s']:.1f}",
        memory,
    ]
    return [SectionTable(title="hotsplit run, as a user types it", columns=COLUMNS, rows=[row])]


def run(
    case: TrainedCase, device: str, cache: Path, tokens: int, more: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The command's report. Raises CommandError."""
    command = [
        sys.executable,
        "-m",
        "hotsplit",
        "run",
        str(case.model),
        "-p",
        TEXT,
        "--json",
        "-n",
        str(tokens),
        "-c",
        str(CONTEXT),
        "--temp",
        "0",
        "--ignore-eos",
        "--yes",
        "--speculate",
        "none",
        "--device",
        "cpu" if case.vram_bytes == 0 else device,
    ]
    if case.vram_bytes is not None:
        command += ["--vram", f"{case.vram_bytes // 2**20}MiB" if case.vram_bytes else "0"]
    command += more
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HOTSPLIT_CACHE": str(cache)}
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise CommandError(f"{case.title}: {lines[-1] if lines else done.returncode}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def predicted_s(cache: Path, vram_bytes: int | None) -> float | None:
    """Seconds per token of the newest plan in the cache for this budget."""
    if not vram_bytes:
        return None
    paths = [cache / each.name / each.file for each in list_cache(cache) if each.kind == "plan"]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        split = Split.load(path)
        if split.vram_budget_bytes == vram_bytes // 2**20 * 2**20:
            return split.objective_s
    return None


def stand_in(folder: Path, sizes: Sizes = SMOLLM2) -> Path:
    """A file of random weights in q8_0, made at its first use."""
    path = folder / "random-weights" / "smollm2-shape.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        planted = Planted(sizes=sizes, rank=32, device=torch.device("cpu"))
        write_dense(planted, path, layout="sparse", kind="q8_0")
    return path


def command_line() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("models", type=Path, nargs="+")
    found.add_argument("--output", type=Path, default=Path("build/gpu-trained/results.json"))
    found.add_argument("--seconds", type=float, default=150.0)
    found.add_argument("--device", default="cuda")
    found.add_argument("--tokens", type=int, default=TOKENS)
    return found


def main() -> int:
    """Returns 0 if every case of every model that exists has a result."""
    asked = command_line().parse_args()
    sections = Sections(asked.output, "gpu-trained", asked.seconds)
    cache, names = asked.output.parent / "cache", list[str]()
    missing = [model for model in asked.models if not model.exists()]
    for model in missing:
        sections.add_facts(**{str(model): "missing; benchmarks/README.md says how it is made"})
    models = [model for model in asked.models if model not in missing]
    for model in models or [stand_in(asked.output.parent)]:
        for case in cases_of(model):
            names.append(case.title)
            sections.run(
                case.title,
                lambda c=case: measure(c, asked.device, cache, asked.tokens),
                least_s=10.0,
                most_s=90.0,
            )
    print(page_of(sections.content, names))
    return 0 if sections.is_fine(names) else 1


if __name__ == "__main__":
    sys.exit(main())
