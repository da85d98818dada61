"""What torch.cuda does on the fake runtime: thin stand-ins for the C++ that torch's CPU build lacks.

`fake_cuda()` puts them in torch's place for a block; the product's code runs unchanged in it. What
torch has in Python (torch.cuda.graph, torch.cuda.stream, torch.cuda.device) is torch's own."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import byref, c_size_t
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_cuda import library
from fake_cuda.allocator import Allocator
from fake_cuda.declared import declarations
from fake_cuda.kernels import launched
from fake_cuda.tensors import DeviceTensor, Dispatch
from torch import Tensor

from sparkinfer.runtime.device import cuda_runtime
from sparkinfer.runtime.kernels.gpu.kernels import Kernels, reference_kernels
from sparkinfer.runtime.weights import gpu_products

_NON_BLOCKING = 1
_POOL_SIZE = 32  # streams of a device; then the first again, as c10/cuda/CUDAStream.cpp has it
_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}


class _Thread(threading.local):
    """What each thread has of its own: its current device, and the current stream of each."""

    def __init__(self, num_devices: int) -> None:
        self.device = 0
        self.streams = [Stream(torch.device("cuda", i), handle=0) for i in range(num_devices)]
        library.call("cudaSetDevice", 0)


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
    graphs: list["CUDAGraph"] = field(default_factory=list)  # those that live, in order
    unused: set[int] = field(default_factory=set)  # pinned memory that no tensor has
    is_over: bool = False

    def __post_init__(self) -> None:
        for index in range(self.num_devices):
            self.allocators.append(Allocator(index, self.total_bytes))
            self.pools.append([])
            self.num_streams.append(0)
        self.thread = _Thread(self.num_devices)

    @property
    def current(self) -> int:
        return self.thread.device

    # ---- of tensors.Owner

    def allocate(self, device: int, num_bytes: int) -> tuple[int, Callable[[], None]]:
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
        """torch keeps the memory for its next pinned tensor, which may be written at once."""
        if not self.is_over:
            library.load().fakeBlock(start, size, 0)
            self.unused.add(start)

    @contextmanager
    def on_device(self, device: int) -> Iterator[int]:
        before = self.set_device(device)
        try:
            yield self.thread.streams[device].cuda_stream
        finally:
            self.set_device(before)

    # ---- devices and memory

    def set_device(self, device: int) -> int:
        """Returns the one before; a negative number changes nothing."""
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

    def empty_cache(self) -> None:
        for allocator in self.allocators:
            with self.on_device(allocator.device):
                allocator.empty_cache()

    def set_fraction(self, fraction: float, device: Any = None) -> None:
        assert 0 <= fraction <= 1, fraction
        self.allocators[self.index(device)].fraction = fraction

    def properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name="fake CUDA device", total_memory=self.total_bytes, major=8, minor=0,
            multi_processor_count=1,
        )  # fmt: skip

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


_active: list[FakeCuda] = []


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, *, handle: int | None = None) -> None:
        if handle is None:
            index = _active[-1].index(device)
            handle = _active[-1].pooled(index)
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
        with _active[-1].on_device(self.device.index):  # whose default stream 0 is
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
    """Made on the device of the first stream that records it, as at::cuda::CUDAEvent is."""

    def __init__(self, enable_timing: bool = False, **options: object) -> None:
        self._handle: int | None = None
        self._owner = _active[-1]

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._owner.current_stream()
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

    def _made(self) -> int:
        """torch returns in silence where nothing was recorded; here that is an error."""
        if self._handle is None:
            with self._owner.on_device(self._owner.current):
                self._handle = library.made("cudaEventCreateWithFlags", 2)
        return self._handle

    def __del__(self) -> None:
        if self._handle is not None and not self._owner.is_over:
            library.load().cudaEventDestroy(self._handle)


class CUDAGraph:
    """As aten/src/ATen/cuda/CUDAGraph.cpp."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._owner = _active[-1]
        self._graph = self._exec = self._pool = 0
        self._stream: Stream | None = None

    def capture_begin(self, capture_error_mode: str = "global", **options: object) -> None:
        assert not self._graph, "a graph is captured once"
        stream = self._owner.current_stream()
        if not stream.cuda_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._owner.num_graphs += 1
        self._pool = self._owner.capturing = self._owner.num_graphs
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
        self._owner.graphs.append(self)

    def replay(self) -> None:
        stream = self._owner.current_stream()
        stream._call("cudaGraphLaunch", self._exec, stream.cuda_stream)

    @property
    def handle(self) -> int:
        return self._exec

    def reset(self) -> None:
        if self._exec and not self._owner.is_over:
            library.load().cudaGraphExecDestroy(self._exec)
            library.load().cudaGraphDestroy(self._graph)
            for allocator in self._owner.allocators:  # its memory is everybody's from here on
                for segment in allocator.segments:
                    segment.pool = 0 if segment.pool == self._pool else segment.pool
        self._exec = 0

    __del__ = reset


def _cudart() -> SimpleNamespace:
    """torch._C._cudart: statuses are returned, not raised."""
    runtime = library.load()
    return SimpleNamespace(
        cudaHostRegister=runtime.cudaHostRegister, cudaHostUnregister=runtime.cudaHostUnregister
    )


class _Generator(torch.Generator):
    """A device's random numbers are the CPU's."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
        is_fake = torch.device(device).type == "cuda"
        return _real_generator("cpu" if is_fake else device)


_real_generator = torch.Generator


def _is_pinned(tensor: Tensor, device: object = None) -> bool:
    is_there = not isinstance(tensor, DeviceTensor) and tensor.device.type == "cpu"
    return bool(is_there and library.load().fakeIsPinned(tensor.data_ptr()))


def _replaced(cuda: FakeCuda) -> dict[str, object]:
    """Of torch.cuda, by name."""
    stats = cuda.allocators
    return {
        "is_available": lambda: True,
        "device_count": lambda: cuda.num_devices,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "current_device": lambda: cuda.current,
        "set_device": lambda device: cuda.set_device(cuda.index(device)),
        "_exchange_device": cuda.set_device,
        "_maybe_exchange_device": cuda.set_device,
        "get_device_name": lambda device=None: cuda.properties().name,
        "get_device_properties": cuda.properties,
        "synchronize": cuda.synchronize,
        "current_stream": cuda.current_stream,
        "default_stream": lambda d=None: Stream(torch.device("cuda", cuda.index(d)), handle=0),
        "set_stream": cuda.set_stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "mem_get_info": cuda.mem_get_info,
        "empty_cache": cuda.empty_cache,
        "memory_allocated": lambda d=None: stats[cuda.index(d)].allocated,
        "memory_reserved": lambda d=None: stats[cuda.index(d)].reserved,
        "max_memory_allocated": lambda d=None: stats[cuda.index(d)].peak_allocated,
        "max_memory_reserved": lambda d=None: stats[cuda.index(d)].peak_reserved,
        "set_per_process_memory_fraction": cuda.set_fraction,
        "get_allocator_backend": lambda: "native",
        "cudart": _cudart,
    }


@contextmanager
def fake_cuda(
    num_devices: int = 1,
    total_bytes: int = 1 << 30,
    seed: int = 0,
    kernels: Kernels | None = None,
) -> Iterator[FakeCuda]:
    """CUDA devices for the code in the block. Everything of theirs must be gone at its end.

    `seed` decides in what order things run, of those that streams and events allow. `kernels` are
    in Triton's place (kernels.launched, ptx_kernels.StreamedPtx); None: the float64 reference."""
    library.add_device_guard()
    library.load().fakeReset(num_devices, total_bytes, seed)
    cuda_runtime.load.cache_clear()
    gpu_products._kernels.cache_clear()
    cuda = FakeCuda(num_devices, total_bytes)
    with ExitStack() as stack:
        for name, value in _replaced(cuda).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_pinned", _is_pinned))
        stack.enter_context(
            mock.patch.object(torch._C, "_host_emptyCache", lambda: None, create=True)
        )
        dispatch = Dispatch(cuda)
        stack.enter_context(
            mock.patch.object(torch.Tensor, "pin_memory", lambda t, d=None: dispatch.pinned(t))
        )
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(DeviceTensor, "dispatch", dispatch))
        stack.enter_context(mock.patch.object(threading.Thread, "run", _run_in(dispatch)))
        made = kernels or launched(reference_kernels())
        for module in [m for m in sys.modules.values() if vars(m).get("triton_kernels")]:
            stack.enter_context(mock.patch.object(module, "triton_kernels", lambda: made))
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is then a copy
        stack.enter_context(declarations())
        stack.callback(_finish, cuda)
        _active.append(cuda)
        with dispatch:
            yield cuda


def _run_in(dispatch: Dispatch) -> Callable[[threading.Thread], None]:
    """Thread.run for a thread whose tensors may be on the devices, too: torch's modes are a
    thread's own."""
    run = threading.Thread.run

    def in_mode(thread: threading.Thread) -> None:
        with dispatch:
            run(thread)

    return in_mode


def _finish(cuda: FakeCuda) -> None:
    if any(allocator.allocated for allocator in cuda.allocators):
        gc.collect()  # cycles of the product: a captured step and its inputs
    library.load().fakeForgive()
    cuda.empty_cache()
    for start in cuda.unused:
        library.call("cudaFreeHost", start)
    cuda.is_over = True
    _active.remove(cuda)
    cuda_runtime.load.cache_clear()
    gpu_products._kernels.cache_clear()
