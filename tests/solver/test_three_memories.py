"""Plans of experts on a GPU, in main memory and on the drive: brute force over all placements,
budgets, and more memory."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from brute_force import CLOSE
from models import solver_files
from test_drive import reads_of
from test_solver_experts import save, tiny

from hotsplit.artifacts.machine_file import Figure
from hotsplit.artifacts.split_file import Split
from hotsplit.cli import main
from hotsplit.costs import part_bytes
from hotsplit.errors import DoesNotFitError, HotsplitError
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.mode_choice import find
from hotsplit.solver.solve import split_of
from hotsplit.solver.three_memories import find_with_drive, lower_hull
from hotsplit.solver.verify import plan_seconds, verify


@pytest.fixture(autouse=True)
def no_slots(monkeypatch):
    """Slots of experts take more than tiny models have experts."""
    monkeypatch.setattr(part_bytes, "SLOT_LAYERS", 0)


def random_inputs(seed: int) -> Inputs:
    """A tiny mixture with a drive that reads at 3 % to 150 % of the CPU's rate, a GPU or none, and
    a main memory that holds between none and all of the experts that are on no GPU."""
    inputs, random = tiny(seed), np.random.default_rng(10_000 + seed)
    rate = inputs.machine.best_cpu_bandwidth_gb_per_s * 10 ** random.uniform(-1.5, 0.2)
    machine = replace(inputs.machine, drives=(reads_of({(256, 4): rate}),))
    budgets = (0,) if seed % 5 == 0 else inputs.budgets
    paths = (inputs.paths[0], None, Path("machine"))
    inputs = replace(inputs, machine=machine, budgets=budgets, paths=paths)
    problem = inputs.pipeline().model
    experts = int(problem.neuron_bytes_L.sum()) * problem.num_neurons
    least = inputs.always_on_host + problem.placeable_bytes - experts
    most = inputs.always_on_host + problem.placeable_bytes - 1
    host = least + int(random.uniform(0, 1) * experts)
    return replace(inputs, host_budget=min(host, most))


def layer_options(problem, layer: int) -> np.ndarray:
    """Every placement of a layer, token by token: bytes on the GPU, bytes on the drive, seconds,
    whether the dense block is on the GPU, whether anything is."""
    number, size = problem.num_neurons, int(problem.neuron_bytes_L[layer])
    hot_s, cold_s = size * problem.hot_s_per_byte_L[layer], size * problem.cpu_s_per_byte_L[layer]
    found = []
    for on_gpu, *places in product((False, True), *[range(3)] * number):
        hot = {rank for rank, place in enumerate(places) if place == 0}
        away = {rank for rank, place in enumerate(places) if place == 2}
        if 0 < len(hot) < problem.min_hot_L[layer]:
            continue
        is_split = len(hot) < number if on_gpu else len(hot) > 0
        wait_s, total = problem.hand_over_s * is_split, 0.0
        for chosen in problem.rank_LTK[layer].tolist():
            num_hot, num_away = len(hot & {*chosen}), len(away & {*chosen})
            sides = [num_hot * hot_s + problem.kernels_s * bool(hot)]
            sides.append((len(chosen) - num_hot) * cold_s + wait_s)
            if num_away:
                sides.append(num_away * problem.drive_s_L[layer] + wait_s)
            total += max(sides)
        seconds = total / problem.rank_LTK.shape[1]
        seconds += (problem.dense_gpu_s_L if on_gpu else problem.dense_cpu_s_L)[layer]
        held = problem.dense_bytes_L[layer] * on_gpu + size * len(hot)
        found.append((held, size * len(away), seconds, on_gpu, on_gpu or bool(hot)))
    return np.array(found, float)


def brute_force(problem, need_bytes: int) -> float:
    """The fewest seconds of a token over all placements that fit both memories."""
    head = [(0, 0, problem.head_cpu_s, True, False)]
    head.append((problem.head_bytes, 0, problem.head_gpu_s, True, True))
    items = [*(layer_options(problem, n) for n in range(problem.num_layers)), np.array(head)]
    held, away, seconds, uses, runs = (np.zeros(1) for _ in range(5))
    is_there = np.ones(1)
    for item in items:
        begins = np.logical_and.outer(is_there == 1, item[:, 3] == 0)
        runs = (runs[:, None] + begins).ravel()
        is_there = np.add.outer(0 * is_there, item[:, 3]).ravel()
        held, away, seconds = (
            np.add.outer(sums, item[:, column]).ravel()
            for column, sums in enumerate((held, away, seconds))
        )
        uses = np.logical_or.outer(uses, item[:, 4]).ravel()
    seconds = seconds + uses * (problem.use_s + problem.cpu_run_s * runs)
    fits = (held + problem.workspace_bytes <= problem.budget_bytes) | (held == 0)
    return float(seconds[fits & (held + away >= need_bytes)].min(initial=np.inf))


@pytest.mark.parametrize(
    "seeds", [range(50), pytest.param(range(50, 300), marks=pytest.mark.long)], ids=str
)
def test_agrees_with_brute_force_over_three_memories(seeds):
    """The bound is no larger than the best, and the plan is the best; memories that hold none have
    none."""
    num_plans = 0
    for seed in seeds:
        inputs = random_inputs(seed)
        pipeline = inputs.with_slots(inputs.pipeline())
        best_s = brute_force(pipeline.model, pipeline.need_bytes)
        answer = find_with_drive(pipeline, time_limit_s=5)
        assert (answer is None) == np.isinf(best_s), seed
        if answer is None:
            continue
        assert answer.bound_s <= best_s * (1 + CLOSE), seed
        assert answer.objective_s == pytest.approx(best_s, rel=CLOSE), seed
        num_plans += 1
    assert num_plans > 0.8 * len(seeds)


def solved(inputs: Inputs) -> Split:
    return split_of(find(inputs, time_limit_s=5), solve_s=0.0)


def on_the_drive(seeds) -> list[tuple[Inputs, Split]]:
    """Inputs whose plans have experts on the drive, and these plans."""
    found = []
    for inputs in map(random_inputs, seeds):
        try:
            split = solved(inputs)
        except DoesNotFitError:
            continue
        found += [(inputs, split)] if any(split.num_on_drive_L) else []
    return found


def test_written_plans_are_verified_and_over_no_budget(tmp_path):
    """A second computation of bytes and seconds finds an expert that was moved."""
    plans = on_the_drive(range(16))
    assert len(plans) > 5
    for inputs, split in plans:
        files = {"model": inputs.model, "profile": inputs.profile, "machine": inputs.machine}
        verify(split, **files)
        split.save(tmp_path / "s")
        again = Split.load(tmp_path / "s")
        pairs = zip(again.resident_experts, split.resident_experts, strict=True)
        assert all(a is b or np.array_equal(a, b) for a, b in pairs)
        assert sum(split.cpu_bytes.values()) <= inputs.host_budget
        assert sum(split.gpu_bytes.values()) <= sum(inputs.budgets)
        layer = int(np.argmax(split.num_on_drive_L))
        there = split.resident_experts[layer].tolist()
        away = {*range(split.num_experts)} - {*there} - {*split.hot[layer].tolist()}
        changed = [*split.resident_experts]
        changed[layer] = np.array(sorted([*there, min(away)]), np.int32)
        with pytest.raises(HotsplitError, match="takes"):
            verify(replace(split, resident_experts=tuple(changed)), **files)
        changed[layer] = np.array([1, 0], np.int32)
        with pytest.raises(HotsplitError, match="resident experts must be ascending"):
            replace(split, resident_experts=tuple(changed)).validate()
        with pytest.raises(HotsplitError, match="a drive that was not measured"):
            verify(split, **files | {"machine": replace(inputs.machine, drives=())})
        faster = replace(inputs.machine.drives[0].reads[0], gb_per_s=Figure(best=1e3))
        drive = replace(inputs.machine.drives[0], reads=(faster,))
        machine = replace(inputs.machine, drives=(drive,))
        seconds = plan_seconds(split, **files | {"machine": machine})
        assert seconds <= split.objective_s * (1 + CLOSE)


def test_solve_writes_the_plan_and_says_what_limits(tmp_path, capsys):
    """By the command: its report, its lines, and its check of the plan."""
    inputs, split = on_the_drive([5, 10])[0]
    save(tmp_path, inputs.model, inputs.profile, inputs.machine)
    files = solver_files(tmp_path)
    words = [str(files["model"]), "--machine", str(files["machine"])]
    words += ["--profile", str(files["profile"]), "-o", str(tmp_path / "plan.gguf"), "-vb", "0"]
    words += ["-c", str(inputs.context_length)]
    real = inputs.with_workspace(workspace_bytes)
    host = inputs.host_budget - inputs.workspace + real.workspace
    assert main(["solve", *words, "--ram", f"{host}B"]) == 0
    lines = capsys.readouterr().err.splitlines()
    (line,) = (line for line in lines if "limited by" in line)
    count = sum(split.num_on_drive_L)
    assert f"{count} of " in line and "16.00 GiB more of main memory would bring" in line
    assert "the rest on the CPU" in lines[-1] and f"; {count} of " in lines[-1]
    written = Split.load(tmp_path / "plan.gguf")
    assert written.num_on_drive_L == split.num_on_drive_L
    assert main(["solve", *words, "--check"]) == 0


def test_more_memory_is_never_slower():
    for seed in (3, 6, 9, 10):
        inputs = random_inputs(seed)
        seconds = np.inf
        for share in np.linspace(0.3, 1.1, 9):
            larger = replace(inputs, host_budget=int(share * inputs.host_budget))
            try:
                split = solved(larger)
            except DoesNotFitError:
                assert np.isinf(seconds), "less memory had a plan"
                continue
            assert split.objective_s <= seconds * (1 + CLOSE)
            seconds = split.objective_s
        assert np.isfinite(seconds)


def test_without_a_drive_nothing_is_left_out():
    inputs = random_inputs(0)
    with pytest.raises(DoesNotFitError, match="does not fit"):
        solved(replace(inputs, machine=replace(inputs.machine, drives=())))


def test_the_smallest_memory_that_is_named_works():
    inputs = random_inputs(10)
    small = replace(inputs, host_budget=inputs.always_on_host + 1)
    with pytest.raises(DoesNotFitError) as refused:
        solved(small)
    host = refused.value.smallest.host
    assert any(solved(replace(small, host_budget=host)).num_on_drive_L)
    with pytest.raises(DoesNotFitError):
        solved(replace(small, host_budget=host - 1))


def test_slots_are_of_the_experts_of_two_layers(monkeypatch):
    inputs = random_inputs(10)
    without = solved(replace(inputs, host_budget=1 << 30))
    monkeypatch.setattr(part_bytes, "SLOT_LAYERS", 2)
    spec, sizes = inputs.model.spec, [part_bytes.placed_units(inputs.model, n)[1] for n in (0, 1)]
    slots = 2 * spec.layers[0].route.num_used * max(sizes)
    assert part_bytes.expert_slots_bytes(inputs.model) == slots
    away = (np.zeros(0, np.int32), None)
    gpus, cpu = replace(without, resident_experts=away).items_of_gpus(inputs.model)
    assert cpu["neuron_cache"] == slots
    assert (
        cpu["neurons"] == without.cpu_bytes["neurons"] - sizes[0] * spec.layers[0].route.num_experts
    )


def test_the_lower_hull_of_values():
    assert lower_hull(np.array([4.0, 3.0, 1.0, 0.5, 0.4])).tolist() == [4, 2.5, 1, 0.5, 0.4]
    found = lower_hull(np.array([np.inf, 1.0, 3.0, 1.0, np.inf]))
    assert found.tolist() == [np.inf, 1, 1, 1, np.inf]
    values = np.random.default_rng(0).random(30)
    lines = [
        min(
            values[a] + (values[b] - values[a]) * (n - a) / max(1, b - a)
            for a in range(n + 1)
            for b in range(n, 30)
        )
        for n in range(30)
    ]
    assert lower_hull(values) == pytest.approx(lines)
