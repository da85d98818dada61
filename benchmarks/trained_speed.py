"""Measures what a model that was trained to be sparse costs and gains: KL, bytes and step times.

    hotsplit convert TRAINED -o trained-60-q8_0.gguf --outtype q8_0           # and other types
    python benchmarks/trained_speed.py --dense f16.gguf q8_0.gguf \\
        --trained trained-60-f16.gguf trained-60-q8_0.gguf --text held-out.txt

`--dense` are files of the untrained model, the first of which is the reference for KL. Each trained
file runs in mode dense, its trained weights without limits, and in mode exact, with them.

Loss: KL of every file and mode from the reference on the same windows of held-out text, with a 95 %
interval. Speed: decode steps over the same text, STEPS at a time, all files and modes in turn
within a round. The rounds of earlier sessions in the JSON are kept. Bytes are those of the weights
that a step reads: the layers' as the runtime counts them, and the head's."""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from machine import machine, processor, slug

from hotsplit import Engine
from hotsplit.costs.budget import head_bytes
from hotsplit.files.atomic import partial_file
from hotsplit.measure.evaluate.comparison import Comparison
from hotsplit.profile.corpus.corpus import read_windows
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.feed_forward import Mode

ROOT = Path(__file__).resolve().parent.parent
WINDOW, STEPS = 512, 16
Run = tuple[Path, Mode]


def name_of(run: Run) -> str:
    return f"{run[0].stem} {run[1]}"


def losses(reference: Path, runs: Sequence[Run], text: Path, num_tokens: int) -> dict[str, Any]:
    """KL, difference of loss and same top token of each run, against the reference in mode dense."""
    found = {}
    with Engine.load(reference, mode="dense", device="cpu", is_resident=False) as dense:
        windows = read_windows(
            [text], dense.codec, context_length=WINDOW, max_tokens=num_tokens, seed=0
        ).ids
        for run in runs:
            comparison = Comparison(1)
            with Engine.load(run[0], mode=run[1], device="cpu", is_resident=False) as engine:
                for ids_T in windows:
                    comparison.begin_window()
                    logits = [each.logits(ids_T)[:-1] for each in (dense, engine)]
                    comparison.add(logits[0], logits[1:], ids_T[1:])
            one = comparison.result(0)
            found[name_of(run)] = {
                "kl": one.divergence.mean, "kl_error": one.divergence.half_width,
                "loss_difference": one.loss_difference.mean,
                "loss_difference_error": one.loss_difference.half_width,
                "same_top_token": one.agreement.mean, "tokens": one.num_tokens,
            }  # fmt: skip
            print(f"{name_of(run):28} {json.dumps(found[name_of(run)])}", flush=True)
    return found


class Timed:
    """A run's engine, its step times, and the bytes that its steps read."""

    def __init__(self, run: Run, ids: list[int]) -> None:
        self.engine = Engine.load(run[0], mode=run[1], device="cpu", context_length=WINDOW)
        self.ids, self.rounds, self.read = ids, list[list[float]](), dict[str, float]()
        self.step_through(range(STEPS))  # warms up
        self.rounds.clear()

    def step_through(self, positions: range) -> None:
        before, times = asdict(self.engine.traffic), list[float]()
        for position in positions:
            began = time.perf_counter()
            self.engine._step(self.ids[position], position)
            times.append(time.perf_counter() - began)
        self.rounds.append(times)
        for part, count in asdict(self.engine.traffic).items():
            self.read[part] = self.read.get(part, 0) + count - before[part]

    def result(self, earlier: dict[str, Any]) -> dict[str, Any]:
        """The run's figures; times include the rounds of earlier sessions."""
        count = sum(map(len, self.rounds)) + STEPS  # with those that warmed up
        round_s = [*earlier.get("round_s", ()), *(sum(t) / len(t) for t in self.rounds)]
        model = self.engine.model
        whole_up = sum(
            model.tensors[f"blk.{layer}.ffn_up.weight"].num_bytes
            for layer in range(model.spec.num_layers)
        )
        return {
            "bytes": head_bytes(model) + sum(self.read.values()) / count,
            "silent_share": 1 - self.read["up"] / count / whole_up,
            "shortest_round_s": min(round_s), "median_s": median(round_s), "round_s": round_s,
        }  # fmt: skip


def speeds(
    runs: Sequence[Run], text: Path, num_rounds: int, earlier: dict[str, Any]
) -> dict[str, Any]:
    """Figures of all runs, timed in turn. Raises SystemExit if the rounds of earlier sessions are
    of other files or modes."""
    if earlier and list(earlier) != list(map(name_of, runs)):
        raise SystemExit(f"earlier rounds are of {list(earlier)}; give another --output")
    with Engine.load(runs[0][0], mode="dense", device="cpu", is_resident=False) as engine:
        windows = read_windows(
            [text], engine.codec, context_length=WINDOW, max_tokens=WINDOW, seed=1
        )
    ids = windows.ids[0].tolist()
    timed = {name_of(run): Timed(run, ids) for run in runs}
    places = [range(at, at + STEPS) for at in range(0, len(ids) - STEPS, STEPS)]
    for number in range(num_rounds):
        order = list(timed.values())
        for each in order if number % 2 else reversed(order):
            each.step_through(places[number % len(places)])
    return {name: each.result(earlier.get(name, {})) for name, each in timed.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dense", type=Path, nargs="+", required=True)
    parser.add_argument("--trained", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, required=True, help="held-out text")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens for KL")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", default="loss,speed", help="others stay as they are in the file")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    library.set_threads(arguments.threads)
    name = f"trained-speed-smollm2-{slug(processor())}.json"
    output = arguments.output or ROOT / "benchmarks/results" / name
    result = json.loads(output.read_text()) if output.exists() else {}
    runs: list[Run] = [(path, "dense") for path in arguments.dense]
    runs += [(path, mode) for path in arguments.trained for mode in ("dense", "exact")]
    for part in arguments.parts.split(","):
        about = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"), "level": library.level(),
            "machine": machine(), "threads": arguments.threads, "text": arguments.text.name,
            "load_before": os.getloadavg(),
        }  # fmt: skip
        if part == "loss":
            found = losses(arguments.dense[0], runs, arguments.text, arguments.tokens)
        else:
            known = result.get("speed", {})
            about["sessions"] = [*known.get("sessions", ()), about["time"]]
            found = speeds(runs, arguments.text, arguments.rounds, known.get("runs", {}))
        result |= {"benchmark": "trained-speed"}
        result[part] = {**about, "runs": found}
        with partial_file(output) as partial:
            partial.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {output}", flush=True)


if __name__ == "__main__":
    main()
