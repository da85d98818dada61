"""Runs one engine in a separate process for gpu.py, with its own memory and budget.

    python gpu_worker.py MODEL --mode MODE [--split SPLIT] [--device cuda] [--threads N]

Each line on stdin is a JSON request, each line on stdout the JSON of its answer; the first line,
with the number of threads, comes once everything is imported. The answer for a HotsplitError is
{"error": "..."}."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from hotsplit import Engine
from hotsplit.errors import HotsplitError
from hotsplit.runtime.kernels.threads import use_threads
from hotsplit.runtime.step.hybrid_step import HybridStep


def main() -> None:
    arguments = _arguments()
    answers = sys.stdout
    with redirect_stdout(sys.stderr):  # output of libraries is not an answer
        threads = use_threads(arguments.threads)
        _answer(answers, {"threads": threads})
        worker = EngineWorker(arguments)
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                _answer(answers, worker.does[asked.pop("do")](**asked))
            except HotsplitError as error:
                _answer(answers, {"error": str(error)})


def _answer(stream: Any, content: dict[str, Any]) -> None:
    stream.write(json.dumps(content) + "\n")
    stream.flush()


class EngineWorker:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self._engine: Engine | None = None
        self.does: dict[str, Callable[..., dict[str, Any]]] = {
            "load": self.load,
            "prefill": self.prefill,
            "decode": self.decode,
            "follow": self.follow,
            "memory": self.memory,
        }

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "load comes first"
        return self._engine

    def load(self) -> dict[str, Any]:
        asked = self.arguments
        self._engine = Engine.load(
            asked.model,
            split=asked.split,
            mode=asked.mode,
            device=asked.device,
            is_resident=True,
            graph=not asked.plain,
        )
        step = self.engine._live.native
        streams_from = step.passes.least_streamed if isinstance(step, HybridStep) else None
        return {"load_s": self.engine.load_s, "streams_from": streams_from}

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        """Seconds up to the logits after `ids`, which are then in the cache."""
        for _ in self.engine.generate(ids, max_tokens=1, temperature=0.0):
            pass
        return {"seconds": self.engine.last_run.prefill_s}

    def decode(self, steps: int, start: int) -> dict[str, Any]:
        """Seconds of the steps from position `start` on, and the bytes counted for their
        feed-forward layers."""
        before = self.engine.traffic.total
        seconds = self.engine.decode_seconds(steps=steps, start=start)
        return {"seconds": seconds, "ffn_bytes": self.engine.traffic.total - before}

    def follow(self, ids: list[int]) -> dict[str, Any]:
        """Seconds of the step of each of these tokens, from the beginning of a text."""
        times = []
        with self.engine.sequence() as text:
            for token_id in ids:
                began = time.perf_counter()
                text.extend([token_id])
                times.append(time.perf_counter() - began)
        return {"seconds": times}

    def memory(self) -> dict[str, Any]:
        """The engine's memory report of each device."""
        return {"devices": [dict(vars(found)) for found in self.engine.memory_report()]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--split", type=Path)
    parser.add_argument("--mode", required=True, choices=("dense", "exact", "predicted"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--plain", action="store_true", help="without a graph")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
