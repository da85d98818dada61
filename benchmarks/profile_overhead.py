"""Measures what counting adds to the forward pass: the same windows with and without. A pass with
counting makes a native call for each layer, one without a call for all; the overhead includes that.
Set OMP_WAIT_POLICY=passive, as `profile` does.

Each round runs both on the same tokens, in an order that alternates, after one round that is
discarded; the overhead is the median of the rounds' ratios minus one, in processor time and in
elapsed time. No predictors are trained."""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from machine import processor, slug

from hotsplit import Engine
from hotsplit.files.atomic import partial_file
from hotsplit.profile.count.counting import Counter
from hotsplit.runtime.model.feed_forward import Gate


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    with Engine.load(arguments.model, mode="dense", device=arguments.device) as engine:
        generator = torch.Generator().manual_seed(0)
        vocab_size = engine.model.spec.vocab_size
        windows = torch.randint(vocab_size, (arguments.windows, 512), generator=generator)
        counter = _counter(engine)

        def plain() -> None:
            for ids_T in windows:
                engine.hidden(ids_T)

        def counted() -> None:
            with engine.observe(counter.observe, counter.wants):
                plain()

        runs = (plain, counted)
        rounds = [
            _round(engine, plain, counted, order=runs[:: -1 if number % 2 else 1])
            for number in range(arguments.rounds + 1)
        ][1:]
        shape = engine.model.shape
        result = {
            "benchmark": "profile_overhead",
            "machine": _machine(engine),
            "system": platform.system() + " " + platform.release(),
            "torch": torch.__version__,
            "threads": arguments.threads,
            "load_1_5_15_min": os.getloadavg(),
            "model": Path(arguments.model).name,
            "activation": engine.model.activation,
            "layers_width_neurons": [shape.num_layers, shape.hidden_size, shape.num_neurons],
            "tokens_a_round": windows.numel(),
            "rounds": len(rounds),
            "overhead_processor": round(statistics.median(r[0] for r in rounds) - 1, 4),
            "overhead_clock": round(statistics.median(r[1] for r in rounds) - 1, 4),
        }
    name = f"profile-overhead-{slug(str(result['machine']))}.json"
    output = arguments.output or Path(__file__).parent / "results" / name
    output.parent.mkdir(parents=True, exist_ok=True)
    with partial_file(output) as unfinished:
        unfinished.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def _counter(engine: Engine) -> Counter:
    model = engine.model
    gates = tuple(Gate(activation=model.activation, threshold=t) for t in model.threshold_L)
    return Counter(gates, model.spec.most_neurons)


def _round(
    engine: Engine,
    plain: Callable[[], None],
    counted: Callable[[], None],
    *,
    order: Sequence[Callable[[], None]],
) -> tuple[float, float]:
    """(ratio of processor times, ratio of elapsed times): with counting over without."""
    took = {run: _timed(engine, run) for run in order}
    without, with_counts = took[plain], took[counted]
    return with_counts[0] / without[0], with_counts[1] / without[1]


def _timed(engine: Engine, run: Callable[[], None]) -> tuple[float, float]:
    began = time.process_time(), time.perf_counter()
    run()
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return time.process_time() - began[0], time.perf_counter() - began[1]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model file")
    parser.add_argument(
        "--output", type=Path, help="[default: results/profile-overhead-MACHINE.json]"
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--windows", type=int, default=2, help="windows of 512 tokens per pass")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device")
    return parser.parse_args()


def _machine(engine: Engine) -> str:
    """The name of the device that computed."""
    if engine.device.type == "cuda":
        return torch.cuda.get_device_name(engine.device)
    return processor()


if __name__ == "__main__":
    sys.exit(main())
