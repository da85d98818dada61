"""Benchmarks a mixture of experts on the CPU against llama.cpp, alternating in one run.

    python benchmarks/expert_speed.py FOLDER --rival path/to/venv/bin/python [--model qwen3-30b-a3b]
    [--types q4_k_m,q8_0]

The models are random, in the shapes that random_model.py lists; files missing in FOLDER are made
first, and nothing is measured in that run. Both sides run the stock layout as it is. What is
measured, and how, is described in chat_model.py. The limit of decode is that of the bytes of the
experts that were chosen. With --sequences 8, steps with one token of each of eight texts are
measured instead, as in batch_speed.py. With --positions 100,4096,32768, our tokens after texts of
these lengths are measured instead, without the rival: whole, and the part of each kind of layer
that is not its products (attention, or a gated delta net).

A model with silent neurons is in our layout and is measured in modes `dense` and `exact` instead:
seconds and bytes a token of both, and of the neurons in it, alternating; beside llama.cpp if it has
no experts (minitron-4b), which runs a model of the same shape in the stock layout.

A run adds its figures to those of earlier runs in the result, so that each can be short."""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import batch_speed
import torch
from chat_model import CONTEXT, STEPS, Tests, add_tests, decode_s, measure, numbers
from cpu_rival import PROMPT, Rival, rival_parser
from machine import add_to_result, result_of
from random_model import LAYOUTS, SHAPES, make_mixture, route_of

from hotsplit import Engine
from hotsplit.measure.bench.runner import cpu_bandwidth
from hotsplit.measure.timing.interleave import take_turns
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.native_step import PARTS, NativeStep, timed_parts

MODES = ("dense", "exact")


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    paths = {
        kind: arguments.folder / f"{arguments.model}-{kind}.gguf"
        for kind in arguments.types.split(",")
    }
    missing = {kind: path for kind, path in paths.items() if not path.exists()}
    for kind, path in missing.items():
        make_mixture(path, arguments.model, kind)
        if route_of(arguments.model) is None:
            make_mixture(_twin(path), arguments.model, kind, layout="stock")
    if missing:
        return print(f"made {', '.join(map(str, missing.values()))}; run this again to measure")
    for kind, path in paths.items():
        print(f"wrote {_write(arguments, kind, _reports(arguments, path))}")
    return None


def _reports(arguments: argparse.Namespace, path: Path) -> dict[str, object]:
    """What a run measures, by number of threads."""
    threads, counts = numbers(arguments.threads), numbers(arguments.sequences)
    if positions := numbers(arguments.positions):
        return {str(count): _after_texts(path, count, positions) for count in threads}
    if counts:
        return {str(count): _batches(arguments, path, count, counts) for count in threads}
    if LAYOUTS.get(arguments.model) == "sparse":
        has_rival = route_of(arguments.model) is None
        rival = Rival(arguments.rival, _twin(path), CONTEXT) if has_rival else None
        return {str(count): _modes(path, count, arguments.rounds, rival) for count in threads}
    return measure(path, arguments, list(threads), Tests.of(arguments), cpu_bandwidth())


def _twin(path: Path) -> Path:
    """The rival's file of a model in our layout."""
    return path.with_suffix(".stock.gguf")


def _write(arguments: argparse.Namespace, kind: str, reports: dict[str, object]) -> Path:
    """Adds a run's reports, by number of threads, to those of earlier runs in the result."""
    name = f"experts-{arguments.model}-{kind}"
    result = result_of(
        "experts", model=arguments.model, type=kind, level=library.level(), rounds=arguments.rounds
    )
    return add_to_result(result | reports, name, arguments.output)


def _batches(
    arguments: argparse.Namespace, path: Path, threads: int, counts: tuple[int, ...]
) -> dict[str, object]:
    library.set_threads(threads)
    asked = argparse.Namespace(
        model=path, stock=path, rival=arguments.rival, threads=threads, rounds=arguments.rounds
    )
    return {"batches": batch_speed.measure(asked, ["dense"], counts)}


def _after_texts(path: Path, threads: int, positions: tuple[int, ...]) -> dict[str, object]:
    """Seconds of a token of STEPS after texts of these lengths, whose keys, values and states are
    zeros: times do not depend on them; then those of a prompt's tokens."""
    library.set_threads(threads)
    generator, report, length = random.Random(0), {}, max(positions) + STEPS
    with Engine.load(path, mode="dense", device="cpu", context_length=length) as engine:
        ids = [generator.randrange(3, engine.model.spec.vocab_size) for _ in range(CONTEXT)]
        states = engine._live.weights.states

        def decode(position: int) -> None:
            if states is not None:
                states.take(0, [position])
            for number, token in enumerate(ids[:STEPS]):
                engine._step(token, position + number)

        decode(positions[0])  # warms up
        for position in positions:
            report[str(position)] = _by_kind(engine, partial(decode, position), STEPS)
            print(f"{path.stem}, {threads} threads, after {position}: {report[str(position)]}")
        prompt = _by_kind(engine, lambda: engine._prefill(torch.tensor(ids)), CONTEXT)
        print(f"{path.stem}, {threads} threads, tokens of a prompt of {CONTEXT}: {prompt}")
    return {"after_texts": report, "tokens_of_prompt": prompt}


def _by_kind(engine: Engine, run: Callable[[], object], num_tokens: int) -> dict[str, float]:
    """Seconds a token: of all, of attention in its layers, and of the delta nets in theirs, both
    without products."""
    native = engine._live.native
    assert isinstance(native, NativeStep)
    attends_L = torch.tensor([layer.recurrent is None for layer in engine.model.spec.layers])
    with timed_parts(native) as counts_LP2:
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
    mixing_L = 1e-9 * counts_LP2[:-1, PARTS.index("attend"), 0]
    attention_s, delta_s = (float(mixing_L[which].sum()) for which in (attends_L, ~attends_L))
    parts = {"s": seconds, "attention_s": attention_s, "delta_s": delta_s}
    return {name: value / num_tokens for name, value in parts.items()}


def _modes(path: Path, threads: int, rounds: int, rival: Rival | None) -> dict[str, object]:
    """Decode in both modes and by the rival, in turn: seconds and bytes a token of each round."""
    library.set_threads(threads)
    generator = random.Random(0)
    engines = {
        mode: Engine.load(path, mode=mode, device="cpu", context_length=CONTEXT) for mode in MODES
    }
    size = engines["dense"].model.spec.vocab_size
    texts = [[generator.randrange(3, size) for _ in range(STEPS)] for _ in range(rounds + 1)]

    def turn_of(engine: Engine) -> Callable[[int], tuple[float, int, float, float]]:
        return lambda number: _parts(engine, texts[number])

    turns = {mode: turn_of(engine) for mode, engine in engines.items()}
    if rival is not None:
        turns["llama.cpp"] = lambda number: (
            rival.decode_s(threads, True, texts[number]),
            0,
            0.0,
            0.0,
        )
    found = take_turns(turns, rounds)
    report: dict[str, object] = {"bandwidth_gb_per_s": cpu_bandwidth()() / 1e9}
    medians = {}
    for mode, samples in found.items():
        names = ("s", "bytes", "experts_s", "experts_bytes")
        columns = dict(zip(names, zip(*samples, strict=True), strict=True))
        medians[mode] = {name: statistics.median(values) for name, values in columns.items()}
        report[mode] = {"a_token": medians[mode], "samples": columns}
        print(f"{path.stem}, {threads} threads, {mode}: {medians[mode]}")
    ratios = {name: value / medians["exact"][name] for name, value in medians["dense"].items()}
    report["dense_over_exact"] = ratios
    print(f"dense over exact: {ratios}")
    return report


def _parts(engine: Engine, ids: list[int]) -> tuple[float, int, float, float]:
    """Seconds and bytes of a token, then those of its experts."""
    native = engine._live.native
    assert isinstance(native, NativeStep)
    engine._prefill(torch.tensor(PROMPT))
    with timed_parts(native) as counts_LP2:
        seconds, read = decode_s(engine, ids)
    ns, num_bytes = counts_LP2[:, PARTS.index("neurons")].sum(dim=0).tolist()
    return seconds, read, 1e-9 * ns / len(ids), num_bytes / len(ids)


def _arguments() -> argparse.Namespace:
    parser = rival_parser(__doc__, types="q4_k_m,q8_0", rounds=3)
    parser.add_argument("--model", choices=list(SHAPES), default="qwen3-30b-a3b")
    add_tests(parser, prompts="16,64,512")
    parser.add_argument(
        "--sequences",
        default="",
        help="measure steps of so many texts instead of decode and prompts",
    )
    parser.add_argument(
        "--positions", default="", help="measure our tokens after texts of these lengths instead"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
