"""Measures llama.cpp on the CPU, in a separate process, on request.

Its other half is llamacpp_cpu.py. The process idles between requests, so that its threads, which
spin while they wait for each other, never run while ours is measured."""

import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

# OpenMP threads continue to spin after a job before they sleep, GNU's 300,000 times: up to 20 ms.
# Each side waits for the other's threads.
PAUSE_S = 0.03


class Rival:
    """llama.cpp with one model; `about` is its own report of the instructions that it uses."""

    def __init__(
        self, python: str, model: Path, context_length: int, num_sequences: int = 1
    ) -> None:
        program = Path(__file__).with_name("llamacpp_cpu.py")
        self.process = subprocess.Popen(
            [python, program, str(model), str(context_length), str(num_sequences)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.about = str(self._line())

    def decode_s(self, threads: int, flash: bool, ids: list[int]) -> float:
        """Mean seconds per token of decoding `ids` one by one, after a prompt of 16."""
        return statistics.mean(self._ask("decode", threads, flash, ids))

    def prefill_s(self, threads: int, flash: bool, ids: list[int], repeats: int = 1) -> float:
        """Seconds from the prompt `ids`, in one batch, to the last logits; median of repeats."""
        return statistics.median(self._ask("prefill", threads, flash, ids, repeats=repeats))

    def batch_s(self, threads: int, flash: bool, ids: list[int], num_sequences: int) -> float:
        """Mean seconds of a step with one token of each of `num_sequences` sequences."""
        return statistics.mean(self._ask("batch", threads, flash, ids, sequences=num_sequences))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _ask(self, do: str, threads: int, flash: bool, ids: list[int], **more: int) -> list[float]:
        asked = {"do": do, "threads": threads, "flash": flash, "ids": ids, **more}
        time.sleep(PAUSE_S)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer: list[float] = self._line()
        time.sleep(PAUSE_S)
        return answer

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the rival died; its message is above")
        return json.loads(line)
