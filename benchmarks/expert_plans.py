"""Plans mixtures of experts in the full shapes of known models, from headers alone.

    python benchmarks/expert_plans.py [--models qwen3-30b-a3b,qwen3.6-35b-a3b] [--budgets 4,8,12,16]
    [--cases 1,0.7,0.5,1:8,1@200,1:8@200]

No weights exist: a model file is its spec and the types and shapes of its tensors, in Q4_K_M. A
case's routings are drawn. In `S`, the expert of rank r in a layer's own order has the weight r^-S,
and a token chooses as many of them as the model's do, without replacement. In `S:N`, a text of
STRETCH tokens has one of N topics, and a topic has factors of its own on all weights, whose
logarithms have the standard deviation SPREAD: experts are then chosen together. The machine is an
RTX 4060 by its data sheet (all of its bandwidth) beside a CPU that reads 60 GB/s, or as many as the
case says after an `@`. Times are the solver's predictions, of tokens that were not used to plan;
only the solver's own seconds are measured."""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from machine import RESULTS, result_of, write_result
from random_model import CONV, blueprint_of

from hotsplit.artifacts.data_sheets import machine_of as machine_of_sheets
from hotsplit.artifacts.machine_file import CpuCosts, Figure, Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import NUM_BINS, Corpus, Profile
from hotsplit.convert.type_mixtures import Roles
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.model.spec import ModelSpec
from hotsplit.model.weight_types import NAMES
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.layer_split import cpu_moe, layer_split
from hotsplit.solver.optimise import find_plan
from hotsplit.solver.problem import (
    Problem,
    SolvedPlacement,
    is_feasible,
    on_one_device,
    placement_bytes,
    placement_seconds,
)

CONTEXT, PLANNED, SEED = 4096, 2048, 0
CPU_GB_PER_S, LAYER_S, TOKEN_S, LOGIT_S = 60.0, 8e-6, 5e-5, 1e-10
STRETCH, SPREAD = 64, 2.0
CARD, CARD_GB_PER_S = "rtx-4060-8gb", 272.0
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "expert-plans.svg"
# Layers and words.
FULL = {"qwen3-30b-a3b": (48, 151_936), "qwen3.6-35b-a3b": (40, 248_320)}
WAYS = {
    "plan": "this plan",
    "hottest_first": "hottest experts first",
    "uniform": "as many of each layer, any",
    "cpu_moe": "llama.cpp --n-cpu-moe",
    "layers": "llama.cpp, whole layers",
    "cpu": "the CPU alone",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="qwen3-30b-a3b,qwen3.6-35b-a3b")
    parser.add_argument("--budgets", default="4,8,12,16", help="GiB")
    parser.add_argument("--cases", default="1,0.7,0.5,1:8,1@200,1:8@200")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "expert-plans.json")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models.split(","):
        model = model_of(name)
        for case in arguments.cases.split(","):
            routing, _, rate = case.partition("@")
            tokens = [drawn(model.spec, routing, seed) for seed in (SEED, SEED + 1)]
            for gib in map(float, arguments.budgets.split(",")):
                row: dict[str, object] = {"model": name, "case": case, "gib": gib}
                row |= times_of(model, machine_of(float(rate or CPU_GB_PER_S)), tokens, gib)
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    result = result_of("expert-plans", context=CONTEXT, tokens=PLANNED, rows=rows)
    print(f"wrote {write_result(result, 'expert-plans', arguments.output)}")
    plot(rows, PICTURE)


# ---- models, routings and a machine ---------------------------------------------------------


def model_of(name: str) -> ModelFile:
    """A model file without weights."""
    spec = _spec_of(name)
    model = ModelFile(
        path=Path(name),
        layout="stock",
        model_id="0" * 64,
        bare_spec=spec,
        threshold_L=(0.0,) * spec.num_layers,
        predictor=None,
        tensors={},
        extra_keys={},
    )
    shapes, _ = model.expected_shapes()
    shapes["output.weight"] = (spec.vocab_size, spec.hidden_size)
    type_of = partial(Roles.of(spec, is_tied=False).type_in, "q4_k_m")
    return replace(model, tensors={n: _entry(type_of, n, dims) for n, dims in shapes.items()})


def _spec_of(name: str) -> ModelSpec:
    num_layers, vocab_size = FULL[name]
    return replace(blueprint_of(name, num_layers).spec, vocab_size=vocab_size)


def _entry(type_of: Callable[[str], str], name: str, dims: tuple[int, ...]) -> TensorEntry:
    is_f32 = len(dims) == 1 or "gate_inp" in name or name.endswith(CONV)
    return TensorEntry(shape=dims, kind="f32" if is_f32 else type_of(name), read_rows=_no_weights)


def _no_weights(first: int, last: int) -> np.ndarray:
    raise AssertionError("headers alone")


def drawn(spec: ModelSpec, routing: str, seed: int) -> np.ndarray:
    """The experts of PLANNED tokens, int16 [L, T, K]: Gumbel's trick for choices without
    replacement. The experts' popularity, also that by topic, is the same for every seed."""
    popular, chance = np.random.default_rng(99), np.random.default_rng(seed)
    skew, _, topics = routing.partition(":")
    route, found = spec.layers[0].route, []
    assert route is not None
    shape = int(topics or 1), route.num_experts
    topic_T = np.repeat(chance.integers(0, shape[0], PLANNED // STRETCH), STRETCH)
    for _ in spec.layers:
        weight_E = -float(skew) * np.log(popular.permutation(route.num_experts) + 1.0)
        score_TE = weight_E + chance.gumbel(size=(PLANNED, route.num_experts))
        if topics:
            score_TE += SPREAD * popular.standard_normal(shape)[topic_T]
        found.append(np.sort(np.argsort(-score_TE, axis=1)[:, : route.num_used], axis=1))
    return np.stack(found).astype(np.int16)


def profile_of(model: ModelFile, id_LTK: np.ndarray) -> Profile:
    spec, (num_layers, num_tokens, _) = model.spec, id_LTK.shape
    num_experts = spec.layers[0].neurons.num_experts
    histogram_LB = np.zeros((num_layers, NUM_BINS), np.int64)
    histogram_LB[:, 0] = num_tokens * spec.most_neurons
    return Profile(
        model_id=model.model_id,
        num_tokens=num_tokens,
        threshold_L=model.threshold_L,
        corpora=(Corpus(name="drawn", sha256="0" * 64, num_tokens=num_tokens),),
        active_count_LF=np.ones((num_layers, spec.most_neurons), np.int64),
        gate_histogram_LB=histogram_LB,
        routing_LTK=id_LTK,
        expert_count_LE=np.stack([np.bincount(i.ravel(), minlength=num_experts) for i in id_LTK]),
    )


def machine_of(cpu_gb_per_s: float) -> Machine:
    rates = dict.fromkeys(NAMES, Figure(best=cpu_gb_per_s))
    costs = CpuCosts(
        all_rows_gb_per_s=rates,
        chosen_rows_gb_per_s=rates,
        kv_gb_per_s=rates["f16"],
        layer_s=dict.fromkeys(("exact", "predicted"), Figure(best=LAYER_S)),
        token_s=Figure(best=TOKEN_S),
        logit_s=Figure(best=LOGIT_S),
    )
    card = machine_of_sheets(CARD)
    gpu = replace(card.gpus[0], bandwidth_gb_per_s=Figure(best=CARD_GB_PER_S))
    return replace(card, gpus=(gpu,), cpu_costs=costs, memory_bytes=64 << 30, free_bytes=60 << 30)


# ---- times ----------------------------------------------------------------------------------


def inputs_of(model: ModelFile, machine: Machine, id_LTK: np.ndarray, budget: int) -> Inputs:
    return Inputs(
        model=model,
        profile=profile_of(model, id_LTK),
        machine=machine,
        paths=(model.path,) * 3,
        context_length=CONTEXT,
        mode="dense",
        workspace=0,
        budgets=(budget,),
        host_budget=1 << 60,
    ).with_workspace(workspace_bytes)


def times_of(
    model: ModelFile, machine: Machine, tokens: list[np.ndarray], gib: float
) -> dict[str, object]:
    """Milliseconds of a token by WAYS, on tokens other than those that were planned with; the
    solver's seconds, and its gap."""
    budget = int(gib * 2**30)
    planned, other = (inputs_of(model, machine, id_LTK, budget) for id_LTK in tokens)
    began, used = time.perf_counter(), time.process_time()
    pipeline = planned.pipeline()
    answer = find_plan(pipeline, time_limit_s=10)
    seconds, processor_s = time.perf_counter() - began, time.process_time() - used
    assert answer is not None
    problem, truth = pipeline.model, other.pipeline().model
    random = np.random.default_rng(SEED)
    found = {
        "plan": answer.placement,
        "hottest_first": hottest_first(problem),
        "uniform": uniform(problem, random),
        "cpu": on_one_device(problem, gpu=False),
    }
    times = {
        name: 1e3 * placement_seconds(truth, on(problem, truth, placement))
        for name, placement in found.items()
        if placement is not None
    }
    moe, layers = cpu_moe(other), layer_split(other)
    if moe is not None:
        times |= {"cpu_moe": 1e3 * moe[1]}
    hot = answer.placement.num_hot_L
    return {
        "bytes": sum(entry.num_bytes for entry in model.tensors.values()),
        "seconds": seconds,
        "processor_s": processor_s,
        "gap": answer.gap,
        "status": answer.status,
        "hot": int(hot.sum()),
        "experts": int(hot.size * problem.num_neurons),
        "least_hot": int(hot.min()),
        "most_hot": int(hot.max()),
        "blocks": int(answer.placement.dense_L.sum()),
        "head": answer.placement.head,
        "planned_ms": 1e3 * answer.objective_s,
        "layers": layers.num_layers,
        "n_cpu_moe": None if moe is None else moe[0],
        "ms": times | {"layers": 1e3 * layers.seconds},
    }


def on(problem: Problem, other: Problem, placement: SolvedPlacement) -> SolvedPlacement:
    """The same experts by their ranks in another problem."""
    hot_LF = np.zeros_like(placement.hot_LF)
    for layer, is_hot_F in enumerate(placement.hot_LF):
        hot_LF[layer] = np.isin(other.order_LF[layer], problem.order_LF[layer][is_hot_F])
    return replace(placement, hot_LF=hot_LF)


def hottest_first(problem: Problem) -> SolvedPlacement | None:
    """All attention and the head on the GPU, then the most frequent experts of all layers."""
    shape = problem.touched_LF.shape
    dense = replace(on_one_device(problem, gpu=True), hot_LF=np.zeros(shape, bool))
    room = problem.budget_bytes - placement_bytes(problem, dense)
    order = np.argsort(
        -(problem.touched_LF / problem.neuron_bytes_L[:, None]), axis=None, kind="stable"
    )
    sizes = problem.neuron_bytes_L[order // shape[1]]
    hot_LF = np.zeros(shape, bool)
    hot_LF.ravel()[order[np.cumsum(sizes) <= room]] = True
    placement = replace(dense, hot_LF=hot_LF)
    return placement if room >= 0 and is_feasible(problem, placement) else None


def uniform(problem: Problem, random: np.random.Generator) -> SolvedPlacement | None:
    """All attention and the head on the GPU, and as many experts of each layer, whichever."""
    num_layers, number = problem.touched_LF.shape
    dense = replace(on_one_device(problem, gpu=True), hot_LF=np.zeros((num_layers, number), bool))
    room = problem.budget_bytes - placement_bytes(problem, dense)
    count = min(number, room // int(problem.neuron_bytes_L.sum()))
    if count < 0:
        return None
    hot_LF = np.stack([random.permutation(number) < count for _ in range(num_layers)])
    return replace(dense, hot_LF=hot_LF)


# ---- the picture ----------------------------------------------------------------------------


def plot(rows: list[dict], path: Path) -> None:
    """Tokens per second over the budget, one panel a model, for the first case."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(5.2 * len(names), 4.2), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        own = [r for r in rows if r["model"] == name and r["case"] == rows[0]["case"]]
        for way, label in WAYS.items():
            points = [(row["gib"], 1e3 / row["ms"][way]) for row in own if way in row["ms"]]
            axis.plot(
                *zip(*points, strict=True), marker="o", label=label, lw=2 if way == "plan" else 1
            )
        axis.set(title=name, xlabel="GiB of GPU memory", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("tokens/s, predicted")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "expert-plans"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
