"""Compares the CPU's part of plans with the CPU engine's own step of the same layers.

    python benchmarks/plan_part.py [MODEL] [--types q8_0,q4_0] [--threads 2,1]

Without MODEL, random models of TinyLlama's shape (1.1 B parameters) are made in memory. Both roles of
a plan are on the CPU, where the GPU's kernels do nothing; the hand-overs of a step are served as
beside a GPU whose flags are all set: in one call, by the first of the kernels' threads. A round decodes some tokens in mode dense with the CPU engine, whose parts are timed,
and with each plan, alternating. The time of a round is that of its fastest token, since other load
only adds to it; a ratio is the median of the rounds', and 1.00 is the CPU engine's time for as many
bytes of the same matrices."""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from machine import result_of, write_result
from random_checkpoint import TINYLLAMA

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from models import family_spec, required_shapes
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.files.gguf_file import TensorEntry, type_of
from hotsplit.measure.timing.interleave import take_turns
from hotsplit.runtime.device.streams import HostNode, PlainStream
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gpu.kernels import NAMES, Kernels
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.doorbells import HandoverStruct, ServingStruct
from hotsplit.runtime.step.plain_backend import plain_backend
from hotsplit.runtime.step.step_times import PARTS, timed_parts

CONTEXT = 64
ROUNDS = 7
SECONDS = 0.4  # of decoding per measurement
LINE = 16  # int32 values in a cache line
MADE_ROWS = 256  # random rows, which a matrix repeats


def main() -> None:
    arguments = _arguments()
    result = result_of("plan_part", level=library.level(), rounds=arguments.rounds)
    threads = [int(count) for count in arguments.threads.split(",")]
    if arguments.model is not None:
        result[arguments.model.stem] = _measured(
            ModelFile.load(arguments.model), threads, arguments
        )
    else:
        for kind in arguments.types.split(","):
            result[f"1.1 B, {kind}"] = _measured(random_model(kind), threads, arguments)
    result["load_after"] = os.getloadavg()
    print(f"wrote {write_result(result, 'plan-part', arguments.output)}")


class CollectingStream(PlainStream):
    """Keeps host functions instead of running them."""

    def __init__(self) -> None:
        self.nodes: list[HostNode] = []

    def host(self, node: HostNode) -> None:
        self.nodes.append(node)


class Served:
    """Runs host functions as those of a GPU's step whose flags are set."""

    def __init__(self, nodes: list[HostNode]) -> None:
        self._ready, self._done = (np.ones(LINE * len(nodes), np.int32) for _ in range(2))
        flags = [
            (self._ready[i:].ctypes.data, self._done[i:].ctypes.data)
            for i in range(0, LINE * len(nodes), LINE)
        ]
        self._handovers = (HandoverStruct * len(nodes))(*[
            HandoverStruct(function=node.function, argument=node.argument, ready=ready, done=done)
            for node, (ready, done) in zip(nodes, flags, strict=True)
        ])  # fmt: skip
        self._serving, self._kept = ServingStruct(), nodes

    def seconds(self) -> float:
        began = time.perf_counter()
        library.serve(self._handovers, 0, len(self._handovers), self._serving)
        return time.perf_counter() - began


def _plans(model: ModelFile) -> dict[str, Split]:
    """Plans with the head on the GPU."""
    num_layers, num_neurons = model.spec.num_layers, model.spec.most_neurons
    every, none = np.arange(num_neurons), np.arange(0)
    half = num_layers // 2
    layers = (
        [none] * half + [every] * (num_layers - half),
        [False] * half + [True] * (num_layers - half),
    )
    hot = {
        "half of the layers": layers,
        "all neurons": ([none] * num_layers, [True] * num_layers),
        "half of the neurons": (
            [every[: num_neurons // 128 * 64]] * num_layers,
            [True] * num_layers,
        ),
        "half and 13 neurons": ([every[: num_neurons // 2 - 13]] * num_layers, [True] * num_layers),
    }
    made = {
        name: make_split(model, ids, dense_on_gpu=dense, context_length=CONTEXT)
        for name, (ids, dense) in hot.items()
    }
    return {name: dataclasses.replace(split, mode="dense") for name, split in made.items()}


def _measured(
    model: ModelFile, threads: list[int], arguments: argparse.Namespace
) -> dict[str, object]:
    plans = _plans(model)
    engines = [Engine.of(model, mode="dense", device="cpu", context_length=CONTEXT)]
    turns: dict[str, Callable[[int], np.ndarray]] = {"CPU alone": _alone(engines[0])}
    for name, split in plans.items():
        engines.append(Engine.of(model, split, device="cpu"))
        turns[name] = _part(engines[-1], split)
    found: dict[str, object] = {}
    for count in threads:
        library.set_threads(count)
        samples = take_turns(turns, arguments.rounds)
        alone = samples.pop("CPU alone")
        ms = 1e3 * statistics.median(float(parts_LP.sum()) for parts_LP in alone)
        print(f"{model.path.name}, {count} threads: CPU alone {ms:.2f} ms")
        found[str(count)] = {
            name: _compared(name, split, model.spec.most_neurons, samples[name], alone)
            for name, split in plans.items()
        }
    for engine in engines:
        engine.close()
    return found


def _compared(
    name: str, split: Split, num_neurons: int, samples: list[np.ndarray], alone: list[np.ndarray]
) -> dict[str, object]:
    """Prints and returns a plan's seconds, and those of the CPU engine for the same work."""
    got = [float(seconds) for seconds in samples]
    want = [_of_plan(split, num_neurons, parts_LP) for parts_LP in alone]
    ratio = statistics.median(a / b for a, b in zip(got, want, strict=True))
    ms = 1e3 * statistics.median(got)
    print(f"  {name:22} {ms:6.2f} ms, {ratio:.2f} times the CPU engine's time", flush=True)
    return {"seconds": got, "of_cpu_engine": want, "ratio": ratio}


def _of_plan(split: Split, num_neurons: int, parts_LP: np.ndarray) -> float:
    """The CPU engine's seconds for what a plan leaves to the CPU."""
    seconds, is_ffn = 0.0, np.array([part.startswith("neurons") for part in PARTS])
    for ids, on_gpu, parts_P in zip(split.hot, split.dense_on_gpu, parts_LP, strict=False):
        seconds += parts_P[is_ffn].sum() * (1 - len(ids) / num_neurons)
        seconds += 0.0 if on_gpu else parts_P[~is_ffn].sum()
    return float(seconds)


def _fastest(run: Callable[[int], np.ndarray]) -> Callable[[int], np.ndarray]:
    """A turn: the seconds of its fastest token. `run` decodes the token at a position and returns its
    seconds, in all or by part."""

    def turn(number: int) -> np.ndarray:
        began, found = time.perf_counter(), []
        while len(found) < 2 or time.perf_counter() - began < SECONDS:
            found.append(run(len(found) % CONTEXT))
        return min(found, key=lambda seconds: float(seconds.sum()))

    return turn


def _alone(engine: Engine) -> Callable[[int], np.ndarray]:
    def run(position: int) -> np.ndarray:
        with timed_parts(engine._live.native) as counts_LP2:
            engine._step(7, position)
        return counts_LP2[..., 0].numpy() / 1e9

    return _fastest(run)


def _part(engine: Engine, split: Split) -> Callable[[int], np.ndarray]:
    weights, stream = engine._live.weights, CollectingStream()

    def nothing(*given: object, **options: object) -> None:
        pass

    kernels = Kernels(**dict.fromkeys(NAMES, nothing), own=lambda kernel: nothing)
    backend = plain_backend(kernels)
    backend = dataclasses.replace(backend, stream=lambda device: stream)
    placement = Placement.of_split(split, (torch.device("cpu"),))
    step = hybrid_builder.build(weights, placement, engine.traffic, backend)
    stream.nodes.clear()
    step.run(7, 0)
    served = Served(stream.nodes.copy())

    def run(position: int) -> np.ndarray:
        stream.nodes.clear()
        step.run(7, position)  # sets the position
        return np.array(served.seconds())

    return _fastest(run)


def random_model(kind: str) -> ModelFile:
    """A SiLU model of TinyLlama's shape, whose rows repeat."""
    model = ModelFile(
        path=Path(f"1.1 B, {kind}"), layout="sparse", model_id="0" * 64,
        bare_spec=family_spec("llama", TINYLLAMA), threshold_L=(0.0,) * TINYLLAMA.num_layers,
        predictor=None, tensors={}, extra_keys={},
    )  # fmt: skip
    tensors = {name: _random(dims, kind) for name, dims in required_shapes(model).items()}
    return dataclasses.replace(model, tensors=tensors)


def _random(dims: tuple[int, ...], kind: str) -> TensorEntry:
    if len(dims) == 1:
        return TensorEntry(
            shape=dims, kind="f32", read_rows=lambda a, b: np.ones(b - a, np.float32)
        )
    values = np.random.default_rng(0).normal(0.0, 0.02, (MADE_ROWS, dims[1])).astype(np.float32)
    made = gguf.quants.quantize(values, type_of(kind))
    return TensorEntry(
        shape=dims, kind=kind, read_rows=lambda a, b: made[np.arange(a, b) % MADE_ROWS]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--types", default="q8_0,q4_0,f16")
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
