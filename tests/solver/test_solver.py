"""The solver against brute force and hand-solved cases, for one GPU and several; more memory never
predicts a slower plan."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from brute_force import (
    CLOSE,
    CONTEXT,
    HIGHS,
    WORKSPACE,
    brute_force,
    by_hand,
    random_inputs,
    whole_plan,
)
from models import (
    make_machine,
    make_problem,
    make_profile,
    make_sizes,
    power_law_frequencies,
    shape_only,
)

from hotsplit.artifacts.machine_file import Machine
from hotsplit.solver import integer_program
from hotsplit.solver.fullest import fullest_plan
from hotsplit.solver.integer_program import Solved, solve_program
from hotsplit.solver.lagrangian import search
from hotsplit.solver.multi_gpu import (
    Pipeline,
    bytes_of_gpus,
    cpu_only_plan,
    plan_is_feasible,
    plan_seconds,
)
from hotsplit.solver.optimise import OPTIMAL_GAP, find_plan
from hotsplit.solver.problem import (
    Problem,
    is_feasible,
    of_counts,
    on_one_device,
    placement_bytes,
    placement_seconds,
)


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


@pytest.mark.parametrize(
    ("num_gpus", "seed"),
    [(n, seed) for n, count in ((1, 80), (2, 60), (3, 6)) for seed in range(count)],
)
def test_agrees_with_brute_force(seed, num_gpus):
    """For one GPU, where main memory has room, the search alone and the integer program alone do,
    too."""
    inputs = random_inputs(seed, num_gpus)
    best, pipeline = brute_force(inputs), inputs.pipeline()
    answer = find_plan(pipeline, time_limit_s=20)
    if np.isinf(best):
        assert answer is None
        return
    assert answer.objective_s == pytest.approx(best, rel=HIGHS)
    assert answer.bound_s <= best * (1 + CLOSE)
    assert plan_is_feasible(pipeline, answer.plan)
    assert answer.objective_s == plan_seconds(pipeline, answer.plan)
    assert (pipeline.cuts()[1] <= best * (1 + CLOSE)).any()
    if num_gpus > 1 or seed % 2:
        return
    assert answer.status in ("optimal", "cpu_only") and answer.gap <= 2 * HIGHS
    problem = pipeline.model
    coarse = search(problem)
    assert coarse.bound_s <= best * (1 + CLOSE) and coarse.objective_s >= best * (1 - CLOSE)
    assert coarse.objective_s == placement_seconds(problem, coarse.placement)
    assert is_feasible(problem, coarse.placement)
    solved, seconds = solve_alone(problem, time_limit_s=20)
    assert solved.status == "optimal" and seconds == pytest.approx(best, rel=HIGHS)
    assert best * (1 - 4 * HIGHS) <= solved.bound_s <= best * (1 + CLOSE)
    assert is_feasible(problem, solved.plan.placement)


@pytest.mark.parametrize("seed", range(12))
def test_groups_of_layers_agree_with_brute_force(seed):
    """Dense blocks of a group, at random, are on one side."""
    inputs, random = random_inputs(seed), np.random.default_rng(seed)
    layers = random.permutation(inputs.model.spec.num_layers).tolist()
    groups = [tuple(sorted(layers[:2])), tuple(layers[2:])][: 1 + seed % 2]
    best = min(
        brute_force(
            inputs,
            sides={layer: on for group, on in zip(groups, chosen, strict=True) for layer in group},
        )
        for chosen in product((False, True), repeat=len(groups))
    )
    pipeline = replace(inputs.pipeline(), together=tuple(groups))
    fullest = replace(pipeline, need_bytes=sum(bytes_of_gpus(pipeline, fullest_plan(pipeline))))
    assert find_plan(fullest, time_limit_s=0) is not None
    assert find_plan(replace(fullest, need_bytes=fullest.need_bytes + 1), time_limit_s=0) is None
    assert np.isinf(best) == (fullest.need_bytes < pipeline.need_bytes)
    answer = find_plan(pipeline, time_limit_s=20)
    if np.isinf(best):
        assert answer is None
        return
    assert answer.objective_s == pytest.approx(best, rel=HIGHS)
    assert answer.bound_s <= best * (1 + CLOSE)
    assert plan_is_feasible(pipeline, answer.plan)
    assert answer.objective_s == plan_seconds(pipeline, answer.plan)
    dense_L, (first, *others) = answer.placement.dense_L.copy(), groups[0]
    dense_L[others] = not dense_L[first]
    divided = replace(answer.plan, placement=replace(answer.placement, dense_L=dense_L))
    groups_alone = replace(pipeline, problems=(), need_bytes=0)
    assert plan_is_feasible(groups_alone, answer.plan)
    assert not others or not plan_is_feasible(groups_alone, divided)


def test_main_memory_that_binds_has_a_tight_bound():
    # Each of two equal GPUs has room for two thirds of the model. The best plan puts less than nine
    # tenths on them, but main memory requires nine tenths. More neurons on a GPU cost nothing while
    # the CPU takes longer.
    shape = make_sizes(num_layers=12, width=1024, num_neurons=2816, num_heads=16, num_kv_heads=16)
    model = shape_only(shape)
    profile = make_profile(model, power_law_frequencies(12, 2816))
    machine = make_machine(gpu_gb_per_s=200.0, launch_s=1e-7, hand_over_s=1e-6, copy_latency_s=1e-6)
    problem = make_problem(model, profile, machine, 0, workspace=0)
    whole = problem.placeable_bytes
    pipeline = Pipeline(problems=(replace(problem, budget_bytes=2 * whole // 3),) * 2, need_bytes=0)
    free = find_plan(pipeline, time_limit_s=5)
    assert free.gap < 1e-3 and sum(bytes_of_gpus(pipeline, free.plan)) < 0.9 * whole
    pipeline = replace(pipeline, need_bytes=9 * whole // 10)
    answer = find_plan(pipeline, time_limit_s=5)
    assert answer.gap < 1e-3 and plan_is_feasible(pipeline, answer.plan)
    assert free.bound_s <= answer.objective_s


# --- hand-solved cases ---------------------------------------------------------------------------


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


# --- more memory -------------------------------------------------------------------------------

SHARES = (0.1, 0.4, 0.7, 0.9, 0.98, 1.0, 1.01, 3.0)  # of the bytes of everything


def random_machine(random: np.random.Generator, num_gpus: int) -> Machine:
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


def budgets_of(whole: int, num_gpus: int) -> list[tuple[int, ...]]:
    """Rising budgets; with two GPUs first one rises, then the other."""
    sizes = [WORKSPACE + int(share * whole) for share in SHARES]
    if num_gpus == 1:
        return [(size,) for size in sizes]
    some = sizes[1::3]
    return [(0, size) for size in some] + [(size, some[-1]) for size in some]


@pytest.mark.parametrize("seed", range(25))
def test_more_memory_never_predicts_a_slower_plan(seed):
    """Every fourth machine has two GPUs; the models of every fifth are too large for all choices to
    be tried."""
    num_gpus, best_s = 2 if seed % 4 == 3 else 1, np.inf
    machine = random_machine(np.random.default_rng(seed), num_gpus)
    inputs = random_inputs(seed, machine=machine, num_neurons=32 if seed % 5 == 4 else None)
    whole = sum(whole_plan(inputs.model, CONTEXT).values())
    for budgets in budgets_of(whole, num_gpus):
        pipeline = replace(inputs, budgets=budgets, host_budget=1 << 60).pipeline()
        answer = find_plan(pipeline, time_limit_s=5)
        assert answer.objective_s <= best_s * (1 + HIGHS)
        best_s = min(best_s, answer.objective_s)
        assert plan_is_feasible(pipeline, answer.plan)
        assert answer.objective_s == plan_seconds(pipeline, answer.plan)
        is_proven = answer.status in ("optimal", "cpu_only")
        assert is_proven == (answer.gap <= OPTIMAL_GAP)
