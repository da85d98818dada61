"""Times several operations in turn, round by round, so that a slow moment of the machine affects
all of them alike and shows in the spread of each.

`take_turns` runs the rounds and `in_turn` is the order of one; `run_rounds` and `sum_of_rounds`
make figures of a machine file."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import TypeVar

from hotsplit.artifacts.machine_file import Figure

MIN_ROUNDS, MAX_ROUNDS = 5, 15

Side = TypeVar("Side")
Name = TypeVar("Name", bound=Hashable)
Sample = TypeVar("Sample")


def in_turn(sides: Sequence[Side], number: int) -> list[Side]:
    """The order of the sides in a round: reversed in every second one, so that on average each has
    the same place in a round and a slow drift affects all alike."""
    return list(sides) if number % 2 == 0 else list(sides)[::-1]


def take_turns(
    turns: Mapping[Name, Callable[[int], Sample]],
    num_rounds: int,
    *,
    alternates: bool = True,
    is_over: Callable[[int], bool] = lambda number: False,
) -> dict[Name, list[Sample]]:
    """The samples of each side, one a round. A turn is called with the number of its round. Round 0
    warms up and is not counted. The order is `in_turn`'s if it alternates, and else always the
    given one, in which no side has two turns in succession. If `is_over(number)` is true before a
    round, from 1 on, the rounds end there."""
    samples: dict[Name, list[Sample]] = {name: [] for name in turns}
    for number in range(num_rounds + 1):
        if number and is_over(number):
            break
        for name in in_turn(list(turns), number if alternates else 0):
            sample = turns[name](number)
            if number:
                samples[name].append(sample)
    return samples


@dataclass(frozen=True, kw_only=True)
class Probe:
    """An operation to time. `seconds()` runs it, waits for its end and returns the seconds of one
    run; the figure is `num_bytes` over that time in GB/s or, if `num_bytes` is None, the time
    itself."""

    name: str
    seconds: Callable[[], float]
    num_bytes: int | None = None

    def figure(self, times: Sequence[float]) -> Figure:
        if self.num_bytes is None:
            return Figure.of_rounds(times, is_rate=False)
        return Figure.of_rounds([self.num_bytes / t / 1e9 for t in times], is_rate=True)


def run_rounds(
    probes: Sequence[Probe],
    time_limit_s: float,
    on_probe: Callable[[float], None] = lambda count: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Figure]:
    """Figures of the probes by name, from `time_rounds`."""
    times = time_rounds(probes, time_limit_s, on_probe, clock)
    return {probe.name: probe.figure(times[probe.name]) for probe in probes}


def time_rounds(
    probes: Sequence[Probe],
    time_limit_s: float,
    on_probe: Callable[[float], None] = lambda count: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of the probes by name, of up to MAX_ROUNDS rounds: fewer once the time is up, but at
    least MIN_ROUNDS. A warm-up round comes first and is not counted."""
    began = clock()

    def turn_of(probe: Probe) -> Callable[[int], float]:
        def turn(number: int) -> float:
            taken = probe.seconds()
            on_probe(1)
            return taken

        return turn

    turns = {probe.name: turn_of(probe) for probe in probes}
    assert len(turns) == len(probes), "two probes have one name"
    # Always in one order: what a probe has just read is in a cache for its next turn.
    return take_turns(
        turns,
        MAX_ROUNDS,
        alternates=False,
        is_over=lambda number: number > MIN_ROUNDS and clock() - began > time_limit_s,
    )


def sum_of_rounds(
    times: Mapping[str, Sequence[float]], factors: Mapping[str, float], *, least: float
) -> Figure:
    """The sum of probes' times, each times its factor, of every round; at least `least`. The times
    of one round belong together: what slows it slows all of them."""
    rounds = zip(*(times[name] for name in factors), strict=True)
    sums = [sum(map(mul, factors.values(), values)) for values in rounds]
    return Figure.of_rounds([max(least, value) for value in sums], is_rate=False)


def seconds_of(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
