"""Predicted against measured seconds of a token, of ten plans on two models, with both roles on the
CPU: hybrid steps with the plain backend, whose products are the C++ kernels', priced by a machine
file whose "GPU" is fitted to such steps as `calibrate` fits a real one. The plain backend runs the
two sides of a layer one after the other, so the seconds of both count here, not those of the slower.

    python benchmarks/predicted_steps.py [MODEL.gguf]    # f16; default: two random shapes

Prints a line a plan, and writes a JSON file. A quiet machine is needed, and some minutes. Run it with
OMP_NUM_THREADS=1: the smaller operations are torch's."""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import torch
from machine import result_of, write_result

from hotsplit.artifacts.machine_file import Figure, Gpu, Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import NUM_BINS, Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.kernel_counts import HOT_KERNELS, dense_kernels
from hotsplit.measure.calibrate import step_costs
from hotsplit.measure.calibrate.cpu_bandwidth import buffer_bytes
from hotsplit.measure.calibrate.cpu_costs import measure_costs
from hotsplit.measure.calibrate.step_costs import (
    CONTEXT,
    Card,
    Shape,
    Step,
    engine_of,
    fit,
    plan_of,
    time_steps,
)
from hotsplit.measure.timing.interleave import Probe, time_rounds
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu import reference
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.kernels.gpu.step_rows import by_rows
from hotsplit.runtime.kernels.stored import StoredMatrix
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.multi_gpu import plan_seconds
from hotsplit.solver.prediction import parts_of, placement_of
from hotsplit.system.processors import processor_name, processors
from hotsplit.system.system_memory import memory_bytes

CPU = torch.device("cpu")
EMPTY = Shape(num_layers=8, hidden_size=64, num_neurons=64, vocab_size=500, head_dim=64)
NARROW = Shape(num_layers=8, hidden_size=256, num_neurons=512, vocab_size=2000, head_dim=64)
WIDE = Shape(num_layers=4, hidden_size=2048, num_neurons=4096, vocab_size=2000, head_dim=64)
MODELS = {
    "narrow": Shape(num_layers=12, hidden_size=512, num_neurons=1536, head_dim=64),
    "wide": Shape(num_layers=8, hidden_size=1536, num_neurons=4096, head_dim=64),
}
TARGET = 0.15
STEPS = 3


def product(matrix: StoredMatrix, bias_N: torch.Tensor | None, x_D: torch.Tensor) -> torch.Tensor:
    y_N = library.dot_rows(matrix.data, matrix.kind, x_D)
    return y_N if bias_N is None else y_N + bias_N


@by_rows
def down(
    matrix: StoredMatrix, hidden_N: torch.Tensor, parts_SD: torch.Tensor, *, skips_zeros: bool
) -> None:
    parts_SD.zero_()
    parts_SD[0] = library.accumulate_rows(matrix.data, matrix.kind, hidden_N)


def machine_here(time_limit_s: float) -> Machine:
    """This machine, with its CPU also in the role of the GPU."""
    cpu = measure_costs(buffer_bytes() // 2, time_limit_s, lambda count: None)
    rate = cpu.all_rows_gb_per_s["f16"]
    empty, *times = time_steps((EMPTY, NARROW, WIDE), CPU, 3 * time_limit_s)
    model = EMPTY.model(1)
    num_kernels = dense_kernels(model, 0, has_predictor=False) + HOT_KERNELS
    launch_s = float(np.median(empty.fitted_RT()[:, 1])) / num_kernels
    costs = fit(*times, Card(bandwidth=None, link=1e9 * rate.median, launch_s=launch_s), cpu)
    assert costs.bandwidth is not None
    read = Figure(best=costs.bandwidth.median / 1e9)
    none = Figure(best=1e-9)
    total, free = memory_bytes()
    gpu = Gpu(
        name="the CPU", source="reference kernels", memory_bytes=total, free_bytes=free,
        bandwidth_gb_per_s=read, chosen_rows_gb_per_s=read, host_to_device_gb_per_s=rate,
        host_to_device_pageable_gb_per_s=rate, copy_latency_s=none, launch_s=Figure(best=launch_s),
        kernel_s=costs.kernel_s, token_s=costs.token_s, hand_over_s=costs.hand_over_s,
        cpu_run_s=costs.cpu_run_s,
    )  # fmt: skip
    return Machine(
        cpu_name=processor_name(), num_threads=processors().usable, memory_bytes=total,
        free_bytes=free, cpu_bandwidth_gb_per_s={processors().usable: rate}, cpu_sum_gb_per_s={},
        cpu_costs=cpu, gpus=(gpu,), versions={"torch": torch.__version__},
    )  # fmt: skip


def steps_of_model(num_layers: int) -> list[Step]:
    """Five plans: all there, half divided, all divided, half on the CPU in one run and in several."""
    half = num_layers // 2
    apart = tuple(n for n in range(num_layers) if n % 4 < 2)
    return [
        Step(num_layers=num_layers),
        Step(num_layers=num_layers, num_divided=half),
        Step(num_layers=num_layers, num_divided=num_layers),
        Step(num_layers=num_layers, on_cpu=tuple(range(half))),
        Step(num_layers=num_layers, on_cpu=apart),
    ]


def seconds_in_turn(inputs: Inputs, split: Split) -> float:
    """The predicted seconds of a plan whose sides run one after the other."""
    pipeline, plan = inputs.pipeline(), placement_of(split, inputs)
    problem, hot_LF = pipeline.model, plan.placement.hot_LF
    hot_L = (problem.touched_LF * hot_LF).sum(axis=1)
    hot_s_L = hot_L * problem.hot_s_per_byte_L + problem.kernels_s
    cold_s_L = (problem.touched_L - hot_L) * problem.cpu_s_per_byte_L + problem.hand_over_s
    is_divided_L = hot_LF.any(axis=1) & ~hot_LF.all(axis=1)
    return plan_seconds(pipeline, plan) + float(np.minimum(hot_s_L, cold_s_L)[is_divided_L].sum())


def compare(name: str, model: ModelFile, machine: Machine, time_limit_s: float) -> list[dict]:
    """The plans of one model, each with its predicted and measured seconds; all are timed in turn."""
    spec, rows, probes, engines = model.spec, [], [], []
    shape = (spec.num_layers, spec.most_neurons)
    profile = Profile(
        model_id=model.model_id, num_tokens=1, threshold_L=model.threshold_L, corpora=(),
        active_count_LF=np.ones(shape, np.int64),
        gate_histogram_LB=np.zeros((spec.num_layers, NUM_BINS), np.int64),
    )  # fmt: skip
    inputs = Inputs(
        model=model, profile=profile, machine=machine, paths=(model.path,) * 3, workspace=0,
        context_length=CONTEXT, mode="dense", budgets=(1 << 50,), host_budget=1 << 50,
    )  # fmt: skip
    for step in steps_of_model(spec.num_layers):
        split = plan_of(model, step)
        predicted_s = seconds_in_turn(inputs, split)
        engine = engine_of(model, split, CPU)
        engines.append(engine)
        label = f"{len(step.on_cpu)} layers on the CPU, {step.num_divided} divided, {len(rows)}"
        rows.append({"model": name, "plan": label, "predicted_s": predicted_s,
                     "parts_s": parts_of(split, inputs)})  # fmt: skip

        def seconds(engine=engine) -> float:
            return median(engine.decode_seconds(steps=1, start=n) for n in range(STEPS))

        probes.append(Probe(name=label, seconds=seconds))
    times = time_rounds(probes, time_limit_s)
    for row in rows:
        row["measured_s"] = median(times[row["plan"]])
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
    for engine in engines:
        engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="*", help="f16 model files")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each part")
    asked = parser.parse_args()
    kernels = replace(reference_kernels(), down=down)
    with (
        mock.patch.object(reference, "product", product),
        mock.patch.object(step_costs, "reference_kernels", lambda: kernels),
    ):
        measure(asked)


def measure(asked: argparse.Namespace) -> None:
    machine = machine_here(asked.seconds)
    models = {path.name: ModelFile.load(path) for path in asked.model}
    models |= {name: shape.model(shape.num_layers) for name, shape in MODELS.items()}
    rows = []
    for name in list(models)[:2]:
        model = models[name]
        spec = replace(model.bare_spec, context_length=CONTEXT)
        found = compare(name, replace(model, bare_spec=spec), machine, asked.seconds)
        for row in found:
            print(f"{name}, {row['plan']}: {1e3 * row['predicted_s']:.2f} ms predicted,"
                  f" {1e3 * row['measured_s']:.2f} measured, {row['error']:+.1%}")  # fmt: skip
        rows += found
    within = sum(abs(row["error"]) <= TARGET for row in rows)
    result = result_of("predicted_steps", target=TARGET, within=within, plans=rows)
    print(f"wrote {write_result(result, 'predicted-steps')}")


if __name__ == "__main__":
    main()
