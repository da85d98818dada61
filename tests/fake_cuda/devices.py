"""Streams, events, graphs and memory of the fake devices, in place of the classes of torch's C++:
they call the fake runtime as those call CUDA."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_size_t
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from fake_cuda import library
from fake_cuda.allocator import Allocator

NUM_MULTIPROCESSORS = 132  # of an H100
_NON_BLOCKING = 1
_POOL_SIZE = 32  # streams of a device, then the first again, as in c10/cuda/CUDAStream.cpp
_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}


class _Thread(threading.local):
    """The state of a thread: its current device, and the current stream of each device."""

    def __init__(self, num_devices: int) -> None:
        self.device = 0
        self.streams = [Stream(torch.device("cuda", i), handle=0) for i in range(num_devices)]
        library.call("cudaSetDevice", 0)


class Seeds:
    """The two numbers that torch's generator holds on the device while graphs exist, allocated on
    the stream of the first capture, as in CUDAGeneratorImpl.cpp (before torch 2.13)."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self._graphs: dict[int, set[int]] = {}  # by device
        self._held: dict[int, list[tuple[int, Callable[[], None]]]] = {}

    def register(self, device: int, graph: int) -> None:
        if not self._graphs.get(device):
            self._held[device] = [self._cuda.allocate(device, 8) for _ in range(2)]
        self._graphs.setdefault(device, set()).add(graph)

    def forget(self, device: int, graph: int) -> None:
        self._graphs.get(device, set()).discard(graph)
        if not self._graphs.get(device):
            for _, free in self._held.pop(device, []):
                free()


@dataclass(eq=False)
class FakeCuda:
    """The devices of one `fake_cuda` block."""

    num_devices: int
    total_bytes: int
    allocators: list[Allocator] = field(default_factory=list)
    pools: list[list["Stream"]] = field(default_factory=list)
    num_streams: list[int] = field(default_factory=list)
    capturing: int = 0  # the allocator's pool of a capture under way
    num_graphs: int = 0
    captured: "list[ref[CUDAGraph]]" = field(default_factory=list)
    unused: set[int] = field(default_factory=set)  # pinned memory that no tensor uses
    is_over: bool = False

    def __post_init__(self) -> None:
        for index in range(self.num_devices):
            self.allocators.append(Allocator(index, self.total_bytes))
            self.pools.append([])
            self.num_streams.append(0)
        self.thread = _Thread(self.num_devices)
        self.seeds = Seeds(self)

    @property
    def graphs(self) -> list["CUDAGraph"]:
        """The graphs that exist, in the order of their captures."""
        return [graph for each in self.captured if (graph := each()) is not None]

    @property
    def current(self) -> int:
        return self.thread.device

    # ---- memory of tensors

    def allocate(self, device: int, num_bytes: int) -> tuple[int, Callable[[], None]]:
        """(address, function that frees it) of memory for a tensor on the device's current
        stream."""
        if not num_bytes:
            return 0, lambda: None
        allocator = self.allocators[device]
        with self.on_device(device) as stream:
            start = allocator.allocate(num_bytes, stream, self.capturing)
        return start, partial(self._free, allocator, start)

    def _free(self, allocator: Allocator, start: int) -> None:
        if not self.is_over:
            allocator.free(start)

    def pinned(self, num_bytes: int) -> tuple[int, Callable[[], None]]:
        size = max(1, num_bytes)
        start = library.made("cudaHostAlloc", size, 0)
        library.load().fakeBlock(start, size, 1)
        return start, partial(self._unpinned, start, size)

    def _unpinned(self, start: int, size: int) -> None:
        """Marks the memory as unused. torch keeps it for its next pinned tensor, which may be
        written at once."""
        if not self.is_over:
            library.load().fakeBlock(start, size, 0)
            self.unused.add(start)

    @contextmanager
    def on_device(self, device: int) -> Iterator[int]:
        """A context in which the device is current; its value is the current stream's handle."""
        before = self.set_device(device)
        try:
            yield self.thread.streams[device].cuda_stream
        finally:
            self.set_device(before)

    # ---- devices and memory

    def set_device(self, device: int) -> int:
        """Returns the previous device; a negative number changes nothing."""
        before = self.current
        if device >= 0 and device != before:
            library.call("cudaSetDevice", device)
            self.thread.device = device
        return before

    def index(self, device: Any = None) -> int:
        if device is None:
            return self.current
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return self.current if found is None else found

    def synchronize(self, device: Any = None) -> None:
        with self.on_device(self.index(device)):
            library.call("cudaDeviceSynchronize")

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        with self.on_device(self.index(device)):
            library.call("cudaMemGetInfo", byref(free), byref(total))
        return free.value, total.value

    def release_pool(self, number: int) -> None:
        """Lets other tensors use the memory of a pool."""
        for allocator in self.allocators:
            for segment in allocator.segments:
                segment.pool = 0 if segment.pool == number else segment.pool

    def empty_cache(self) -> None:
        for allocator in self.allocators:
            with self.on_device(allocator.device):
                allocator.empty_cache()

    def set_fraction(self, fraction: float, device: Any = None) -> None:
        assert 0 <= fraction <= 1, fraction
        self.allocators[self.index(device)].fraction = fraction

    def properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name="fake CUDA device",
            total_memory=self.total_bytes,
            major=9,
            minor=0,
            multi_processor_count=NUM_MULTIPROCESSORS,
        )

    # ---- streams

    def pooled(self, device: int) -> int:
        pool, number = self.pools[device], self.num_streams[device]
        self.num_streams[device] += 1
        if number < _POOL_SIZE:
            with self.on_device(device):
                pool.append(library.made("cudaStreamCreateWithFlags", _NON_BLOCKING))
        return pool[number % _POOL_SIZE]

    def set_stream(self, stream: "Stream") -> None:
        self.set_device(stream.device.index)
        self.thread.streams[stream.device.index] = stream

    def current_stream(self, device: Any = None) -> "Stream":
        return self.thread.streams[self.index(device)]


ACTIVE: list[FakeCuda] = []


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, *, handle: int | None = None) -> None:
        if handle is None:
            index = ACTIVE[-1].index(device)
            handle = ACTIVE[-1].pooled(index)
            device = torch.device("cuda", index)
        self.device, self.cuda_stream = device, handle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device, self.cuda_stream) == (
            other.device,
            other.cuda_stream,
        )

    def __hash__(self) -> int:
        return hash((self.device, self.cuda_stream))

    def _call(self, name: str, *arguments: object) -> None:
        with ACTIVE[-1].on_device(self.device.index):  # handle 0: its default stream
            library.call(name, *arguments)

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self.cuda_stream)

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event


class Event:
    """Belongs to the device of the first stream that records it, as at::cuda::CUDAEvent does."""

    def __init__(self, enable_timing: bool = False, **options: object) -> None:
        self._handle: int | None = None
        self._owner = ACTIVE[-1]

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._owner.current_stream()
        self._recorded_s = time.perf_counter()
        with self._owner.on_device(stream.device.index):
            if self._handle is None:
                self._handle = library.made("cudaEventCreateWithFlags", 2)
            library.call("cudaEventRecord", self._handle, stream.cuda_stream)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or self._owner.current_stream()
        stream._call("cudaStreamWaitEvent", stream.cuda_stream, self._made(), 0)

    def synchronize(self) -> None:
        library.call("cudaEventSynchronize", self._made())

    def query(self) -> bool:
        status = library.load().cudaEventQuery(self._made())
        return status != library.NOT_READY

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between the calls that recorded them: work has no times here."""
        assert self.query() and end.query()
        return 1e3 * (end._recorded_s - self._recorded_s)

    def _made(self) -> int:
        """The handle. torch returns at once from waiting for an event that was never recorded; here
        that is an error."""
        if self._handle is None:
            with self._owner.on_device(self._owner.current):
                self._handle = library.made("cudaEventCreateWithFlags", 2)
        return self._handle

    def __del__(self) -> None:
        if self._handle is not None and not self._owner.is_over:
            library.load().cudaEventDestroy(self._handle)


class CUDAGraph:
    """Captures and replays as aten/src/ATen/cuda/CUDAGraph.cpp does."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._owner = ACTIVE[-1]
        self._graph = self._exec = self._pool = 0
        self._stream: Stream | None = None

    def capture_begin(self, capture_error_mode: str = "global", **options: object) -> None:
        assert not self._graph, "a graph is captured once"
        stream = self._owner.current_stream()
        if not stream.cuda_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._owner.num_graphs += 1
        number = self._owner.num_graphs
        self._owner.seeds.register(stream.device.index, number)
        self._pool = number
        self._owner.capturing = number
        self._stream = stream
        try:
            library.call("cudaStreamBeginCapture", stream.cuda_stream, _MODES[capture_error_mode])
        except library.CudaError:
            self._owner.capturing = 0
            raise

    def capture_end(self) -> None:
        assert self._stream is not None
        self._owner.capturing = 0
        self._graph = library.made_after("cudaStreamEndCapture", self._stream.cuda_stream)
        self._exec = library.made("cudaGraphInstantiate", self._graph, 0)
        self._owner.captured.append(ref(self))

    def replay(self) -> None:
        stream = self._owner.current_stream()
        stream._call("cudaGraphLaunch", self._exec, stream.cuda_stream)

    @property
    def handle(self) -> int:
        return self._exec

    def reset(self) -> None:
        if self._stream is not None and not self._owner.is_over:
            self._owner.seeds.forget(self._stream.device.index, self._pool)
        if self._exec and not self._owner.is_over:
            library.load().cudaGraphExecDestroy(self._exec)
            library.load().cudaGraphDestroy(self._graph)
            self._owner.release_pool(self._pool)
        self._exec = 0

    __del__ = reset
