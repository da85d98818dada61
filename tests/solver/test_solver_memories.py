"""Memories that are too small are refused before a search, and only those. test_solver_named tries
the sizes that refusals name."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from brute_force import brute_force, random_inputs

from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode
from hotsplit.solver import optimise
from hotsplit.solver.fullest import emptiest, fullest, fullest_plan, least_room
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.memories import TooSmallError, least_of
from hotsplit.solver.mode_choice import find
from hotsplit.solver.multi_gpu import bytes_of_gpus
from hotsplit.solver.problem import Problem, held_bytes, is_feasible


def random_run(rng: np.random.Generator) -> Problem:
    """A run of 0 to 3 layers of 1 to 5 neurons; sizes are equal, nearly equal, or different."""
    num_layers, num_neurons = int(rng.integers(0, 4)), int(rng.integers(1, 6))
    unit = int(rng.choice([1, 1, 32]))
    sizes = rng.integers(1, 9, num_layers) if rng.random() < 0.5 else np.full(num_layers, 7)
    touched_LF = -np.sort(-rng.random((num_layers, num_neurons)), axis=1)
    return Problem(
        order_LF=np.tile(np.arange(num_neurons, dtype=np.int32), (num_layers, 1)),
        touched_LF=touched_LF,
        neuron_bytes_L=(sizes * unit).astype(np.int64),
        min_hot_L=rng.integers(1, num_neurons + 1, num_layers),
        dense_bytes_L=rng.choice([11, 12, int(rng.integers(0, 40))], num_layers) * unit,
        dense_gpu_s_L=rng.random(num_layers),
        dense_cpu_s_L=rng.random(num_layers),
        head_bytes=int(rng.choice([0, 10, 33])) * unit,
        head_gpu_s=1.0,
        head_cpu_s=2.0,
        workspace_bytes=5,
        budget_bytes=int(rng.integers(0, 150)) * unit,
        gpu_s_per_byte=0.1,
        hot_s_per_byte_L=np.full(num_layers, 0.1),
        cpu_s_per_byte_L=rng.random(num_layers),
        kernels_s=0.1,
        hand_over_s=0.1,
        cpu_run_s=0.1,
        use_s=0.1,
    )


def all_sums(run: Problem) -> set[int]:
    choices = [{0, run.head_bytes}]
    for layer in range(run.num_layers):
        counts = [0, *range(int(run.min_hot_L[layer]), run.num_neurons + 1)]
        choices.append({n * int(run.neuron_bytes_L[layer]) for n in counts})
        choices.append({0, int(run.dense_bytes_L[layer])})
    return {sum(one) for one in product(*choices)}


@pytest.mark.parametrize("seed", range(150))
def test_fullest_and_emptiest_agree_with_all_sums(seed):
    rng = np.random.default_rng(seed)
    run = random_run(rng)
    sums = all_sums(run)
    for limit in rng.integers(0, max(sums) + 9, 12).tolist():
        full, few = fullest(run, limit), emptiest(run, limit)
        assert held_bytes(run, full) == max(s for s in sums if s <= limit)
        assert is_feasible(replace(run, budget_bytes=limit + run.workspace_bytes), full)
        enough = [s for s in sums if s >= limit]
        assert (few is None) == (not enough)
        if few is not None:
            assert held_bytes(run, few) == min(enough)
            assert ((few.num_hot_L == 0) | (few.num_hot_L >= run.min_hot_L)).all()


def test_sums_of_a_model_of_many_sizes_are_found_at_once():
    """80 layers whose dense blocks all differ in size, as with predictors of many ranks."""
    rng = np.random.default_rng(0)
    num_layers, num_neurons = 80, 8192
    run = random_run(np.random.default_rng(1))
    run = replace(
        run,
        order_LF=np.zeros((num_layers, num_neurons), np.int32),
        touched_LF=np.ones((num_layers, num_neurons)),
        neuron_bytes_L=rng.choice([13_824, 16_128], num_layers),
        min_hot_L=rng.integers(100, 900, num_layers),
        dense_bytes_L=rng.integers(1 << 18, 1 << 20, num_layers) * 128,
        head_bytes=128 << 20,
    )
    room = 12 << 30
    full = held_bytes(run, fullest(run, room))
    few = emptiest(run, room)
    assert few is not None
    assert room - 256 < full <= room <= held_bytes(run, few) < room + 256


def refusal_of(inputs: Inputs) -> TooSmallError | None:
    try:
        find(inputs, time_limit_s=5)
    except TooSmallError as error:
        return error
    return None


def refused_inputs(seed: int, mode: Mode | None = None) -> Inputs:
    """A problem whose memories are reduced until there is no plan."""
    rng = np.random.default_rng(seed)
    mode = mode or ("exact", "dense")[int(rng.integers(2))]
    inputs = random_inputs(int(rng.integers(0, 10_000)), int(rng.integers(1, 3)), mode)
    while True:
        pipeline = inputs.pipeline()
        if refusal_of(inputs):
            return inputs
        kind = rng.random()
        if kind < 0.5:
            held = int(rng.uniform(0.3, 1) * inputs.host_budget)
            inputs = replace(inputs, host_budget=held)
        elif kind < 0.8:
            budgets = tuple(int(rng.uniform(0, 1) * budget) for budget in inputs.budgets)
            inputs = replace(inputs, budgets=budgets)
        else:
            gpu = int(rng.integers(0, len(inputs.budgets)))
            least = pipeline.problems[gpu].minimum_bytes
            budgets = list(inputs.budgets)
            budgets[gpu] = int(rng.choice([0, 1, least - 1, least, least + 1]))
            inputs = replace(inputs, budgets=tuple(budgets))


@pytest.mark.parametrize("seed", range(15))
def test_a_refusal_is_right_by_brute_force(seed):
    """Tries every placement of layers and every set of neurons to see whether there is a plan."""
    inputs = refused_inputs(seed, "exact")
    pipeline = inputs.pipeline()
    is_usable = all(not 0 < p.budget_bytes < p.minimum_bytes for p in pipeline.problems)
    if is_usable:
        assert (refusal_of(inputs) is not None) == np.isinf(brute_force(inputs))
    error = refusal_of(inputs)
    if error is not None and error.smallest.host is not None and not error.smallest.together:
        host = error.smallest.host
        assert np.isfinite(brute_force(replace(inputs, host_budget=host)))
        assert np.isinf(brute_force(replace(inputs, host_budget=host - 1)))


def test_a_refusal_comes_before_the_search(monkeypatch):
    """Asks for one byte more than all GPUs together can hold, without a search: for a 7B shape, a
    search that finds no plan takes 90 s."""
    monkeypatch.setattr(optimise, "_start", lambda pipeline: pytest.fail("searched"))
    inputs = random_inputs(4, 2, "exact")
    pipeline = replace(inputs.pipeline(), need_bytes=1)
    most = sum(bytes_of_gpus(pipeline, fullest_plan(pipeline)))
    assert most > 0
    assert optimise.find_plan(replace(pipeline, need_bytes=most + 1), time_limit_s=30) is None
    with pytest.raises(pytest.fail.Exception, match="searched"):
        optimise.find_plan(replace(pipeline, need_bytes=most), time_limit_s=30)


def test_gpu_memory_does_not_replace_what_is_always_in_main_memory():
    inputs = replace(random_inputs(3, 1, "exact"), host_budget=10)
    assert least_room(inputs.pipeline(), 0) is None
    error = refusal_of(inputs)
    assert error is not None and error.smallest.budgets is None
    assert "of GPU memory, or" not in str(error)
    roomy = replace(inputs, budgets=(1 << 30,))
    assert refusal_of(roomy) is not None
    # Nor does main memory make a GPU of one byte hold anything: both are named.
    both = refusal_of(replace(inputs, budgets=(1,)))
    assert both is not None and both.smallest.together and " and " in str(both)


def test_the_smallest_memory_of_several_modes_is_named():
    errors = []
    for mode in ("exact", "dense"):
        inputs = replace(refused_inputs(5, mode), host_budget=1)
        error = refusal_of(inputs)
        assert error is not None
        errors.append(error)
    found = least_of(errors)
    hosts = [error.smallest.host for error in errors]
    assert found.smallest.host == min(host for host in hosts if host is not None)
    assert isinstance(found, HotsplitError)
