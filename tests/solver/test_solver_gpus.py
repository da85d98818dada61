"""Several GPUs and a limit on main memory, against brute force and hand-solved cases."""

import re
from dataclasses import replace
from itertools import product

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
from test_solver import CLOSE, CONTEXT, HIGHS, SLOW, brute_force, random_gpu, whole_plan

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs import part_bytes
from hotsplit.errors import HotsplitError
from hotsplit.solver.fullest import fullest_plan
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.multi_gpu import Pipeline, bytes_of_gpus, plan_is_feasible, plan_seconds
from hotsplit.solver.optimise import find_plan
from hotsplit.solver.solve import SolveConfig, check, solve
from hotsplit.solver.verify import verify


def tiny_inputs(seed: int, num_gpus: int, tmp_path) -> Inputs:
    """A random model, machine and budget for each GPU, and for odd seeds a tight main memory."""
    random = np.random.default_rng(1000 * num_gpus + seed)
    num_layers = int(random.integers(1, 4))
    num_neurons = int(random.integers(2, 6 if num_layers < 3 else 4))
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
    model = make_model(sizes=shape, kind=["f32", "f16"][seed % 2])
    cpu = 10 ** random.uniform(-2.3, -0.7)
    one = make_machine(
        cpu_gb_per_s=cpu,
        chosen_share=random.choice([1.0, 0.7]),
        layer_s=random.choice([1e-9, 2e-6]),
    )
    gpus = [make_machine(**random_gpu(random, cpu)).gpus[0] for _ in range(num_gpus)]
    profile = make_profile(model, random.beta(0.5, 1.0, (num_layers, num_neurons)))
    workspace = 500
    most = sum(whole_plan(model, CONTEXT, workspace=0).values())
    budgets = tuple(workspace + int(random.uniform(0.05, 0.9) * most) for _ in range(num_gpus))
    on_cpu = most + part_bytes.embedding_bytes(model) + workspace
    host = on_cpu - int(random.uniform(0.1, 0.7) * min(most, sum(budgets))) if seed % 2 else on_cpu
    machine = replace(one, gpus=tuple(gpus))
    return make_inputs(model, profile, machine, *budgets, workspace=workspace, host_budget=host)


@pytest.mark.parametrize(
    ("num_gpus", "seed"),
    [(n, seed) for n, count in ((1, 60), (2, 60), (3, 6)) for seed in range(count)],
)
def test_agrees_with_brute_force(seed, num_gpus, tmp_path):
    inputs = tiny_inputs(seed, num_gpus, tmp_path)
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


@pytest.mark.parametrize("seed", range(12))
def test_groups_of_layers_agree_with_brute_force(seed, tmp_path):
    """Dense blocks of a group, at random, are on one side."""
    inputs, random = tiny_inputs(seed, 1, tmp_path), np.random.default_rng(seed)
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


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    model = make_model(sizes=make_sizes(num_layers=4), kind="f16", predictor_rank=8)
    return save_solver_files(tmp_path, model, c=make_machine(**SLOW, num_gpus=2))


def config_of(folder, *budgets, **changes) -> SolveConfig:
    files = solver_files(folder) | {"output": folder / "plan"}
    return SolveConfig(**files, vram_budget_bytes=budgets, **changes)


def room(folder, share: float) -> int:
    """A budget for the workspace and a share of everything else."""
    items = whole_plan(ModelFile.load(folder / "m.gguf"), 32)
    return WORKSPACE + int(share * sum(items.values()))


def test_a_plan_for_two_gpus_is_written_and_checked(folder):
    limits = (room(folder, 0.4), room(folder, 0.3))
    report = solve(config_of(folder, *limits), take_workspace)
    split = check(config_of(folder, *limits))
    assert split == replace(split, home=tuple(sorted(split.home))) and set(split.home) == {0, 1}
    used = [sum(items.values()) for items in report.bytes_of_gpus]
    assert all(0.9 * limit < n <= limit for n, limit in zip(used, limits, strict=True))
    assert report.gap < 1e-3 and report.advice.cpu_only_s > report.objective_s


def test_verify_refuses_wrong_plans_for_two_gpus(folder):
    solve(config_of(folder, room(folder, 0.4), room(folder, 0.3)), take_workspace)
    split = Split.load(folder / "plan")
    files = load_solver_files(folder)
    verify(split, **files)
    first, second = split.gpu_budget_bytes
    wrong = {
        "falling homes": {"home": split.home[::-1]},
        "one GPU for all": {"home": (0,) * 5},
        "too few homes": {"home": split.home[1:]},
        "a third GPU": {"home": (*split.home[:-1], 2)},
        "budgets exchanged": {"gpu_budget_bytes": (second, first)},
        "budgets that do not add up": {"gpu_budget_bytes": (first, second + 1)},
        "main memory": {"host_budget_bytes": sum(split.cpu_bytes.values()) - 1},
        "workspace": {"cpu_bytes": split.cpu_bytes | {"workspace": 1}},
    }
    for what, changes in wrong.items():
        with pytest.raises(HotsplitError):
            verify(replace(split, **changes), **files)
            pytest.fail(f"accepted {what}")
    with pytest.raises(HotsplitError, match="of main memory for a budget of"):
        verify(replace(split, **wrong["main memory"]), **files)


def test_changed_files_invalidate_a_plan(folder):
    config = config_of(folder, room(folder, 0.5))
    solve(config, take_workspace)
    check(config)
    model = ModelFile.load(folder / "m.gguf")
    other_profile = make_profile(model, np.full((4, 96), 0.25))
    changes = {
        "p": (other_profile, "another profile"),
        "c": (make_machine(cpu_gb_per_s=1.0), "another machine file"),
        "m.gguf": (make_model(sizes=make_sizes(num_layers=4), seed=5), "made for model"),
    }
    for name, (other, words) in changes.items():
        before = (folder / name).read_bytes()
        other.save(folder / name)
        with pytest.raises(HotsplitError, match=words):
            check(config)
        (folder / name).write_bytes(before)
    check(config)


def predicted(folder, *budgets, **changes) -> SolveConfig:
    """A config in mode predicted, which takes the most memory."""
    return config_of(folder, *budgets, mode="predicted", **changes)


def named(error: HotsplitError) -> list[int]:
    """The bytes that a refusal names."""
    return [int(size.replace(",", "")) for size in re.findall(r"\(([\d,]+) bytes\)", str(error))]


def test_the_refusal_of_a_small_main_memory_names_what_works(folder):
    cpu_bytes = solve(predicted(folder, 0), take_workspace).cpu_bytes
    on_cpu = sum(cpu_bytes.values())
    with pytest.raises(HotsplitError, match="smallest that works is") as error:
        solve(predicted(folder, 0, host_budget_bytes=on_cpu - 1000, force=True), take_workspace)
    vram, host = named(error.value)
    assert host == on_cpu
    solve(predicted(folder, 0, host_budget_bytes=host, force=True), take_workspace)
    half = predicted(folder, room(folder, 0.6), host_budget_bytes=on_cpu - 1000, force=True)
    assert sum(solve(half, take_workspace).cpu_bytes.values()) <= on_cpu - 1000
    with pytest.raises(HotsplitError):
        solve(
            predicted(folder, vram - 1, host_budget_bytes=on_cpu - 1000, force=True), take_workspace
        )
    some = room(folder, 0.3)  # including the workspace, which holds no weights
    short = on_cpu - (some - cpu_bytes["workspace"]) - 1
    with pytest.raises(HotsplitError, match="smallest that works is") as error:
        solve(predicted(folder, some, host_budget_bytes=short, force=True), take_workspace)
    _, host = named(error.value)
    # Any plan will do: to prove that none is better would take half a minute where so few bytes are
    # free.
    tight = predicted(folder, some, host_budget_bytes=host, force=True, time_limit_s=1.0)
    assert solve(tight, take_workspace).num_hot
    assert solve(
        predicted(folder, vram, host_budget_bytes=on_cpu - 1000, force=True), take_workspace
    ).num_hot


def test_without_a_gpu_there_is_a_plan_for_the_cpu(folder):
    make_machine(num_gpus=0).save(folder / "c")
    report = solve(config_of(folder, 0), take_workspace)
    assert report.status == "cpu_only" and not sum(report.gpu_bytes.values())
    check(config_of(folder, 0))
    with pytest.raises(HotsplitError, match="no GPU"):
        solve(config_of(folder, room(folder, 0.5), force=True), take_workspace)
    with pytest.raises(HotsplitError, match="for 2 budgets"):
        solve(config_of(folder, 0, 0, force=True), take_workspace)
