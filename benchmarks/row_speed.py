"""Benchmarks a check of a draft: the time of a pass of r rows of one text over that of one row,
beside other programs' llama-bench, in turns.

    python benchmarks/row_speed.py MODEL... [--rival NAME=path/to/llama-bench[,option,...]]
    python benchmarks/row_speed.py --make qwen3-30b-a3b-q4_k_m.gguf

Ours has the logits of all rows, as a check needs them, at each of --levels; a rival's pass of r
tokens (`-p r -n 0`) only those of the last one, at the instructions that it was built for. A round
is a few passes of each number of rows by each side; the least time of all rounds counts. Texts have
random ids and 64 tokens before the rows. `--make` writes twelve layers in Qwen3-30B-A3B's shape.
Runs with fewer models add to one result."""

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llama_bench import seconds_of
from machine import add_to_result, result_of
from random_model import make_mixture

from hotsplit import Engine
from hotsplit.measure.timing.interleave import take_turns
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.sequences import Part

ROWS = (1, 2, 3, 4, 5, 6, 8)
BEFORE = 64  # tokens
PASSES = 5  # of each number of rows in a round


def main() -> None:
    arguments = _arguments()
    if arguments.make:
        return make_mixture(arguments.make, "qwen3-30b-a3b", "q4_k_m")
    library.set_threads(arguments.threads)
    result = result_of("rows", threads=arguments.threads, rounds=arguments.rounds)
    result["models"] = {path.stem: _measure(arguments, path) for path in arguments.models}
    print(f"wrote {add_to_result(result, 'rows', arguments.output)}")
    return None


def _measure(arguments: argparse.Namespace, path: Path) -> dict[str, dict[str, float]]:
    """The least seconds of a pass, by side and number of rows; prints them."""
    with Engine.load(path, mode="dense", device="cpu", context_length=256) as engine:
        levels = arguments.levels.split(",") if arguments.levels else _levels()
        sides: dict[str, Callable[[int], dict[int, float]]] = {
            level: partial(_ours, engine, level) for level in levels
        }
        for rival in arguments.rival:
            name, command = rival.split("=", 1)
            sides[name] = partial(_theirs, command.split(","), path, arguments.threads)
        samples = take_turns(sides, arguments.rounds)
    report = {}
    for side, rounds in samples.items():
        least = {rows: min(found[rows] for found in rounds) for rows in ROWS}
        report[side] = {str(rows): seconds for rows, seconds in least.items()}
        cells = "  ".join(f"{rows}: {seconds / least[1]:.2f}" for rows, seconds in least.items())
        print(f"{path.stem}, {side}: one row {1e3 * least[1]:.1f} ms; over it {cells}", flush=True)
    return report


def _levels() -> list[str]:
    """The best level, and avx2."""
    return list(dict.fromkeys([library.usable_levels()[0], "avx2"]))


def _ours(engine: Engine, level: str, number: int) -> dict[int, float]:
    """The least seconds of a pass by its number of rows, in a round."""
    library.set_level(level)
    generator, size = random.Random(number), engine.model.spec.vocab_size
    text = engine.sequence()
    text.extend([generator.randrange(3, size) for _ in range(BEFORE)], "none")
    least = dict.fromkeys(ROWS, float("inf"))
    for _ in range(PASSES):
        for rows in ROWS:
            ids = [generator.randrange(3, size) for _ in range(rows)]
            began = time.perf_counter()
            engine.run([Part(sequence=text, tokens=ids, wanted="all")])
            least[rows] = min(least[rows], time.perf_counter() - began)
            text.rollback(BEFORE)
    text.close()
    return least


def _theirs(command: list[str], path: Path, threads: int, _number: int) -> dict[int, float]:
    """The same by a llama-bench."""
    found = seconds_of(command, path, threads, prompts=ROWS, repetitions=PASSES)
    return {rows: min(seconds) for rows, seconds in found.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--make", type=Path, help="write a mixture to this path instead")
    parser.add_argument("--rival", action="append", default=[], help="NAME=LLAMA_BENCH,OPTION,...")
    parser.add_argument("--levels", default="", help="ours; the best and avx2 unless told")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
