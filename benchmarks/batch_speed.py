"""Benchmarks a step of several sequences against llama.cpp's batches, alternating in one run.

    python benchmarks/batch_speed.py MODEL STOCK --rival path/to/python [--modes dense,predicted]

MODEL is our model file, STOCK the same for llama.cpp, made by `make smollm2`; `decode.py` makes a
ReLU model and its SiLU twin. A round computes 16 steps with one token of each of 1, 2, 4, 8 and 16
sequences, after prompts of 16 tokens each, on both sides with the same random token ids, which
differ between sequences; figures are tokens per second of all sequences, from the median over
rounds of the mean step. llama.cpp is measured with and without its flash attention, and the faster
counts."""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cpu_rival import Rival
from machine import result_of, write_result

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
    result = result_of(
        "batch",
        model=arguments.model.stem,
        level=library.level(),
        threads=arguments.threads,
        rounds=arguments.rounds,
    )
    result |= {**measure(arguments, modes, COUNTS), "load_after": os.getloadavg()}
    print(f"wrote {write_result(result, f'batch-{arguments.name}', arguments.output)}")


def measure(
    arguments: argparse.Namespace, modes: list[str], counts: Sequence[int]
) -> dict[str, object]:
    """Tokens a second and seconds of a step, by side, number of sequences and round; prints
    them."""
    samples = _samples(arguments, modes, counts)
    sides = {side: _figures(by_count) for side, by_count in samples.items()}
    _print(sides, modes, counts)
    return {"tokens_per_s": sides, "samples_s": samples}


def _samples(
    arguments: argparse.Namespace, modes: list[str], counts: Sequence[int]
) -> dict[str, dict[int, list[float]]]:
    rival = Rival(arguments.rival, arguments.stock, CONTEXT, max(counts))
    engines = {
        mode: Engine.load(
            arguments.model,
            mode=mode,
            device="cpu",
            context_length=CONTEXT,
            num_sequences=max(counts),
        )
        for mode in modes
    }
    generator = random.Random(0)
    texts = [
        [[generator.randrange(3, 30_000) for _ in range(max(counts))] for _ in range(STEPS)]
        for _ in range(arguments.rounds + 1)
    ]
    sides: dict[str, Callable[[list[list[int]]], float]] = {
        **{mode: partial(_ours, engine) for mode, engine in engines.items()},
        "llama.cpp": partial(rival.batch_s, arguments.threads, False),
        "llama.cpp, flash": partial(rival.batch_s, arguments.threads, True),
    }

    def turn_of(side: str, count: int) -> Callable[[int], float]:
        return lambda number: sides[side]([step[:count] for step in texts[number]])

    keys = [(side, count) for count in counts for side in sides]
    found = take_turns({key: turn_of(*key) for key in keys}, arguments.rounds)
    rival.close()
    return {side: {count: found[side, count] for count in counts} for side in sides}


def _ours(engine: Engine, steps: list[list[int]]) -> float:
    """Mean seconds of a step with a token of each sequence; `steps`: the tokens of each."""
    texts = [engine.sequence() for _ in steps[0]]
    engine.run([Part(sequence=text, tokens=[7] * PROMPT) for text in texts])
    began = time.perf_counter()
    for step in steps:
        engine.run([Part(sequence=t, tokens=[i]) for t, i in zip(texts, step, strict=True)])
    seconds = (time.perf_counter() - began) / len(steps)
    for text in texts:
        text.close()
    return seconds


def _figures(by_count: dict[int, list[float]]) -> dict[int, float]:
    return {count: count / statistics.median(seconds) for count, seconds in by_count.items()}


def _print(sides: dict[str, dict[int, float]], modes: list[str], counts: Sequence[int]) -> None:
    print(
        "tokens/s of all sequences; in brackets ratios to the first number and to llama.cpp's best"
    )
    for mode in modes:
        cells = []
        for count in counts:
            ours = sides[mode][count]
            theirs = max(f[count] for side, f in sides.items() if side.startswith("llama"))
            cells.append(
                f"{count}: {ours:.1f} ({ours / sides[mode][counts[0]]:.2f}x, {ours / theirs:.2f}x)"
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
