"""Runs llama.cpp for comparison, through a Python that has llama_cpp or through llama-bench.

The Python is one process that runs tests on request and idles in between; llama-bench is started
anew for each test, loads the model and measures one repetition. Both run in the environment as the
user has it: OMP_WAIT_POLICY=passive, which the commands set for torch, would slow llama.cpp's
threads (1.1 B in Q4_K_M, 2 threads: 31 tokens/s instead of 50)."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import type_of
from hotsplit.measure.bench.bench_config import BenchConfig, BenchTest
from hotsplit.runtime.engine import Engine
from hotsplit.system.processors import environment_as_found

WORKER = Path(__file__).with_name("llamacpp_worker.py")
PROBE_S = 60.0  # timeout for --version and --help
# OpenMP threads spin for a while after a job (GNU's 300,000 times, up to 20 ms) and then sleep.
# Pauses around llama.cpp's tests keep one side's spinning threads out of the other side's times.
PAUSE_S = 0.03
MOST_LETTERS = 200  # characters of llama.cpp's output quoted in an error


@dataclass(frozen=True, kw_only=True)
class RivalOptions:
    """How to run llama.cpp."""

    path: Path
    model: Path
    context_length: int
    type_k: str
    type_v: str
    threads: int
    gpu_layers: int | None  # None: all


@dataclass(frozen=True, kw_only=True)
class About:
    """llama.cpp's description of itself and its model; "" and 0 where unknown."""

    tool: str
    system: str = ""
    model_type: str = ""
    model_size: int = 0
    model_n_params: int = 0
    vocab_size: int = 0


def program_of(path: Path) -> Literal["python", "llama-bench"]:
    """The kind of program at `path`. Raises HotsplitError for anything else."""
    path = located(path)
    if not path.is_file() or not os.access(path, os.X_OK):
        what = "is not a program" if path.exists() else "no such file"
        raise HotsplitError(
            f"{path}: {what}; wanted a Python that has llama_cpp (pip install llama-cpp-python), or"
            " a llama-bench"
        )
    if _says(path, "--version").startswith("Python "):
        return "python"
    if "n-prompt" in _says(path, "--help"):
        return "llama-bench"
    raise HotsplitError(f"{path}: is neither a Python nor a llama-bench; wanted one of the two")


def located(path: Path) -> Path:
    """The absolute path of a program given by path or by name, looked up as a shell does."""
    found = shutil.which(path)
    return (path if found is None else Path(found)).absolute()


def _says(path: Path, option: str) -> str:
    try:
        done = subprocess.run(
            [path, option],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_S,
            check=False,
        )
    except OSError as error:
        raise HotsplitError(f"{path}: cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.decode(errors="replace")


class PythonRival:
    """A llama-cpp-python, one process for all tests."""

    def __init__(self, options: RivalOptions) -> None:
        self._path = options.path
        asked = {
            "model": str(options.model),
            "context": options.context_length,
            "type_k": type_of(options.type_k),
            "type_v": type_of(options.type_v),
            "threads": options.threads,
            "gpu_layers": options.gpu_layers,
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [options.path, "-c", WORKER.read_text(encoding="utf-8"), json.dumps(asked)],
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
                raise self._refusal(found, options)
            self.about = About(**found)
        except BaseException:
            self.close()
            raise

    def _refusal(self, found: dict[str, Any], options: RivalOptions) -> HotsplitError:
        log = [line for line in found.get("log", []) if line]
        words = f"{options.path}: {found['error']}"
        if not log and "log" not in found:
            return HotsplitError(f"{words}; pip install llama-cpp-python there, or name another")
        words += f" {options.model}" + (f" ({log[0][:MOST_LETTERS]})" if log else "")
        return HotsplitError(f"{words}; give a file that it loads with --compare-model")

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


class LlamaBench:
    """A llama-bench, one process per test. It draws its own tokens."""

    def __init__(self, options: RivalOptions) -> None:
        self._options = options
        shortest = self._measure(BenchTest(kind="tg", length=1))
        self.about = About(
            tool=f"llama-bench {shortest.get('build_number', '')}".rstrip(),
            system=str(shortest.get("cpu_info", "")),
            model_type=str(shortest.get("model_type", "")),
            model_size=int(shortest.get("model_size", 0)),
            model_n_params=int(shortest.get("model_n_params", 0)),
        )

    def go_to(self, ids: Sequence[int]) -> None:
        """Does nothing: llama-bench fills the cache in each test, before its clock starts."""

    def run(self, test: BenchTest, ids: Sequence[int]) -> int:
        found = self._measure(test)
        try:
            return int(found["samples_ns"][0])
        except (KeyError, IndexError, TypeError, ValueError):
            raise HotsplitError(
                f"{self._options.path}: reports no samples_ns for {test.name}; use a newer"
                " llama-bench"
            ) from None

    def close(self) -> None:
        pass

    def _measure(self, test: BenchTest) -> dict[str, Any]:
        options = self._options
        lengths = {"-p": 0, "-n": 0, "-p" if test.kind == "pp" else "-n": test.length}
        asked: dict[str, object] = {
            "-m": options.model,
            **lengths,
            "-r": 1,
            "-t": options.threads,
            "-ctk": options.type_k,
            "-ctv": options.type_v,
            "-o": "json",
        }
        if test.depth:
            asked["-d"] = test.depth
        if options.gpu_layers is not None:
            asked["-ngl"] = options.gpu_layers
        words = [str(word) for pair in asked.items() for word in pair]
        done = subprocess.run(
            [options.path, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env=environment_as_found(),
        )
        try:
            found = json.loads(done.stdout)[0]
            assert isinstance(found, dict)
        except (ValueError, IndexError, TypeError, KeyError, AssertionError):
            raise self._failed(test, done) from None
        time.sleep(PAUSE_S)
        return found

    def _failed(self, test: BenchTest, done: subprocess.CompletedProcess[bytes]) -> HotsplitError:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        errors = [line for line in said if "error" in line.lower()] or said[-1:]
        words = f" ({errors[0].strip()[:MOST_LETTERS]})" if errors else ""
        return HotsplitError(
            f"{self._options.path}: cannot measure {test.name} of {self._options.model}{words};"
            " give a file that it loads with --compare-model"
        )


Rival = PythonRival | LlamaBench


def check_rival(config: BenchConfig, file: ModelFile) -> None:
    """Refuses an impossible comparison before the engine is loaded."""
    if config.compare is None:
        return
    program_of(config.compare)
    if config.compare_model is None and file.layout != "stock":
        raise HotsplitError(
            f"{file.path}: llama.cpp cannot load the sparse layout; give the same weights in a form"
            " that it loads with --compare-model FILE (hotsplit convert --layout stock writes one)"
        )
    if config.compare_model is not None and not config.compare_model.is_file():
        raise HotsplitError(f"{config.compare_model}: no such file; wanted a GGUF for llama.cpp")


def start_rival(config: BenchConfig, engine: Engine, threads: int) -> Rival | None:
    """Starts the llama.cpp that the options ask for, on the CPU if the engine is there."""
    if config.compare is None:
        return None
    types = engine.cache_types
    layers = config.compare_gpu_layers
    options = RivalOptions(
        path=located(config.compare),
        model=(config.compare_model or config.model).absolute(),
        context_length=config.num_tokens,
        type_k=types.key.kind,
        type_v=types.value.kind,
        threads=threads,
        gpu_layers=0 if layers is None and engine.device.type == "cpu" else layers,
    )
    is_python = program_of(options.path) == "python"
    rival: Rival = PythonRival(options) if is_python else LlamaBench(options)
    if rival.about.vocab_size not in (0, engine.model.spec.vocab_size):
        rival.close()
        raise HotsplitError(
            f"{config.compare_model or config.model}: has {rival.about.vocab_size} tokens in"
            f" llama.cpp, {config.model} has {engine.model.spec.vocab_size}: another model;"
            " give the same one with --compare-model"
        )
    return rival
