"""CUDA calls that torch does not offer, made through the runtime that torch has loaded and through
the driver.

A second copy of the runtime would have a state of its own, so the one that the process has loaded
is looked up; no CUDA toolkit is needed. Signatures: cuda_runtime_api.h and cuda.h."""

import re
from ctypes import CDLL, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p, cast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from hotsplit.errors import HotsplitError

NOT_READY = 600  # cudaErrorNotReady, CUDA_ERROR_NOT_READY
_DRIVER = "libcuda.so.1"
_BY_ADDRESS = 4  # cudaMemcpyDefault: the direction follows from the addresses
_MAPS = Path("/proc/self/maps")
_NAME = re.compile(r"libcudart[^/]*\.so[.\d]*$")


class DeviceLost(HotsplitError):
    """A device failed and no longer answers: what is on it is lost."""


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
        self._check(self.library.cudaLaunchHostFunc(stream, function, argument), "a host function")

    def _check(self, status: int, what: str) -> None:
        if status:
            text = self.library.cudaGetErrorString(status).decode()
            raise HotsplitError(f"{what} was refused by CUDA: {text} (error {status})")


@dataclass(frozen=True)
class StreamMemory:
    """The driver's operations by which a stream writes and awaits 32-bit values in pinned memory.
    CUDA 11.7 and drivers from 515 on have them; drivers for Windows, and so those under WSL, and
    virtual GPUs may not."""

    driver: CDLL

    def write(self, stream: int, address: int, value: int) -> None:
        """Writes a value, in stream order, after everything written before is visible to the
        host."""
        self._check(self.driver.cuStreamWriteValue32_v2(stream, address, value, 0))

    def wait(self, stream: int, address: int, value: int) -> None:
        """Makes later work of the stream wait until the value at the address is at least `value`
        (CU_STREAM_WAIT_VALUE_GEQ, which compares modulo 2^32)."""
        self._check(self.driver.cuStreamWaitValue32_v2(stream, address, value, 0))

    @property
    def query(self) -> int:
        """The address of cuStreamQuery. Unlike cudaStreamQuery it leaves no error behind that a
        later call of torch would find."""
        return cast(self.driver.cuStreamQuery, c_void_p).value or 0

    def _check(self, status: int) -> None:
        if status:
            raise HotsplitError(f"the driver refuses stream memory operations (error {status})")


@cache
def stream_memory() -> StreamMemory:
    """Raises HotsplitError if the driver has no such operations."""
    load()
    try:
        driver = CDLL(_DRIVER)
        driver.cuStreamWriteValue32_v2.argtypes = [c_void_p, c_uint64, c_uint32, c_uint]
        driver.cuStreamWaitValue32_v2.argtypes = [c_void_p, c_uint64, c_uint32, c_uint]
        driver.cuStreamQuery.argtypes = [c_void_p]
    except (OSError, AttributeError):
        raise HotsplitError("this driver has no stream memory operations") from None
    return StreamMemory(driver)


@cache
def load() -> CudaRuntime:
    """Loads the CUDA runtime. Raises HotsplitError if torch has not loaded one."""
    torch.cuda.init()
    library = CDLL(loaded_library(_MAPS.read_text() if _MAPS.exists() else ""))
    library.cudaMemcpyAsync.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_void_p]
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
