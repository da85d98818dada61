"""A GPU whose submissions are captured in graphs: kernels by Triton, copies, host functions and
stream memory operations by the driver's interface, on torch's streams."""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

WIDTH = 4096  # D, of the vectors that are handed over
COPY_ATTRIBUTES = {
    "memory operations": 92,
    "64-bit ones": 93,
    "version 2": 122,
    "native host atomics": 86,
}


class Refused(Exception):
    """CUDA, or this driver, refuses a submission."""


class HandoverGpu:
    """`memops` says how stream memory operations can be captured: "direct" or "none"."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes the context
        from handover import triton_kernels  # needs Triton

        self.kernels = triton_kernels
        self.main, self.side = torch.cuda.Stream(), torch.cuda.Stream()
        library = ctypes.CDLL("libcuda.so.1")
        p, s, u32, u64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint64

        def function(names: Sequence[str], *arguments: Any) -> Any:
            found = next((f for name in names if (f := getattr(library, name, None))), None)
            if found is not None:
                found.restype, found.argtypes = ctypes.c_int, list(arguments)
            return found

        self._copy = function(["cuMemcpyAsync"], u64, u64, s, p)
        self._host = function(["cuLaunchHostFunc"], p, p, p)
        self._memop = {
            word: function(
                [f"cuStream{word}Value32_v2", f"cuStream{word}Value32"], p, u64, u32, u32
            )
            for word in ("Write", "Wait")
        }
        self._attribute = function(["cuDeviceGetAttribute"], ctypes.POINTER(ctypes.c_int), u32, u32)
        self.memops = "none"

    def facts(self) -> dict[str, object]:
        def attribute(number: int) -> int:
            value = ctypes.c_int(-1)
            self._attribute(ctypes.byref(value), number, 0)
            return value.value

        found = {name: attribute(number) for name, number in COPY_ATTRIBUTES.items()}
        return {"device": torch.cuda.get_device_name(), **found}

    def check(self, status: int, what: str) -> None:
        if status:
            raise Refused(f"{what}: CUDA error {status}")

    def launch(self, name: str, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        with torch.cuda.stream(self.main):
            getattr(self.kernels, name)[grid](*arguments, **options)

    def busy(self, us: float, stamp: int = 0) -> None:
        self.launch("busy", (1,), int(1000 * us), stamp, num_warps=1)

    def put(self, x_D: torch.Tensor, address: int, flag: int = 0) -> None:
        self.launch("put", (1,), x_D, address, flag, 1, D=WIDTH, num_warps=8)

    def add(self, x_D: torch.Tensor, address: int, flag: int = 0) -> None:
        self.launch("add", (1,), x_D, address, flag, 1, D=WIDTH, num_warps=8)

    def copy(self, target: int, source: int, num_bytes: int, *, on_side: bool = False) -> None:
        self.check(self._copy(target, source, num_bytes, self._stream(on_side)), "a copy")

    def host(self, function: int, argument: int, *, on_side: bool = False) -> None:
        self.check(self._host(self._stream(on_side), function, argument), "a host function")

    def write(self, address: int, value: int) -> None:
        self._operate("Write", address, value)

    def wait(self, address: int, value: int) -> None:
        """The stream goes on once the value is at least this."""
        self._operate("Wait", address, value)

    def fork(self) -> None:
        self._order(self.main, self.side)

    def join(self) -> None:
        self._order(self.side, self.main)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, pin_memory=True)

    def zeros(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device="cuda")

    def captured(self, submit: Callable[[], Any]) -> Any:
        """A graph of what `submit` submits."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, stream=self.main, capture_error_mode="thread_local"):
                submit()
        finally:  # after a failed capture, torch leaves the capture's stream current
            torch.cuda.set_stream(current)
        return graph

    def timed(
        self, graph: Any, serve: Callable[[], Any] | None = None, *, sleeps: bool = False
    ) -> tuple[float, float]:
        """Microseconds on the GPU, and on the host until everything has ended. `sleeps`: this
        thread waits without a core."""
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True, blocking=sleeps)
        began = time.perf_counter()
        with torch.cuda.stream(self.main):
            begin.record(self.main)
            graph.replay()
            end.record(self.main)
        if serve is not None:
            serve()
        end.synchronize()
        host_us = 1e6 * (time.perf_counter() - began)
        return 1e3 * begin.elapsed_time(end), host_us

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def warm_up(self, x_D: torch.Tensor, pinned_D: torch.Tensor, flags: torch.Tensor) -> None:
        """Compiles the kernels, which a capture must not do, and tries memory operations in one."""
        for flag in (flags.data_ptr(), 0):
            self.busy(1, flags.data_ptr())
            self.put(x_D, pinned_D.data_ptr(), flag)
            flags.fill_(1)
            self.add(x_D, pinned_D.data_ptr(), flag)
            self.synchronize()
        flags.zero_()
        at = flags.data_ptr()
        try:
            graph = self.captured(lambda: (self.write(at, 7), self.wait(at, 7)))
            self.timed(graph)
            self.memops = "direct" if int(flags[0]) == 7 else "none"
        except (Refused, RuntimeError):
            self.memops = "none"
        flags.zero_()

    def _operate(self, word: str, address: int, value: int) -> None:
        if self._memop[word] is None:
            raise Refused("this driver has no stream memory operations")
        self.check(self._memop[word](self.main.cuda_stream, address, value, 0), word)

    def _stream(self, on_side: bool) -> int:
        return (self.side if on_side else self.main).cuda_stream

    def _order(self, first: torch.cuda.Stream, second: torch.cuda.Stream) -> None:
        event = torch.cuda.Event()
        event.record(first)
        second.wait_event(event)
