"""Times commands alongside processes that keep every core busy, and the same commands alone.

    python benchmarks/fair_share.py MODEL CORPUS [--rounds 5]

Each round runs them alone, then alongside one endless loop per physical core. With an even share of
the processor, a command then takes twice as long. Exits with 1 if one takes more than BOUND times
as long, by the median of the rounds."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import machine, processor, slug

from hotsplit.files.atomic import partial_file
from hotsplit.runtime.kernels.threads import physical_cores

BOUND = 3.0
EVAL_TOKENS, PROMPT_BYTES = 1024, 4000


@contextmanager
def busy(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def seconds(model: Path, corpus: Path, prompt: Path) -> dict[str, float]:
    """Seconds of an eval, of a prefill, and of the whole command that generates one token."""
    began = time.perf_counter()
    run("eval", model, "--corpus", corpus, "--tokens", EVAL_TOKENS, "--json")
    evaluated = time.perf_counter()
    told = run("generate", model, "-f", prompt, "-n", 1, "--json")
    ended = time.perf_counter()
    return {
        "eval": evaluated - began,
        "prefill": told["prefill_s"],
        "first_token": ended - evaluated,
    }


def run(*words: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "hotsplit", *map(str, words)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    alone, beside = [], []
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        text = arguments.corpus.read_bytes()[:PROMPT_BYTES].decode(errors="ignore")
        prompt.write_text(text)
        for _ in range(arguments.rounds):
            alone.append(seconds(arguments.model, arguments.corpus, prompt))
            with busy(physical_cores()):
                beside.append(seconds(arguments.model, arguments.corpus, prompt))
            print(json.dumps({"alone": alone[-1], "beside": beside[-1]}), flush=True)
    ratios = {
        name: [b[name] / a[name] for a, b in zip(alone, beside, strict=True)] for name in alone[0]
    }
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    result = {
        "benchmark": "fair-share", "model": arguments.model.stem, "machine": machine(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"), "busy": physical_cores(),
        "eval_tokens": EVAL_TOKENS, "alone_s": alone, "beside_s": beside, "ratios": ratios,
        "median_ratios": medians, "bound": BOUND,
    }  # fmt: skip
    folder = Path(__file__).parent / "results"
    output = arguments.output or folder / f"fair-share-{slug(processor())}.json"
    with partial_file(output) as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {output}: {medians}")
    return 1 if max(medians.values()) > BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
