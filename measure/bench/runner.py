"""Runs a test on our engine, through the code path that generates text, but without sampling."""

import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from hotsplit.errors import HotsplitError
from hotsplit.files.json_file import read_text
from hotsplit.measure.bench.bench_config import BenchTest
from hotsplit.measure.bench.parts import Steps
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step.native_step import NativeStep, timed_parts
from hotsplit.runtime.step.sequences import Sequence as TextSequence

WARM_UP = 4  # tokens generated in a warm-up
FIRST_ID = 3  # lower ids are special tokens in Llama's vocabulary


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of a test."""

    ns: int
    steps: Steps  # for a prompt, every token counts as a step


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


class Runner:
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
        steps = Steps(num_steps=len(ids), start=test.depth, counts_LP2=counts_LP2, traffic=read)
        return Sample(ns=ns, steps=steps)

    def close(self) -> None:
        if self._text is not None:
            self._text.close()
