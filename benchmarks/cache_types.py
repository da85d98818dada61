"""Benchmarks the quality and speed of the KV cache's types, against llama.cpp in the same run.

    python benchmarks/cache_types.py MODEL STOCK --corpus TEXT --rival path/to/venv/bin/python

Loss: every type compared with f16 on the same windows of held-out text, mode dense. Speed: decode
after DEPTHS tokens, ours and llama.cpp's alternating, with keys and values in the same type; a
figure is the median of the rounds. llama.cpp is measured with its flash attention and, where
possible, without it; the faster is the rival. Recent versions of it rotate keys and values in block
types by a Hadamard matrix, as our q8_0 and q4_0 do."""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import machine, processor, slug
from rival import Rival
from torch import Tensor

from hotsplit import Engine
from hotsplit.files.atomic import partial_file
from hotsplit.measure.evaluate.comparison import Compared, Comparison
from hotsplit.options.cache_types import NAMES, CacheTypes
from hotsplit.profile.corpus.corpus import read_windows
from hotsplit.runtime.kernels.cpu import library

DEPTHS = (512, 4096, 8000)
SPEEDS = ("f16", "q8_0", "q4_0")
STEPS = 24
CONTEXT = 8192


def losses(model: Path, corpus: Path, num_tokens: int) -> dict[str, Any]:
    """KL and loss of each type, and of three mixed pairs, relative to f16."""
    wanted = [(name, name) for name in NAMES if name != "f16"]
    wanted += [("q4_0", "f16"), ("f16", "q4_0"), ("q8_0", "q4_0")]
    found: dict[str, Any] = {}
    with Engine.load(model, mode="dense", device="cpu", cache_type_k="f16") as plain:
        width = plain.model.spec.layers[-1].attention.head_dim
        windows = read_windows(
            (corpus,), plain.codec, context_length=2048, max_tokens=num_tokens, seed=0
        ).ids
        for key, value in wanted:
            types = CacheTypes.of(key, value)
            with Engine.load(
                model, mode="dense", device="cpu", cache_type_k=key, cache_type_v=value
            ) as engine:
                one = compared(plain, engine, windows)
            found[str(types)] = {
                "bytes_of_f16": types.row_bytes(width) / CacheTypes.of("f16").row_bytes(width),
                "kl": one.divergence.mean, "kl_error": one.divergence.half_width,
                "loss_difference": one.loss_difference.mean,
                "loss_difference_error": one.loss_difference.half_width,
                "same_top_token": one.agreement.mean, "tokens": one.num_tokens,
            }  # fmt: skip
            print(f"{types!s:12} {json.dumps(found[str(types)])}", flush=True)
    return found


def compared(plain: Engine, engine: Engine, windows: Sequence[Tensor]) -> Compared:
    comparison = Comparison(1)
    for ids_T in windows:
        comparison.begin_window()
        logits = [each.logits(ids_T)[:-1] for each in (plain, engine)]
        comparison.add(logits[0], logits[1:], ids_T[1:])
    return comparison.result(0)


class Side:
    """Our side; its text keeps the tokens of the depth last measured."""

    def __init__(self, model: Path, cache: str) -> None:
        self.engine = Engine.load(
            model, mode="dense", device="cpu", context_length=CONTEXT, cache_type_k=cache
        )
        self.text = self.engine.sequence()

    def seconds(self, ids: list[int], depth: int) -> float:
        if self.text.length > depth:
            self.text.rollback(0)
        filler = [3 + 7 * position % 40_000 for position in range(self.text.length, depth)]
        if filler:
            self.text.extend(filler)
        samples = []
        for token in ids:
            began = time.perf_counter()
            self.text.extend([token])
            samples.append(time.perf_counter() - began)
        self.text.rollback(depth)
        return statistics.median(samples)


def speeds(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    generator = random.Random(0)
    for cache in arguments.types.split(","):
        ours, rival = (
            Side(arguments.model, cache),
            Rival(arguments.rival, arguments.stock, CONTEXT, cache=cache),
        )
        flashes = (True,) if cache not in ("f16", "f32", "bf16") else (False, True)
        by_depth: dict[str, Any] = {}
        for depth in DEPTHS:
            samples: dict[str, list[float]] = {"ours": [], "plain": [], "flash": []}
            for number in range(arguments.rounds + 1):
                ids = [generator.randrange(3, 40_000) for _ in range(STEPS)]
                taken = {"ours": ours.seconds(ids, depth)}
                for flash in flashes:
                    name = "flash" if flash else "plain"
                    taken[name] = rival.deep_s(arguments.threads, flash, ids, depth)
                for name, seconds in taken.items() if number else ():  # the first warms up
                    samples[name].append(seconds)
            medians = {name: statistics.median(s) for name, s in samples.items() if s}
            theirs = min(medians[name] for name in medians if name != "ours")
            by_depth[str(depth)] = {
                "ours_s": medians["ours"], "theirs_s": theirs,
                "times_rival": theirs / medians["ours"], "samples_s": samples,
            }  # fmt: skip
            print(f"{cache:6} {depth:6} ours {1e3 * medians['ours']:.2f} ms, llama.cpp"
                  f" {1e3 * theirs:.2f} ms, {theirs / medians['ours']:.2f}x", flush=True)  # fmt: skip
        ours.engine.close()
        rival.close()
        found[cache] = {"rival": rival.about, **by_depth}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("stock", type=Path, help="the same in llama.cpp's layout")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--rival", required=True, help="Python that has llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--types", default=",".join(SPEEDS), help="types whose speed is measured")
    parser.add_argument(
        "--parts",
        default="loss,speed",
        help="parts to measure; figures of the others stay in the file",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    library.set_threads(arguments.threads)
    folder = Path(__file__).parent / "results"
    output = arguments.output or folder / f"cache-types-{slug(processor())}.json"
    result = json.loads(output.read_text()) if output.exists() else {}
    parts = {
        "loss": lambda: losses(arguments.model, arguments.corpus, arguments.tokens),
        "speed": lambda: speeds(arguments),
    }
    for part in arguments.parts.split(","):
        about = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"), "level": library.level(),
            "machine": machine(), "threads": arguments.threads, "load_before": os.getloadavg(),
        }  # fmt: skip
        found = parts[part]()
        result |= {"benchmark": "cache-types", "model": arguments.model.stem}
        result[part] = {**about, "load_after": os.getloadavg(), "types": found}
        write(result, output)


def write(result: dict[str, Any], output: Path) -> None:
    with partial_file(output) as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {output}", flush=True)


if __name__ == "__main__":
    main()
