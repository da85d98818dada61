"""The solver against brute force and hand-solved cases; what `verify` and the solver refuse."""

import json
import math
from dataclasses import asdict, replace
from itertools import combinations_with_replacement, product
from pathlib import Path

import numpy as np
import pytest
from models import (
    WORKSPACE,
    load_solver_files,
    make_inputs,
    make_machine,
    make_model,
    make_problem,
    make_profile,
    make_sizes,
    power_law_frequencies,
    save_solver_files,
    shape_only,
    solver_files,
    take_workspace,
)

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs import part_bytes
from hotsplit.costs.kernel_counts import HOT_KERNELS, dense_kernels
from hotsplit.errors import HotsplitError
from hotsplit.solver import integer_program
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.integer_program import Solved, solve_program
from hotsplit.solver.lagrangian import search
from hotsplit.solver.multi_gpu import Pipeline, cpu_only_plan
from hotsplit.solver.optimise import find_plan
from hotsplit.solver.problem import (
    Problem,
    is_feasible,
    of_counts,
    on_one_device,
    placement_bytes,
    placement_seconds,
)
from hotsplit.solver.solve import SolveConfig, solve
from hotsplit.solver.verify import verify

CLOSE = 1e-9  # relative: f64 sums in another order
HIGHS = 1e-6  # relative: HiGHS's own tolerance
NUM_NEURONS = 40  # per layer, in the small model on disk
CONTEXT = 8  # of random models
SLOW = {"cpu_gb_per_s": 0.005, "gpu_gb_per_s": 0.5}


# --- brute force ---------------------------------------------------------------------------------


def random_gpu(random: np.random.Generator, cpu: float) -> dict[str, float]:
    """A kernel, a hand-over, a run on the CPU and a use of the GPU take 1 ns to 4 us, and the link
    copies at a fifth or twice the CPU's rate, so that each of these decides some plans."""
    return {
        "gpu_gb_per_s": cpu * random.choice([0.7, 1.5, 3, 20]),
        "link_gb_per_s": cpu * random.choice([0.2, 2]),
        "launch_s": random.choice([1e-9, 5e-7, 2e-6]),
        "kernel_s": random.choice([1e-9, 1e-6, 3e-6]),
        "hand_over_s": random.choice([1e-9, 1e-6, 4e-6]),
        "cpu_run_s": random.choice([1e-9, 1e-6, 4e-6]),
        "use_s": random.choice([1e-9, 2e-6]),
        "gpu_chosen_share": random.choice([1.0, 0.4]),
    }


def whole_plan(model: ModelFile, context_length: int, **options) -> dict[str, int]:
    """The GPU's bytes with everything there."""
    num_layers = model.spec.num_layers
    return part_bytes.plan_bytes(
        model,
        context_length=context_length,
        num_hot=[model.spec.most_neurons] * num_layers,
        dense_on_gpu=[True] * num_layers,
        head_on_gpu=True,
        **options,
    )[0][0]


def tiny(seed: int, num_neurons: int | None = None) -> Inputs:
    """A random model, profile, machine and budget, with two or three layers of a few neurons. The
    CPU reads a whole neuron in 0.5 to 80 us."""
    random = np.random.default_rng(seed)
    num_layers = int(random.integers(2, 4))
    num_neurons = num_neurons or int(random.integers(2, 7 if num_layers == 2 else 5))
    shape = make_sizes(
        num_layers=num_layers,
        width=32,
        num_neurons=num_neurons,
        num_heads=2,
        num_kv_heads=1,
        head_width=16 if seed % 3 == 2 else 2,  # q8_0 needs rows of 32
        vocab_size=int(random.integers(4, 30)),
        context_length=CONTEXT,
    )
    has_predictor = seed % 3 == 0
    model = make_model(
        sizes=shape,
        kind=["f32", "f16", "q8_0"][seed % 3],
        predictor_rank=2 * has_predictor,
        predictor_density=0.4 if seed % 2 else None,
    )
    cpu = 10 ** random.uniform(-2.3, -0.7)
    machine = make_machine(
        cpu_gb_per_s=cpu,
        **random_gpu(random, cpu),
        chosen_share=random.choice([1.0, 0.6]),
        layer_s=random.choice([1e-9, 3e-6]),
        token_s=2e-6,
        logit_s=1e-8,
    )
    profile = make_profile(model, random.beta(0.5, 1.0, (num_layers, num_neurons)))
    whole = whole_plan(model, CONTEXT)
    limit = WORKSPACE + int(random.uniform(0.05, 0.999) * sum(whole.values()))
    mode = "predicted" if has_predictor else "exact"
    return make_inputs(model, profile, machine, limit, mode=mode)


def layer_options(inputs: Inputs, layer: int, subsets, gpu_number: int):
    """(GPU bytes, seconds, whether the dense block is on the GPU, whether anything is) of every
    allowed placement of one layer with hot neurons from `subsets`, by the definition, in plain
    loops."""
    model, profile, machine, mode = inputs.model, inputs.profile, inputs.machine, inputs.mode
    sizes, gpu = part_bytes.layer_bytes(model, layer), machine.gpus[gpu_number]
    gpu_rate, cpu_rate = (
        gpu.bandwidth_gb_per_s.best * 1e9,
        max(f.best for f in machine.cpu_bandwidth_gb_per_s.values()) * 1e9,
    )
    kv = part_bytes.kv_bytes(model, 0, CONTEXT)
    fired = [count / profile.num_tokens for count in profile.active_count_LF[layer]]
    fired = [1.0] * len(fired) if mode == "dense" else fired
    gate, costs = [1.0] * len(fired), machine.cpu_costs
    if mode == "predicted":
        known = model.predictor.density_L
        factor = known[layer] / (sum(fired) / len(fired)) if known else 1.0
        gate = [min(1.0, a * factor) for a in fired]
    touched = [
        g * sizes.gate_row + a * (sizes.up_row + sizes.down_row)
        for g, a in zip(gate, fired, strict=True)
    ]
    all_s = 1e-9 / costs.all_rows_gb_per_s["f32"].best
    tenth_s = 1e-9 / costs.chosen_rows_gb_per_s["f32"].best

    def byte_s(density):  # all rows to a tenth of them: linear in the log of the share
        return all_s + (tenth_s - all_s) * min(1.0, max(0.0, -math.log10(density or 0.1)))

    gate_s, rest_s = byte_s(sum(gate) / len(gate)), byte_s(sum(fired) / len(fired))
    all_cold_s = sum(
        g * sizes.gate_row * gate_s + a * (sizes.up_row + sizes.down_row) * rest_s
        for g, a in zip(gate, fired, strict=True)
    )
    cold_rate = sum(touched) / all_cold_s if sum(touched) else cpu_rate
    row_bytes = sizes.gate_row + sizes.up_row + sizes.down_row
    way = min(1.0, -math.log10(max(0.1, sum(touched) / len(touched) / row_bytes)))
    hot_byte_s = 1 / gpu_rate + way * (1e-9 / gpu.chosen_rows_gb_per_s.best - 1 / gpu_rate)
    least, saved = len(fired), 0.0
    kernels_s = HOT_KERNELS * gpu.kernel_s.best
    for number, neuron in enumerate(sorted(touched, reverse=True), 1):
        saved += neuron / cold_rate
        if saved > kernels_s + gpu.hand_over_s.best:
            least = number
            break
    read = sizes.attention + kv / 2 + (sizes.predictor if mode == "predicted" else 0)
    # Llama: four products, two norms, three kernels around the attention, two of a predictor.
    kernels = 4 + 2 + 3 + (2 if mode == "predicted" else 0)
    options = []
    for on_gpu, hot in product((False, True), subsets):
        if 0 < len(hot) < least:
            continue
        cold = set(range(len(fired))) - set(hot)
        devices = {on_gpu} | ({True} if hot else set()) | ({False} if cold else set())
        hot_s = sum(touched[j] for j in hot) * hot_byte_s + (kernels_s if hot else 0)
        cold_s = sum(touched[j] for j in cold) / cold_rate
        cold_s += gpu.hand_over_s.best if len(devices) == 2 else 0
        dense = sizes.attention + sizes.predictor + kv
        options.append(
            (
                dense * on_gpu + len(hot) * sizes.neuron,
                (
                    kernel_seconds(gpu, kernels, read)
                    if on_gpu
                    else read / cpu_rate + costs.layer_s["exact" if mode == "dense" else mode].best
                )
                + max(hot_s, cold_s),
                on_gpu,
                on_gpu or bool(hot),
            )
        )
    return np.array(options)


def head_options(model, machine, gpu_number):
    """The same for the head: a norm, a product, and the copy of the logits to the CPU."""
    head, gpu = part_bytes.head_bytes(model), machine.gpus[gpu_number]
    gpu_s = kernel_seconds(gpu, 2, head)
    gpu_s += 4 * model.spec.vocab_size / (gpu.host_to_device_gb_per_s.best * 1e9)
    cpu_s = head / (machine.cpu_costs.all_rows_gb_per_s["f32"].best * 1e9)
    return np.array([(0, cpu_s, True, False), (head, gpu_s, True, True)])  # begins no run


def kernel_seconds(gpu, count, num_bytes) -> float:
    read_s = num_bytes / (gpu.bandwidth_gb_per_s.best * 1e9)
    return max(count * gpu.kernel_s.best, count * gpu.launch_s.best + read_s)


def all_subsets(units):
    """Every union of `units`, which are tuples of neurons."""
    for chosen in product((False, True), repeat=len(units)):
        yield tuple(j for unit, is_in in zip(units, chosen, strict=True) if is_in for j in unit)


def brute_force(inputs: Inputs, units_of_layer=None, *, sides=None) -> float:
    """Fewest seconds per token over all homes and placements of whole units, by default neurons;
    infinite if none fits. `sides`: layers whose dense blocks are on the GPU or not, by number."""
    model, machine, num_gpus = inputs.model, inputs.machine, len(inputs.budgets)
    num_layers, num_neurons = model.spec.num_layers, model.spec.most_neurons
    units_of_layer = units_of_layer or (lambda layer: [(j,) for j in range(num_neurons)])
    options = {
        (layer, gpu): layer_options(inputs, layer, list(all_subsets(units_of_layer(layer))), gpu)
        for layer in range(num_layers)
        for gpu in range(num_gpus)
    }
    for key, item in options.items():
        if sides and key[0] in sides:
            options[key] = item[item[:, 2] == sides[key[0]]]
    head, costs = part_bytes.head_bytes(model), machine.cpu_costs
    everything = sum(
        part_bytes.layer_bytes(model, layer).attention
        + part_bytes.layer_bytes(model, layer).predictor
        + part_bytes.kv_bytes(model, 0, CONTEXT)
        + num_neurons * part_bytes.layer_bytes(model, layer).neuron
        for layer in range(num_layers)
    )
    everything += head + part_bytes.embedding_bytes(model) + inputs.workspace
    best = np.inf
    for home in combinations_with_replacement(range(num_gpus), num_layers + 1):
        seconds = np.array([costs.token_s.best + model.spec.vocab_size * costs.logit_s.best])
        is_there, before = np.ones(1), home[0]
        runs_KN = [np.array([0]) for _ in range(num_gpus)]  # on the CPU, by home
        uses_KN = [np.array([0]) for _ in range(num_gpus)]
        held_KN = [np.array([0]) for _ in range(num_gpus)]
        items = [options[layer, home[layer]] for layer in range(num_layers)]
        items.append(head_options(model, machine, home[-1]))
        for gpu, item in zip(home, items, strict=True):
            # A run on the CPU begins unless the layer before is on the CPU too, with this home.
            begins = np.logical_and.outer((is_there == 1) | (gpu != before), item[:, 2] == 0)
            seconds = np.add.outer(seconds, item[:, 1]).ravel()
            is_there, before = np.add.outer(0 * is_there, item[:, 2]).ravel(), gpu
            for k in range(num_gpus):
                held_KN[k] = np.add.outer(held_KN[k], (k == gpu) * item[:, 0]).ravel()
                uses_KN[k] = np.logical_or.outer(uses_KN[k], (k == gpu) * item[:, 3]).ravel()
                runs_KN[k] = (runs_KN[k][:, None] + (k == gpu) * begins).ravel()
        for gpu, uses, runs in zip(machine.gpus, uses_KN, runs_KN, strict=False):
            seconds = seconds + uses * (gpu.token_s.best + runs * gpu.cpu_run_s.best)
        fits = everything - sum(held_KN) <= inputs.host_budget
        for held, limit in zip(held_KN, inputs.budgets, strict=True):
            fits &= (held == 0) | (held + inputs.workspace <= limit)
        best = min(best, seconds[fits].min(initial=np.inf))
    return float(best)


def solve_alone(problem: Problem, time_limit_s: float) -> tuple[Solved, float]:
    """The integer program's answer for one GPU, from everything on the CPU, and its seconds."""
    pipeline = Pipeline(problems=(problem,), need_bytes=0)
    start = cpu_only_plan(pipeline)
    solved = solve_program(pipeline, start=start, time_limit_s=time_limit_s)
    assert solved.plan is not None
    return solved, placement_seconds(problem, solved.plan.placement)


def find_placement(problem: Problem, time_limit_s: float):
    """The best plan for one GPU."""
    return find_plan(Pipeline(problems=(problem,), need_bytes=0), time_limit_s=time_limit_s)


@pytest.mark.parametrize("seed", range(60))
def test_agrees_with_brute_force_over_all_subsets(seed):
    inputs = tiny(seed)
    problem, best = inputs.pipeline().model, brute_force(inputs)
    coarse = search(problem)
    assert coarse.bound_s <= best * (1 + CLOSE) and coarse.objective_s >= best * (1 - CLOSE)
    assert coarse.objective_s == placement_seconds(problem, coarse.placement)
    assert is_feasible(problem, coarse.placement)
    answer = find_placement(problem, time_limit_s=20)
    assert answer.objective_s == pytest.approx(best, rel=HIGHS)
    assert answer.bound_s <= best * (1 + CLOSE)
    assert is_feasible(problem, answer.placement)
    solved, seconds = solve_alone(problem, time_limit_s=20)
    assert solved.status == "optimal" and seconds == pytest.approx(best, rel=HIGHS)
    assert best * (1 - 4 * HIGHS) <= solved.bound_s <= best * (1 + CLOSE)
    assert is_feasible(problem, solved.plan.placement)


# --- hand-solved cases ---------------------------------------------------------------------------


def by_hand(touched, **changes) -> Problem:
    """One layer. A touched byte takes 1 s on the CPU, 1/4 s on the GPU; a neuron holds 10 bytes.

    By default the kernels take 1/2 s, a hand-over 1/4 s, a run on the CPU and a use of the GPU 0 s.
    The dense block: 100 bytes, 20 s on the CPU, 5 s on the GPU. The head: 100 bytes, 10 s and 2 s.
    No workspace."""
    touched_LF = np.array([touched], np.float64)
    fields = {
        "order_LF": np.arange(len(touched), dtype=np.int32)[None],
        "touched_LF": touched_LF,
        "neuron_bytes_L": np.array([10]),
        "min_hot_L": np.array([1]),
        "dense_bytes_L": np.array([100]),
        "dense_gpu_s_L": np.array([5.0]),
        "dense_cpu_s_L": np.array([20.0]),
        "head_bytes": 100,
        "head_gpu_s": 2.0,
        "head_cpu_s": 10.0,
        "workspace_bytes": 0,
        "budget_bytes": 0,
        "gpu_s_per_byte": 0.25,
        "hot_s_per_byte_L": np.array([0.25]),
        "cpu_s_per_byte_L": np.array([1.0]),
        "kernels_s": 0.5,
        "hand_over_s": 0.25,
        "cpu_run_s": 0.0,
        "use_s": 0.0,
    }
    return Problem(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "seconds", "hot", "dense", "head"),
    [
        # All on the CPU: 20 + 10 + 15.
        ({"budget_bytes": 0}, 45.0, [], False, False),
        # One neuron fits. The hottest: max(8/4 + 1/2, 7 + 1/4) = 7.25, and 20 + 10.
        ({"budget_bytes": 10}, 37.25, [0], False, False),
        # The neurons alone would be 33.5 (see below), the head 2 + 20 + 15, the dense block
        # 5 + 10 + 15 and the hand-over that its cold neurons now cost.
        ({"budget_bytes": 100}, 30.25, [], True, False),
        # The block and all neurons fit. All four neurons take 4.25 and no hand-over, three
        # max(4, 1.25), two max(12/4 + 1/2, 3 + 1/4) = 3.5. Two are best: 5 + 10 + 3.5.
        ({"budget_bytes": 140}, 18.5, [0, 1], True, False),
        # A slow hand-over of 6 s: now two would be max(3.5, 9), all 4.25 without any.
        ({"budget_bytes": 140, "hand_over_s": 6.0}, 19.25, [0, 1, 2, 3], True, False),
        # Workspace takes 40 of 139: no block fits, all neurons do. Two: 20 + 10 + 3.5.
        ({"budget_bytes": 139, "workspace_bytes": 40}, 33.5, [0, 1], False, False),
        # At least three neurons or none, where two would be best. The hottest three take max(4,
        # 1.25); with the coldest instead of the third, max(13/4 + 1/2, 2 + 1/4) = 3.75: 18.75.
        ({"budget_bytes": 140, "min_hot_L": np.array([3])}, 18.75, [0, 1, 3], True, False),
        # Two neurons and the block on the CPU take a run of 4 s there: 37.5. The block alone on the
        # GPU is none: 30.25; nor is a head on the CPU after it.
        ({"budget_bytes": 100, "cpu_run_s": 4.0}, 30.25, [], True, False),
        # Where only the neurons fit, they pay for the run: 33.5 + 4; and for using the GPU: + 6.
        ({"budget_bytes": 40, "cpu_run_s": 4.0}, 37.5, [0, 1], False, False),
        ({"budget_bytes": 40, "cpu_run_s": 4.0, "use_s": 6.0}, 43.5, [0, 1], False, False),
        # With 8 s they do not pay off.
        ({"budget_bytes": 40, "cpu_run_s": 4.0, "use_s": 8.0}, 45.0, [], False, False),
        # Neurons take 1/2 s a byte on the GPU: of 8 + 2, max(10/2 + 1/2, 5 + 1/4) = 5.5.
        ({"budget_bytes": 140, "hot_s_per_byte_L": np.array([0.5])}, 20.5, [0, 2], True, False),
        # At least three neurons or none, and room for two: none, so everything is on the CPU.
        ({"budget_bytes": 20, "min_hot_L": np.array([3])}, 45.0, [], False, False),
    ],
)
def test_hand_solved(changes, seconds, hot, dense, head):
    problem = by_hand([8, 4, 2, 1], **changes)
    answer = find_placement(problem, time_limit_s=5)
    assert answer.objective_s == pytest.approx(seconds, rel=CLOSE)
    assert np.flatnonzero(answer.placement.hot_LF[0]).tolist() == hot
    assert (answer.placement.dense_L[0], answer.placement.head) == (dense, head)
    assert answer.bound_s <= answer.objective_s
    # The integer program finds the same when it starts with everything on the CPU.
    assert solve_alone(problem, time_limit_s=5)[1] == pytest.approx(seconds, rel=CLOSE)


def test_the_number_of_kernels_of_a_dense_block():
    # Llama: q, k, v, o; two norms; rotation, attention over parts of the cache, their combination.
    # Falcon: one norm, and one product for q, k and v. A predictor has two products.
    for architecture, count in (("llama", 9), ("falcon", 2 + 1 + 3), ("opt", 9)):
        model = shape_only(make_sizes(), predictor_rank=8, architecture=architecture)
        assert dense_kernels(model, 1, has_predictor=False) == count
        assert dense_kernels(model, 1, has_predictor=True) == count + 2


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of a small model with predictors, for a CPU slow enough that every block is worth its
    place, even with a layer's round trip."""
    shape = make_sizes(num_layers=3, num_neurons=NUM_NEURONS)
    model = make_model(sizes=shape, kind="f16", predictor_rank=8, predictor_density=0.3)
    return save_solver_files(tmp_path_factory.mktemp("solver"), model, c=make_machine(**SLOW))


def config_of(folder: Path, output: Path, budget_bytes: int, **changes) -> SolveConfig:
    values = solver_files(folder) | {"output": output, "vram_budget_bytes": budget_bytes}
    return SolveConfig(**values | changes)


def test_every_budget_from_nothing_to_everything(folder, tmp_path):
    model = ModelFile.load(folder / "m.gguf")
    context = model.spec.context_length
    most = sum(whole_plan(model, context, workspace=WORKSPACE).values())
    limits = [0, *np.linspace(WORKSPACE + 40_000, most, 12).astype(int).tolist(), 2 * most]
    before = np.inf
    for number, limit in enumerate(limits):
        output = tmp_path / f"{number}.split.gguf"
        report = solve(config_of(folder, output, limit, mode="predicted"), take_workspace)
        split = Split.load(output)
        split.check_against(model, output)
        (gpu,), cpu = part_bytes.plan_bytes(
            model,
            context_length=context,
            num_hot=[len(ids) for ids in split.hot],
            dense_on_gpu=split.dense_on_gpu,
            head_on_gpu=split.head_on_gpu,
            workspace=WORKSPACE,
        )
        assert (
            (gpu, cpu) == (split.gpu_bytes, split.cpu_bytes) == (report.gpu_bytes, report.cpu_bytes)
        )
        assert sum(gpu.values()) <= limit
        assert split.bound_s <= split.objective_s <= before * (1 + HIGHS)
        before = split.objective_s
        assert report.objective_s == split.objective_s and report.num_hot == sum(
            map(len, split.hot)
        )
        assert report.fits_entirely == (limit >= most)
        assert json.loads(json.dumps(asdict(report)))["output"] == str(output)
    assert report.hot_traffic_share == pytest.approx(1) and any(
        "fits entirely" in note for note in report.notes
    )
    assert report.num_hot == report.num_neurons and all(split.dense_on_gpu) and split.head_on_gpu
    nothing = Split.load(tmp_path / "0.split.gguf")
    assert (
        nothing.status == "cpu_only" and not nothing.head_on_gpu and not any(nothing.dense_on_gpu)
    )
    assert sum(nothing.gpu_bytes.values()) == 0 and nothing.gap < 1e-9


def middle_budget(folder: Path) -> int:
    model = ModelFile.load(folder / "m.gguf")
    context = model.spec.context_length
    return WORKSPACE + 3 * sum(whole_plan(model, context).values()) // 4


def test_plan_is_deterministic_and_hottest_first(folder, tmp_path):
    plans = []
    for name in "ab":
        solve(config_of(folder, tmp_path / name, middle_budget(folder)), take_workspace)
        plans.append(Split.load(tmp_path / name))
    profile = make_profile(ModelFile.load(folder / "m.gguf"))
    assert any(0 < len(ids) < NUM_NEURONS for ids in plans[0].hot)
    for layer, (ids, again) in enumerate(zip(plans[0].hot, plans[1].hot, strict=True)):
        np.testing.assert_array_equal(ids, again)
        counts = profile.active_count_LF[layer]
        assert ids.tolist() == sorted(ids.tolist(), key=lambda j: (-counts[j], j))


def corruptions(split: Split):
    """(what is wrong, the wrong plan) for each."""
    layer = next(i for i, ids in enumerate(split.hot) if 1 < len(ids) < NUM_NEURONS)
    ids = split.hot[layer]

    def with_ids(new):
        return replace(split, hot=(*split.hot[:layer], new, *split.hot[layer + 1 :]))

    coldest = np.setdiff1d(np.arange(NUM_NEURONS, dtype=np.int32), ids)[-1:]
    yield "another neuron", with_ids(np.concatenate([coldest, ids[1:]]))
    yield "one neuron fewer", with_ids(ids[:-1])
    yield "order", with_ids(ids[::-1].copy())
    yield (
        "an unknown neuron",
        with_ids(np.concatenate([ids[:-1], np.array([NUM_NEURONS], np.int32)])),
    )
    yield (
        "bytes",
        replace(split, gpu_bytes=split.gpu_bytes | {"neurons": split.gpu_bytes["neurons"] - 1}),
    )
    yield "cpu bytes", replace(split, cpu_bytes=split.cpu_bytes | {"head": 1})
    yield (
        "half the time",
        replace(split, objective_s=split.objective_s / 2, bound_s=split.bound_s / 2),
    )
    yield "a millionth more time", replace(split, objective_s=split.objective_s * (1 + 1e-6))
    yield "bound", replace(split, bound_s=split.objective_s * 1.01)
    yield "budget", replace(split, vram_budget_bytes=sum(split.gpu_bytes.values()) - 1)
    yield "dense block", replace(split, dense_on_gpu=tuple(not d for d in split.dense_on_gpu))
    yield "head", replace(split, head_on_gpu=not split.head_on_gpu)
    yield "mode", replace(split, mode="exact")
    yield "context", replace(split, context_length=split.context_length - 1)
    yield "model", replace(split, model_id="0" * 64)


def test_verify_refuses_every_wrong_plan(folder, tmp_path):
    solve(config_of(folder, tmp_path / "plan", middle_budget(folder)), take_workspace)
    split = Split.load(tmp_path / "plan")
    files = load_solver_files(folder)
    verify(split, **files)
    for what, wrong in corruptions(split):
        with pytest.raises(HotsplitError):
            verify(wrong, **files)
            pytest.fail(f"accepted a plan with a mistake: {what}")
    with pytest.raises(HotsplitError, match="s a token"):
        verify(split, **(files | {"machine": make_machine(cpu_gb_per_s=0.006, gpu_gb_per_s=0.5)}))
    slow_launch = make_machine(**SLOW, hand_over_s=10.0)
    with pytest.raises(HotsplitError, match="hot neurons, which save"):
        verify(split, **(files | {"machine": slow_launch}))


def refusals(folder: Path, tmp_path: Path):
    """(changes to a good request, its budget, words of the refusal) for each."""
    model = ModelFile.load(folder / "m.gguf")
    other = make_model(spec=model.bare_spec, seed=1)
    make_profile(other).save(tmp_path / "other.safetensors")
    smaller = replace(make_profile(make_model(sizes=make_sizes())), model_id=model.model_id)
    smaller.save(tmp_path / "smaller.safetensors")
    make_machine(num_gpus=0).save(tmp_path / "no-gpu.json")
    other.save(tmp_path / "no-predictors.gguf")
    no_predictors = {
        "model": tmp_path / "no-predictors.gguf",
        "profile": tmp_path / "other.safetensors",
    }
    budget_bytes = middle_budget(folder)
    yield {"profile": tmp_path / "other.safetensors"}, budget_bytes, "made from model"
    yield {"profile": tmp_path / "smaller.safetensors"}, budget_bytes, "layers and neurons"
    yield {"profile": tmp_path / "none"}, budget_bytes, "no such file"
    yield {"machine": tmp_path / "no-gpu.json"}, budget_bytes, "--gpu-from FILE"
    yield no_predictors | {"mode": "predicted"}, budget_bytes, "no predictors"
    yield {"context_length": 1_000_000}, budget_bytes, "was made for 32"
    yield {}, 1, r"smallest that works is [\d,.]+ MiB \([\d,]+ bytes\)"


def test_refusals_leave_no_file(folder, tmp_path):
    output = tmp_path / "out" / "plan.split.gguf"
    for changes, budget_bytes, words in refusals(folder, tmp_path):
        with pytest.raises(HotsplitError, match=words):
            solve(config_of(folder, output, budget_bytes, **changes), take_workspace)
        assert not output.parent.exists()
    output.parent.mkdir()
    output.write_text("mine")
    with pytest.raises(HotsplitError, match="exists already"):
        solve(config_of(folder, output, 0), take_workspace)
    assert output.read_text() == "mine"
    solve(config_of(folder, output, 0, force=True), take_workspace)
    assert [path.name for path in output.parent.glob("*")] == [output.name]


@pytest.mark.parametrize(
    "changes",
    [
        {"vram_budget_bytes": -1},
        {"context_length": 0},
        {"mode": "sparse"},
        {"time_limit_s": 0.0},
        {"output": Path("m.gguf")},
    ],
)
def test_config_is_checked(changes):
    good = solver_files(Path()) | {"output": Path("o"), "vram_budget_bytes": 0}
    SolveConfig(**good)
    with pytest.raises(HotsplitError):
        SolveConfig(**(good | changes))


def test_the_smallest_budget_named_by_the_refusal_works(folder, tmp_path):
    with pytest.raises(HotsplitError) as error:
        solve(config_of(folder, tmp_path / "plan", 1), take_workspace)
    smallest = int(str(error.value).split(" bytes)")[0].split("MiB (")[1].replace(",", ""))
    with pytest.raises(HotsplitError):
        solve(config_of(folder, tmp_path / "plan", smallest - 1), take_workspace)
    report = solve(config_of(folder, tmp_path / "plan", smallest), take_workspace)
    assert report.gpu_bytes["workspace"] > 0 and sum(report.gpu_bytes.values()) == smallest


def test_notes_say_what_the_figures_leave_open(folder, tmp_path):
    model = make_model(predictor_rank=8)
    save_solver_files(tmp_path, model, c=make_machine(num_gpus=2, memory_bytes=1 << 20))
    replace(make_profile(model), threshold_L=(0.5, 0.5)).save(tmp_path / "p")
    report = solve(config_of(tmp_path, tmp_path / "plan", 1 << 30), take_workspace)
    for words in ("2 GPUs", "not measured here", "above the", "unknown", "other activation"):
        assert any(words in note for note in report.notes), words
    assert report.mode == "predicted"
    files = {"profile": folder / "p", "mode": "exact"}
    report = solve(config_of(folder, tmp_path / "exact", 0, **files), take_workspace)
    words = ("not measured here", "helps on this machine (by 1 % or more); everything fits from")
    assert report.mode == "exact" and len(report.notes) == len(words)
    assert all(word in note for word, note in zip(words, report.notes, strict=True))


# --- the shape of a real model -------------------------------------------------------------------


def seven_billion(gib: float) -> Problem:
    shape = make_sizes(
        num_layers=32,
        width=4096,
        num_neurons=11008,
        num_heads=32,
        num_kv_heads=32,
        vocab_size=32000,
        context_length=4096,
    )
    model = shape_only(shape)
    profile = make_profile(model, power_law_frequencies(32, 11008))
    return make_problem(model, profile, make_machine(), int(gib * 2**30))


def test_seven_billion_parameters():
    problem = seven_billion(8)
    answer = find_placement(problem, time_limit_s=30)
    assert answer.bound_s <= answer.objective_s <= answer.bound_s * 1.005
    assert placement_bytes(problem, answer.placement) <= problem.budget_bytes
    # A plan that fills the budget with an equal number of each layer's hottest is no faster.
    dense_L = np.ones(32, bool)
    left = problem.room_bytes - int(problem.dense_bytes_L.sum()) - problem.head_bytes
    each = left // int(problem.neuron_bytes_L.sum())
    alike = of_counts(problem, np.full(32, each), dense_L, True)
    assert is_feasible(problem, alike)
    assert answer.objective_s <= placement_seconds(problem, alike)


def test_a_time_limit_still_gives_a_plan_and_says_so(monkeypatch):
    """A program that is far too large for its time: the plan of the search is kept."""
    shape = make_sizes(num_layers=8, width=256, num_neurons=1024, vocab_size=500)
    model = shape_only(shape)
    profile = make_profile(model, power_law_frequencies(8, 1024))
    machine = make_machine(hand_over_s=5e-6, cpu_run_s=5e-6)
    nothing = make_problem(model, profile, machine, 0)
    whole = placement_bytes(nothing, on_one_device(nothing, gpu=True))
    problem = make_problem(model, profile, machine, int(0.45 * whole))
    fast = find_placement(problem, time_limit_s=1e-3)
    assert not integer_program.is_small(Pipeline(problems=(problem,), need_bytes=0))
    assert fast.status == "bounded" and 1e-3 < fast.gap < 1e-2
    monkeypatch.setattr(integer_program, "MAX_NEURONS", 1 << 20)
    answer = find_placement(problem, time_limit_s=1e-3)
    assert answer.status == "time_limit" and any("was stopped after" in n for n in answer.notes)
    assert (answer.objective_s, answer.bound_s) == (fast.objective_s, fast.bound_s)
