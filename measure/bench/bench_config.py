"""The configuration of `bench`, and its tests: prefill of prompts, and generation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotsplit.errors import HotsplitError
from hotsplit.options.engine_config import EngineConfig

MOST_TOKENS = 1 << 24  # upper limit of -p, -n and -d
MOST_TESTS, MOST_REPETITIONS = 256, 10_000

Kind = Literal["pp", "tg"]


@dataclass(frozen=True, kw_only=True)
class BenchTest:
    """A prompt in one call (pp), or token by token (tg), after `depth` cached tokens."""

    kind: Kind
    length: int
    depth: int = 0

    @property
    def name(self) -> str:
        """The test's name in llama-bench."""
        return f"{self.kind}{self.length}" + (f" @ d{self.depth}" if self.depth else "")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The options of `bench`. A length of 0 means no such test, as in llama-bench."""

    model: Path
    split: Path | None = None
    prompt_lengths: tuple[int, ...] = (512,)
    gen_lengths: tuple[int, ...] = (128,)
    depths: tuple[int, ...] = (0,)
    repetitions: int = 5
    threads: int | None = None
    engine: EngineConfig = EngineConfig()  # without a plan, the tests need their own context
    text: Path | None = None  # the tokens' source; None draws them at random from `seed`
    seed: int = 0
    compare: Path | None = None  # a Python that has llama_cpp, or a llama-bench
    compare_model: Path | None = None  # the file that llama.cpp loads; None: `model`
    compare_gpu_layers: int | None = None  # None: 0 if ours is on the CPU, else all

    def __post_init__(self) -> None:
        named = {"-p": self.prompt_lengths, "-n": self.gen_lengths, "-d": self.depths}
        for option, lengths in named.items():
            for length in lengths:
                if not 0 <= length <= MOST_TOKENS:
                    raise HotsplitError(f"{option} is {length}, wanted 0 to {MOST_TOKENS}")
        if not 1 <= self.repetitions <= MOST_REPETITIONS:
            raise HotsplitError(f"-r is {self.repetitions}, wanted 1 to {MOST_REPETITIONS}")
        if not 1 <= len(self.tests) <= MOST_TESTS:
            raise HotsplitError(
                "-p and -n are both 0, which leaves nothing to measure; give one of them a length"
                if not self.tests
                else f"{len(self.tests)} tests asked for, wanted at most {MOST_TESTS}"
            )
        if self.seed < 0:
            raise HotsplitError(f"seed is {self.seed}, wanted 0 or more")
        if self.compare is None and (self.compare_model or self.compare_gpu_layers is not None):
            raise HotsplitError("there is nothing to compare with; give --compare PATH too")
        if self.compare_gpu_layers is not None and self.compare_gpu_layers < 0:
            raise HotsplitError(f"{self.compare_gpu_layers} layers on a GPU, wanted 0 or more")

    @property
    def tests(self) -> tuple[BenchTest, ...]:
        """The tests in order of depth, at each depth prompts first, without duplicates."""
        kinds: tuple[tuple[Kind, tuple[int, ...]], ...] = (
            ("pp", self.prompt_lengths),
            ("tg", self.gen_lengths),
        )
        found = [
            BenchTest(kind=kind, length=length, depth=depth)
            for depth in sorted(set(self.depths))
            for kind, lengths in kinds
            for length in dict.fromkeys(lengths)
            if length
        ]
        return tuple(found)

    @property
    def num_tokens(self) -> int:
        """Tokens that the context must hold."""
        return max(test.depth + test.length for test in self.tests)

    @property
    def num_runs(self) -> int:
        """Runs of all tests, warm-ups included."""
        return len(self.tests) * (self.repetitions + 1)
