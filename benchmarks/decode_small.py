"""Benchmarks decode of the bundled model against its byte limit and against torch.

    python benchmarks/decode_small.py MODEL.gguf

MODEL is written to build/demo by `make demo`. For every mode: milliseconds a step with the native
call, through the ordinary path (many native calls), and with torch alone; the bytes that a step
must read over the read bandwidth measured in the same rounds (the model fits into the last-level
cache, so this limit can be exceeded); and the time of a step right after a product by torch with
all its threads, which spin while they wait for more work, and alongside a thread that multiplies
with torch all the time. The medians of the rounds go to results/."""

import argparse
import json
import os
import statistics
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from decode import MODES, _bandwidth
from machine import machine, processor, slug

from hotsplit import Engine
from hotsplit.files.atomic import partial_file
from hotsplit.files.gguf_file import array_entry
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.weights.resident import Residence

CONTEXT, PROMPT, STEPS = 128, 16, 100


def main() -> None:
    arguments = _arguments()
    weight = Residence().matrix(array_entry(np.ones((1 << 15, 1 << 11)), "f32")).data
    product = torch.ones(384, 384)
    result: dict[str, object] = {
        "benchmark": "decode_small",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "level": library.level(),
        "threads": library.num_threads(),
        "torch_threads": torch.get_num_threads(),
        "load_before": os.getloadavg(),
        "rounds": arguments.rounds,
    }
    for mode in MODES:
        result[mode] = _mode(arguments, mode, weight, product)
        print(mode, json.dumps(result[mode]), flush=True)
    result["load_after"] = os.getloadavg()
    name = f"decode-small-{slug(processor())}.json"
    with partial_file(Path(__file__).parent / "results" / name) as partial:
        partial.write_text(json.dumps(result, indent=2) + "\n")


def _mode(
    arguments: argparse.Namespace, mode: str, weight: torch.Tensor, product: torch.Tensor
) -> dict[str, float]:
    with Engine.load(arguments.model, mode=mode, device="cpu", context_length=CONTEXT) as engine:
        for position in range(PROMPT):
            engine._step(7, position)
        before = engine.traffic.total
        _step_s(engine)
        items = engine.bytes_by_role["cpu"]
        read = items["attention"] + items["head"] + (engine.traffic.total - before) // STEPS
        rounds = [_round(engine, weight, product) for _ in range(arguments.rounds)]
    middle = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    limit = read / middle.pop("bandwidth")
    middle = {name: 1e3 * seconds for name, seconds in middle.items()}
    return middle | {
        "bytes": read,
        "limit_ms": 1e3 * limit,
        "share_of_limit": 1e3 * limit / middle["native_ms"],
        "times_torch": middle["torch_ms"] / middle["native_ms"],
        "after_torch_over_alone": middle["after_torch_ms"] / middle["native_ms"],
    }


def _round(engine: Engine, weight: torch.Tensor, product: torch.Tensor) -> dict[str, float]:
    found = {"bandwidth": _bandwidth(weight), "native_ms": _step_s(engine)}
    with engine.observe(lambda name, layer, value: None, lambda name, layer: False):
        found["ordinary_ms"] = _step_s(engine, 20)
        kept, library._lib = library._lib, None  # as if the kernels were not built
        try:
            found["torch_ms"] = _step_s(engine, 5)
        finally:
            library._lib = kept
    found["after_torch_ms"] = _after_s(engine, product)
    found["beside_torch_ms"] = _beside_s(engine, product)
    return found


def _step_s(engine: Engine, steps: int = STEPS) -> float:
    return engine.decode_seconds(steps=steps, start=PROMPT) / steps


def _after_s(engine: Engine, product: torch.Tensor) -> float:
    """Seconds of a step right after a product by torch, without the product."""
    total = 0.0
    for position in range(PROMPT, PROMPT + STEPS):
        product @ product
        began = time.perf_counter()
        engine._step(7, position)
        total += time.perf_counter() - began
    return total / STEPS


def _beside_s(engine: Engine, product: torch.Tensor) -> float:
    """Seconds of a step while another thread multiplies all the time."""
    is_over = threading.Event()

    def multiply() -> None:
        while not is_over.is_set():
            product @ product

    other = threading.Thread(target=multiply)
    other.start()
    try:
        return _step_s(engine)
    finally:
        is_over.set()
        other.join()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args()


if __name__ == "__main__":
    main()
