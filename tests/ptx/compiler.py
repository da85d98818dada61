"""Compiles Triton kernels to PTX for architectures that need not be present, in a separate process:
a process whose Triton interprets kernels cannot also compile them.

`Compiler().compile(...)` asks that process, which runs this file as a program."""

import atexit
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from paths import SEARCH_PATH

CACHE = Path(__file__).parents[2] / "build" / "ptx"


@dataclass(frozen=True)
class Pointer:
    """What the compiler needs to know about a tensor."""

    dtype: torch.dtype
    is_aligned: bool  # to 16 bytes

    def data_ptr(self) -> int:
        return 0 if self.is_aligned else 4


@dataclass(frozen=True, kw_only=True)
class Source:
    """A kernel, with the package of its module, and the folder to import it from if that is not the
    installed one."""

    package: str
    module: str
    name: str
    folder: str | None = None


@dataclass(frozen=True, kw_only=True)
class Compiled:
    ptx: str
    parameters: tuple[str, ...]  # those of the function that the PTX has, too
    argument_names: tuple[str, ...]
    num_warps: int
    shared_bytes: int


class Compiler:
    """The compiling process, started at the first request."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._known: dict = {}

    def compile(self, source: Source, arch: int, arguments: tuple, options: dict) -> Compiled:
        key = (source, arch, arguments, tuple(sorted(options.items())))
        if key not in self._known:
            self._known[key] = self._ask((source, arch, arguments, options))
        return self._known[key]

    def _ask(self, question: tuple) -> Compiled:
        if self._process is None:
            self._process = self._start()
        pickle.dump(question, self._process.stdin)
        self._process.stdin.flush()
        try:
            answer = pickle.load(self._process.stdout)
        except EOFError as error:
            self._process = None
            raise RuntimeError(f"the compiling process ended at {question[0]}") from error
        if isinstance(answer, str):
            raise RuntimeError(f"{question[0]} does not compile for sm_{question[1]}:\n{answer}")
        return answer

    def _start(self) -> subprocess.Popen:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(CACHE)  # its kernels lack machine code: see main
        environment["PYTHONPATH"] = SEARCH_PATH
        process = subprocess.Popen(
            [sys.executable, "-m", "ptx.compiler"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self.close)
        return process

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(timeout=30)
            self._process = None


COMPILER = Compiler()


# ---- the process ---------------------------------------------------------------------------


class AbsentDevices:
    """The properties that Triton reads before it compiles; the device's number is `arch`."""

    arch = 80

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def _answer(devices: AbsentDevices, source: Source, arch, arguments, options) -> Compiled:
    devices.arch = arch
    if source.folder is not None and source.folder not in sys.path:
        sys.path.insert(0, source.folder)
    function = getattr(importlib.import_module(f"{source.package}.{source.module}"), source.name)
    kernel = function.run(*arguments, grid=(1,), warmup=True, **options)
    return Compiled(
        ptx=kernel.asm["ptx"],
        parameters=tuple(_parameters(kernel.src.signature)),
        argument_names=tuple(function.arg_names),
        num_warps=kernel.metadata.num_warps,
        shared_bytes=kernel.metadata.shared,
    )


def _parameters(signature: dict) -> Iterator[str]:
    """The names of what is passed to compiled code; of a tuple `x` they are `x.0`, `x.1` and so
    on."""
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            yield from _parameters({f"{name}.{i}": part for i, part in enumerate(kind)})
        elif kind != "constexpr":
            yield name


def main() -> None:
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.driver import driver

    sys.stdin, questions = None, sys.stdin.buffer
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    CUDABackend.make_cubin = lambda *_: b""  # the machine code is not needed
    devices = AbsentDevices()
    driver.set_active(devices)
    while True:
        try:
            question = pickle.load(questions)
        except EOFError:
            return
        try:
            answer = _answer(devices, *question)
        except Exception as error:  # noqa: BLE001  # raised by the caller
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    from ptx import compiler  # pickled objects need the importable name

    compiler.main()
