"""Compares predicted with measured seconds per token, for plans on the CPU alone.

For each of three shapes, a random checkpoint with ReLU is converted, profiled on tokens that it
generates, solved with a VRAM budget of 0 and a machine file measured in the same run, and decoded
in the middle of its context, where the solver's assumption of a half-full cache holds. Half of the
neurons fire for a token, unlike in a trained model, but prediction and measurement see the same.

Both sides count their best figures, as other load only makes them slower; the median of the
measured times is listed too. Calibration and decoding take turns (`--rounds`), so that a slow
minute affects both.

    python predicted_time.py [--scratch FOLDER] [--outtype f16] [--sizes 150m --sizes 400m]

On a shared machine: `OMP_NUM_THREADS=1 taskset -c 0 python predicted_time.py --processor-time`.
This uses one thread on one core, and both sides count processor time, which equals elapsed time on
a core without other load. Other load on the memory bandwidth still affects both."""

import json
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
import torch
from random_checkpoint import Shape, make_checkpoint

from hotsplit.artifacts.machine_file import CpuCosts, Figure, Machine
from hotsplit.artifacts.profile_file import NUM_BINS, Corpus, Profile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.measure.calibrate.calibrate import CalibrateConfig, calibrate
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.prefill.workspace import measure_workspace
from hotsplit.solver.solve import SolveConfig, solve

SIZES = {
    "150m": Shape(num_layers=8, width=1024, num_neurons=2816, num_heads=16, num_kv_heads=4),
    "400m": Shape(num_layers=24, width=1024, num_neurons=2816, num_heads=16, num_kv_heads=4),
    "1100m": Shape(num_layers=22),
}
CONTEXT = 256
STEPS = 4  # per repetition
TOLERANCE = 0.15
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Row:
    size: str
    num_bytes: int
    density: float
    predicted_s: float
    measured_s: float
    median_s: float
    rounds: int

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@click.command()
@click.option(
    "--scratch",
    type=click.Path(path_type=Path),
    help="Folder for models and profiles, which are kept; a temporary one if omitted.",
)
@click.option("--outtype", default="f16", show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Rounds of calibration and decoding.")
@click.option(
    "--processor-time",
    is_flag=True,
    help="Count processor, not elapsed, time; run this on one core.",
)
@click.option("--sizes", multiple=True, default=tuple(SIZES), show_default=True)
def main(
    scratch: Path | None, outtype: str, rounds: int, processor_time: bool, sizes: tuple[str, ...]
) -> None:
    if processor_time:
        library.set_threads(1)
        torch.set_num_threads(1)
        time.perf_counter = time.process_time  # calibrate and the engine call it too
    with tempfile.TemporaryDirectory() as temporary:
        folder = scratch or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = run(folder, outtype, rounds, sizes)
    report["clock"] = "processor" if processor_time else "wall"
    name = report["cpu"].lower().replace(" ", "-").replace("(", "").replace(")", "")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"predicted-time-{outtype}-{name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def run(folder: Path, outtype: str, rounds: int, sizes: tuple[str, ...]) -> dict:
    models = {size: make_model(folder, size, outtype) for size in sizes}
    seconds: dict[str, list[float]] = {size: [] for size in sizes}
    machines = []
    for number in range(rounds):
        path = folder / f"machine-{number}.json"
        machines.append(calibrate(CalibrateConfig(output=path, force=True), note))
        for size, (model, _) in models.items():
            seconds[size] += decode(model)
            note(f"{size}: best so far {1e3 * min(seconds[size]):.1f} ms")
    best = best_of(machines)
    best.save(folder / "machine.json")
    rows = [row(folder, size, models[size], seconds[size]) for size in sizes]
    for found in rows:
        note(
            f"{found.size}: predicted {1e3 * found.predicted_s:.1f} ms, measured"
            f" {1e3 * found.measured_s:.1f} ({found.error:+.1%}), median"
            f" {1e3 * found.median_s:.1f}"
        )
    return {
        "benchmark": "predicted_time",
        "cpu": best.cpu_name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": library.num_threads(),
        "outtype": outtype,
        "context": CONTEXT,
        "is_within_tolerance": all(abs(found.error) <= TOLERANCE for found in rows),
        "rows": [vars(found) | {"error": found.error} for found in rows],
        "figures": {name: figure.best for name, figure in best.figures.items()},
    }


def note(line: str) -> None:
    if not line.startswith("note:"):
        click.echo(line, err=True)


def make_model(folder: Path, size: str, outtype: str) -> tuple[Path, Path]:
    """Returns the paths of model file and profile; makes them if missing."""
    checkpoint, model = folder / size, folder / f"{size}-{outtype}.gguf"
    profile = folder / f"{size}-{outtype}.profile.safetensors"
    if not model.exists():
        make_checkpoint(checkpoint, SIZES[size])
        config = json.loads((checkpoint / "config.json").read_text()) | {"hidden_act": "relu"}
        (checkpoint / "config.json").write_text(json.dumps(config))
        convert(ConvertConfig(source=checkpoint, output=model, outtype=outtype, force=True))
    if not profile.exists():
        counted(model).save(profile)
    return model, profile


def counted(path: Path) -> Profile:
    """Firing counts for tokens that the model generates."""
    with Engine.load(path, mode="exact", device="cpu", context_length=CONTEXT) as engine:
        shape = engine.model.shape
        count_LF = np.zeros((shape.num_layers, shape.num_neurons), np.int64)
        tokens = 0

        def count(name: str, layer: int | None, gate_TA: torch.Tensor) -> None:
            nonlocal tokens
            if name == "ffn_gate" and layer is not None:
                count_LF[layer] += (gate_TA > 0).sum(dim=0).cpu().numpy()
                tokens += len(gate_TA) * (layer == 0)

        with engine.observe(count):
            engine.decode_seconds(steps=64)
        histogram_LB = np.zeros((shape.num_layers, NUM_BINS), np.int64)
        histogram_LB[:, 0] = tokens * shape.num_neurons
        return Profile(
            model_id=engine.model.model_id, num_tokens=tokens,
            threshold_L=engine.model.threshold_L,
            corpora=(Corpus(name="generated", sha256="0" * 64, num_tokens=tokens),),
            active_count_LF=count_LF, gate_histogram_LB=histogram_LB,
        )  # fmt: skip


def decode(model: Path) -> list[float]:
    """Seconds per token, in the middle of the context, of each of 12 repetitions."""
    start = CONTEXT // 2 - STEPS // 2
    with Engine.load(model, mode="exact", device="cpu", context_length=CONTEXT) as engine:
        engine.decode_seconds(steps=STEPS, start=start)
        return [engine.decode_seconds(steps=STEPS, start=start) / STEPS for _ in range(12)]


def best_of(machines: list[Machine]) -> Machine:
    """The first of several calibrations of one machine, with the best CPU costs of all."""

    def best(figures: list[Figure], *, is_rate: bool) -> Figure:
        return sorted(figures, key=lambda figure: figure.best, reverse=is_rate)[0]

    def table(name: str, *, is_rate: bool) -> dict[str, Figure]:
        tables = [getattr(machine.costs, name) for machine in machines]
        return {key: best([t[key] for t in tables], is_rate=is_rate) for key in tables[0]}

    costs = CpuCosts(
        all_rows_gb_per_s=table("all_rows_gb_per_s", is_rate=True),
        chosen_rows_gb_per_s=table("chosen_rows_gb_per_s", is_rate=True),
        kv_gb_per_s=best([m.costs.kv_gb_per_s for m in machines], is_rate=True),
        layer_s=table("layer_s", is_rate=False),
        token_s=best([m.costs.token_s for m in machines], is_rate=False),
    )
    return replace(machines[0], cpu_costs=costs)


def row(folder: Path, size: str, files: tuple[Path, Path], seconds: list[float]) -> Row:
    model, profile = files
    report = solve(
        SolveConfig(
            model=model, profile=profile, machine=folder / "machine.json",
            output=folder / f"{size}.split.gguf", vram_budget_bytes=0, context_length=CONTEXT,
            mode="exact", force=True,
        ),
        measure_workspace,
    )  # fmt: skip
    return Row(
        size=size,
        num_bytes=model.stat().st_size,
        density=float(Profile.load(profile).density_L.mean()),
        predicted_s=report.objective_s,
        measured_s=min(seconds),
        median_s=statistics.median(seconds),
        rounds=len(seconds),
    )


if __name__ == "__main__":
    main()
