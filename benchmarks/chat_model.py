"""Benchmarks a real chat model on the CPU against llama.cpp, alternating in one run, dense in both.

    python benchmarks/chat_model.py FOLDER --rival path/to/venv/bin/python

FOLDER is what `make smollm2` makes: SmolLM2-135M-Instruct as TYPE-stock.gguf, which both sides run
as it is. A round measures the read bandwidth (as decode.py does), decode after a prompt of 16
tokens, and the seconds from prompts of several lengths to the logits of their last token, each on
both sides with the same random token ids. A prompt is repeated for about REPEATS_S in a
round, at most MOST_REPEATS times, and counts by the median; a figure is the median of the rounds.

llama.cpp takes a prompt in one batch and is measured with and without its flash attention: the
faster, by the median of the rounds, is the rival. The limit of decode is the bytes a step must read
over the bandwidth; the smaller files fit partly into the last-level cache, so they may come closer
to the limit than memory alone allows, or exceed it. A run adds to the result of earlier ones, so
that each may measure a part. torch has one thread unless --torch-threads says otherwise: further
ones would spin after each product and compete with ours."""

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from cpu_rival import PROMPT, Rival, rival_parser
from decode import bytes_a_token
from machine import add_to_result, result_of

from hotsplit import Engine
from hotsplit.measure.bench.runner import Bandwidth, cpu_bandwidth
from hotsplit.measure.timing.interleave import in_turn
from hotsplit.runtime.kernels.cpu import library

CONTEXT = 512
STEPS, WARM_UP = 64, 64
REPEATS_S, MOST_REPEATS = 0.3, 50
OURS, PLAIN, FLASH = "ours", "llama.cpp", "llama.cpp, flash"
SIDES = (OURS, PLAIN, FLASH)
Samples = dict[str, list[float]]  # seconds in each round, by side


@dataclass(frozen=True, kw_only=True)
class Tests:
    """What is measured: decode, and prompts of so many tokens. `seconds`: no round begins after the
    first that may end later, counted from before the models are loaded."""

    seconds: float = math.inf
    has_decode: bool = True
    prompts: tuple[int, ...] = ()

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Tests":
        """What the options of `add_tests` ask for."""
        return cls(
            seconds=arguments.seconds,
            has_decode=arguments.decode,
            prompts=numbers(arguments.prompts),
        )


@dataclass
class Measured:
    """One type with one number of threads; one sample per round."""

    bandwidths: list[float] = field(default_factory=list)  # bytes a second
    decode: Samples = field(default_factory=lambda: defaultdict(list))  # per token
    prompts: dict[int, Samples] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    step_bytes: int = 0


def main() -> None:
    run(parser().parse_args(), "chat_model", "SmolLM2-135M-Instruct", "chat-model")


def run(arguments: argparse.Namespace, benchmark: str, model: str, name: str) -> None:
    """Measures all types of a folder and adds them to the result, by default
    results/NAME-PROCESSOR.json."""
    torch.set_num_threads(arguments.torch_threads)
    bandwidth = cpu_bandwidth()
    result = result_of(
        benchmark,
        model=model,
        level=library.level(),
        torch_threads=arguments.torch_threads,
        rounds=arguments.rounds,
    )
    print(f"{library.level()}, torch with {arguments.torch_threads} threads")
    threads, tests = list(numbers(arguments.threads)), Tests.of(arguments)
    types = arguments.types.split(",")
    result["types"] = {
        kind: measure(arguments.folder / f"{kind}-stock.gguf", arguments, threads, tests, bandwidth)
        for kind in types
    }
    result["load_after"] = os.getloadavg()
    print(f"wrote {add_to_result(result, name, arguments.output)}")


def measure(
    model: Path,
    arguments: argparse.Namespace,
    threads: list[int],
    tests: Tests,
    bandwidth: Bandwidth,
) -> dict[str, object]:
    """Measures a model, which both sides run as it is; reports by number of threads. Of the rounds,
    those that fit into `tests.seconds` are run."""
    began = time.perf_counter()
    rival = Rival(arguments.rival, model, CONTEXT)
    generator, kind = random.Random(0), model.stem
    measured = {count: Measured() for count in threads}
    with Engine.load(model, mode="dense", device="cpu", context_length=CONTEXT) as engine:
        rounds = [Round(engine, rival, count, bandwidth, tests) for count in threads]
        for number in range(arguments.rounds + 1):
            round_began = time.perf_counter()
            for one in rounds:
                one.run(generator, measured[one.threads] if number else Measured(), number)
            now = time.perf_counter()
            if number and 2 * now - round_began - began > tests.seconds:
                break
    rival.close()
    report = {str(count): _report(kind, count, measured[count]) for count in threads}
    return {"rival": rival.about, **report}


class Round:
    """`run` measures everything once, ours and llama.cpp in turn, with `threads` threads."""

    def __init__(
        self, engine: Engine, rival: Rival, threads: int, bandwidth: Bandwidth, tests: Tests
    ) -> None:
        self.engine, self.rival, self.threads, self.bandwidth = engine, rival, threads, bandwidth
        self.tests = tests
        self._known: dict[tuple[int, str], float] = {}  # seconds of a prompt in the previous round

    def run(self, generator: random.Random, measured: Measured, number: int) -> None:
        """Adds the samples of a round; 0 warms up, with the beginnings of prompts."""
        library.set_threads(self.threads)
        measured.bandwidths.append(self.bandwidth())
        if self.tests.has_decode:
            ids = self._ids(generator, STEPS)
            for side in in_turn(SIDES, number):
                if side == OURS:
                    self.engine._prefill(torch.tensor(PROMPT))
                    seconds, measured.step_bytes = decode_s(self.engine, ids)
                else:
                    seconds = self.rival.decode_s(self.threads, side == FLASH, ids)
                measured.decode[side].append(seconds)
        for length in self.tests.prompts:
            ids = self._ids(generator, length if number else min(length, WARM_UP))
            for side in in_turn(SIDES, number):
                repeats = self._repeats(length, side)
                seconds = self._prompt(side)(ids, repeats)
                self._known[length, side] = seconds * length / len(ids)
                measured.prompts[length][side].append(seconds)

    def _ids(self, generator: random.Random, count: int) -> list[int]:
        return [generator.randrange(3, self.engine.model.spec.vocab_size) for _ in range(count)]

    def _repeats(self, length: int, side: str) -> int:
        known = self._known.get((length, side), REPEATS_S)
        return max(1, min(MOST_REPEATS, round(REPEATS_S / known)))

    def _prompt(self, side: str) -> Callable[[list[int], int], float]:
        """A function that measures the seconds of a prompt, median of several repeats."""
        if side == OURS:
            return self._our_prompt
        return lambda ids, repeats: self.rival.prefill_s(self.threads, side == FLASH, ids, repeats)

    def _our_prompt(self, ids: list[int], repeats: int) -> float:
        ids_T, samples = torch.tensor(ids), []
        for _ in range(repeats):
            began = time.perf_counter()
            self.engine._prefill(ids_T)
            samples.append(time.perf_counter() - began)
        return statistics.median(samples)


def decode_s(engine: Engine, ids: list[int]) -> tuple[float, int]:
    """(seconds a token, bytes a token must read) of tokens one by one, after PROMPT in the
    cache."""
    before, began = engine.traffic.total, time.perf_counter()
    for position, token in enumerate(ids, start=len(PROMPT)):
        engine._step(token, position)
    seconds = (time.perf_counter() - began) / len(ids)
    return seconds, bytes_a_token(engine, before, len(ids))


@dataclass(frozen=True)
class RivalSpeed:
    """Ours against the faster setting of llama.cpp."""

    samples: Samples
    rival: str
    ours_s: float
    theirs_s: float
    in_rounds: float  # median of the ratios; other load slows both sides of a round alike

    @classmethod
    def of(cls, samples: Samples) -> "RivalSpeed":
        medians = {side: statistics.median(samples[side]) for side in SIDES}
        rival = min((PLAIN, FLASH), key=lambda side: medians[side])
        ratios = [b / a for a, b in zip(samples[OURS], samples[rival], strict=True)]
        return cls(dict(samples), rival, medians[OURS], medians[rival], statistics.median(ratios))

    def json(self) -> dict[str, object]:
        return {
            "ours_s": self.ours_s,
            "theirs_s": self.theirs_s,
            "rival": self.rival,
            "times_rival": self.theirs_s / self.ours_s,
            "times_rival_in_rounds": self.in_rounds,
            "samples_s": self.samples,
        }

    def print(self, name: str, ours: str, theirs: str, more: str = "") -> None:
        ratio, flash = self.theirs_s / self.ours_s, "flash" if self.rival == FLASH else "plain"
        print(
            f"  {name:12}{ours:>12}{theirs:>12} {flash}{ratio:7.2f}x{self.in_rounds:10.2f}x{more}"
        )


def _report(kind: str, threads: int, measured: Measured) -> dict[str, object]:
    bandwidth = statistics.median(measured.bandwidths)
    print(f"{kind}, {threads} threads, {bandwidth / 1e9:.1f} GB/s")
    print(f"  {'':12}{'ours':>12}{'llama.cpp':>18}{'ratio':>8}{'in rounds':>11}   of the limit")
    report: dict[str, object] = {"bandwidth_gb_per_s": bandwidth / 1e9}
    if measured.decode:
        report["bytes_a_token"] = measured.step_bytes
        report["limit_tokens_per_s"] = bandwidth / measured.step_bytes
        report["decode"] = _decode_report(measured)
    for length, samples in measured.prompts.items():
        found = RivalSpeed.of(samples)
        ours, theirs = f"{found.ours_s * 1e3:.2f} ms", f"{found.theirs_s * 1e3:.2f} ms"
        found.print(f"prompt {length:4}", ours, theirs)
        report[f"prompt of {length}"] = found.json()
    print(flush=True)
    return report


def _decode_report(measured: Measured) -> dict[str, object]:
    found = RivalSpeed.of(measured.decode)
    shares = []
    for side in (OURS, found.rival):
        rounds = zip(measured.bandwidths, measured.decode[side], strict=True)
        shares.append(statistics.median(measured.step_bytes / b / second for b, second in rounds))
    found.print(
        "decode",
        f"{1 / found.ours_s:.1f}/s",
        f"{1 / found.theirs_s:.1f}/s",
        f"   {shares[0]:.0%}, llama.cpp {shares[1]:.0%}",
    )
    return {
        "tokens_per_s": 1 / found.ours_s,
        "rival_tokens_per_s": 1 / found.theirs_s,
        "share_of_limit": shares[0],
        "rival_share_of_limit": shares[1],
        **found.json(),
    }


def parser() -> argparse.ArgumentParser:
    found = rival_parser(__doc__, types="f16,q8_0,q4_0", rounds=7)
    found.add_argument("--torch-threads", type=int, default=1)
    add_tests(found, prompts="1,5,16,64,256")
    return found


def add_tests(parser: argparse.ArgumentParser, *, prompts: str) -> None:
    """Options for a part of the measurements, so that a run can be short."""
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no round that ends later"
    )
    parser.add_argument("--decode", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--prompts", default=prompts, help="tokens of each prompt")


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


if __name__ == "__main__":
    sys.exit(main())
