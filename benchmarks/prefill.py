"""Benchmarks prefill speed on the CPU against llama.cpp, alternating in one run.

    python benchmarks/prefill.py FOLDER --rival path/to/venv/bin/python

Models and rounds are like those of decode.py: ours runs a Llama of 1.1 B parameters with planted
sparsity in all modes, llama.cpp its SiLU twin of the same shape and type. A measurement is the time
of a prompt of --tokens tokens, up to the logits after it. llama.cpp takes the prompt in one batch,
with and without flash attention; the faster counts. Figures are medians of the rounds.

To force the instruction set of an older processor, with a rival built for the same one
(CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON ..."):

    HOTSPLIT_CPU_LEVEL=avx2 python benchmarks/prefill.py FOLDER --rival ..."""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from cpu_rival import Rival
from decode import MODEL, MODES, make_models, parser
from machine import result_of, write_result
from random_checkpoint import TINYLLAMA

from hotsplit import Engine
from hotsplit.measure.timing.interleave import take_turns
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.threads import use_threads

FORCED = ("HOTSPLIT_CPU_LEVEL",)


def main() -> None:
    arguments = _arguments()
    forced = {name: os.environ[name] for name in FORCED if name in os.environ}
    types = arguments.types.split(",")
    threads = [int(count) for count in arguments.threads.split(",")]
    for kind in types:
        make_models(arguments.folder, kind, arguments.num_layers)
    result = result_of(
        "prefill",
        model=MODEL,
        level=library.level(),
        forced=forced,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
    )
    print(f"{library.level()}, forced: {forced or 'nothing'}")
    result["types"] = {kind: _type(arguments, kind, threads) for kind in types}
    result["load_after"] = os.getloadavg()
    path = write_result(result, f"prefill-{library.level()}", arguments.output)
    print(f"wrote {path}")


def _type(arguments: argparse.Namespace, kind: str, threads: list[int]) -> dict[str, object]:
    folder, num_tokens = arguments.folder, arguments.tokens
    engines = {
        mode: Engine.load(folder / f"{kind}.gguf", mode=mode, context_length=2 * num_tokens)
        for mode in arguments.modes.split(",")
    }
    rival = Rival(arguments.rival, folder / f"{kind}-stock.gguf", 2 * num_tokens)
    generator = random.Random(0)
    texts = [
        [generator.randrange(3, TINYLLAMA.vocab_size) for _ in range(num_tokens)]
        for _ in range(arguments.rounds + 1)
    ]
    sides: dict[str, Callable[[int, list[int]], float]] = {
        **{mode: partial(_ours, engine) for mode, engine in engines.items()},
        "llama.cpp": lambda count, ids: rival.prefill_s(count, False, ids),
        "llama.cpp, flash": lambda count, ids: rival.prefill_s(count, True, ids),
    }

    def turn_of(count: int, side: str) -> Callable[[int], float]:
        return lambda number: sides[side](count, texts[number])

    keys = [(count, side) for count in threads for side in sides]
    times = take_turns({key: turn_of(*key) for key in keys}, arguments.rounds)
    rival.close()
    for engine in engines.values():
        engine.close()
    report: dict[str, object] = {"rival": rival.about}
    for count in threads:
        report[str(count)] = _report(kind, count, num_tokens, times)
    return report


def _ours(engine: Engine, count: int, ids: list[int]) -> float:
    use_threads(count)
    ids_T = torch.tensor(ids)
    began = time.perf_counter()
    engine._prefill(ids_T)
    return time.perf_counter() - began


def _report(
    kind: str, count: int, num_tokens: int, times: dict[tuple[int, str], list[float]]
) -> dict[str, object]:
    runs = {name: seconds for (threads, name), seconds in times.items() if threads == count}
    theirs = min(
        (runs["llama.cpp"], runs["llama.cpp, flash"]),
        key=lambda seconds: statistics.median(seconds),
    )
    print(f"{kind}, {count} threads")
    lines: dict[str, object] = {}
    for name, seconds in runs.items():
        median = statistics.median(seconds)
        # Other load slows both engines alike within a round, so ratios are also taken per round.
        ratio = statistics.median(a / b for a, b in zip(theirs, seconds, strict=True))
        lines[name] = {
            "tokens_per_s": num_tokens / median,
            "best_tokens_per_s": num_tokens / min(seconds),
            "samples_s": seconds,
            "times_rival": statistics.median(theirs) / median,
            "times_rival_in_rounds": ratio,
        }
        print(
            f"  {name:16} {num_tokens / median:7.2f} tokens/s, best"
            f" {num_tokens / min(seconds):7.2f}, {statistics.median(theirs) / median:.2f}x"
            f" llama.cpp ({ratio:.2f}x per round)",
            flush=True,
        )
    return lines


def _arguments() -> argparse.Namespace:
    found = parser(__doc__)
    found.add_argument("--modes", default=",".join(MODES))
    found.add_argument("--tokens", type=int, default=512)
    return found.parse_args()


if __name__ == "__main__":
    sys.exit(main())
