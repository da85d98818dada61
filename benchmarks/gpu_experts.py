"""Measures a mixture of experts as a user runs it: `hotsplit run` at three budgets, against
llama.cpp with --n-cpu-moe at the same bytes in the same run.

    python benchmarks/gpu_experts.py [--output FILE.json] [--rival build/gpu-rival] [--seconds 420]
        [--model MODEL.gguf] [--device cuda]

The model has 16 of Qwen3-30B-A3B's 48 layers in Q4_K_M with random weights and routers that choose
as by Zipf's law (random_model.py); it is made in the folder of FILE. `run` profiles, calibrates,
plans and tries; what it then runs is timed in a process of its own: decode, and prompts of 512 and
4,096 tokens. Results are saved case by case; cases with a result in FILE are not repeated. With
`--device cpu` and a small model, it checks itself on any machine."""

import argparse
import random
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_rival import RivalModel, best_rival
from gpu_sections import Sections, SectionTable, page_of
from gpu_trained import TrainedCase, run
from random_model import make_mixture
from worker_process import Process, ProcessError

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.artifacts.trial_file import FILES, Trial
from hotsplit.costs.part_bytes import is_expert
from hotsplit.run.housekeeping import list_cache

SHAPE, LAYERS, KIND = "qwen3-30b-a3b", 16, "q4_k_m"
SHARES, THREADS, PROMPTS = (0.25, 0.5, 0.75), (8, 16), (512, 4096)
CONTEXT, STEPS, ROUNDS, TRIED_TOKENS = 4352, 24, 3, 8
COLUMNS = (
    "budget, threads",
    "runs",
    "predicted, ms",
    "measured, ms",
    "llama.cpp, ms",
    "times as fast",
    *(f"prompt of {n:,}, times as fast" for n in PROMPTS),
)


@dataclass(frozen=True)
class Times:
    """Seconds of a token, and of prompts by their tokens."""

    token_s: float
    prompts_s: dict[int, float]


class MixtureBench:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.folder = asked, asked.output.parent
        self.path = asked.model or self.folder / f"{SHAPE}-{LAYERS}-{KIND}.gguf"
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            make_mixture(self.path, SHAPE, KIND, LAYERS)
        self.model = ModelFile.load(self.path)
        self.context = min(CONTEXT, self.model.spec.context_length)
        chance, tokens = random.Random(0), range(3, self.model.spec.vocab_size)
        self.ids = chance.choices(tokens, k=self.context)

    def measure(self, share: float, threads: int) -> list[SectionTable]:
        budget = int(share * self.path.stat().st_size) // 2**20 * 2**20
        case = TrainedCase(model=self.path, name=f"{share:.0%}", vram_bytes=budget)
        more = ("-t", str(threads), "-c", str(self.context))
        cache = self.folder / f"cache-{threads}"  # what is calibrated depends on them
        run(case, self.asked.device, cache, TRIED_TOKENS, more)
        trial, split = self._chosen(budget, cache)
        ours = self._ours(split, threads)
        theirs: Times | str = "no rival"
        if self.asked.rival:
            try:
                theirs = self._theirs(budget, threads)
            except ProcessError as error:
                theirs = str(error)[:80]
        runs = trial.runs if trial else "no GPU"
        predicted = f"{1e3 * trial.predicted_s[trial.runs]:.2f}" if trial else "-"
        row = [f"{share:.0%}, {threads}", runs, predicted, f"{1e3 * ours.token_s:.2f}"]
        if isinstance(theirs, str):
            row += ["-"] * (2 + len(PROMPTS))
        else:
            row += [f"{1e3 * theirs.token_s:.2f}", f"{theirs.token_s / ours.token_s:.2f}"]
            row += [f"{theirs.prompts_s[n] / ours.prompts_s[n]:.2f}" for n in PROMPTS]
        note = "; ".join(
            [*([trial.line] if trial else []), *([theirs] if isinstance(theirs, str) else [])]
        )
        title = f"{self.model.spec.num_layers} layers of {SHAPE}, against --n-cpu-moe"
        return [SectionTable(title=title, columns=COLUMNS, rows=[row], note=note)]

    def _chosen(self, budget: int, cache: Path) -> tuple[Trial | None, Path | None]:
        """The trial of the plan for this budget, and the plan that runs; (None, None) without a
        GPU, (trial, None) for the CPU alone."""
        paths: dict[str, list[Path]] = {"plan": [], "trial": []}
        for entry in list_cache(cache):
            paths.setdefault(entry.kind, []).append(cache / entry.name / entry.file)
        plans = {
            Split.load(path).objective_s: path
            for path in paths["plan"]
            if Split.load(path).vram_budget_bytes == budget
        }
        for path in paths["trial"]:
            trial = Trial.load(path)
            if (plan := plans.get(trial.predicted_s["the plan"])) is not None:
                if trial.runs in FILES:
                    return trial, path.with_name(FILES[trial.runs])
                return trial, plan if trial.runs == "the plan" else None
        return None, None

    def _ours(self, split: Path | None, threads: int) -> Times:
        program = Path(__file__).with_name("gpu_worker.py")
        device = self.asked.device if split else "cpu"
        command = (
            sys.executable,
            program,
            self.path,
            "--mode",
            "dense",
            "--device",
            device,
            "--threads",
            str(threads),
            *(("--split", split) if split else ()),
        )
        process = Process.of(command, "hotsplit", self.folder / "ours.log")
        try:
            process.ask("load")
            steps = process.ask("follow", ids=self.ids[:STEPS])["seconds"]
            return Times(median(steps[4:]), self._prompts(process, lambda found: found["seconds"]))
        finally:
            process.close()

    def _theirs(self, budget: int, threads: int) -> Times:
        spec = self.model.spec
        of_layer = sum(e.num_bytes for n, e in self.model.layer_tensors[0].items() if is_expert(n))
        rival = RivalModel(
            folder=self.asked.rival,
            model=self.path,
            context_length=self.context,
            num_layers=spec.num_layers,
            layer_bytes=of_layer,
        )
        log = self.folder / "rival.log"
        process = best_rival(rival, budget, log, moves_experts=True).process
        try:
            ids = self.ids[:STEPS]
            steps = process.ask("decode", threads=threads, ids=ids, start=0)["seconds"]
            prompts = self._prompts(process, lambda f: f["seconds"][0], threads=threads)
            return Times(median(steps[4:]), prompts)
        finally:
            process.close()

    def _prompts(self, process: Process, seconds: Any, **more: int) -> dict[int, float]:
        """Medians of ROUNDS, after one that is not counted; no prompt begins as the one before."""
        found = {}
        for count in PROMPTS:
            count_here = min(count, self.context - 1)
            rounds = [
                seconds(process.ask("prefill", ids=self.ids[n : n + count_here], **more))
                for n in range(2 if count > 512 else 1 + ROUNDS)
            ]
            found[count] = median(rounds[1:])
        return found


def command_line() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--output", type=Path, default=Path("build/gpu-experts/results.json"))
    found.add_argument("--rival", type=Path, help="folder built by gpu_rival.sh; else no rival")
    found.add_argument("--model", type=Path, help="a GGUF in llama.cpp's layout")
    found.add_argument("--seconds", type=float, default=420.0)
    found.add_argument("--device", default="cuda")
    return found


def main() -> int:
    """Returns 0 if every case has a result."""
    asked = command_line().parse_args()
    sections, mixture = Sections(asked.output, "gpu-experts", asked.seconds), MixtureBench(asked)
    cases = {f"{share:.0%}, {count}": (share, count) for count in THREADS for share in SHARES}
    for name, case in cases.items():
        sections.run(name, lambda c=case: mixture.measure(*c), least_s=30.0, most_s=240.0)
    print(page_of(sections.content, tuple(cases)))
    if asked.model is None and sections.is_fine(tuple(cases)):
        with suppress(OSError):
            mixture.path.unlink()
    return 0 if sections.is_fine(tuple(cases)) else 1


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
