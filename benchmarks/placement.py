"""Compares our placements with three others, all priced by the same cost model.

    random          dense blocks first, then neurons at random
    hottest first   dense blocks first, then the neurons that fire most, over all layers
    PowerInfer      dense blocks first, then its published program (Song et al. 2024, section 6):
                    maximise the sum of firing frequencies of the neurons on the GPU, where a layer
                    has none or at least C_l of them (from C_l on they save more time than a
                    synchronisation takes); neurons in batches of 64, solved by HiGHS through PuLP
    ours            `hotsplit solve`

Dense blocks first, as PowerInfer allocates its memory: the attention, norms, predictor and cache of
each layer, from the first on, as far as they fit; the head too if there is room for all.
Shapes are real, activity is synthetic (power law), and the machines' figures are from datasheets,
so this compares policies, not measured speeds.

    python placement.py        # writes results/placement.json and prints it"""

import json
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pulp

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from models import make_machine, make_profile, make_sizes, power_law_frequencies, shape_only

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.optimise import find_plan
from hotsplit.solver.problem import (
    Placement,
    Problem,
    is_feasible,
    placement_bytes,
    placement_seconds,
)

# layers, D, F, heads, key-value heads, vocabulary, architecture
SHAPES = {
    "7B": (32, 4096, 11008, 32, 32, 32000, "llama"),
    "13B": (40, 5120, 13824, 40, 40, 32000, "llama"),
    "40B": (60, 8192, 32768, 128, 8, 65024, "falcon"),
    "70B": (80, 8192, 28672, 64, 8, 32000, "llama"),
}
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)  # of the bytes of everything that can be on the GPU
BATCH = 64  # neurons that PowerInfer's program places together
OVERFETCH = 2.0
# The relative gain that a policy may have from layers with fewer hot neurons than C_l.
BELOW_MINIMUM = 2e-5
MACHINES = {
    "fast": {"gpu_gb_per_s": 1000.0, "cpu_gb_per_s": 60.0, "launch_s": 4e-6,
             "round_trip_s": 15e-6, "copy_latency_s": 8e-6},
    "slow": {"gpu_gb_per_s": 272.0, "cpu_gb_per_s": 40.0, "launch_s": 5e-6,
             "round_trip_s": 1e-4, "copy_latency_s": 8e-6},
}  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "placement.json"


def make_model(name: str) -> ModelFile:
    layers, width, neurons, heads, kv_heads, vocabulary, architecture = SHAPES[name]
    shape = make_sizes(
        num_layers=layers, width=width, num_neurons=neurons, num_heads=heads,
        num_kv_heads=kv_heads, vocab_size=vocabulary, context_length=4096,
    )  # fmt: skip
    return shape_only(shape, predictor_rank=width // 8, architecture=architecture)


def make_inputs(model: ModelFile, machine: str) -> Inputs:
    profile = make_profile(
        model, power_law_frequencies(model.spec.num_layers, model.spec.most_neurons)
    )
    assert model.predictor is not None
    named = tuple(min(1.0, OVERFETCH * d) for d in profile.density_L.tolist())
    model = replace(model, predictor=replace(model.predictor, density_L=named))
    return Inputs(
        model=model, profile=profile, machine=make_machine(**MACHINES[machine]),
        paths=(model.path,) * 3, context_length=4096, mode="predicted", workspace=256 << 20,
        budgets=(0,), host_budget=1 << 40,
    )  # fmt: skip


def dense_first(problem: Problem) -> tuple[np.ndarray, bool, int]:
    """(dense blocks on the GPU, head on the GPU, bytes left)."""
    room, dense_L = problem.room_bytes, np.zeros(problem.num_layers, bool)
    head = problem.dense_bytes_L.sum() + problem.head_bytes <= room
    room -= problem.head_bytes * bool(head)
    for layer, size in enumerate(problem.dense_bytes_L.tolist()):
        if size > room:
            break
        dense_L[layer], room = True, room - size
    return dense_L, bool(head), int(room)


def of_order(problem: Problem, order_N: np.ndarray) -> Placement:
    """Dense blocks, then neurons (flat ranks) in this order as far as they fit."""
    dense_L, head, room = dense_first(problem)
    layer_N = order_N // problem.num_neurons
    fits_N = np.cumsum(problem.neuron_bytes_L[layer_N]) <= room
    hot_N = np.zeros(problem.touched_LF.size, bool)
    hot_N[order_N[fits_N]] = True
    return Placement(hot_LF=hot_N.reshape(problem.touched_LF.shape), dense_L=dense_L, head=head)


def random_neurons(problem: Problem, frequency_LF: np.ndarray) -> Placement:
    return of_order(problem, np.random.default_rng(0).permutation(problem.touched_LF.size))


def hottest_first(problem: Problem, frequency_LF: np.ndarray) -> Placement:
    return of_order(problem, np.argsort(-frequency_LF.ravel(), kind="stable"))


def powerinfer(problem: Problem, frequency_LF: np.ndarray) -> Placement:
    """PowerInfer's integer program; frequencies are by rank, so that batches hold similar neurons.

    All neurons have the same size here, so if the hottest neurons meet every layer's minimum, they
    are its optimum and HiGHS is not run. HiGHS stops after 60 s."""
    hottest = hottest_first(problem, frequency_LF)
    if ((hottest.num_hot_L == 0) | (hottest.num_hot_L >= problem.min_hot_L)).all():
        return hottest
    dense_L, head, room = dense_first(problem)
    starts_G = np.arange(0, problem.num_neurons, BATCH)
    sizes_G = np.diff(np.append(starts_G, problem.num_neurons))
    gain_LG = np.add.reduceat(frequency_LF, starts_G, axis=1)
    lp = pulp.LpProblem("powerinfer", pulp.LpMaximize)
    gains, held, hot_LG = [], [], []
    for layer in range(problem.num_layers):
        has_hot = lp.add_variable(f"y_{layer}", cat=pulp.LpBinary)
        hot_G = [lp.add_variable(f"a_{layer}_{g}", cat=pulp.LpBinary) for g in range(len(sizes_G))]
        count = pulp.LpAffineExpression(list(zip(hot_G, sizes_G.tolist(), strict=True)))
        lp += count >= int(problem.min_hot_L[layer]) * has_hot, f"least_{layer}"
        lp += count <= problem.num_neurons * has_hot, f"none_{layer}"
        gains += list(zip(hot_G, gain_LG[layer].tolist(), strict=True))
        mega = int(problem.neuron_bytes_L[layer]) / 1e6
        held += list(zip(hot_G, (sizes_G * mega).tolist(), strict=True))
        hot_LG.append(hot_G)
    lp += pulp.LpAffineExpression(held) <= room / 1e6, "memory"
    lp.setObjective(pulp.LpAffineExpression(gains))
    lp.solve(pulp.HiGHS(msg=False, gapRel=1e-4, timeLimit=60))
    chosen_LG = np.array([[v.varValue > 0.5 for v in hot_G] for hot_G in hot_LG])
    return Placement(hot_LF=np.repeat(chosen_LG, sizes_G, axis=1), dense_L=dense_L, head=head)


POLICIES = {"random": random_neurons, "hottest": hottest_first, "powerinfer": powerinfer}


def compare(name: str, machine: str, share: float) -> dict:
    """One row of the table. Peak memory is counted per process, so each row needs its own."""
    inputs = make_inputs(make_model(name), machine)
    whole = inputs.pipeline().model.placeable_bytes + inputs.workspace
    inputs = inputs.with_budget(int(share * whole))
    began, cpu_began = time.perf_counter(), time.process_time()
    pipeline = inputs.pipeline()
    answer = find_plan(pipeline, time_limit_s=10)
    solve_s, solve_cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    problem = pipeline.model
    assert answer is not None
    frequency_LF = np.take_along_axis(inputs.profile.frequency_LF, problem.order_LF, axis=1)
    seconds = {"ours": answer.objective_s}
    for policy, place in POLICIES.items():
        placement = place(problem, frequency_LF)
        assert placement_bytes(problem, placement) <= problem.budget_bytes * (1 + 1e-9), policy
        seconds[policy] = placement_seconds(problem, placement)
        # Random and hottest first may give a layer fewer than C_l hot neurons; a plan may not.
        slack = 1e-9 if is_feasible(problem, placement) else BELOW_MINIMUM
        assert answer.objective_s <= seconds[policy] * (1 + slack), f"{policy} is better"
    return {
        "shape": name, "machine": machine, "share": share, "budget_bytes": problem.budget_bytes,
        "seconds": seconds, "bound_s": answer.bound_s, "gap": float(answer.gap),
        "solve_s": solve_s, "solve_cpu_s": solve_cpu_s, "peak_bytes": peak_bytes,
        "status": answer.status, "notes": answer.notes,
    }  # fmt: skip


def main() -> None:
    rows = []
    for machine in MACHINES:
        for name in SHAPES:
            for share in SHARES:
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                    rows.append(alone.submit(compare, name, machine, share).result())
                print(table_row(rows[-1]), file=sys.stderr, flush=True)
                report = {"benchmark": "placement", "machines": MACHINES, "overfetch": OVERFETCH,
                          "rows": rows}  # fmt: skip
                RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def table_row(row: dict) -> str:
    seconds = row["seconds"]
    gains = " | ".join(f"{seconds[policy] / seconds['ours'] - 1:+.1%}" for policy in POLICIES)
    return (
        f"| {row['shape']} | {row['machine']} | {row['share']:.0%}"
        f" | {row['budget_bytes'] / 2**30:.1f} GiB | {1 / seconds['ours']:.1f} | {gains}"
        f" | {row['gap']:.4%} | {row['solve_s']:.1f} s"
        f" | {row['solve_cpu_s']:.1f} s | {row['peak_bytes'] / 2**30:.2f} GiB |"
    )


if __name__ == "__main__":
    main()
