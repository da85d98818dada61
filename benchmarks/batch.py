"""Benchmarks a step of several sequences against llama.cpp's batches, alternating in one run.

    python benchmarks/batch.py MODEL STOCK --rival path/to/venv/bin/python [--modes dense,predicted]

MODEL is our model file, STOCK the same for llama.cpp, made by `make smollm2`; `decode.py` makes a
ReLU model and its SiLU twin. A round computes 16 steps with one token of each of 1, 2, 4, 8 and 16
sequences, after prompts of 16 tokens each, on both sides with the same random token ids; figures
are tokens per second of all sequences, from the median over rounds of the mean step. llama.cpp is
measured with and without its flash attention, and the faster counts."""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from machine import result_of, write_result
from rival import Rival

from hotsplit import Engine
from hotsplit.measure.timing.interleave import take_turns
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.sequences import Part

CONTEXT = 256
PROMPT = 16
STEPS = 16
COUNTS = (1, 2, 4, 8, 16)


def main() -> None:
    arguments = _arguments()
    library.set_threads(arguments.threads)
    modes = arguments.modes.split(",")
    result = result_of("batch", model=arguments.model.stem, level=library.level(),
                       threads=arguments.threads, rounds=arguments.rounds)  # fmt: skip
    samples = _measure(arguments, modes)
    sides = {side: _figures(by_count) for side, by_count in samples.items()}
    result |= {"tokens_per_s": sides, "samples_s": samples, "load_after": os.getloadavg()}
    _print(sides, modes)
    print(f"wrote {write_result(result, f'batch-{arguments.name}', arguments.output)}")


def _measure(arguments: argparse.Namespace, modes: list[str]) -> dict[str, dict[int, list[float]]]:
    """Seconds of a step, by side, number of sequences and round."""
    rival = Rival(arguments.rival, arguments.stock, CONTEXT, max(COUNTS))
    engines = {
        mode: Engine.load(
            arguments.model, mode=mode, device="cpu", context_length=CONTEXT,
            num_sequences=max(COUNTS),
        )
        for mode in modes
    }  # fmt: skip
    generator = random.Random(0)
    texts = [
        [generator.randrange(3, 30_000) for _ in range(STEPS)] for _ in range(arguments.rounds + 1)
    ]
    sides: dict[str, Callable[[list[int], int], float]] = {
        **{mode: partial(_ours, engine) for mode, engine in engines.items()},
        "llama.cpp": partial(rival.batch_s, arguments.threads, False),
        "llama.cpp, flash": partial(rival.batch_s, arguments.threads, True),
    }

    def turn_of(side: str, count: int) -> Callable[[int], float]:
        return lambda number: sides[side](texts[number], count)

    keys = [(side, count) for count in COUNTS for side in sides]
    found = take_turns({key: turn_of(*key) for key in keys}, arguments.rounds)
    rival.close()
    return {side: {count: found[side, count] for count in COUNTS} for side in sides}


def _ours(engine: Engine, ids: list[int], count: int) -> float:
    """Mean seconds per step."""
    texts = [engine.sequence() for _ in range(count)]
    engine.run([Part(sequence=text, tokens=[7] * PROMPT) for text in texts])
    began = time.perf_counter()
    for token in ids:
        engine.run([Part(sequence=text, tokens=[token]) for text in texts])
    seconds = (time.perf_counter() - began) / len(ids)
    for text in texts:
        text.close()
    return seconds


def _figures(by_count: dict[int, list[float]]) -> dict[int, float]:
    return {count: count / statistics.median(seconds) for count, seconds in by_count.items()}


def _print(sides: dict[str, dict[int, float]], modes: list[str]) -> None:
    print("tokens/s of all sequences; in brackets ratios to one sequence and to llama.cpp's best")
    for mode in modes:
        cells = []
        for count in COUNTS:
            ours = sides[mode][count]
            theirs = max(f[count] for side, f in sides.items() if side.startswith("llama"))
            cells.append(
                f"{count}: {ours:.1f} ({ours / sides[mode][1]:.2f}x, {ours / theirs:.2f}x)"
            )
        print(f"{mode:9} {'  '.join(cells)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("stock", type=Path)
    parser.add_argument("--rival", required=True, help="a Python that has llama-cpp-python")
    parser.add_argument("--modes", default="dense")
    parser.add_argument(
        "--name", default="smollm2-q8_0", help="name of the model in the name of the results file"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
