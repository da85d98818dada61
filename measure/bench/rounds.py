"""Runs all tests in turn, round by round, so that a slow round affects both sides alike."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from hotsplit.measure.bench.bandwidth import Bandwidth
from hotsplit.measure.bench.bench_config import BenchConfig, BenchTest
from hotsplit.measure.bench.rival import Rival
from hotsplit.measure.bench.runner import WARM_UP, Runner, Sample, Tokens
from hotsplit.measure.timing.interleave import in_turn


@dataclass
class RunSamples:
    """The samples of one test, one per round."""

    began: str = ""  # UTC
    ours: list[Sample] = field(default_factory=list)
    theirs: list[int] = field(default_factory=list)
    bandwidths: list[dict[str, float]] = field(default_factory=list)  # by device


class Rounds:
    """The rounds of a benchmark; each runs every test of a depth once on both sides."""

    def __init__(
        self,
        config: BenchConfig,
        runner: Runner,
        tokens: Tokens,
        rival: Rival | None,
        probes: dict[str, Bandwidth],
        on_test: Callable[[float], None],
    ) -> None:
        self.config, self.runner, self.tokens, self.rival = config, runner, tokens, rival
        self.probes, self.on_test = probes, on_test
        self.bandwidths: list[dict[str, float]] = []  # bytes per second by device, for each round
        self.measured = {test: RunSamples() for test in config.tests}

    def run(self) -> None:
        for depth in sorted({test.depth for test in self.measured}):
            tests = [test for test in self.measured if test.depth == depth]
            ids = self.tokens.take(depth)
            self.runner.go_to(ids)
            if self.rival is not None:
                self.rival.go_to(ids)
            for test in tests:
                self._warm_up(test)
            for number in range(self.config.repetitions):
                bandwidth = {name: measure() for name, measure in self.probes.items()}
                self.bandwidths.append(bandwidth)
                for test in tests:
                    self._measure(test, number, bandwidth)

    def _warm_up(self, test: BenchTest) -> None:
        length = test.length if test.kind == "pp" else min(test.length, WARM_UP)
        short = BenchTest(kind=test.kind, length=length, depth=test.depth)
        ids = self.tokens.take(length)
        self.runner.run(short, ids)
        if self.rival is not None:
            self.rival.run(short, ids)
        self.on_test(1)

    def _measure(self, test: BenchTest, number: int, bandwidth: dict[str, float]) -> None:
        measured, ids = self.measured[test], self.tokens.take(test.length)
        measured.began = measured.began or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        measured.bandwidths.append(bandwidth)
        for side in in_turn((self.runner, self.rival), number):
            if side is self.runner:
                measured.ours.append(self.runner.run(test, ids))
            elif self.rival is not None:
                measured.theirs.append(self.rival.run(test, ids))
        self.on_test(1)
