"""Benchmarks decoding on the CPU against llama.cpp and the machine's limit, alternating in one run.

    python benchmarks/decode.py FOLDER --rival path/to/venv/bin/python

Models: a synthetic Llama of 1.1 B parameters with planted sparsity (planted_checkpoint.py), which
hotsplit runs in all modes, and for llama.cpp its SiLU twin of the same shape and type. Files
missing in FOLDER are made first. A round runs every mode and the rival (with flash attention) once,
on the same token ids; figures are medians of the rounds, unless named otherwise. The limit is the
read bandwidth over the bytes that a token must read; the bandwidth, which may change within
seconds, is measured before and after each run as by `hotsplit bench`, and their mean counts. The
sparse feed-forward is also measured alone, over a tenth of the neurons, counting only the bytes of
their rows."""

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from cpu_rival import Rival, rival_parser
from machine import result_of, write_result
from planted_checkpoint import make_planted
from random_checkpoint import TINYLLAMA

from hotsplit import Engine
from hotsplit.convert.convert import ConvertConfig, convert
from hotsplit.measure.bench.runner import Bandwidth, cpu_bandwidth
from hotsplit.measure.timing.interleave import in_turn
from hotsplit.runtime.device.bits import pack_bits
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.ops.neurons.native import NativeNeurons

MODEL = "synthetic: planted_checkpoint.py"
MODES = ("dense", "exact", "predicted")
FFN = "a tenth of all neurons"
CONTEXT = 128
PROMPT = 16
SECONDS = 0.7  # of decoding per measurement
MOST_TOKENS = CONTEXT - PROMPT


def bytes_read(neurons: NativeNeurons) -> int:
    struct = neurons.struct
    return struct.gate_bytes + struct.up_bytes + struct.down_bytes


class Tenth:
    """Runs gate, up and down of a tenth of the neurons of every layer, one tenth after another."""

    def __init__(self, engine: Engine) -> None:
        always = Gate(activation="fatrelu", threshold=-math.inf)  # predicted neurons always fire
        self.neurons = [
            NativeNeurons.of(layer.ffn.blocks[0], always, layer.ffn.num_neurons, is_named=True)
            for layer in engine.layers
        ]
        order = torch.rand(engine.model.spec.most_neurons).argsort()
        named = [torch.zeros(len(order), dtype=torch.bool) for _ in range(10)]
        self.masks = [
            pack_bits(n.index_fill_(0, ids, True))
            for n, ids in zip(named, order.chunk(10), strict=True)
        ]
        for neurons in self.neurons:
            neurons.x_D.fill_(1.0)

    def run(self) -> tuple[float, int]:
        """(seconds, bytes) of all layers, averaged over all tenths."""
        before, seconds = sum(map(bytes_read, self.neurons)), 0.0
        for mask in self.masks:
            for neurons in self.neurons:
                assert neurons.named_W is not None
                neurons.named_W.copy_(mask)
            began = time.perf_counter()
            for neurons in self.neurons:
                neurons.node.run()
            seconds += time.perf_counter() - began
        read = sum(map(bytes_read, self.neurons)) - before
        return seconds / len(self.masks), read // len(self.masks)


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    bandwidth = cpu_bandwidth()
    result = result_of("decode", model=MODEL, level=library.level(), rounds=arguments.rounds)
    threads = [int(count) for count in arguments.threads.split(",")]
    types = arguments.types.split(",")
    for kind in types:
        make_models(arguments.folder, kind, arguments.num_layers)
    result["types"] = {kind: _type(arguments, kind, threads, bandwidth) for kind in types}
    result["load_after"] = os.getloadavg()
    print(f"wrote {write_result(result, 'decode', arguments.output)}")


def _type(
    arguments: argparse.Namespace, kind: str, threads: list[int], bandwidth: Bandwidth
) -> dict[str, object]:
    folder = arguments.folder
    engines = {
        mode: Engine.load(folder / f"{kind}.gguf", mode=mode, context_length=CONTEXT)
        for mode in MODES
    }
    for engine in engines.values():  # once: decoding overwrites later positions only
        for position in range(PROMPT):
            engine._step(7, position)
    tenth = Tenth(engines["predicted"])
    rival = Rival(arguments.rival, folder / f"{kind}-stock.gguf", CONTEXT)
    times: dict[tuple[int, str], list[float]] = {}
    bandwidths: dict[tuple[int, str], list[float]] = {}
    read: dict[str, int] = {}
    known: dict[int, float] = {}  # the rival's seconds per token in the previous round
    generator = random.Random(0)
    for number in range(arguments.rounds + 1):  # the first warms up
        for count in threads:
            library.set_threads(count)
            ids = [generator.randrange(3, TINYLLAMA.vocab_size) for _ in range(MOST_TOKENS)]
            some = ids[: 4 if number == 0 else _how_many(known[count])]
            runs: dict[str, Callable[[], tuple[float, int]]] = {
                **{mode: partial(_ours, engine, ids) for mode, engine in engines.items()},
                FFN: tenth.run,
                "llama.cpp": partial(_theirs, rival, count, some),
            }
            probes = [bandwidth()]
            for mode in in_turn(list(runs), number):
                seconds, num_bytes = runs[mode]()
                probes.append(bandwidth())
                if number:
                    times.setdefault((count, mode), []).append(seconds)
                    bandwidths.setdefault((count, mode), []).append(sum(probes[-2:]) / 2)
                    read[mode] = num_bytes
                if mode == "llama.cpp":
                    known[count] = seconds
    rival.close()
    for engine in engines.values():
        engine.close()
    return _report(kind, threads, times, bandwidths, read, rival.about)


def _how_many(seconds_a_token: float) -> int:
    return max(4, min(MOST_TOKENS, round(SECONDS / seconds_a_token)))


def _ours(engine: Engine, ids: list[int]) -> tuple[float, int]:
    """(seconds per token, bytes that a token must read)."""
    before, began, count = engine.traffic.total, time.perf_counter(), 0
    while count < len(ids) and (count < 4 or time.perf_counter() - began < SECONDS):
        engine._step(ids[count], PROMPT + count)
        count += 1
    return (time.perf_counter() - began) / count, bytes_a_token(engine, before, count)


def bytes_a_token(engine: Engine, before: int, count: int) -> int:
    """Bytes that a token must read. `before`: the engine's traffic before `count` tokens."""
    items = engine.bytes_by_role["cpu"]
    dense = items["attention"] + items["head"]
    return dense + (engine.traffic.total - before) // count


def _theirs(rival: Rival, num_threads: int, ids: list[int]) -> tuple[float, int]:
    return rival.decode_s(num_threads, True, ids), 0


def _report(
    kind: str,
    threads: list[int],
    times: dict[tuple[int, str], list[float]],
    bandwidths: dict[tuple[int, str], list[float]],
    read: dict[str, int],
    rival: str,
) -> dict[str, object]:
    report: dict[str, object] = {"rival": rival}
    for count in threads:
        limit = statistics.median(
            b for mode in (*MODES, FFN, "llama.cpp") for b in bandwidths[count, mode]
        )
        theirs = statistics.median(times[count, "llama.cpp"])
        lines: dict[str, object] = {"bandwidth_gb_per_s": limit / 1e9}
        print(f"{kind}, {count} threads, {limit / 1e9:.1f} GB/s", flush=True)
        for mode in (*MODES, FFN, "llama.cpp"):
            seconds = times[count, mode]
            median = statistics.median(seconds)
            num_bytes = read[mode] or read["dense"]
            # Other load slows ours, theirs and the memory alike in a round, so shares and ratios
            # are taken per round.
            shares = [
                num_bytes / bandwidth / second
                for bandwidth, second in zip(bandwidths[count, mode], seconds, strict=True)
            ]
            share = statistics.median(shares)
            pairs = zip(times[count, "llama.cpp"], seconds, strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            lines[mode] = {
                "tokens_per_s": 1 / median,
                "best_tokens_per_s": 1 / min(seconds),
                "samples_s": seconds,
                "bytes_a_token": num_bytes,
                "bandwidth_gb_per_s": statistics.median(bandwidths[count, mode]) / 1e9,
                "limit_tokens_per_s": limit / num_bytes,
                "share_of_limit": share,
                "times_rival": theirs / median,
                "times_rival_in_rounds": ratio,
            }
            if mode == FFN:
                print(f"  {mode}: {num_bytes / median / 1e9:.1f} GB/s ({share:.0%})", flush=True)
                continue
            print(
                f"  {mode:10} {1 / median:7.2f} tokens/s, best {1 / min(seconds):7.2f}, limit"
                f" {limit / num_bytes:7.2f} ({share:.0%}), {theirs / median:.2f}x llama.cpp"
                f" ({ratio:.2f}x in rounds)",
                flush=True,
            )
        report[str(count)] = lines
    return report


def make_models(folder: Path, kind: str, num_layers: int) -> None:
    """Makes the two model files of a type unless both exist."""
    ours, theirs = folder / f"{kind}.gguf", folder / f"{kind}-stock.gguf"
    if ours.exists() and theirs.exists():
        return
    source = folder / "checkpoint"
    if not (source / "predictors").exists():
        print("making the checkpoint", flush=True)
        make_planted(source, replace(TINYLLAMA, num_layers=num_layers))
    print(f"converting to {kind}", flush=True)
    convert(
        ConvertConfig(
            source=source / "relu",
            output=ours,
            outtype=kind,
            predictors=source / "predictors",
            force=True,
        )
    )
    convert(
        ConvertConfig(
            source=source / "silu", output=theirs, outtype=kind, layout="stock", force=True
        )
    )


def _arguments() -> argparse.Namespace:
    return parser(__doc__).parse_args()


def parser(doc: str) -> argparse.ArgumentParser:
    """The options of benchmarks of the planted models."""
    found = rival_parser(doc, types="f16,bf16,q8_0,q4_0", rounds=5)
    found.add_argument("--num-layers", type=int, default=TINYLLAMA.num_layers)
    return found


if __name__ == "__main__":
    sys.exit(main())
