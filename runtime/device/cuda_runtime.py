"""CUDA runtime calls that torch does not offer, made through the library that torch has loaded.

A second copy of that library would have a state of its own, so the one that the process has loaded
is looked up; no CUDA toolkit is needed. Signatures: cuda_runtime_api.h."""

import re
from ctypes import CDLL, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from hotsplit.errors import HotsplitError

_BY_ADDRESS = 4  # cudaMemcpyDefault: the direction follows from the addresses
_MAPS = Path("/proc/self/maps")
_NAME = re.compile(r"libcudart[^/]*\.so[.\d]*$")


@dataclass(frozen=True)
class CudaRuntime:
    library: CDLL

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copies asynchronously, in stream order; the direction follows from the addresses."""
        self._check(
            self.library.cudaMemcpyAsync(target, source, num_bytes, _BY_ADDRESS, stream),
            f"a copy of {num_bytes:,} bytes",
        )

    def host_function(self, stream: int, function: int, argument: int) -> None:
        """Calls `void function(void* argument)` on the host, in stream order."""
        if not hasattr(self.library, "cudaLaunchHostFunc"):  # before CUDA 10
            raise HotsplitError("this CUDA runtime has no cudaLaunchHostFunc")
        self._check(self.library.cudaLaunchHostFunc(stream, function, argument), "a host function")

    def _check(self, status: int, what: str) -> None:
        if status:
            text = self.library.cudaGetErrorString(status).decode()
            raise HotsplitError(f"{what} was refused by CUDA: {text} (error {status})")


@cache
def load() -> CudaRuntime:
    """Loads the CUDA runtime. Raises HotsplitError if torch has not loaded one."""
    torch.cuda.init()
    library = CDLL(loaded_library(_MAPS.read_text() if _MAPS.exists() else ""))
    library.cudaMemcpyAsync.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_void_p]
    if hasattr(library, "cudaLaunchHostFunc"):
        library.cudaLaunchHostFunc.argtypes = [c_void_p, c_void_p, c_void_p]
        library.cudaLaunchHostFunc.restype = c_int
    library.cudaGetErrorString.argtypes = [c_int]
    library.cudaGetErrorString.restype = c_char_p
    library.cudaMemcpyAsync.restype = c_int
    return CudaRuntime(library)


def loaded_library(maps: str) -> str:
    """The path of the CUDA runtime in a process's mappings, given the text of /proc/self/maps."""
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and _NAME.search(fields[5]):
            return fields[5]
    raise HotsplitError(
        "torch has not loaded CUDA's runtime library (libcudart) as a separate file, so no copies"
        " can be submitted to a stream; run on the CPU with device='cpu'"
    )
