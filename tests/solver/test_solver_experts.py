"""Plans of mixtures of experts, priced by recorded choices: brute force over all subsets, a second
computation of the price, and what is refused."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from brute_force import CLOSE, CONTEXT, random_gpu
from models import (
    WORKSPACE,
    make_inputs,
    make_machine,
    make_model,
    make_sizes,
    mixture_spec,
    solver_files,
    take_workspace,
)
from test_runtime import make_split

from hotsplit.artifacts.machine_file import Figure
from hotsplit.artifacts.profile_file import NUM_BINS, Corpus, Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.cache_bytes import cached_layers
from hotsplit.costs.part_bytes import placed_units, plan_bytes
from hotsplit.errors import HotsplitError
from hotsplit.model.spec import Route
from hotsplit.options.neuron_cache_options import CacheOptions
from hotsplit.runtime.neuron_cache.policy import CachePolicy, packed
from hotsplit.runtime.neuron_cache.setup import first_residents
from hotsplit.solver import replay
from hotsplit.solver.optimise import find_plan
from hotsplit.solver.prediction import inputs_for
from hotsplit.solver.problem import SolvedPlacement, is_feasible, placement_seconds
from hotsplit.solver.solve import SolveConfig, prompt_rates, solve
from hotsplit.solver.verify import plan_seconds, verify


def random_choices(random, num_layers: int, num_tokens: int, route: Route, skew: float):
    """int16 [L, T, K], ascending: Gumbel's trick over popularities of this skew."""
    size = num_layers, 1, route.num_experts
    popularity = skew * random.standard_normal(size)
    score = popularity + random.gumbel(size=(num_layers, num_tokens, route.num_experts))
    return np.sort(np.argsort(-score, axis=2)[:, :, : route.num_used], axis=2).astype(np.int16)


def profile_of(model, id_LTK) -> Profile:
    spec, (num_layers, num_tokens, _) = model.spec, id_LTK.shape
    num_experts = max(layer.neurons.num_experts for layer in spec.layers)
    count_LE = np.stack([np.bincount(i[i >= 0], minlength=num_experts) for i in id_LTK])
    shape = num_layers, spec.most_neurons
    histogram_LB = np.zeros((num_layers, NUM_BINS), np.int64)
    histogram_LB[:, 0] = num_tokens * spec.most_neurons
    return Profile(
        model_id=model.model_id,
        num_tokens=num_tokens,
        threshold_L=model.threshold_L,
        corpora=(Corpus(name="ids", sha256="0" * 64, num_tokens=num_tokens),),
        active_count_LF=np.ones(shape, np.int64),
        gate_histogram_LB=histogram_LB,
        expert_count_LE=count_LE,
        routing_LTK=id_LTK,
    )


def tiny(seed: int, num_dense: int = 0, activation="silu"):
    """Inputs with one or two layers of a few experts, of which the CPU reads one in 0.5 to 80
    us."""
    random = np.random.default_rng(seed)
    num_layers, num_experts = (1, 5) if seed % 2 else (2, 3)
    route = Route(num_experts=num_experts, num_used=int(random.integers(1, num_experts + 1)))
    sizes = make_sizes(
        num_layers=num_layers + num_dense,
        width=32,
        num_heads=2,
        num_kv_heads=1,
        head_width=16,
        vocab_size=int(random.integers(4, 30)),
        context_length=CONTEXT,
        num_neurons=4,
    )
    numbers = {"num_neurons": 3, "num_dense": num_dense, "activation": activation}
    model = make_model(
        spec=mixture_spec(sizes, route=route, **numbers), kind=["f32", "f16"][seed % 3 % 2]
    )
    cpu = 10 ** random.uniform(-2.3, -0.7)
    machine = make_machine(
        cpu_gb_per_s=cpu,
        **random_gpu(random, cpu),
        layer_s=random.choice([1e-9, 3e-6]),
        token_s=2e-6,
        logit_s=1e-8,
    )
    tokens, skew = int(random.integers(1, 30)), random.choice([0.0, 1.0, 3.0])
    id_LTK = random_choices(random, num_layers + num_dense, tokens, route, skew)
    id_LTK[:num_dense] = -1
    layers = model.spec.layers
    every = [layer.neurons.num_experts for layer in layers]
    every[:num_dense] = [layer.neurons.number for layer in layers[:num_dense]]
    whole = plan_bytes(
        model,
        context_length=CONTEXT,
        num_hot=every,
        dense_on_gpu=[True] * len(every),
        head_on_gpu=True,
    )[0][0]
    budget = WORKSPACE + int(random.uniform(0.05, 1.05) * sum(whole.values()))
    return make_inputs(model, profile_of(model, id_LTK), machine, budget, mode="dense")


def save(folder, *files) -> None:
    for path, each in zip(solver_files(folder).values(), files, strict=True):
        each.save(path)


def brute_force(problem) -> float:
    """The fewest seconds of any subset of experts, blocks and head."""
    num_layers, number = problem.touched_LF.shape
    sets = [np.array(bits, bool) for bits in product([False, True], repeat=number)]
    blocks = list(product([False, True], repeat=num_layers))
    best = np.inf
    for hot, dense, head in product(product(sets, repeat=num_layers), blocks, [False, True]):
        placement = SolvedPlacement(hot_LF=np.array(hot), dense_L=np.array(dense), head=head)
        if is_feasible(problem, placement):
            best = min(best, placement_seconds(problem, placement))
    return best


@pytest.mark.parametrize("seed", range(16))
def test_agrees_with_brute_force_over_all_subsets(seed):
    pipeline = tiny(seed).pipeline()
    best_s = brute_force(pipeline.model)
    answer = find_plan(pipeline, time_limit_s=5)
    assert answer.objective_s == pytest.approx(best_s, rel=CLOSE)
    assert answer.bound_s <= best_s * (1 + CLOSE)


def test_the_price_is_the_mean_of_the_slower_side():
    """A layer with experts 0 and 1 of three on the GPU: the first token has both there, the second
    one, the third none."""
    sides = replay.Sides(
        rank_TK=np.array([[0, 1], [1, 2], [2, 2]]),
        num_experts=3,
        hot_s=1.0,
        cold_s=5.0,
        kernels_s=0.5,
        hand_over_s=0.25,
    )
    hot_1E = np.array([[True, True, False]])
    slower = [2 * 1 + 0.5, 5 + 0.25, 2 * 5 + 0.25]
    assert replay.sets_seconds(sides, hot_1E, True)[0] == pytest.approx(np.mean(slower))
    means = max(1.0 * 1 + 0.5, 1.0 * 5 + 0.25)
    assert means < replay.sets_seconds(sides, hot_1E, True)[0]
    prefixes_N = replay.prefix_seconds(sides, True)
    assert prefixes_N[2] == replay.sets_seconds(sides, hot_1E, True)[0]
    assert prefixes_N[0] == 2 * 5 + 0.25 and prefixes_N[3] == 2 * 1 + 0.5


@pytest.mark.parametrize("seed", range(3))
def test_no_set_is_below_the_bound(seed):
    random = np.random.default_rng(seed)
    route = Route(num_experts=9, num_used=3)
    id_TK = random_choices(random, 1, 40, route, 1.5)[0]
    order_E = np.argsort(-np.bincount(id_TK.ravel(), minlength=9), kind="stable")
    sides = replay.Sides(
        rank_TK=np.argsort(order_E)[id_TK],
        num_experts=9,
        hot_s=random.uniform(0.1, 1.5),
        cold_s=1.0,
        kernels_s=0.3,
        hand_over_s=0.2,
    )
    set_HE = np.array(list(product([False, True], repeat=9)))
    seconds_H, count_H = replay.sets_seconds(sides, set_HE, True), set_HE.sum(axis=1)
    least_N = np.array([seconds_H[count_H == n].min() for n in range(1, 9)])
    bound_N = replay.least_seconds(sides, range(1, 9), np.zeros(8))
    assert (bound_N <= least_N * (1 + CLOSE)).all()
    assert (np.diff(bound_N, 2) >= -1e-12).all()
    for count in range(1, 9):
        start_E = np.arange(9) < count
        found_E = replay.improved(sides, start_E, 20)
        start_s, found_s = replay.sets_seconds(sides, np.stack([start_E, found_E]), True)
        assert found_E.sum() == count and least_N[count - 1] * (1 - CLOSE) <= found_s <= start_s
        polished_E = replay.polished(sides, start_E)
        polished_s = replay.sets_seconds(sides, polished_E[None], True)[0]
        assert (
            polished_E.sum() == count and least_N[count - 1] * (1 - CLOSE) <= polished_s <= start_s
        )


def test_experts_that_are_chosen_together_are_divided():
    """Every token chooses 0 and 1, or 2 and 3. With one of each pair on the GPU both sides always
    have one expert; the two hottest would leave all work to one side."""
    sides = replay.Sides(
        rank_TK=np.array([[0, 1], [2, 3], [0, 1]]),
        num_experts=4,
        hot_s=1.0,
        cold_s=1.0,
        kernels_s=0.0,
        hand_over_s=0.0,
    )
    hottest_E = np.arange(4) < 2
    for found_E in (replay.improved(sides, hottest_E, 4), replay.polished(sides, hottest_E)):
        assert found_E[:2].sum() == found_E[2:].sum() == 1
        assert replay.sets_seconds(sides, np.stack([hottest_E, found_E]), True).tolist() == [2, 1]


@pytest.mark.parametrize("seed, num_dense", [(1, 0), (2, 0), (4, 1), (5, 1)])
def test_a_written_plan_is_verified(seed, num_dense, tmp_path):
    """A second computation of its price finds a changed plan."""
    inputs = tiny(seed, num_dense)
    model, profile, machine = inputs.model, inputs.profile, inputs.machine
    save(tmp_path, model, profile, machine)
    config = SolveConfig(
        **solver_files(tmp_path),
        output=tmp_path / "plan",
        vram_budget_bytes=inputs.budgets[0],
        mode="dense",
    )
    report = solve(config, take_workspace)
    split = Split.load(tmp_path / "plan")
    files = {"model": model, "profile": profile, "machine": machine}
    assert plan_seconds(split, **files) == pytest.approx(report.objective_s, rel=CLOSE)
    with pytest.raises(HotsplitError, match="says"):
        verify(replace(split, objective_s=split.objective_s * 1.001), **files)


@pytest.mark.parametrize("seed, num_dense", [(0, 0), (2, 1)])
def test_a_plan_with_a_neuron_cache(seed, num_dense, tmp_path):
    """The recorded tokens take the plan's seconds by the cache's times; other times, frequencies or
    bytes are found."""
    inputs = tiny(seed, num_dense)
    model, profile, machine = inputs.model, inputs.profile, inputs.machine
    save(tmp_path, model, profile, machine)
    report = solve(
        SolveConfig(
            **solver_files(tmp_path),
            output=tmp_path / "plan",
            neuron_cache=CacheOptions(most_rows=2),
            vram_budget_bytes=inputs.budgets[0],
        ),
        take_workspace,
    )
    split = Split.load(tmp_path / "plan")
    cache, experts = split.cache, placed_units(model, num_dense)
    assert cache.most_rows == 2 and split.gpu_bytes["neuron_cache"] >= 2 * experts[1]
    cached = cached_layers(model, [len(ids) for ids in split.hot], split.dense_on_gpu)
    copies = sum(len(ids) for ids, has_slots in zip(split.hot, cached, strict=True) if has_slots)
    assert any(cached) and split.cpu_bytes["neuron_cache"] > copies * experts[1]
    assert (cache.costs.copy_row_s_L > 0).tolist() == cached
    assert any(
        line.endswith("tokens/s") and "copies of hot experts" in line for line in report.notes
    )
    policy = CachePolicy(
        first_residents(model, split), cache.frequency_LF, cache.costs, CacheOptions(), "experts"
    )
    id_LTK = profile.routing_LTK
    for token in range(id_LTK.shape[1]):
        is_read_LE = np.zeros(cache.frequency_LF.shape, bool)
        for layer in range(num_dense, len(id_LTK)):
            is_read_LE[layer, id_LTK[layer, token]] = True
        policy.step(packed(is_read_LE)[None])
    got = policy.report().planned_seconds / id_LTK.shape[1]
    assert got == pytest.approx(split.objective_s, rel=1e-6)
    verify(split, model=model, profile=profile, machine=machine)
    costs = replace(cache.costs, rest_s=1.01 * cache.costs.rest_s)
    fewer = tuple(np.float32(0.9) * frequency_E for frequency_E in cache.frequency)
    for wrong, line in (
        (replace(cache, costs=costs), "by the cache's times"),
        (replace(cache, frequency=fewer), "frequencies"),
    ):
        with pytest.raises(HotsplitError, match=line):
            verify(replace(split, cache=wrong), model=model, profile=profile, machine=machine)
    with pytest.raises(HotsplitError, match="neuron_cache of .* takes"):
        bytes_ = split.gpu_bytes | {"neuron_cache": split.gpu_bytes["neuron_cache"] - 1}
        replace(split, gpu_bytes=bytes_).check_against(model, tmp_path / "plan")


@pytest.mark.parametrize(
    "options, line",
    [
        ({"mode": "exact"}, "plans with --mode exact are not supported for mixtures"),
        ({"kv_offload": "on"}, "plans with --kv-offload are not supported for mixtures"),
        ({}, "has no recorded experts"),
    ],
)
def test_refused(options, line, tmp_path):
    inputs = tiny(1)
    profile = replace(inputs.profile, routing_LTK=None)
    save(tmp_path, inputs.model, profile, inputs.machine)
    given = {**solver_files(tmp_path), "output": tmp_path / "plan", "vram_budget_bytes": 1 << 20}
    with pytest.raises(HotsplitError, match=line):
        solve(SolveConfig(**given, **options), take_workspace)


def test_a_plan_of_silent_experts_is_read_again_in_its_mode(tmp_path):
    """As by --explain, by the trial of run, and by options for llama.cpp."""
    inputs = tiny(1, activation="relu")
    save(tmp_path, inputs.model, inputs.profile, inputs.machine)
    given = {**solver_files(tmp_path), "output": tmp_path / "plan", "vram_budget_bytes": 1 << 20}
    solve(SolveConfig(**given, mode="exact"), take_workspace)
    split = Split.load(tmp_path / "plan")
    again = inputs_for(split, SolveConfig(**given), take_workspace)
    assert split.mode == again.mode == "exact"


def test_silent_neurons_of_experts_are_not_priced_in_mode_exact():
    """On the CPU the gates of a chosen expert are read, and of its other matrices the rows of
    neurons that fire: here about half."""
    inputs = tiny(1, activation="relu")
    spec, counts = inputs.model.spec.layers[0].neurons, inputs.profile.expert_count_LE
    active_LF = np.zeros_like(inputs.profile.active_count_LF)
    num_chosen = int(counts[0].sum()) * spec.of_expert
    active_LF[0, 0] = num_chosen // 2
    inputs = replace(inputs, profile=replace(inputs.profile, active_count_LF=active_LF))
    prices = {}
    for mode in ("dense", "exact"):
        own = replace(inputs, mode=mode)
        problem, off = own.pipeline().model, np.zeros(1, bool)
        hot_LF = np.zeros(problem.touched_LF.shape, bool)
        placement = SolvedPlacement(hot_LF=hot_LF, dense_L=off, head=False)
        split = make_split(
            inputs.model, [[]], dense_on_gpu=False, head_on_gpu=False, context_length=CONTEXT
        )
        files = {"model": own.model, "profile": own.profile, "machine": own.machine}
        prices[mode] = plan_seconds(replace(split, mode=mode), **files)
        assert placement_seconds(problem, placement) == pytest.approx(prices[mode], rel=CLOSE)
    entries = inputs.model.layer_tensors[0]
    experts_s = sum(
        e.num_bytes / inputs.machine.cpu_rate(e.kind) for n, e in entries.items() if "_exps" in n
    )
    experts_s *= inputs.model.spec.layers[0].route.num_used / spec.num_experts
    kind = entries["ffn_up_exps.weight"].kind
    fired = (num_chosen // 2) / num_chosen
    slower = inputs.machine.cpu_rate(kind) / inputs.machine.cpu_rate(kind, density=fired)
    saved_s = experts_s * (1 - fired * slower) * 2 / 3
    assert prices["dense"] - prices["exact"] == pytest.approx(saved_s, rel=1e-6)


def test_plans_have_the_rates_of_prompts(tmp_path):
    """Those of the types of the experts, weighed by their bytes, if the machine file has them."""
    inputs = tiny(0)
    rates = dict.fromkeys(inputs.machine.costs.all_rows_gb_per_s, Figure(best=0.1))
    assert prompt_rates(inputs) is None
    costs = replace(inputs.machine.costs, pass_rows_gb_per_s=rates)
    inputs = replace(inputs, machine=replace(inputs.machine, cpu_costs=costs))
    no_gpus = replace(inputs, machine=replace(inputs.machine, gpus=()))
    assert prompt_rates(no_gpus) is None
    found = prompt_rates(inputs)
    read_s = 1 / inputs.machine.cpu_rate("f32")
    assert found.cpu_s == pytest.approx(read_s)
    assert found.token_s == pytest.approx(max(0.0, 1e-8 - read_s) / 32)
    gpu = inputs.machine.gpus[0]
    assert found.link_s == 1e-9 / gpu.host_to_device_gb_per_s.median
    assert found.staged_s == 1e-9 / gpu.host_to_device_pageable_gb_per_s.median
    plan = replace(
        make_split(inputs.model, [[0]] * inputs.model.spec.num_layers), prompt_rates=found
    )
    plan.save(tmp_path / "plan")
    assert Split.load(tmp_path / "plan").prompt_rates == found
