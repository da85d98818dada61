"""Compares the neuron cache's policy with four others and with a lower bound on the time.

It replays texts other than the profiled one, for three budgets, three links and two CPUs.

    python benchmarks/cache_replay.py NAME=MODEL ... --profile-text CODE --text NAME=FILE ...
        [--sparsity NAME=0.5] [--predicted NAME] [--tokens 1500]

For each model: profile the text CODE, which also sets the thresholds if a sparsity is given; then,
for each CPU, solve for budgets that hold 10, 25 and 50 % of the neurons besides the dense part;
then replay each text. The machines are scaled to a model of 7 B parameters: rates are divided by
the ratio of its layers' size to this model's, so that a layer takes as long as in the large model,
while fixed times (launches, round trips) stay. The neurons that are read are those that fire in the
model on the text, or with --predicted those that its predictors select."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from hotsplit import Engine
from hotsplit.artifacts.machine_file import CpuCosts, Figure, Gpu, Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.budget import layer_bytes
from hotsplit.files.atomic import partial_file
from hotsplit.files.json_file import read_text
from hotsplit.measure.cache_replay.bound import lower_bound
from hotsplit.measure.cache_replay.policies import POLICIES, Case, belady, hindsight
from hotsplit.measure.cache_replay.recording import Trace, record
from hotsplit.measure.cache_replay.replay import case_of
from hotsplit.measure.cache_replay.times import Outcome, seconds_T
from hotsplit.model.mode_quality import RunMode
from hotsplit.options.neuron_cache import CacheOptions
from hotsplit.solver.solve import SolveConfig, solve

# A layer's neurons in a model of 7 B parameters: 11,008, each three rows of 4,096 values in q4_0.
LAYER_BYTES = 11008 * 3 * 4096 * 18 / 32
CPUS = {"40 GB/s": 40.0, "80 GB/s": 80.0}
LINKS = {"x16, 25 GB/s": 25.0, "x4, 7 GB/s": 7.0, "none worth it, 0.2 GB/s": 0.2}
GPU_GB_PER_S = 272.0
SHARES = (0.1, 0.25, 0.5)
SEEN_BY_LINK = ("sparkinfer", "ours")  # policies whose choices depend on the link
CONTEXT = 512


def machine_of(cpu_gb_per_s: float, link_gb_per_s: float, scale: float) -> Machine:
    """A machine for plans, with rates divided by `scale`."""

    def rate(value: float) -> Figure:
        return Figure(best=value / scale)

    kinds = ("f32", "f16", "bf16", "q8_0", "q4_0")
    gpu = Gpu(
        name="8 GB card", source="datasheet", memory_bytes=8 << 30, free_bytes=8 << 30,
        bandwidth_gb_per_s=rate(GPU_GB_PER_S), host_to_device_gb_per_s=rate(link_gb_per_s),
        host_to_device_pageable_gb_per_s=rate(link_gb_per_s / 2), copy_latency_s=Figure(best=5e-6),
        launch_s=Figure(best=2e-6), round_trip_s=Figure(best=25e-6),
    )  # fmt: skip
    rates = {kind: rate(cpu_gb_per_s) for kind in kinds}
    costs = CpuCosts(
        all_rows_gb_per_s=rates, chosen_rows_gb_per_s=rates, kv_gb_per_s=rate(cpu_gb_per_s),
        layer_s={"exact": Figure(best=2e-5), "predicted": Figure(best=2e-5)},
        token_s=Figure(best=1e-4),
    )  # fmt: skip
    return Machine(
        cpu_name="a CPU", num_threads=8, memory_bytes=32 << 30, free_bytes=32 << 30,
        cpu_bandwidth_gb_per_s={8: rate(cpu_gb_per_s)}, cpu_sum_gb_per_s={}, cpu_costs=costs,
        gpus=(gpu,), versions={},
    )  # fmt: skip


def hotsplit(*arguments: object) -> None:
    command = [sys.executable, "-m", "hotsplit", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def profiled(
    source: Path, text: Path, sparsity: str | None, is_predicted: bool, folder: Path
) -> tuple[Path, Path]:
    """(model, profile) after profiling the text, with the thresholds and predictors found."""
    profile, model = folder / "profile.safetensors", folder / "model.gguf"
    base = folder / "base.gguf"
    if source.suffix == ".gguf":
        base = source
    else:
        hotsplit("convert", source, "-o", base, "--outtype", "q8_0", "--force")
    options = ["--target-sparsity", sparsity] if sparsity else []
    options += ["--train-predictors", folder] if is_predicted else []
    hotsplit(
        "profile", base, "--corpus", text, "-o", profile, "--tokens", 16384, "--force", *options
    )
    made = ["--thresholds", profile] if sparsity else []
    made += ["--predictors", folder] if is_predicted else []
    if not made:
        return base, profile
    hotsplit("convert", base, "-o", model, *made, "--force")
    return model, profile


def traces(model: Path, mode: RunMode, texts: dict[str, Path], num_tokens: int) -> dict[str, Trace]:
    with Engine.load(model, mode=mode, device="cpu") as engine:
        return {
            name: record(engine, engine.codec.encode(read_text(path, "text"))[:num_tokens], CONTEXT)
            for name, path in texts.items()
        }


def planned(
    model: Path, profile: Path, mode: RunMode, share: float, cpu: float, link: float, folder: Path
) -> tuple[Split, float]:
    """The plan that has about this share of the neurons on the GPU, and the machine's scale."""
    file = ModelFile.load(model)
    sizes = [layer_bytes(file, layer).neuron for layer in range(file.spec.num_layers)]
    scale = LAYER_BYTES / (np.mean(sizes) * file.spec.most_neurons)
    described, plan = folder / "machine.json", folder / "plan.gguf"
    machine_of(cpu, link, float(scale)).save(described)
    config = SolveConfig(
        model=model, profile=profile, machine=described, output=plan, vram_budget_bytes=1 << 40,
        context_length=CONTEXT, mode=mode, force=True,
    )  # fmt: skip
    solve(config)
    whole = Split.load(plan).gpu_bytes
    neurons = sum(sizes) * file.spec.most_neurons
    rest = sum(whole.values()) - whole["neurons"]
    options = CacheOptions(most_rows=128)
    solve(
        replace(
            config,
            vram_budget_bytes=int(rest + share * neurons + 2 * options.most_rows * max(sizes)),
            neuron_cache=options,
        )
    )
    return Split.load(plan), float(scale)


def cases(
    model: Path, profile: Path, mode: RunMode, found: dict[str, Trace], folder: Path
) -> Iterator[tuple[dict[str, Any], Case, dict[str, Outcome]]]:
    """Every setting with its case, and the outcomes of policies that do not depend on the link."""
    for cpu_name, cpu in CPUS.items():
        for share in SHARES:
            first, _ = planned(model, profile, mode, share, cpu, LINKS["x4, 7 GB/s"], folder)
            for text, trace in found.items():
                assert first.cache is not None
                outcomes: dict[str, Outcome] = {}
                for link_name, link in LINKS.items():
                    costs = first.cache.costs.scaled(link=link / LINKS["x4, 7 GB/s"])
                    case = case_of(first, trace, CacheOptions(), costs)
                    if not outcomes:
                        outcomes = {
                            n: p(case) for n, p in POLICIES.items() if n not in SEEN_BY_LINK
                        }
                        outcomes |= {"hindsight": hindsight(case), "belady": belady(case)}
                    known = {"cpu": cpu_name, "share": share, "text": text, "link": link_name}
                    yield known, case, outcomes


def judged(case: Case, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    outcomes = outcomes | {name: POLICIES[name](case) for name in SEEN_BY_LINK}
    read_TL = case.trace.read_TL
    ms = {
        name: float(seconds_T(case.costs, read_TL, outcome).mean()) * 1e3
        for name, outcome in outcomes.items() if name != "belady"
    }  # fmt: skip
    bound = lower_bound(case, min(ms.values()) / 1e3)
    bound_ms = bound.seconds * 1e3
    rivals = {name: ms[name] for name in ("static", "lru", "lfu", "sparkinfer")}
    best = min(rivals, key=rivals.__getitem__)
    return {
        "num_layers": len(case.slots_LN), "num_slots": int(case.num_slots_L.sum()),
        "read": float(read_TL.sum(axis=1).mean()), "ms": ms, "bound_ms": bound_ms,
        "hit_rate": {n: float(o.hits_TL.sum() / read_TL.sum()) for n, o in outcomes.items()},
        "copied": {n: o.num_copied / case.num_tokens for n, o in outcomes.items()},
        "best_rival": best, "of_best_rival": ms["ours"] / ms[best], "of_static": ms["ours"] / ms["static"],
        "share_of_bound": (ms["static"] - ms["ours"]) / max(1e-12, ms["static"] - bound_ms),
        "share_of_bound_hindsight": (ms["static"] - ms["hindsight"]) / max(1e-12, ms["static"] - bound_ms),
        "bound": asdict(bound),
    }  # fmt: skip


def write(
    options: argparse.Namespace, sparsity: dict[str, str], results: list[dict[str, Any]]
) -> None:
    content = {
        "benchmark": "cache_replay", "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(), "tokens": options.tokens, "sparsity": sparsity, "settings": str(CacheOptions()), "results": results,
    }  # fmt: skip
    with partial_file(options.output) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--profile-text", type=Path, required=True)
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--sparsity", action="append", default=[], metavar="NAME=SHARE")
    parser.add_argument("--predicted", action="append", default=[], metavar="NAME")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/cache-replay.json"))
    options = parser.parse_args()
    texts = {name: Path(path) for name, _, path in (text.partition("=") for text in options.text)}
    sparsity = dict(item.split("=") for item in options.sparsity)
    results = []
    for item in options.models:
        name, _, source = item.partition("=")
        is_predicted = name in options.predicted
        mode: RunMode = "predicted" if is_predicted else "exact"
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            model, profile = profiled(
                Path(source), options.profile_text, sparsity.get(name), is_predicted, folder
            )
            found = traces(model, mode, texts, options.tokens)
            for known, case, outcomes in cases(model, profile, mode, found, folder):
                result = {"model": name, "mode": mode, **known, **judged(case, outcomes)}
                results.append(result)
                print(
                    name, *known.values(), {k: round(v, 3) for k, v in result["ms"].items()},
                    f"bound {result['bound_ms']:.3f}, {result['share_of_bound']:.2f} of the way from static"
                    f" to it, {result['of_best_rival']:.3f} of the time of {result['best_rival']}", flush=True,
                )  # fmt: skip
        write(options, sparsity, results)


if __name__ == "__main__":
    main()
