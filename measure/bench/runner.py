"""Runs a test on our engine, through the code path that generates text, but without sampling, and
measures memory bandwidth: on the CPU with the runtime's matrix-vector product and threads, on a GPU
with torch's sum. The buffer has at most 1 GiB and exceeds most caches unless free memory is short.

The bandwidth is measured again in every round, so that whatever slows the model in a round also
slows the probe."""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry
from hotsplit.files.json_file import read_text
from hotsplit.measure.bench.bench_config import BenchConfig, BenchTest
from hotsplit.measure.bench.parts import CountedSteps
from hotsplit.measure.bench.rival import Rival
from hotsplit.measure.calibrate.cpu_bandwidth import buffer_bytes
from hotsplit.measure.calibrate.gpu import READ_BYTES, event_seconds
from hotsplit.measure.timing.interleave import in_turn, seconds_of
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step.native_step import NativeStep, timed_parts
from hotsplit.runtime.step.sequences import Sequence as TextSequence
from hotsplit.runtime.weights.resident import Residence

WARM_UP = 4  # tokens generated in a warm-up
FIRST_ID = 3  # lower ids are special tokens in Llama's vocabulary
ROW_VALUES, TRIES = 4096, 3  # of a measured bandwidth; the fastest try counts

Bandwidth = Callable[[], float]  # measures bytes per second


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of a test."""

    ns: int
    steps: CountedSteps  # for a prompt, every token counts as a step


class RandomTokens:
    """Random tokens from a seed."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._random, self._size = random.Random(seed), vocab_size

    def take(self, count: int) -> list[int]:
        first = min(FIRST_ID, self._size - 1)
        return [self._random.randrange(first, self._size) for _ in range(count)]


class TextTokens:
    """Consecutive pieces of a text, from the beginning again if its rest is too short."""

    def __init__(self, path: Path, engine: Engine, longest: int) -> None:
        self._ids = engine.codec.encode(read_text(path, "text"))
        self._at = 0
        if len(self._ids) < longest:
            raise HotsplitError(
                f"{path}: has {len(self._ids)} tokens, the longest test takes {longest}; give a"
                " longer text"
            )

    def take(self, count: int) -> list[int]:
        if self._at + count > len(self._ids):
            self._at = 0
        self._at += count
        return self._ids[self._at - count : self._at]


Tokens = RandomTokens | TextTokens  # the same for both sides of a comparison


class BenchRunner:
    """Our side of a comparison."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._text: TextSequence | None = None
        native = engine._live.native
        self.native = native if isinstance(native, NativeStep) else None

    def go_to(self, ids: Sequence[int]) -> None:
        """Fills the cache with these tokens, and only these."""
        if self._text is None:
            self._text = self.engine.sequence()
        if self._text.ids != list(ids):
            self._text.rollback(0)
            if ids:
                self._text.extend(ids, "none")

    def run(self, test: BenchTest, ids: Sequence[int]) -> Sample:
        """Runs a test after the cached tokens; the cache is unchanged afterwards."""
        text = self._text
        assert text is not None and text.length == test.depth, test
        before = asdict(self.engine.traffic)
        pieces = [list(ids)] if test.kind == "pp" else [[token] for token in ids]
        with nullcontext() if self.native is None else timed_parts(self.native) as counts_LP2:
            began = time.perf_counter_ns()
            for piece in pieces:
                text.extend(piece)
            ns = time.perf_counter_ns() - began
        text.rollback(test.depth)
        now = asdict(self.engine.traffic)
        read = Traffic(**{part: count - before[part] for part, count in now.items()})
        steps = CountedSteps(
            num_steps=len(ids), start=test.depth, counts_LP2=counts_LP2, traffic=read
        )
        return Sample(ns=ns, steps=steps)

    def close(self) -> None:
        if self._text is not None:
            self._text.close()


@dataclass
class RunSamples:
    """The samples of one test, one per round."""

    began: str = ""  # UTC
    ours: list[Sample] = field(default_factory=list)
    theirs: list[int] = field(default_factory=list)
    bandwidths: list[dict[str, float]] = field(default_factory=list)  # by device


class BenchRounds:
    """The rounds of a benchmark; each runs every test of a depth once on both sides."""

    def __init__(
        self,
        config: BenchConfig,
        runner: BenchRunner,
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
                length = test.length if test.kind == "pp" else min(test.length, WARM_UP)
                short = BenchTest(kind=test.kind, length=length, depth=test.depth)
                warm_up_ids = self.tokens.take(length)
                self.runner.run(short, warm_up_ids)
                if self.rival is not None:
                    self.rival.run(short, warm_up_ids)
                self.on_test(1)
            for number in range(self.config.repetitions):
                bandwidth = {name: measure() for name, measure in self.probes.items()}
                self.bandwidths.append(bandwidth)
                for test in tests:
                    self._measure(test, number, bandwidth)

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


def cpu_bandwidth(num_bytes: int | None = None) -> Bandwidth:
    """A probe that times an f32 matrix-vector product over memory allocated like weights: so many
    bytes, or more than caches hold."""
    num_rows = max(1, (num_bytes or buffer_bytes()) // (4 * ROW_VALUES))
    ones = array_entry(np.ones((num_rows, ROW_VALUES), np.float32), "f32")
    matrix = Residence().matrix(ones)
    x_D = torch.ones(ROW_VALUES)

    def measure() -> float:
        best = min(seconds_of(lambda: matrix.dot(x_D)) for _ in range(TRIES))
        return matrix.num_bytes / best

    return measure


def gpu_bandwidth(device: torch.device) -> Bandwidth:
    """A probe that times torch's sum over a buffer, with two CUDA events."""
    free, _ = torch.cuda.mem_get_info(device)
    values = torch.ones(min(READ_BYTES, free // 4) // 4, device=device)

    def measure() -> float:
        with torch.cuda.device(device):
            return values.nbytes / min(event_seconds(values.sum) for _ in range(TRIES))

    return measure
