"""Benchmarks one processor, in one command of ten minutes: a row, a few rows and prompts, at each
level that it has, beside other programs in turns.

    python benchmarks/by_processor.py MODEL... --rival NAME=path/to/llama-bench[,OPTION,...]
    python benchmarks/by_processor.py --make FOLDER

`--make` writes what it is meant for: 1.1 B weights at random in TinyLlama's shape, all matrices in
q8_0, q4_0, q5_k and f16, in Q4_K_M's mixture, and twelve layers in Qwen3-30B-A3B's shape in that.
Real models are better: Qwen2.5-Coder-1.5B, SmolLM2, Gemma 3 270M (Makefile).

A row is a token after a short text; rows are prompts of so many tokens, of which all programs
compute the last one's logits. Rivals run at the instructions that they were built for. The least
time of all rounds counts, and no round begins that would end after --seconds. The limit is the
bytes that a token must read over what memory gave in the same rounds. Cells in which a rival is
faster are named at the end. Runs with fewer models or levels add to one result."""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from low_bits import Speeds, about
from machine import add_to_result, result_of
from random_model import make_dense, make_mixture

from hotsplit.measure.bench.runner import cpu_bandwidth
from hotsplit.runtime.kernels.cpu import library

ROWS = (2, 4, 8, 16, 64, 256)
KINDS = ("q8_0", "q4_0", "q4_k_m", "q5_k", "f16")


def main() -> None:
    arguments = _arguments()
    if arguments.make:
        for kind in KINDS:
            make_dense(arguments.make / f"1.1b-{kind}.gguf", kind)
        return make_mixture(arguments.make / "qwen3-30b-a3b-q4_k_m.gguf", "qwen3-30b-a3b", "q4_k_m")
    torch.set_num_threads(1)
    rivals = dict(each.split("=", 1) for each in arguments.rival)
    levels = arguments.levels.split(",") if arguments.levels else library.usable_levels()[:-1]
    threads = list(map(int, arguments.threads.split(",")))
    began, bandwidth, slower = time.perf_counter(), cpu_bandwidth(), []
    for number, model in enumerate(arguments.models):
        now = time.perf_counter()
        left = (began + arguments.seconds - now) / (len(arguments.models) - number)
        measured = Speeds(model, levels, rivals, bandwidth, ROWS)
        measured.measure(threads, arguments.rounds, now + left)
        report = measured.report()
        slower += list(slower_cells(model.stem, report))
        result = result_of("by_processor", files={model.stem: about(model) | {"speed": report}})
        path = add_to_result(result, "by-processor", arguments.output)
    print("\n".join(slower) or "no cell in which a rival is faster")
    print(f"wrote {path}")
    return None


def slower_cells(name: str, report: dict[str, Any]) -> Iterator[str]:
    """The cells of a `Speeds.report` in which a rival is faster than one of our levels."""
    levels = report["memory_bytes"]
    for threads, found in report.items():
        sides = found["sides"] if isinstance(found, dict) and "sides" in found else {}
        for level in (side for side in sides if side in levels):
            for rival in (side for side in sides if side not in levels):
                own, other = cells_of(sides[level]), cells_of(sides[rival])
                for rows, seconds in own.items():
                    if (ratio := other[rows] / seconds) < 1:
                        share = f", {sides[level]['share_of_limit']:.0%} of the limit"
                        yield (
                            f"{name}, {threads} threads, {level}, {rows} rows: {ratio:.2f}x"
                            f" {rival}{share * (rows == 1)}"
                        )


def cells_of(side: dict[str, Any]) -> dict[int, float]:
    """Seconds by number of rows."""
    return {1: side["token_s"]} | {int(n): s for n, s in side["prompts_s"].items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--make", type=Path, help="write models to this folder instead")
    parser.add_argument("--rival", action="append", default=[], help="NAME=LLAMA_BENCH,OPTION,...")
    parser.add_argument(
        "--levels",
        default="",
        help="ours; all that the processor has, but for generic, unless told",
    )
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--output", type=Path)
    found = parser.parse_args()
    if not found.models and not found.make:
        parser.error("no MODEL; --make FOLDER writes some")
    return found


if __name__ == "__main__":
    sys.exit(main())
