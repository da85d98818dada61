"""The neuron cache without a GPU: its policy keeps to its limits and follows what a text reads; its
tables keep units and slots one to one, and what cannot work is refused or said.

Letters: R tokens of a step, L layers, F neurons of a layer, N slots of a layer."""

import dataclasses

import numpy as np
import pytest
from case_tables import rows_of
from models import byte_level_keys, make_model, make_sizes
from random_policy import RandomPolicy
from test_runtime import make_split

from hotsplit.artifacts.cache_plan import CachePlan
from hotsplit.artifacts.split_file import Split
from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.options.neuron_cache_options import CacheCosts, CacheOptions
from hotsplit.runtime.neuron_cache.cache_slots import Residency
from hotsplit.runtime.neuron_cache.native.policy_library import SWAP
from hotsplit.runtime.neuron_cache.policy import CachePolicy, packed
from hotsplit.runtime.neuron_cache.setup import first_residents, setup_of


def make_costs(num_layers, *, random=None, **changes):
    """Times of a slow CPU and a fast GPU, multiplied by random factors if there is a generator."""
    names = ("hot_s", "hot_row_s", "cold_s", "cold_row_s", "copy_row_s", "gather_row_s")
    each = dict(zip(names, (0.0, 0.1, 0.0, 1.0, 2.0, 0.2), strict=True))
    arrays = {f"{name}_L": np.full(num_layers, value) for name, value in each.items()}
    if random is not None:
        arrays = {name: value * random.uniform(0, 2, num_layers) for name, value in arrays.items()}
    return CacheCosts(**({"rest_s": 10.0, "copy_s": 0.1} | arrays | changes))


def make_case(seed):
    """(generator, slots, frequencies, costs, options), all random."""
    random = np.random.default_rng(seed)
    num_layers, num_neurons = int(random.integers(1, 6)), int(random.integers(3, 90))
    slots = [
        random.permutation(num_neurons)[: random.integers(0, num_neurons + 1)].astype(np.int32)
        for _ in range(num_layers)
    ]
    options = CacheOptions(
        margin=float(random.choice([0, 0.02, 0.1])),
        visited=float(random.choice([0.25, 1])),
        most_rows=int(random.integers(1, 20)),
        stay=float(random.choice([10, 100])),
        burst_weight=float(random.choice([0, 0.3])),
        start_gain=float(random.choice([0.001, 0.01])),
        is_always_on=bool(random.random() < 0.3),
    )
    costs = make_costs(num_layers, random=random)
    if random.random() < 0.2:  # one memory: a copy takes no time
        costs = dataclasses.replace(costs, copy_row_s_L=np.zeros(num_layers))
    return random, slots, random.random((num_layers, num_neurons)), costs, options


def make_steps(random, num_layers, num_neurons, num_steps):
    """Neurons read in steps of one to three tokens; the text changes its subject halfway."""
    base_LF = random.random((num_layers, num_neurons))
    for number in range(num_steps):
        if number == num_steps // 2:
            base_LF = random.random((num_layers, num_neurons))
        yield random.random((int(random.integers(1, 4)), num_layers, num_neurons)) < base_LF


@pytest.mark.parametrize("seed", range(12))
def test_swaps_fit_into_a_step_and_exchange_residents_for_others(seed):
    random, slots, frequency_LF, costs, options = make_case(seed)
    policy = CachePolicy(slots, frequency_LF, costs, options)
    resident = [set(map(int, ids)) for ids in slots]
    longest_s = costs.rest_s + sum(
        max(h + hr * frequency_LF.shape[1], c + cr * frequency_LF.shape[1])
        for h, hr, c, cr in zip(
            costs.hot_s_L, costs.hot_row_s_L, costs.cold_s_L, costs.cold_row_s_L, strict=True
        )
    )
    in_slots, num_read, num_hits = resident, 0, 0
    for is_read_RLF in make_steps(random, *frequency_LF.shape, 80):
        for ids, is_read_F in zip(in_slots, is_read_RLF.any(axis=0), strict=True):
            if 0 < len(ids) < len(is_read_F):  # others have no swaps
                num_read += is_read_F.sum()
                num_hits += is_read_F[[*ids]].sum()
        in_slots = [set(ids) for ids in resident]  # those of the last decision
        swaps = policy.step(packed(is_read_RLF)).copy()
        assert len(swaps) <= options.most_rows
        assert costs.copy_row_s_L[swaps["layer"]].sum() <= longest_s
        for layer, into, out in zip(swaps["layer"], swaps["in"], swaps["out"], strict=True):
            assert out in resident[layer] and into not in resident[layer]
            resident[layer] = resident[layer] - {out} | {int(into)}
    assert policy.report().hit_rate == pytest.approx(num_hits / max(1, num_read))
    policy.step(packed(is_read_RLF))  # takes the last swaps as done
    for layer, ids in enumerate(resident):
        in_slots = policy.resident(layer)
        assert len(in_slots) == len(slots[layer]) and set(in_slots.tolist()) == ids


def steady(num_layers, num_neurons, hot, *, steps, random, high=0.9, low=0.05):
    """Steps that read the neurons of `hot` often and others rarely."""
    chance_F = np.full(num_neurons, low)
    chance_F[list(hot)] = high
    return random.random((steps, 1, num_layers, num_neurons)) < chance_F


def run(policy, steps):
    for is_read_RLF in steps:
        policy.step(packed(is_read_RLF))
    return policy.report()


def test_a_text_like_the_profiles_swaps_nothing():
    random, num_neurons = np.random.default_rng(1), 64
    hot = range(16)
    frequency = np.where(np.isin(np.arange(num_neurons), hot), 0.9, 0.05)[None].repeat(3, 0)
    policy = CachePolicy([np.arange(16)] * 3, frequency, make_costs(3), CacheOptions())
    report = run(policy, steady(3, num_neurons, hot, steps=600, random=random))
    assert report.num_starts == report.num_swaps == 0
    assert report.seconds == report.planned_seconds
    assert "nothing was swapped" in report.line


def test_a_change_of_subject_is_followed_and_the_way_back_too():
    random, num_neurons = np.random.default_rng(2), 64
    frequency = np.where(np.arange(num_neurons) < 16, 0.9, 0.05)[None].repeat(3, 0)
    policy = CachePolicy([np.arange(16)] * 3, frequency, make_costs(3), CacheOptions())
    report = run(policy, steady(3, num_neurons, range(32, 48), steps=300, random=random))
    assert set(policy.resident(1).tolist()) == set(range(32, 48))
    assert report.hit_rate > 0.7 > 0.2 > report.planned_hit_rate
    assert report.seconds < 0.6 * report.planned_seconds
    run(policy, steady(3, num_neurons, range(16), steps=300, random=random))
    assert set(policy.resident(1).tolist()) == set(range(16))


@pytest.mark.parametrize(
    "costs, options",
    [
        ({"hot_s_L": np.full(2, 50.0)}, CacheOptions(stay=1e6)),  # the CPU is always faster
        ({"copy_row_s_L": np.full(2, 1e6)}, CacheOptions(is_always_on=True)),  # a slow link
    ],
)
def test_nothing_moves_where_it_cannot_pay(costs, options):
    random = np.random.default_rng(3)
    policy = CachePolicy([np.arange(8)] * 2, np.zeros((2, 40)), make_costs(2, **costs), options)
    assert run(policy, steady(2, 40, range(20, 30), steps=200, random=random)).num_swaps == 0


def test_swapping_stops_and_the_plan_returns_where_it_does_not_pay():
    """Six steps each read other neurons than the step before, then six steps read those of the
    plan, again and again. The neurons of recent steps are not read again for long enough to pay."""
    num_neurons, random = 64, np.random.default_rng(5)
    options = CacheOptions(decay=0.5, prior_tokens=1, margin=0, stay=1e9, start_gain=1e-9)
    policy = CachePolicy([np.arange(16)], np.zeros((1, num_neurons)), make_costs(1), options)
    blocks = [range(start, start + 16) for start in (16, 32, 48, 16, 32, 48)]
    steps = []
    for _ in range(40):
        for block in blocks:
            steps += list(steady(1, num_neurons, block, steps=1, random=random, high=1, low=0))
        steps += list(steady(1, num_neurons, range(16), steps=6, random=random, high=1, low=0))
    report = run(policy, steps)
    # Once for each time around; without a way back to the plan twice, and without a stop just once.
    assert 30 < report.num_starts < 60 and report.steps_on < report.num_steps
    run(policy, steady(1, num_neurons, range(16), steps=300, random=random, high=1, low=0))
    assert set(policy.resident(0).tolist()) == set(range(16))


def test_the_most_read_come_first_and_the_least_read_go():
    """Neuron j of 8 is read in every (j + 1)th step; 4 to 7 are in the slots."""
    options = CacheOptions(is_always_on=True, most_rows=1, margin=0, stay=1e6)
    policy = CachePolicy([np.arange(4, 8)], np.zeros((1, 8)), make_costs(1), options)
    found = []
    for number in range(200):
        is_read_RLF = (number % np.arange(1, 9) == 0)[None, None]
        found += [(int(s["in"]), int(s["out"])) for s in policy.step(packed(is_read_RLF))]
    assert found[:4] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert found[4:6] == [(4, 2), (2, 3)]  # 2, which is read more than 5, comes back first


WRONG = """
decay=2 => decay is 2.0, wanted a number from 0 to
margin=nan => margin is nan, wanted a number from 0 to 1
most_rows=1.5 => wanted a whole number
most_rows=0 => most_rows is 0, wanted a whole number from 1 to 65536
speed=1 => 'speed=1' in 'speed=1'
decay=0.5,decay=0.6 => 'decay=0.6'
 => wanted on or NAME=VALUE
"""


@pytest.mark.parametrize(("text", "what"), rows_of(WRONG))
def test_wrong_settings_are_refused(text, what):
    with pytest.raises(HotsplitError, match=what):
        CacheOptions.parse(text)


def test_settings_are_read_as_they_are_printed():
    options = CacheOptions(decay=0.5, most_rows=3, is_always_on=True)
    assert CacheOptions.parse(str(options)) == options
    assert CacheOptions.parse("on") == CacheOptions()


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_wrong_times_are_refused(value):
    with pytest.raises(HotsplitError, match="cold_row_s_L of the cache"):
        make_costs(2, cold_row_s_L=np.array([1.0, value]))
    with pytest.raises(HotsplitError, match="rest_s of the cache"):
        make_costs(2, rest_s=value)


F, L = 160, 3


def test_residency_stays_a_bijection_under_any_swaps():
    random = np.random.default_rng(0)
    for seed in range(20):
        num_slots = random.integers(0, F + 1, L)
        num_slots[random.integers(L)] = random.integers(1, F)
        first = [random.permutation(F)[:count] for count in num_slots]
        policy = RandomPolicy(first, F, most_rows=40, seed=seed)
        residency = Residency(first, F)
        for _ in range(50):
            swaps = policy.step(np.zeros((1, L, 5), np.uint32))
            assert len(swaps) <= 40
            before = residency.slot_LF.copy()
            residency.swap(swaps)
            residency.check()
            assert (residency.num_slots_L == num_slots).all()
            changed = (before != residency.slot_LF).sum()
            assert changed == 2 * len(swaps)
            for layer in range(L):
                hot = set(residency.id_N(layer).tolist())
                assert sorted(hot | set(residency.cold(layer).tolist())) == list(range(F))


def test_impossible_swaps_change_nothing():
    residency = Residency([np.arange(4), np.arange(0)], 9)
    before = residency.slot_LF.copy()
    of_slots = ([(0, 4, 5, 0)], [(1, 0, 5, 0)])  # that do not exist, in a layer with slots or none
    of_units = ([(0, 1, 5, 0)], [(0, 1, 2, 1)])  # one that is elsewhere leaves, or is there already
    twice = ([(0, 1, 5, 1), (0, 1, 6, 1)], [(0, 1, 5, 1), (0, 2, 5, 2)])
    for wrong in (*of_slots, *of_units, *twice):
        with pytest.raises(AssertionError):
            residency.swap(np.array([(*swap, 0.0) for swap in wrong], SWAP))
        assert (residency.slot_LF == before).all()
        residency.check()
    residency.slot_LF[0, 5] = 1
    with pytest.raises(AssertionError):
        residency.check()


def with_cache(tmp_path):
    """A model with a tokenizer and a plan with a cache, for a fast GPU and a slow CPU."""
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(
        num_layers=L, num_neurons=F, context_length=256, vocab_size=vocab_size, width=128
    )
    model = make_model(sizes=shape, kind="q8_0", extra_keys=keys)
    model = dataclasses.replace(model, threshold_L=(0.0,) * L, path=tmp_path / "m.gguf")
    model.save(model.path)
    names = ("hot_s", "hot_row_s", "cold_s", "cold_row_s", "copy_row_s", "gather_row_s")
    times = dict(zip(names, (0.0, 1e-9, 0.0, 1e-6, 1e-7, 1e-8), strict=True))
    each = {f"{name}_L": np.full(L, time) for name, time in times.items()}
    given = CacheCosts(**each, rest_s=1e-5, copy_s=1e-7)
    frequency = tuple(np.full(F, 0.5, np.float32) for _ in range(L))
    cache = CachePlan(most_rows=16, costs=given, frequency=frequency)
    ids = np.random.default_rng(3).permutation(F)
    hot = [ids[:60], ids[30:90], ids[:0]]
    make_split(model, hot, context_length=256, cache=cache).save(tmp_path / "s.gguf")
    return model


def test_a_cache_that_cannot_work_is_refused(tmp_path):
    model = with_cache(tmp_path)
    split = Split.load(tmp_path / "s.gguf")
    assert setup_of(None, split, "dense") is setup_of("off", split, split.mode) is None
    assert setup_of(None, split, split.mode).most_rows == 16
    with pytest.raises(HotsplitError, match=f"are for mode {split.mode}, and the mode is dense"):
        setup_of(CacheOptions(), split, "dense")
    whole = make_split(model, [np.arange(F), np.arange(0), np.arange(F)], context_length=256)
    with pytest.raises(HotsplitError, match="divides no layer"):
        first_residents(model, whole)


def test_commands_refuse_wrong_settings_and_say_that_a_cache_needs_a_gpu(tmp_path, capsys):
    with_cache(tmp_path)
    model, split = str(tmp_path / "m.gguf"), str(tmp_path / "s.gguf")
    command = ["generate", model, "-p", "the", "-n", "3", "--temp", "0", "--device", "cpu"]
    assert main([*command, "--split", split, "-v"]) == 0
    assert "so it is off without one" in capsys.readouterr().err
    for wrong, line in (
        ("decay=2", "decay is 2.0, wanted a number from 0"),
        ("most_rows=300", "room for 16 rows"),
        ("size=3", "wanted on or NAME=VALUE"),
    ):
        assert main([*command, "--split", split, "--neuron-cache", wrong]) == 1
        assert line in capsys.readouterr().err
    assert main([*command, "--neuron-cache", "on"]) == 1
    assert "needs a plan that has room for it" in capsys.readouterr().err
