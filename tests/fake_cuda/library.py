"""The calls of the fake CUDA runtime (the *.cpp in this folder), which is built once per version of
its sources. Every refusal raises CudaError with the runtime's message."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from ctypes import (
    CDLL,
    CFUNCTYPE,
    byref,
    c_char_p,
    c_int,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

FOLDER = Path(__file__).parent
BUILD = FOLDER.parent.parent / "build" / "fake-cuda"
NOT_READY = 600
OUT_OF_MEMORY = 2
_RUN, _FORGET = CFUNCTYPE(c_int, c_int64), CFUNCTYPE(None, c_int64)

# What calls take. `out`: where a handle, an address or a number of bytes is written.
TYPES = {
    "address": c_void_p,
    "out": c_void_p,
    "bytes": c_size_t,
    "int": c_int,
    "long": c_int64,
    "u32": c_uint32,
    "u64": c_uint64,
    "name": c_char_p,
    "run": _RUN,
    "forget": _FORGET,
}
# Ranges of memory: their number, starts, sizes, and whether they are written.
_RANGES = "int address address address"
SIGNATURES = {
    "cudaMalloc": "out bytes",
    "cudaFree": "address",
    "cudaHostAlloc": "out bytes int",
    "cudaFreeHost": "address",
    "cudaHostRegister": "address bytes int",
    "cudaHostUnregister": "address",
    "cudaMemGetInfo": "out out",
    "cudaStreamCreateWithFlags": "out int",
    "cudaStreamDestroy": "address",
    "cudaStreamSynchronize": "address",
    "cudaStreamWaitEvent": "address address int",
    "cudaEventCreateWithFlags": "out int",
    "cudaEventDestroy": "address",
    "cudaEventRecord": "address address",
    "cudaEventQuery": "address",
    "cudaEventSynchronize": "address",
    "cudaLaunchHostFunc": "address address address",
    "cudaMemcpyAsync": "address address bytes int address",
    "cuStreamWriteValue32_v2": "address u64 u32 int",
    "cuStreamWaitValue32_v2": "address u64 u32 int",
    "cuStreamQuery": "address",
    "cudaStreamBeginCapture": "address int",
    "cudaStreamEndCapture": "address out",
    "cudaGraphInstantiate": "out address long",
    "cudaGraphLaunch": "address address",
    "cudaGraphDestroy": "address",
    "cudaGraphExecDestroy": "address",
    "fakeReset": "int bytes long int",
    "fakeSeed": "long",
    "fakeDeclare": f"address {_RANGES}",
    "fakeHandover": "u64 u64 address",
    "fakeBlock": "address bytes int",
    "fakeIsPinned": "address",
    "fakeGraphText": "address",
    "fakeGraphOmit": "address int",
    "fakeLaunchKernel": f"name address run long forget {_RANGES}",
}

Range = tuple[int, int, bool]  # address, bytes, whether it is written


class CudaError(RuntimeError):
    """The runtime refused a call; torch raises a RuntimeError of its own for these."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(f"CUDA error: {line}")
        self.status = status


def can_be_built() -> bool:
    return shutil.which("c++") is not None and sys.platform == "linux"


def _built(name: str, source: Path, options: Sequence[str]) -> Path:
    """The path of the library; an earlier build of the same sources is reused."""
    paths = sorted([*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")])
    text = b"".join(path.read_bytes() for path in paths)
    key = hashlib.sha256(text + " ".join([*options, torch.__version__]).encode()).hexdigest()[:16]
    target = BUILD / key / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, name)
        command = ["c++", "-shared", "-fPIC", "-Wall", "-Wextra", str(source), *options]
        subprocess.run([*command, "-o", str(made)], check=True)
        # os.link does not replace a build that another process has made and loaded meanwhile: a
        # loaded file that is replaced is not found by its name.
        with suppress(FileExistsError):
            os.link(made, target)
    return target


@cache
def load() -> CDLL:
    """The runtime, under a file name that cuda_runtime.loaded_library finds."""
    library = CDLL(str(_built("libcudart_fake.so", FOLDER / "runtime.cpp", ["-std=c++17", "-O1"])))
    for name in ("fakeText", "fakeGraphText", "cudaGetErrorString"):
        getattr(library, name).restype = c_char_p
    for name, arguments in SIGNATURES.items():
        getattr(library, name).argtypes = [TYPES[word] for word in arguments.split()]
    return library


@cache
def add_device_guard() -> None:
    """Makes torch accept indexing and other views of tensors on a CUDA device."""
    site = Path(torch.__file__).parent
    options = [
        "-std=c++20",
        "-Wno-unused-parameter",
        f"-I{site / 'include'}",
        f"-L{site / 'lib'}",
        "-lc10",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    CDLL(str(_built("libtorch_cuda_guard.so", FOLDER / "guard.cpp", options)))


def call(name: str, *arguments: object) -> None:
    """Raises CudaError, or the error of a kernel that has run meanwhile."""
    status = getattr(load(), name)(*arguments)
    if _raised:
        raise _raised.pop()
    if status:
        raise CudaError(status, load().cudaGetErrorString(status).decode())


def made(name: str, *arguments: object) -> int:
    """The handle or address that a call returns through its first argument."""
    found = c_void_p()
    call(name, byref(found), *arguments)
    return found.value or 0


def made_after(name: str, argument: object) -> int:
    """The same for calls that return it through the second argument."""
    found = c_void_p()
    call(name, argument, byref(found))
    return found.value or 0


def text(what: str) -> list[str]:
    return load().fakeText(what.encode()).decode().splitlines()


def _ranges(ranges: Iterable[Range]) -> tuple[object, ...]:
    found = list(ranges)
    count = len(found)
    starts, sizes, flags = zip(*found, strict=True) if found else ((), (), ())
    return (
        count,
        (c_void_p * count)(*starts),
        (c_int64 * count)(*sizes),
        (c_int * count)(*map(int, flags)),
    )


def declare(argument: int, ranges: Iterable[Range]) -> None:
    """Declares what the host function with this argument accesses."""
    load().fakeDeclare(argument, *_ranges(ranges))


_kernels: dict[int, Callable[[], object]] = {}
_raised: list[BaseException] = []
_next = iter(range(1, 1 << 62))


@_RUN
def _run(number: int) -> int:
    try:
        with _disable_current_modes(), torch.inference_mode():  # its tensors are the CPU's
            _kernels[number]()
    except BaseException as error:  # noqa: BLE001  # passed on by the call that waits for the kernel
        _raised.append(error)
        return 1
    return 0


@_FORGET
def _forget(number: int) -> None:
    _kernels.pop(number, None)


def launch(name: str, stream: int, run: Callable[[], object], ranges: Iterable[Range]) -> None:
    """Submits a kernel, which runs at the latest when something waits for it."""
    number = next(_next)
    _kernels[number] = run
    call("fakeLaunchKernel", name.encode(), stream, _run, number, _forget, *_ranges(ranges))


def graph_text(exec_handle: int) -> list[list[str]]:
    lines = load().fakeGraphText(exec_handle).decode().splitlines()
    return [line.split("\t") for line in lines]
