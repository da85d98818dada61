"""More memory never predicts a slower plan, on random machines whose GPUs may be slower than their
CPU; status, gap and bound agree with brute force; the fastest plan is found whatever fits."""

from dataclasses import replace

import numpy as np
import pytest
from models import (
    WORKSPACE,
    make_inputs,
    make_machine,
    make_model,
    make_profile,
    make_sizes,
    save_solver_files,
    solver_files,
    take_workspace,
)
from test_solver import CLOSE, CONTEXT, HIGHS, brute_force, by_hand, whole_plan

from hotsplit.artifacts.split_file import Split
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.multi_gpu import Pipeline, plan_is_feasible, plan_seconds
from hotsplit.solver.optimise import OPTIMAL_GAP, Answer, find_plan
from hotsplit.solver.problem import on_one_device, placement_seconds
from hotsplit.solver.solve import SolveConfig, solve

SHARES = (0.1, 0.4, 0.7, 0.9, 0.98, 1.0, 1.01, 3.0)  # of the bytes of everything
NUM_MACHINES = 533


def random_machine(random: np.random.Generator, num_gpus: int):
    """Every figure varies by orders of magnitude; a GPU is up to 30 times slower or faster than
    the CPU."""

    def log_uniform(low: float, high: float) -> float:
        return float(np.exp(random.uniform(np.log(low), np.log(high))))

    cpu = log_uniform(1e-3, 100)
    machines = [
        make_machine(
            cpu_gb_per_s=cpu,
            gpu_gb_per_s=cpu * log_uniform(1 / 30, 30),
            link_gb_per_s=log_uniform(1e-3, 100),
            launch_s=log_uniform(1e-8, 3e-5),
            hand_over_s=log_uniform(1e-8, 1e-4),
            copy_latency_s=log_uniform(1e-8, 1e-4),
            chosen_share=random.uniform(0.3, 1),
            layer_s=log_uniform(1e-9, 1e-5),
            token_s=log_uniform(1e-9, 1e-5),
        )
        for _ in range(num_gpus)
    ]
    return replace(machines[0], gpus=tuple(machine.gpus[0] for machine in machines))


def random_inputs(seed: int) -> tuple[Inputs, int]:
    """A random model and machine, and the bytes of everything. Every fourth machine has two GPUs;
    the models of every fifth are too large for all choices to be tried."""
    random = np.random.default_rng(seed)
    num_layers = int(random.integers(1, 4))
    num_neurons = 32 if seed % 5 == 4 else int(random.integers(1, 5))
    shape = make_sizes(
        num_layers=num_layers,
        width=32,
        num_neurons=num_neurons,
        num_heads=2,
        num_kv_heads=1,
        head_width=2,
        vocab_size=int(random.integers(4, 30)),
        context_length=CONTEXT,
    )
    mode = ("dense", "exact", "predicted")[seed % 3]
    is_predicted = mode == "predicted"
    model = make_model(
        sizes=shape,
        kind=("f32", "f16")[seed % 2],
        predictor_rank=2 * is_predicted,
        predictor_density=0.4 if is_predicted else None,
    )
    profile = make_profile(model, random.beta(0.5, 1.0, (num_layers, num_neurons)))
    num_gpus = 2 if seed % 4 == 3 else 1
    machine = random_machine(random, num_gpus)
    whole = sum(whole_plan(model, CONTEXT).values())
    return make_inputs(model, profile, machine, *[0] * num_gpus, mode=mode), whole


def answers(inputs: Inputs, whole: int) -> list[tuple[Inputs, Answer]]:
    """The plans for rising budgets; with two GPUs first one budget rises, then the other."""
    budgets = [(WORKSPACE + int(share * whole),) for share in SHARES]
    if len(inputs.budgets) == 2:
        some = [size for (size,) in budgets[1::3]]
        budgets = [(0, size) for size in some] + [(size, some[-1]) for size in some]
    found = []
    for sizes in budgets:
        given = replace(inputs, budgets=sizes)
        answer = find_plan(given.pipeline(), time_limit_s=0.3)
        assert answer is not None
        found.append((given, answer))
    return found


@pytest.mark.parametrize(
    "seed",
    [*range(25), *(pytest.param(n, marks=pytest.mark.slow) for n in range(25, NUM_MACHINES))],
)
def test_more_memory_never_predicts_a_slower_plan(seed):
    inputs, whole = random_inputs(seed)
    best_s = np.inf
    for given, answer in answers(inputs, whole):
        assert answer.objective_s <= best_s * (1 + HIGHS)
        best_s = min(best_s, answer.objective_s)
        pipeline = given.pipeline()
        assert plan_is_feasible(pipeline, answer.plan)
        assert answer.objective_s == plan_seconds(pipeline, answer.plan)
        is_proven = answer.status in ("optimal", "cpu_only")
        assert is_proven == (answer.gap <= OPTIMAL_GAP)


@pytest.mark.parametrize("seed", [n for n in range(30) if n % 5 != 4])
def test_status_and_gap_agree_with_brute_force(seed):
    inputs, whole = random_inputs(seed)
    for given, answer in answers(inputs, whole)[::3]:
        best_s = brute_force(given)
        assert answer.objective_s == pytest.approx(best_s, rel=HIGHS)
        assert answer.bound_s <= best_s * (1 + CLOSE)
        assert answer.status in ("optimal", "cpu_only") and answer.gap <= 2 * HIGHS


def test_what_fits_is_divided_where_that_is_faster():
    """A GPU at half the CPU's rate with room for everything: 5 and 2 s for block and head, and of
    15 s of neurons the GPU takes 4 of the bytes in 8 s + 1/2 s beside the CPU's 10 s + 1/4 s."""
    problem = by_hand([4, 4, 4, 3], hot_s_per_byte_L=np.array([2.0]), budget_bytes=1000)
    answer = find_plan(Pipeline(problems=(problem,), need_bytes=0), time_limit_s=5)
    whole_s = placement_seconds(problem, on_one_device(problem, gpu=True))
    assert whole_s == pytest.approx(37.5) and problem.fits
    assert answer.objective_s == pytest.approx(5 + 2 + 11.25) and answer.status == "optimal"
    assert answer.placement.num_hot_L.tolist() == [1]
    assert answer.notes == (
        "everything would fit on the GPU, but a token would take 105.48% longer, by the figures"
        " of this machine",
    )


@pytest.mark.parametrize("order", [1, -1])
def test_the_faster_of_two_gpus_gets_the_model(order):
    slow, fast = by_hand([1] * 4, budget_bytes=1000), by_hand([1] * 4, budget_bytes=1000)
    slow = replace(
        slow, hot_s_per_byte_L=np.array([0.9]), dense_gpu_s_L=np.array([18.0]), head_gpu_s=9.0
    )
    fast = replace(fast, hand_over_s=9.0)
    problems = (slow, fast)[::order]
    answer = find_plan(Pipeline(problems=problems, need_bytes=0), time_limit_s=5)
    assert set(answer.plan.home_I.tolist()) == {1 if order == 1 else 0}
    assert answer.objective_s == pytest.approx(5 + 2 + 4 / 4 + 0.5)
    assert answer.notes == ("fits entirely in 240 B: every layer and the head are on the GPU",)


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_plans_of_a_slow_gpu_through_files(tmp_path, mode):
    """The file of a plan for a budget with room for everything: as fast as for less memory, and
    its report says that everything would fit."""
    machine = make_machine(cpu_gb_per_s=40.0, gpu_gb_per_s=15.0, launch_s=1e-7, hand_over_s=1e-7)
    save_solver_files(tmp_path, make_model(predictor_rank=8), c=machine)
    before_s = np.inf
    for size in (200 << 10, 260 << 10, 400 << 10, 1 << 30):
        report = solve(
            SolveConfig(
                **solver_files(tmp_path),
                output=tmp_path / "s",
                vram_budget_bytes=size,
                mode=mode,
                force=True,
            ),
            take_workspace,
        )
        assert report.objective_s <= before_s * (1 + HIGHS)
        before_s = report.objective_s
    assert report.fits_entirely and report.status == "optimal" == Split.load(tmp_path / "s").status
    assert report.num_hot < report.num_neurons
    assert any("everything would fit" in note for note in report.notes)
    assert not any("everything fits from" in note for note in report.notes)
