"""The neuron cache's policy: the C++ code decides like its definition in numpy, and within
its limits.

The definition goes neuron by neuron. With `dtype` float32, both round alike and decide alike; with
float64, the scores show the effect of rounding. Letters: R tokens of a step, L layers, F neurons of
a layer, N slots of a layer."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from case_tables import rows_of

from hotsplit.errors import HotsplitError
from hotsplit.options.neuron_cache_options import CacheCosts, CacheOptions, Units
from hotsplit.runtime.neuron_cache.policy import CachePolicy, packed

RECENT, ROOM = 0.95, 0.9
PRICE_UP, PRICE_DOWN, LEAST_PRICE = 1.1, 0.97, 1e-3
FIRST_STEPS, LEAST_LOSS = 16, 0.002


@dataclass(frozen=True)
class Swap:
    layer: int
    slot: int
    into: int
    out: int
    gain_s: float


class ReferencePolicy:
    def __init__(
        self,
        resident_LN: Sequence[np.ndarray],
        frequency_LF: np.ndarray,
        costs: CacheCosts,
        options: CacheOptions,
        dtype: type = np.float32,
        units: Units = "neurons",
    ) -> None:
        self.costs, self.options, self.dtype = costs, options.of(units), dtype
        self.are_experts = units == "experts"
        self.score_LF: np.ndarray = frequency_LF.astype(np.float32).astype(dtype)
        self.burst_LF = self.score_LF.copy()
        self.slots = [list(map(int, resident_N)) for resident_N in resident_LN]
        self.planned = [frozenset(slots) for slots in self.slots]
        self.cold_share_L = np.ones(len(self.slots))
        self.swaps: list[Swap] = []
        self.num_rows = self.num_steps = self.next_layer = 0
        self.price = self.step_s = self.free_s = self.gain_s = self.saved_s = 0.0
        self.is_on = self.is_returning = False
        self.cached_s = self.planned_s = 0.0
        self.hits = self.planned_hits = self.read = self.num_swaps = self.num_starts = 0

    def step(self, is_read_RLF: np.ndarray) -> list[Swap]:
        """Ends a step; see policy.CachePolicy.step."""
        is_read_LF: np.ndarray = np.any(is_read_RLF, axis=0)
        saved_s = self._measure(is_read_LF)
        self.saved_s = 0.99 * self.saved_s + 0.01 * saved_s
        self.num_steps += 1
        for swap in self.swaps:
            self.slots[swap.layer][swap.slot] = swap.into
        self.num_swaps += len(self.swaps)
        self.learn(is_read_RLF)
        self._switch()
        self.swaps = self._decide()
        return self.swaps

    def learn(self, is_read_RLF: np.ndarray) -> None:
        real, options = self.dtype, self.options
        for is_read_LF in is_read_RLF:
            first = real(1.0) / (real(options.prior_tokens) + real(self.num_rows + 1))
            rate = max(real(1.0) - real(np.float32(options.decay)), first)
            self.num_rows += 1
            burst_rate = real(1.0) - real(np.float32(options.burst_decay))
            for layer, slots in enumerate(self.slots):
                if not slots:
                    continue
                values_F = is_read_LF[layer].astype(real)
                self.score_LF[layer] += rate * (values_F - self.score_LF[layer])
                if options.burst_weight > 0:
                    self.burst_LF[layer] += burst_rate * (values_F - self.burst_LF[layer])

    def _measure(self, is_read_LF: np.ndarray) -> float:
        costs = self.costs
        step = planned = costs.rest_s
        busy = 0.0
        recent = RECENT if self.num_steps else 0.0
        for layer, slots in enumerate(self.slots):
            ids = set(np.flatnonzero(is_read_LF[layer]).tolist())
            hits, planned_hits = len(ids & set(slots)), len(ids & self.planned[layer])
            if 0 < len(slots) < len(is_read_LF[layer]):  # other layers have no swaps
                self.read, self.hits = self.read + len(ids), self.hits + hits
                self.planned_hits += planned_hits
            hot = costs.hot_s_L[layer] + hits * costs.hot_row_s_L[layer]
            cold = costs.cold_s_L[layer] + (len(ids) - hits) * costs.cold_row_s_L[layer]
            share = self.cold_share_L[layer]
            self.cold_share_L[layer] = recent * share + (1.0 - recent) * float(cold > hot)
            step += max(hot, cold)
            planned += max(
                costs.hot_s_L[layer] + planned_hits * costs.hot_row_s_L[layer],
                costs.cold_s_L[layer] + (len(ids) - planned_hits) * costs.cold_row_s_L[layer],
            )
            busy += cold
        gather = sum(costs.gather_row_s_L[swap.layer] for swap in self.swaps)
        copy = sum(costs.copy_row_s_L[swap.layer] for swap in self.swaps)
        free, computed = 0.0 if self.are_experts else max(0.0, step - busy), step
        step += max(0.0, gather - free)
        if self.swaps:
            step = max(step, costs.copy_s + copy)
        self.cached_s, self.planned_s = self.cached_s + step, self.planned_s + planned
        self.step_s = recent * self.step_s + (1.0 - recent) * computed
        self.free_s = recent * self.free_s + (1.0 - recent) * free
        return planned - step

    def _switch(self) -> None:
        options = self.options
        if options.is_always_on:
            self.is_on = True
        elif (
            not self.is_on
            and self.num_steps >= FIRST_STEPS
            and self.gain_s > options.start_gain * self.step_s
        ):
            self.is_on, self.is_returning = True, False
            self.num_starts += 1
            self.saved_s = options.start_gain * self.step_s
        elif self.is_on and self.saved_s < -LEAST_LOSS * self.step_s:
            self.is_on, self.is_returning = False, True

    def _decide(self) -> list[Swap]:
        num_layers = len(self.slots)
        assert self.options.visited is not None
        num_visited = max(1, round(self.options.visited * num_layers))
        found: list[Swap] = []
        gain_s = 0.0
        for number in range(num_visited):
            layer = (self.next_layer + number) % num_layers
            swaps, gained_s = self._pairs(layer, to_plan=False)
            gain_s += gained_s
            if not self.is_on:
                swaps = self._pairs(layer, to_plan=True)[0] if self.is_returning else []
            found += swaps
        self.next_layer = (self.next_layer + num_visited) % num_layers
        self.gain_s = 0.8 * self.gain_s + 0.2 * (gain_s * num_layers / num_visited)
        taken = self._fitting(found)
        if len(taken) < len(found):
            self.price = max(LEAST_PRICE, self.price * PRICE_UP)
        else:
            self.price *= PRICE_DOWN
        if self.price < LEAST_PRICE:
            self.price = 0.0
        return taken

    def _pairs(self, layer: int, *, to_plan: bool) -> tuple[list[Swap], float]:
        costs, options, slots = self.costs, self.options, self.slots[layer]
        share = self.cold_share_L[layer]
        row_s = share * costs.cold_row_s_L[layer] - (1.0 - share) * costs.hot_row_s_L[layer]
        if not slots or not row_s > 0.0:
            return [], 0.0
        cost = costs.gather_row_s_L[layer] + self.price * costs.copy_row_s_L[layer]
        most_rows = options.most_rows
        stay = options.stay
        assert options.margin is not None and most_rows is not None and stay is not None
        margin = float(np.float32(options.margin))
        least = self.dtype(np.float32(margin + cost / (row_s * stay)))
        weight = self.dtype(np.float32(options.burst_weight))
        score_F, burst_F = self.score_LF[layer], self.burst_LF[layer]
        worth_F = score_F + weight * (burst_F - score_F)
        resident = set(slots)
        cold = [j for j in range(len(worth_F)) if j not in resident]
        hot = list(slots)
        if to_plan:
            cold = [j for j in cold if j in self.planned[layer]]
            hot = [j for j in hot if j not in self.planned[layer]]
        cold.sort(key=lambda j: (-worth_F[j], j))
        hot.sort(key=lambda j: (worth_F[j], j))
        swaps: list[Swap] = []
        gain_s = 0.0
        for into, out in zip(cold, hot, strict=False):
            more = worth_F[into] - worth_F[out]
            if not to_plan and not more > least:
                break
            gained_s = (float(more) - float(least)) * row_s
            gain_s += 0.0 if to_plan else gained_s
            if len(swaps) < most_rows:
                swaps.append(Swap(layer, slots.index(out), into, out, gained_s * stay))
        return swaps, gain_s

    def _fitting(self, found: list[Swap]) -> list[Swap]:
        costs = self.costs

        def order(swap: Swap) -> tuple[float, float, int, int]:
            copy_s = costs.copy_row_s_L[swap.layer]
            per_second = swap.gain_s / copy_s if copy_s else np.inf
            return -per_second, -swap.gain_s, swap.layer, swap.into

        kept: list[Swap] = []
        copy, gather = costs.copy_s, 0.0
        for swap in sorted(found, key=order):
            copy += costs.copy_row_s_L[swap.layer]
            gather += costs.gather_row_s_L[swap.layer]
            if len(kept) == self.options.most_rows:
                break
            room_s = self.step_s if self.are_experts else self.free_s
            if copy > ROOM * self.step_s or gather > ROOM * room_s:
                break
            kept.append(swap)
        return kept


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


@pytest.mark.parametrize("seed", range(24))
def test_decisions_equal_those_of_the_definition(seed):
    random, slots, frequency_LF, costs, options = make_case(seed)
    plan, units = (slots, frequency_LF, costs, options), "neurons" if seed % 3 else "experts"
    policy = CachePolicy(*plan, units=units)
    reference = ReferencePolicy(*plan, units=units)
    exact = ReferencePolicy(*plan, dtype=np.float64)
    for is_read_RLF in make_steps(random, *frequency_LF.shape, 100):
        swaps = policy.step(packed(is_read_RLF))
        want = reference.step(is_read_RLF)
        exact.learn(is_read_RLF)
        assert [tuple(map(int, (s["layer"], s["slot"], s["in"], s["out"]))) for s in swaps] == [
            (s.layer, s.slot, s.into, s.out) for s in want
        ]
    report = policy.report()
    assert report.seconds == pytest.approx(reference.cached_s)
    assert report.planned_seconds == pytest.approx(reference.planned_s)
    assert (report.num_starts, report.num_swaps) == (reference.num_starts, reference.num_swaps)
    assert report.hit_rate == pytest.approx(reference.hits / max(1, reference.read))
    np.testing.assert_allclose(reference.score_LF, exact.score_LF, atol=2e-6)
    for layer, ids in enumerate(reference.slots):
        assert policy.resident(layer).tolist() == ids


@pytest.mark.parametrize("copy_s", [(2, 0), (0, 2), (0, 0)])
def test_swaps_back_to_the_plan_that_lose_are_ordered_alike_where_a_copy_takes_no_time(copy_s):
    """Swapping in layer 0 does not pay, and layer 1 reads no neurons of the plan, so its swaps back
    have negative gains."""
    costs = make_costs(2, copy_row_s_L=np.array(copy_s), cold_row_s_L=np.array([1, 0.15]))
    options = CacheOptions(
        decay=0.5, prior_tokens=1, margin=0, stay=1e9, start_gain=1e-9, visited=1
    )
    plan = [np.arange(16)] * 2, np.zeros((2, 64)), costs, options
    policy, reference = CachePolicy(*plan), ReferencePolicy(*plan)
    losses = 0
    for number in range(120):
        is_read_RLF = np.zeros((1, 2, 64), bool)
        first = (16, 32, 48, 16, 32, 48, 0, 0, 0, 0, 0, 0)[number % 12]
        is_read_RLF[0, 0, first : first + 16] = is_read_RLF[0, 1, 16:32] = True
        swaps, want = policy.step(packed(is_read_RLF)), reference.step(is_read_RLF)
        assert [tuple(map(int, (s["layer"], s["slot"], s["in"], s["out"]))) for s in swaps] == [
            (s.layer, s.slot, s.into, s.out) for s in want
        ]
        losses += sum(s.gain_s < 0 for s in want)
    assert losses


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
    for is_read_RLF in make_steps(random, *frequency_LF.shape, 80):
        swaps = policy.step(packed(is_read_RLF)).copy()
        assert len(swaps) <= options.most_rows
        assert costs.copy_row_s_L[swaps["layer"]].sum() <= longest_s
        for layer, into, out in zip(swaps["layer"], swaps["in"], swaps["out"], strict=True):
            assert out in resident[layer] and into not in resident[layer]
            resident[layer] = resident[layer] - {out} | {int(into)}
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
    assert report.num_starts >= 1 and report.steps_on < report.num_steps
    run(policy, steady(1, num_neurons, range(16), steps=300, random=random, high=1, low=0))
    assert set(policy.resident(0).tolist()) == set(range(16))


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
