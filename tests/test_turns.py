"""Timing in turns, and the choice that rests on it, on machines with simulated clocks."""

import random
from dataclasses import replace
from statistics import median

import pytest
from test_limit_search import point

from hotsplit.measure.advise import turns as module
from hotsplit.measure.advise.advise import timed
from hotsplit.measure.advise.choice import choose
from hotsplit.measure.advise.timings import Gain, Rounds, Timings
from hotsplit.measure.advise.turns import FEW, MORE, STEPS, Turns

SLOWER = 1.8
OWN = point("f16", "dense", 0, 2000, 0.0)
SMALLER = point("q8_0", "dense", 0, 1060, 0.0005)
SMALLEST = point("q4_0", "dense", 0, 560, 0.2)
RULE = point("q8_0", "limits", 0.3, 1000, 0.008)  # bytes say +6 %
LARGE_RULE = point("q8_0", "limits", 0.3, 815, 0.008)  # bytes say +30 %
COSTS = {OWN.trial: 0.020, SMALLER.trial: 0.012, SMALLEST.trial: 0.008}  # seconds per token
NUM_SPELLS = 60


class Machine:
    """A clock that advances as models work, at full speed in one spell and slower in the next."""

    def __init__(self, seed: int, costs, jitter: float = 0.0) -> None:
        self.random, self.costs, self.jitter = random.Random(seed), costs, jitter
        self.now, self.is_slow, self.until = 0.0, seed % 2 == 0, 0.0
        self.closed, self.steps = [], []

    def work(self, seconds: float) -> None:
        """Advances the clock by work that takes these seconds at full speed."""
        while seconds > 1e-9:  # less is rounding
            if self.now >= self.until:
                self.is_slow, self.until = not self.is_slow, self.now + self.random.uniform(1, 8)
            pace = SLOWER if self.is_slow else 1.0
            taken = min(seconds * pace, self.until - self.now)
            self.now, seconds = self.now + taken, seconds - taken / pace

    def clock(self) -> float:
        return self.now

    def open(self, point):
        return Model(self, point)


class Model:
    def __init__(self, machine: Machine, point) -> None:
        self.machine, self.point = machine, point

    def step(self, position: int) -> None:
        machine = self.machine
        machine.steps.append((self.point.name, position))
        noise = machine.random.uniform(1 - machine.jitter, 1 + machine.jitter)
        machine.work(machine.costs[self.point.trial] * noise)

    def close(self) -> None:
        self.machine.closed.append(self.point.name)


def turns_of(machine: Machine, **options) -> Turns:
    return Turns(OWN, machine.open, lambda p: 1, 200, clock=machine.clock, **options)


class Apart:
    """Times from the median of each model's own times: dense models first, then each rule beside
    the dense model of its type, in 7 rounds of 24 tokens."""

    reference = OWN.trial

    def __init__(self, machine: Machine, points) -> None:
        self.machine = machine
        dense = [p for p in points if p.rule == "dense"]
        self.found = self._medians(dense)
        for rule in (p for p in points if p.rule != "dense"):
            own = next(p for p in dense if p.type == rule.type)
            pair = self._medians([own, rule])
            ratio = pair[rule.trial] / pair[own.trial]
            self.found[rule.trial] = self.found[own.trial] * ratio

    def _medians(self, points):
        times = {p.trial: [] for p in points}
        for _ in range(7):
            for each in points:
                began = self.machine.now
                for position in range(24):
                    Model(self.machine, each).step(position)
                times[each.trial].append(self.machine.now - began)
        return {trial: median(rows) / 24 for trial, rows in times.items()}

    def num_rounds(self, trial) -> int:
        return 7

    def seconds(self, trial) -> float:
        return self.found[trial]

    def gain(self, trial, over) -> Gain:
        gain = self.found[over] / self.found[trial] - 1
        return Gain(median=gain, low=gain, high=gain)


def chosen_apart(machine: Machine, points) -> str:
    times = Apart(machine, points)
    points = [replace(p, seconds=times.seconds(p.trial), is_timed=True) for p in points]
    return choose(points, 0.01, times)[0].rule


def chosen_in_turns(machine: Machine, points) -> str:
    turns = turns_of(machine)
    points = timed(points, points, turns, 0.01, lambda line: None)
    return choose(points, 0.01, turns.timings)[0].rule


@pytest.mark.parametrize(
    ("rule", "gain", "right"), [(RULE, 0.01, "dense"), (LARGE_RULE, 0.2, "limits")]
)
def test_spells_of_the_machine_do_not_decide(rule, gain, right):
    """Timed apart, a rule that gains 1 % is advised on some machines, and one that gains 20 % is
    not advised on some. Timed in turns, the choice is always right, with no more steps in all."""
    costs = COSTS | {rule.trial: COSTS[SMALLER.trial] / (1 + gain)}
    points = [OWN, SMALLER, SMALLEST, rule]
    machines = [[Machine(seed, costs) for seed in range(NUM_SPELLS)] for _ in range(2)]
    apart = [chosen_apart(machine, points) for machine in machines[0]]
    assert 3 <= sum(name != right for name in apart) < NUM_SPELLS / 2
    assert {chosen_in_turns(machine, points) for machine in machines[1]} == {right}
    assert sum(len(m.steps) for m in machines[1]) <= sum(len(m.steps) for m in machines[0])


@pytest.mark.parametrize("seed", range(8))
def test_gains_are_found_through_spells(seed):
    """Ratios of times are off by at most 3 %; seconds per token lie between those of both paces."""
    machine = Machine(seed, COSTS | {LARGE_RULE.trial: COSTS[SMALLER.trial] / 1.28})
    turns = turns_of(machine)
    found = timed([OWN, SMALLER, LARGE_RULE], [OWN, SMALLER, LARGE_RULE], turns, 0.01, print)
    gain = turns.timings.gain(LARGE_RULE.trial, SMALLER.trial)
    assert gain.median == pytest.approx(0.28, abs=0.02) and gain.low <= gain.median <= gain.high
    own, smaller, rule = (p.seconds for p in found)
    assert own / smaller == pytest.approx(20 / 12, rel=0.02)
    assert smaller / rule == pytest.approx(1.28, rel=0.03)
    assert 0.0199 < own < 0.0201 * SLOWER


def test_a_difference_that_rounds_do_not_show_does_not_decide():
    """If rounds show no difference between a rule and a dense type, the one with the smaller loss
    is taken."""

    def choice(low, middle, high, rule):
        times = {OWN.trial: 2.0, SMALLER.trial: 1.0}
        rows = [(times[OWN.trial], 1.0, 1 / (1 + gain)) for gain in (low, middle, high)]
        rounds = Rounds(trials=(OWN.trial, SMALLER.trial, rule.trial), seconds=tuple(rows))
        timings = Timings((rounds,))
        points = [replace(p, seconds=timings.seconds(p.trial), is_timed=True)
                  for p in (OWN, SMALLER, rule)]  # fmt: skip
        return choose(points, 0.01, timings)

    best, why = choice(0.0, 0.08, 0.20, RULE)
    assert best.rule == "dense" and best.type == "q8_0"
    assert "gains +8% (95%: +0% to +20%) over q8_0 dense, not distinguishable from 0" in why
    best, why = choice(0.07, 0.08, 0.09, RULE)
    assert best.rule == "limits" and "+8% (95%: +7% to +9%)" in why
    closer = replace(RULE, close=replace(RULE.close, kl=0.0001))
    best, why = choice(0.0, 0.08, 0.20, closer)
    assert best.rule == "limits" and "not distinguishable from 0, but its loss is smaller" in why


def test_of_dense_types_that_are_as_fast_the_closest_is_taken():
    rows = ((1.0, 0.9), (1.0, 1.0), (1.1, 1.05), (0.9, 1.0))
    timings = Timings((Rounds(trials=(OWN.trial, SMALLER.trial), seconds=rows),))
    points = [replace(p, seconds=timings.seconds(p.trial), is_timed=True) for p in (OWN, SMALLER)]
    best, why = choose(points, 0.01, timings)
    assert points[1].seconds < points[0].seconds
    assert best.type == "f16" and "distinguishable from 0, and loses more" in why


def test_only_what_may_be_advised_has_all_rounds():
    far = point("q8_0", "gates", 0.3, 700, 0.5)  # costs too much
    slow = point("f16", "gates", 0.1, 1900, 0.001)
    costs = COSTS | {LARGE_RULE.trial: 0.009, far.trial: 0.007, slow.trial: 0.021}
    turns = turns_of(Machine(1, costs))
    points = [OWN, SMALLER, SMALLEST, LARGE_RULE, far, slow]
    found = {p.name: p.num_rounds for p in timed(points, points, turns, 0.01, print)}
    assert found == {"f16 dense": FEW + MORE, "q8_0 dense": FEW + MORE, "q4_0 dense": FEW,
                     "q8_0 limits 30%": FEW + MORE, "q8_0 gates 30%": FEW,
                     "f16 gates 10%": FEW}  # fmt: skip
    assert set(turns.opened) == {OWN.trial, SMALLER.trial, LARGE_RULE.trial}


def test_what_does_not_fit_into_memory_together_is_timed_beside_the_reference(monkeypatch):
    monkeypatch.setattr(module, "free_memory_bytes", lambda: 8.0)  # for two models of size 1
    rule = LARGE_RULE
    machine = Machine(3, COSTS | {rule.trial: COSTS[SMALLER.trial] / 1.28})
    points = [OWN, SMALLER, SMALLEST, rule]
    turns = turns_of(machine)
    found = timed(points, points, turns, 0.01, print)
    assert [group.trials for group in turns.timings.groups] == [
        (OWN.trial, other.trial) for other in (SMALLER, rule, SMALLEST)
    ]
    assert machine.closed == ["q8_0 dense", rule.name] and len(turns.opened) == 2
    assert turns.timings.gain(rule.trial, SMALLER.trial).median == pytest.approx(0.28, abs=0.03)
    assert choose(found, 0.01, turns.timings)[0].rule == "limits"
    turns.close()
    assert not turns.opened and machine.closed[2:] == ["f16 dense", "q4_0 dense"]


def test_trial_files_are_open_together_only_if_the_disk_has_room():
    rules = [point("f16", "gates", share, 1800, 0.001) for share in (0.1, 0.2, 0.3)]
    turns = turns_of(Machine(1, COSTS), free_disk=lambda: 2)
    assert turns.groups([OWN, SMALLER, *rules]) == [[OWN, SMALLER, *rules[:2]], [OWN, rules[2]]]


def test_a_rule_is_timed_beside_the_dense_model_of_its_type(monkeypatch):
    """The fast spell makes the largest type much faster and the smallest no faster, so a comparison
    through the largest, timed in both spells, would be wrong."""
    monkeypatch.setattr(module, "free_memory_bytes", lambda: 12.0)  # for three models of size 1
    rule = point("q4_0", "limits", 0.3, 400, 0.008)
    fast = {OWN.trial: 0.020, SMALLER.trial: 0.012, SMALLEST.trial: 0.0080, rule.trial: 0.0064}
    slow = fast | {OWN.trial: 0.030, SMALLER.trial: 0.016}
    machine = Machine(1, fast)
    machine.work = lambda seconds: setattr(machine, "now", machine.now + seconds)
    turns = Turns(OWN, machine.open, lambda p: 1, 200, clock=machine.clock)
    groups = turns.groups([OWN, SMALLER, SMALLEST, rule])
    assert groups == [[OWN, SMALLER], [OWN, SMALLEST, rule]]
    for costs, group in zip((slow, fast), groups, strict=True):
        machine.costs = costs
        turns.rounds(group, FEW)
    assert turns.timings.gain(rule.trial, SMALLEST.trial).median == pytest.approx(0.25, abs=0.01)


def test_a_rule_of_a_type_that_does_not_fit_whole_is_still_beside_its_dense_model(monkeypatch):
    monkeypatch.setattr(module, "free_memory_bytes", lambda: 12.0)
    rules = [point("q8_0", "gates", share, 900, 0.001) for share in (0.1, 0.2, 0.3)]
    groups = turns_of(Machine(1, COSTS)).groups([OWN, SMALLEST, SMALLER, *rules])
    assert groups == [[OWN, SMALLEST], *([OWN, SMALLER, rule] for rule in rules)]


def test_models_decode_the_text_in_order_and_change_places():
    machine = Machine(1, COSTS)
    turns = Turns(OWN, machine.open, lambda p: 1, 2 * STEPS + 2, clock=machine.clock)
    turns.time([SMALLER], 3)
    names = [name for name, _ in machine.steps][:: STEPS + 1]
    both = ["f16 dense", "q8_0 dense"]
    assert names == [*both, *both[::-1], *both, *both[::-1]]
    first = [position for name, position in machine.steps if name == "f16 dense"]
    turn = STEPS + 1
    assert first == [*range(turn), *range(2 * turn), *range(turn)]


def test_the_interval_of_a_median_is_that_of_its_ranks():
    """Ranks 8 and 18 of 25, 41 and 60 of 100, as the number of ratios below the median is binomial;
    the first and last of 5."""
    for count, low, high in ((5, 1, 5), (25, 8, 18), (100, 41, 60)):
        rows = tuple((float(i), 1.0) for i in range(count, 0, -1))
        timings = Timings((Rounds(trials=(OWN.trial, SMALLER.trial), seconds=rows),))
        gain = timings.gain(SMALLER.trial, OWN.trial)
        assert (gain.low + 1, gain.high + 1) == (low, high)
