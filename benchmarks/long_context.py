"""Measures decode time after long texts: reading all keys, reading selected keys, and llama.cpp.

    python benchmarks/long_context.py MODEL STOCK --rival PYTHON

MODEL is a model file and STOCK the same in llama.cpp's layout. The caches are filled without
processing a long text: ours with random keys and values, llama.cpp's by repeating those of a short
text. At each depth, reading all keys and reading selected keys each alternate with llama.cpp (flash
attention) on the same token ids; a figure is the median of the rounds. The model's context length
is overridden, since its output does not matter here."""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from machine import machine, processor, slug
from rival import Rival

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.files.atomic import partial_file
from hotsplit.options.key_selection import KeySelection
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.sequences import Sequence

DEPTHS = (8192, 32768, 131072)
STEPS = 8
ROOM = 256
PIECE = 8192  # random rows, repeated to fill the cache


@contextmanager
def text_of(model: Path, depth: int, offload: str | None) -> Iterator[tuple[Engine, Sequence]]:
    """An engine with a text of `depth` tokens, which `_depths` has checked."""
    file = ModelFile.load(model)
    file = replace(file, shape=replace(file.shape, context_length=depth + ROOM))
    options = {"mode": "dense", "device": "cpu", "context_length": depth + ROOM}
    with Engine.of(file, kv_offload=offload, **options) as engine, engine.sequence() as text:
        shape = (min(PIECE, depth), file.shape.num_kv_heads, file.shape.head_dim)
        random_TKW = [torch.randn(shape).half() for _ in range(2)]
        state = [tuple(rows.repeat(depth // len(rows), 1, 1) for rows in random_TKW)]
        text.write_state([1] * depth, state * file.spec.num_layers)
        del state
        yield engine, text


def seconds(text: Sequence, ids: list[int], depth: int) -> float:
    samples = []
    for token in ids:
        began = time.perf_counter()
        text.extend([token])
        samples.append(time.perf_counter() - began)
    text.rollback(depth)
    return statistics.median(samples)


def compare(arguments: argparse.Namespace, rival: Rival, depth: int, offload: str | None) -> Any:
    generator = random.Random(0)
    samples: dict[str, list[float]] = {"ours": [], "llamacpp": []}
    with text_of(arguments.model, depth, offload) as (engine, text):
        for number in range(arguments.rounds + 1):
            ids = [generator.randrange(3, 30_000) for _ in range(STEPS)]
            taken = {"ours": seconds(text, ids, depth)}
            taken["llamacpp"] = rival.grown_s(arguments.threads, ids, depth)
            for name, value in taken.items() if number else ():  # the first warms up
                samples[name].append(value)
        kv_bytes = sum(items["kv_cache"] for items in engine.bytes_by_role.values())
    ours, theirs = (statistics.median(samples[name]) for name in ("ours", "llamacpp"))
    print(f"{depth:7} {offload or 'all keys':10} ours {1e3 * ours:.1f} ms, llama.cpp"
          f" {1e3 * theirs:.1f} ms, {theirs / ours:.2f}x", flush=True)  # fmt: skip
    return {
        "ours_s": ours, "llamacpp_s": theirs, "times_rival": theirs / ours, "kv_bytes": kv_bytes,
        "samples_s": samples,
    }  # fmt: skip


def _depths(text: str) -> list[int]:
    depths = [int(depth) for depth in text.split(",")]
    for depth in depths:
        if depth < 1 or (depth > PIECE and depth % PIECE):
            raise argparse.ArgumentTypeError(
                f"a depth is {depth}, wanted 1 to {PIECE}, or a multiple of {PIECE}"
            )
    return depths


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("stock", type=Path, help="the same in llama.cpp's layout")
    parser.add_argument("--rival", required=True, help="Python that has llama-cpp-python")
    parser.add_argument("--offload", default="on", help="sizes, as of --kv-offload")
    parser.add_argument("--depths", type=_depths, default=",".join(map(str, DEPTHS)),
                        help=f"in tokens, each up to {PIECE} or a multiple of it")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    depths = arguments.depths
    library.set_threads(arguments.threads)
    load = os.getloadavg()
    rival = Rival(arguments.rival, arguments.stock, max(depths) + ROOM)
    found: dict[str, Any] = {}
    for depth in depths:
        ways = {"all": None, "chosen": arguments.offload}
        found[str(depth)] = {
            name: compare(arguments, rival, depth, how) for name, how in ways.items()
        }
    rival.close()
    first, last = found[str(depths[0])], found[str(depths[-1])]
    growth = {name: last[name]["ours_s"] / first[name]["ours_s"] for name in ("all", "chosen")}
    growth["llamacpp"] = last["all"]["llamacpp_s"] / first["all"]["llamacpp_s"]
    result = {
        "benchmark": "long-context", "model": arguments.model.stem, "machine": machine(),
        "level": library.level(), "threads": arguments.threads,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_before": load, "load_after": os.getloadavg(),
        "selection": str(KeySelection.parse(arguments.offload)), "rival": rival.about,
        "growth": growth, "depths": found,
    }  # fmt: skip
    print(json.dumps(growth))
    output = arguments.output or (
        Path(__file__).parent / "results" / f"long-context-{slug(processor())}.json"
    )
    with partial_file(output) as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
