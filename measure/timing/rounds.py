"""Times several operations in turn, round by round, so that a slow moment of the machine affects
all of them alike and shows in the spread of each."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotsplit.artifacts.machine_file import Figure

MIN_ROUNDS, MAX_ROUNDS = 5, 15


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
    """Figures of the probes by name, from up to MAX_ROUNDS rounds: fewer once the time is up, but
    at least MIN_ROUNDS. A warm-up round comes first and is not counted."""
    began = clock()
    times: dict[str, list[float]] = {probe.name: [] for probe in probes}
    assert len(times) == len(probes), "two probes have one name"
    for count in range(MAX_ROUNDS + 1):
        if count > MIN_ROUNDS and clock() - began > time_limit_s:
            break
        for probe in probes:
            taken = probe.seconds()
            if count:
                times[probe.name].append(taken)
            on_probe(1)
    return {probe.name: probe.figure(times[probe.name]) for probe in probes}


def seconds_of(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
