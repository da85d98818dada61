"""Runs llama.cpp for comparison, through a Python that has llama_cpp: one process that runs tests
on request and idles in between.

It has the environment as the user has it: OMP_WAIT_POLICY=passive, which the commands set for
torch, would slow llama.cpp's threads (1.1 B in Q4_K_M, 2 threads: 31 tokens/s instead of 50)."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import type_of
from hotsplit.measure.bench.bench_config import BenchConfig, BenchTest
from hotsplit.runtime.engine import Engine
from hotsplit.system.processors import environment_as_found

WORKER = Path(__file__).with_name("llamacpp_worker.py")
PROBE_S = 60.0  # timeout for --version
# OpenMP threads spin for a while after a job (GNU's 300,000 times, up to 20 ms) and then sleep.
# Pauses around llama.cpp's tests keep one side's spinning threads out of the other side's times.
PAUSE_S = 0.03
MOST_LETTERS = 200  # characters of llama.cpp's output quoted in an error


@dataclass(frozen=True, kw_only=True)
class About:
    """llama.cpp's description of itself and its model; "" and 0 where unknown."""

    tool: str
    system: str = ""
    model_type: str = ""
    model_size: int = 0
    model_n_params: int = 0
    vocab_size: int = 0


def located(path: Path) -> Path:
    """The absolute path of a program given by path or by name, looked up as a shell does."""
    found = shutil.which(path)
    return (path if found is None else Path(found)).absolute()


def check_is_python(path: Path) -> None:
    """Raises HotsplitError for anything but a Python."""
    path = located(path)
    wanted = "wanted a Python that has llama_cpp (pip install llama-cpp-python)"
    if not path.is_file() or not os.access(path, os.X_OK):
        what = "is not a program" if path.exists() else "no such file"
        raise HotsplitError(f"{path}: {what}; {wanted}")
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_S,
            check=False,
        )
    except OSError as error:
        raise HotsplitError(f"{path}: cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        done = None
    if done is None or not done.stdout.startswith(b"Python "):
        raise HotsplitError(f"{path}: is not a Python; {wanted}")


class LlamaCpp:
    """A llama-cpp-python, one process for all tests."""

    def __init__(self, path: Path, asked: dict[str, object]) -> None:
        """`asked`: what llamacpp_worker takes."""
        self._path = path
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [path, "-c", WORKER.read_text(encoding="utf-8"), json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment_as_found(),
        )
        self._ids: list[int] = []
        try:
            found = self._line()
            if "error" in found:
                words, log = f"{path}: {found['error']}", found.get("log")
                if log is None:
                    words += "; pip install llama-cpp-python there, or name another"
                    raise HotsplitError(words)
                said = next((f" ({line[:MOST_LETTERS]})" for line in log if line), "")
                words += f" {asked['model']}{said}"
                raise HotsplitError(f"{words}; give a file that it loads with --compare-model")
            self.about = About(**found)
        except BaseException:
            self.close()
            raise

    def go_to(self, ids: Sequence[int]) -> None:
        """Fills the cache with these tokens, and only these."""
        if self._ids != list(ids):
            self._ask("depth", ids)
            self._ids = list(ids)

    def run(self, test: BenchTest, ids: Sequence[int]) -> int:
        """Runs a test and returns nanoseconds."""
        time.sleep(PAUSE_S)
        ns = self._ask(test.kind, ids)["ns"]
        time.sleep(PAUSE_S)
        return int(ns)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _ask(self, do: str, ids: Sequence[int]) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "ids": list(ids)}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_line` reports why the process ended
        return self._line()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            return json.loads(line)
        except ValueError:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            last = f": {said[-1][:MOST_LETTERS]}" if said else ""
            raise HotsplitError(
                f"{self._path}: llama.cpp ended unexpectedly (code {self._process.wait()}){last}"
            ) from None


def check_rival(config: BenchConfig, file: ModelFile) -> None:
    """Refuses an impossible comparison before the engine is loaded."""
    if config.compare is None:
        return
    check_is_python(config.compare)
    if config.compare_model is None and file.layout != "stock":
        raise HotsplitError(
            f"{file.path}: llama.cpp cannot load the sparse layout; give the same weights in a form"
            " that it loads with --compare-model FILE (hotsplit convert --layout stock writes one)"
        )
    if config.compare_model is not None and not config.compare_model.is_file():
        raise HotsplitError(f"{config.compare_model}: no such file; wanted a GGUF for llama.cpp")


def start_rival(config: BenchConfig, engine: Engine, threads: int) -> LlamaCpp | None:
    """Starts the llama.cpp that the options ask for, on the CPU if the engine is there."""
    if config.compare is None:
        return None
    types = engine.cache_types
    layers = config.compare_gpu_layers
    asked: dict[str, object] = {
        "model": str((config.compare_model or config.model).absolute()),
        "context": config.num_tokens,
        "type_k": type_of(types.key.kind),
        "type_v": type_of(types.value.kind),
        "threads": threads,
        "gpu_layers": 0 if layers is None and engine.device.type == "cpu" else layers,
    }
    rival = LlamaCpp(located(config.compare), asked)
    if rival.about.vocab_size not in (0, engine.model.spec.vocab_size):
        rival.close()
        raise HotsplitError(
            f"{config.compare_model or config.model}: has {rival.about.vocab_size} tokens in"
            f" llama.cpp, {config.model} has {engine.model.spec.vocab_size}: another model;"
            " give the same one with --compare-model"
        )
    return rival
