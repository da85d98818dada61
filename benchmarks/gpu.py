"""Benchmarks decode and prefill on a CUDA device against llama.cpp, at several VRAM budgets.

    python benchmarks/gpu.py FOLDER [--rival build/gpu-rival] [--minutes 8]
    python benchmarks/gpu.py FOLDER --smoke [--machine machine.json]     (anywhere, at toy scale)

Models are synthetic (gpu_model.py): a 7B shape and eight layers of a 70B one (with --short only
eight layers of the 7B one), f16, with planted sparsity. For each shape the benchmark writes the
model, calibrates (once, after the first model, unless --machine is given), solves at each budget (a
share of the model's bytes, mode predicted) and, for 7B, at one that holds the whole model (all
modes), loads each plan in a separate process, and measures them alternately (gpu_cases.py). A
plan's limit is the solver's: the bytes that a token touches on the GPU and on the CPU, over the
measured bandwidth of each, with both overlapped and without fixed costs.

It writes gpu.json as it goes, and at the end prints a table, notes and a line of JSON. To end
within --minutes, it starts no shape in the last LEAST_SECONDS and no case of a round in the last
15 s; what was not measured is reported."""

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gpu_cases
import torch
from gpu_cases import Amount, BudgetCase
from gpu_model import Planted, write_dense, write_planted
from gpu_rival import GpuRival, RivalModel, best_rival
from machine import machine as this_machine
from worker_process import Process, ProcessError

from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.bytes_read import bytes_read
from hotsplit.costs.part_bytes import kv_bytes, layer_bytes
from hotsplit.families.decoder_sizes import Sizes
from hotsplit.files.atomic import partial_file
from hotsplit.measure.calibrate.calibrate import CalibrateConfig, calibrate
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.solver.solve import SolveConfig, solve

# The budget of a model entirely on the GPU: WHOLE times its bytes, plus BESIDE_BYTES for cache and
# workspace.
WHOLE, BESIDE_BYTES = 1.1, 1 << 30
CARD = Path("rtx-4060-8gb")  # by its data sheet
PLAN = (
    "status",
    "gap",
    "solve_s",
    "objective_s",
    "num_hot",
    "num_neurons",
    "num_dense_on_gpu",
    "head_on_gpu",
    "hot_traffic_share",
    "gpu_bytes",
    "cpu_bytes",
)
NO_HOST_LIMIT = 1 << 40  # main memory must not limit a plan here
LEAST_SECONDS = 150.0  # with less time left, no further shape is started


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One model, its budgets, and how much to measure."""

    name: str
    sizes: Sizes
    rank: int
    budgets: tuple[float, ...]  # shares of the model's bytes
    resident: tuple[str, ...]  # modes that are run with the whole model on the GPU
    context_length: int
    steps: int


def shape_of(
    layers: int,
    width: int,
    neurons: int,
    heads: int,
    kv_heads: int,
    vocab: int = 32_000,
    context_length: int = 2048,
) -> Sizes:
    return Sizes(
        num_layers=layers,
        hidden_size=width,
        num_neurons=neurons,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        vocab_size=vocab,
        context_length=context_length,
    )


SEVEN_B_8 = Scale(
    name="7B/4",
    sizes=shape_of(8, 4096, 11008, 32, 32),
    rank=256,
    budgets=(0.45, 0.6, 0.8),
    resident=("predicted",),
    context_length=1024,
    steps=32,
)
SCALES = (
    Scale(
        name="7B",
        sizes=shape_of(32, 4096, 11008, 32, 32),
        rank=256,
        budgets=(0.45, 0.6, 0.8),
        resident=("dense", "exact", "predicted"),
        context_length=1024,
        steps=32,
    ),
    Scale(
        name="70B/10",
        sizes=shape_of(8, 8192, 28672, 64, 8),
        rank=256,
        budgets=(0.45, 0.6, 0.8),
        resident=(),
        context_length=1024,
        steps=32,
    ),
)
SMOKE = Scale(
    name="toy",
    sizes=shape_of(3, 256, 1024, 8, 4, vocab=384, context_length=64),
    rank=32,
    budgets=(0.6,),
    resident=("dense",),
    context_length=64,
    steps=4,
)


def main() -> int:
    """Returns 0 unless a case failed; the table and the notes list what was not measured."""
    arguments = command_line().parse_args()
    bench = GpuBench(arguments)
    scales = (SMOKE,) if arguments.smoke else (SEVEN_B_8,) if arguments.short else SCALES
    for scale in scales:
        if bench.seconds_left < LEAST_SECONDS and scale in SCALES:
            bench.note(f"{scale.name}: not started, {bench.seconds_left:.0f} s left")
            continue
        bench.run(scale)
    print(gpu_cases.table(bench.result["rows"]))
    for line in bench.result["notes"]:
        print(line)
    print(json.dumps({"benchmark": "gpu", "json": str(bench.output)}))
    return int(any(row["error"] for row in bench.result["rows"]))


def dense_limit_seconds(model: ModelFile, machine: Machine, context_length: int) -> float:
    """Least seconds per token of a model that is entirely on the first GPU and reads all neurons.
    Mode dense runs by a plan solved for mode exact, whose own limit leaves out silent neurons."""
    total = bytes_read(model) + model.spec.num_layers * (kv_bytes(model, 0, context_length) // 2)
    return total / (machine.gpus[0].bandwidth_gb_per_s.best * 1e9)


class GpuBench:
    """One run; `result` is the content of gpu.json, which is saved after every stage."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.asked = arguments
        self.began = time.monotonic()
        self.deadline = self.began + 60 * arguments.minutes
        self.folder: Path = arguments.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results: Path = arguments.output or self.folder
        self.results.mkdir(parents=True, exist_ok=True)
        self.output = self.results / "gpu.json"
        self.device = torch.device("cpu" if arguments.smoke else "cuda")
        self.result: dict[str, Any] = {
            "benchmark": "gpu",
            "model": "synthetic: gpu_model.py",
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": this_machine() | {"device": self._device_name()},
            "is_smoke": arguments.smoke,
            "seconds": {},
            "rows": [],
            "notes": [] if arguments.rival else ["no rival; run make gpu-rival, then give --rival"],
        }
        self.machine_path: Path | None = self.asked.machine

    def _device_name(self) -> str:
        return "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)

    def _calibrated(self) -> Path:
        """The machine file, made once per run, after the first model is written: some machines get
        their memory only as it is used, and calibration sizes its buffers by free memory."""
        if self.machine_path is None:
            path = self.results / "machine.json"
            with self.timed("calibrate"):
                card = CARD if self.asked.smoke else None
                calibrate(CalibrateConfig(output=path, gpu_from=card, force=True), self.say)
            self.machine_path = path
        return self.machine_path

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {line}", file=sys.stderr, flush=True)

    def note(self, line: str) -> None:
        self.result["notes"].append(line)
        self.say(line)

    def save(self) -> None:
        with partial_file(self.output) as partial:
            partial.write_text(json.dumps(self.result, indent=1) + "\n")

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.result["seconds"][name] = round(time.monotonic() - began, 1)
        self.say(f"{name}: {time.monotonic() - began:.1f} s")
        self.save()

    def run(self, scale: Scale) -> None:
        """Measures one shape, from writing its model to its rows; removes its files afterwards."""
        folder = self.folder / scale.name.replace("/", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            with self.timed(f"{scale.name}: model"):
                model = self._model(scale, folder)
            self._calibrated()
            # One after the other: not all cases and their rivals fit onto a card of 80 GB.
            for name, make in (("divided", self._divided), ("resident", self._resident)):
                with self.timed(f"{scale.name}: plans, {name}"):
                    cases = list(make(scale, folder, model))
                self._measure(scale, folder, model, cases, name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _model(self, scale: Scale, folder: Path) -> ModelFile:
        planted = Planted(sizes=scale.sizes, rank=scale.rank, device=self.device)
        model, profile = write_planted(planted, folder / "model.gguf")
        profile.save(folder / "profile.safetensors")
        if self.asked.rival:
            write_dense(planted, folder / "stock.gguf", layout="stock")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return model

    def _divided(self, scale: Scale, folder: Path, model: ModelFile) -> Iterator[BudgetCase]:
        """One case per budget. Their processes are started, but nothing is loaded."""
        size = model.path.stat().st_size
        for share in scale.budgets:
            name, budget = f"{scale.name} {share:.0%}", int(share * size)
            yield self._case(scale, folder, model, name, "predicted", budget)

    def _resident(self, scale: Scale, folder: Path, model: ModelFile) -> Iterator[BudgetCase]:
        """One case per resident mode, like `_divided`."""
        whole = int(WHOLE * model.path.stat().st_size) + BESIDE_BYTES
        for mode in scale.resident:
            yield self._case(scale, folder, model, f"{scale.name} resident", mode, whole)

    def _case(
        self, scale: Scale, folder: Path, model: ModelFile, name: str, mode: str, budget: int
    ) -> BudgetCase:
        plan = folder / f"{len(list(folder.glob('*.split.gguf')))}.split.gguf"
        report = solve(
            SolveConfig(
                model=model.path,
                profile=folder / "profile.safetensors",
                machine=self._calibrated(),
                output=plan,
                vram_budget_bytes=budget,
                context_length=scale.context_length,
                force=True,
                time_limit_s=4.0,
                host_budget_bytes=NO_HOST_LIMIT,
                mode="predicted" if mode == "predicted" else "exact",
            ),
            workspace_bytes,
        )
        limit, predicted = report.advice.limit_s, report.objective_s
        if mode == "dense":
            figures = Machine.load(self._calibrated())
            limit, predicted = dense_limit_seconds(model, figures, scale.context_length), None
        self.say(
            f"{name} {mode}: {report.status}, {report.num_hot:,} of {report.num_neurons:,} hot,"
            f" {report.num_dense_on_gpu} dense blocks on the GPU, head on the GPU:"
            f" {report.head_on_gpu}, {1e3 * report.objective_s:.2f} ms predicted,"
            f" {1e3 * limit:.2f} ms at best"
        )
        program = Path(__file__).with_name("gpu_worker.py")
        command = (
            sys.executable,
            program,
            model.path,
            "--mode",
            mode,
            "--split",
            plan,
            "--device",
            self.device.type,
        )
        log = self.folder / f"{re.sub('[^A-Za-z0-9]+', '-', name)}-{mode}.log"
        return BudgetCase(
            name=name,
            mode=mode,
            budget_bytes=budget,
            limit_s=limit,
            predicted_s=predicted,
            plan={name: getattr(report, name) for name in PLAN},
            process=Process.of(command, f"{name} {mode}", log),
        )

    def _measure(
        self, scale: Scale, folder: Path, model: ModelFile, cases: list[BudgetCase], what: str
    ) -> None:
        if not cases:
            return
        amount = Amount(
            prompt=scale.context_length // 2,
            steps=scale.steps,
            vocab_size=scale.sizes.vocab_size,
            rounds=self.asked.rounds,
        )
        try:
            with self.timed(f"{scale.name}: load, {what}"):
                gpu_cases.load(cases)
            if self.asked.rival:
                with self.timed(f"{scale.name}: rival, {what}"):
                    self._add_rivals(scale, folder, model, cases)
            with self.timed(f"{scale.name}: rounds, {what}"):
                gpu_cases.measure(cases, amount, self.deadline - 15)
            self.result["rows"] += [gpu_cases.row(case, amount) for case in cases]
            self.save()
        finally:
            gpu_cases.close(cases)

    def _add_rivals(
        self, scale: Scale, folder: Path, model: ModelFile, cases: list[BudgetCase]
    ) -> None:
        """Starts one rival per budget; modes with the same budget share it, or its error."""
        sizes = layer_bytes(model, 0)
        rival = RivalModel(
            folder=self.asked.rival,
            model=folder / "stock.gguf",
            context_length=scale.context_length,
            num_layers=scale.sizes.num_layers,
            layer_bytes=sizes.attention + model.spec.most_neurons * sizes.neuron,
        )
        found: dict[int, GpuRival | str] = {}  # by budget
        for case in cases:
            budget = case.budget_bytes
            if budget not in found:
                try:
                    found[budget] = best_rival(rival, budget, self.folder / f"rival-{budget}.log")
                except ProcessError as error:
                    found[budget] = str(error)
                    self.note(str(error))
            if isinstance(known := found[budget], str):
                case.rival_error = known
            else:
                case.rival = known


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for models (30 GB, removed afterwards) and logs")
    parser.add_argument("--output", type=Path, help="folder for results, else FOLDER")
    parser.add_argument("--rival", type=Path, help="folder built by gpu_rival.sh; else no rival")
    parser.add_argument("--machine", type=Path, help="machine file; calibrated if omitted")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a toy on the CPU, as a check")
    parser.add_argument("--short", action="store_true", help="only eight layers of 7B: a minute")
    return parser


if __name__ == "__main__":
    sys.exit(main())
