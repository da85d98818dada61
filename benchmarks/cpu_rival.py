"""Measures llama.cpp on the CPU, in a separate process (rival_worker.py), on request.

The process idles between requests, so that its threads, which spin while they wait for each other,
never run while ours is measured."""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from worker_process import Process

PROGRAM = Path(__file__).with_name("rival_worker.py")
PROMPT = [7] * 16  # before decoding
# OpenMP threads continue to spin after a job before they sleep, GNU's 300,000 times: up to 20 ms.
# Each side waits for the other's threads.
PAUSE_S = 0.03


def rival_parser(doc: str, *, types: str, rounds: int) -> argparse.ArgumentParser:
    """The options that the benchmarks beside llama.cpp share; `doc` is a module's docstring."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the models")
    parser.add_argument("--rival", required=True, help="Python that has llama-cpp-python")
    parser.add_argument("--types", default=types)
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--output", type=Path)
    return parser


class Rival:
    """llama.cpp with one model; `about` is its own report of the instructions that it uses."""

    def __init__(
        self, python: str, model: Path, context_length: int, num_sequences: int = 1
    ) -> None:
        options = {
            "model": str(model),
            "context": context_length,
            "sequences": num_sequences,
            "batch": min(2048, context_length),
            "gpu_layers": None,
        }
        log = Path(tempfile.mkdtemp(prefix="llamacpp-")) / "log"
        self.process = Process.of([python, PROGRAM, json.dumps(options)], "llama.cpp", log)
        self.about = str(self.process.about["about"])

    def decode_s(self, threads: int, flash: bool, ids: list[int]) -> float:
        """Mean seconds per token of decoding `ids` one by one, after a prompt of 16."""
        self._ask("prefill", threads, flash, PROMPT)
        return statistics.mean(self._ask("decode", threads, flash, ids, start=len(PROMPT)))

    def prefill_s(self, threads: int, flash: bool, ids: list[int], repeats: int = 1) -> float:
        """Seconds from the prompt `ids`, in one batch, to the last logits; median of repeats."""
        return statistics.median(self._ask("prefill", threads, flash, ids, repeats=repeats))

    def batch_s(self, threads: int, flash: bool, steps: list[list[int]]) -> float:
        """Mean seconds of a step with a token of each sequence; `steps`: the tokens of each."""
        return statistics.mean(self._ask("batch", threads, flash, steps))

    def close(self) -> None:
        self.process.close()

    def _ask(
        self, do: str, threads: int, flash: bool, ids: list[int] | list[list[int]], **more: Any
    ) -> list[float]:
        time.sleep(PAUSE_S)
        answer = self.process.ask(do, threads=threads, flash=flash, ids=ids, **more)
        time.sleep(PAUSE_S)
        return list(answer["seconds"])
