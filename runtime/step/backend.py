"""What a hybrid step runs on: kernels, streams and memory. In the plain form both sides are on the
CPU, where kernels run as they are submitted: for tests without a GPU, and as the reference for
captured steps. The CUDA form has a stream per GPU, captures a GPU's segments as graphs, and hands
the CPU's parts of a step over by flags (doorbells).

A callback of the driver costs an interrupt and the wake-up of its thread, on an H100 60 to 110
microseconds of the 95 to 150 that a divided layer's hand-over took. Here the stream itself writes
and awaits 32-bit values in pinned memory (cuStreamWriteValue32, cuStreamWaitValue32), and the
thread that waits for the step serves it: it looks at the flags in order and runs the functions, as
the first of the kernels' threads (step_server.h). The same is done in FreeToken. Where the driver
has no such operations, kernels beside the CPU's work are launched one by one.

Each captured graph has a list of hand-overs and flags of its own. The CPU resets the flags before
every replay, when nothing of the last one is left, so all of a graph's values can be 1. The GPU
writes a layer's input again only after it has awaited the flag behind the last reading of it, and
the CPU its output only after a flag that follows the last reading of that, so one buffer is enough
for each."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.runtime.device import cuda_runtime
from hotsplit.runtime.device.cuda_runtime import DeviceLost
from hotsplit.runtime.device.streams import CudaStream, HostNode, PlainStream, Stream
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.ops.structs import members
from hotsplit.runtime.step.hybrid_device import Take

if TYPE_CHECKING:
    from hotsplit.runtime.kernels.gpu.kernels import Kernels


# Turns a submission to a stream into a function that is called for every step.
Prepare = Callable[[Stream, Callable[[], None]], Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The kernels, streams and memory that a step runs on."""

    kernels: "Kernels"
    stream: Callable[[torch.device], Stream]  # makes one
    take: Callable[[torch.device], Take]  # zeroed memory for buffers
    prepare: Prepare
    is_pinned: bool
    captures_handovers: bool = True  # `prepare` takes work in which the CPU has a part


def plain_backend(kernels: "Kernels") -> Backend:
    return Backend(
        kernels=kernels,
        stream=lambda device: PlainStream(),
        take=allocated,
        prepare=submitted,
        is_pinned=False,
    )


def allocated(device: torch.device) -> Take:
    """Torch's allocator on a device."""

    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return take


def submitted(stream: Stream, submit: Callable[[], None]) -> Callable[[], None]:
    return submit


_OVERLAPPING = 9  # compute capability


def cuda_backend(
    take: Callable[[torch.device], Take] | None = None,
    *,
    has_graph: bool,
    has_doorbells: bool = False,
    overlaps: bool = False,
) -> Backend:
    """Builds the backend. `take` allocates on a device; None is torch's allocator. Without a graph,
    every step launches its kernels one by one: slower, with the same results; so does work beside
    the CPU's unless that is handed over by flags (`has_doorbells`). `overlaps`: a kernel begins
    before the last one has ended.

    Raises ImportError if Triton is not installed."""
    from hotsplit.runtime.kernels.gpu.kernels import overlapped, triton_kernels

    kernels = triton_kernels()
    return Backend(
        kernels=overlapped(kernels) if overlaps else kernels,
        stream=DoorbellStream if has_doorbells else CudaStream,
        take=take or allocated,
        prepare=_captured if has_graph else submitted,
        is_pinned=True,
        captures_handovers=has_doorbells,
    )


def can_overlap(device: torch.device) -> bool:
    """True if kernels of a CUDA device may begin before the last one has ended
    (kernels.gpu.overlap)."""
    return bool(torch.cuda.get_device_properties(device).major >= _OVERLAPPING)


def _captured(stream: Stream, submit: Callable[[], None]) -> Callable[[], None]:
    """Captures the work that `submit` enqueues on the stream, and on streams that fork from it and
    join it; returns a function that replays it on the stream and runs the CPU's part of it.

    Other threads may allocate meanwhile; their work is not captured."""
    assert isinstance(stream, CudaStream)
    graph = torch.cuda.CUDAGraph()
    device = stream.stream.device
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        with (
            without_collection(),
            stream.collected() as run,
            torch.cuda.graph(graph, stream=stream.stream, capture_error_mode="thread_local"),
        ):
            submit()

    def launch() -> None:
        with torch.cuda.stream(stream.stream):
            graph.replay()

    def replay() -> None:
        run(launch)

    replay()  # the first launch uploads the graph
    stream.finish()
    return replay


@contextmanager
def without_collection() -> Iterator[None]:
    """Disables garbage collection: it could free an unused engine or step during a capture, when
    unpinning memory is not allowed."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# How long the CPU waits for a flag. Nothing between two flags of a step takes a tenth of it; it
# also covers a prompt's pass in front of the first.
TIMEOUT_S = 10.0
# Between two questions to the driver whether the stream still runs: each takes a lock and a few us.
QUERY_US = 5000
POLL_S = 200e-6  # at the end of a step, before the thread sleeps until an interrupt wakes it
MOST = 1024  # hand-overs of a graph: five for each of 200 layers
_LINE = 16  # int32 values in a cache line


def can_ring(device: torch.device) -> bool:
    """True if streams of a CUDA device write and await values in pinned memory: tried once, because
    drivers that have these operations may refuse them, as under WSL."""
    flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    stream = torch.cuda.Stream(device)
    try:
        memory = cuda_runtime.stream_memory()
        with torch.cuda.device(device):
            memory.write(stream.cuda_stream, flag.data_ptr(), 1)
            memory.wait(stream.cuda_stream, flag.data_ptr(), 1)
    except HotsplitError:
        return False
    stream.synchronize()
    return bool(flag[0] == 1)


class HandoverStruct(Structure):
    _fields_ = [*members(c_void_p, "function argument ready done")]


class ServingStruct(Structure):
    _fields_ = [*members(c_void_p, "query stream"), *members(c_int64, "query_us timeout_us")]


class Handovers:
    """A list of hand-overs of a stream, in order, with their flags: int32 [number, ready or done,
    cache line]."""

    def __init__(self, stream: torch.cuda.Stream, query: int) -> None:
        self._device = stream.device
        self.flags = torch.zeros(MOST, 2, _LINE, dtype=torch.int32, pin_memory=True)
        self._values = self.flags.numpy()[:, :, 0]
        self._structs = (HandoverStruct * MOST)()
        self._serving = ServingStruct(query=query, stream=stream.cuda_stream)
        self._kept: list[Any] = []
        self.count = 0

    def add(self, node: HostNode) -> int:
        """Appends a hand-over and returns its number."""
        if self.count == MOST:
            raise HotsplitError(f"a step hands over to the CPU more than {MOST} times")
        number, self.count = self.count, self.count + 1
        self._values[number] = 0
        ready, done = self.addresses(number)
        self._structs[number] = HandoverStruct(
            function=node.function, argument=node.argument, ready=ready, done=done
        )
        self._kept.append(node.kept)
        return number

    def addresses(self, number: int) -> tuple[int, int]:
        """The addresses of a hand-over's flags, `ready` and `done`."""
        start = self.flags.data_ptr() + number * 2 * _LINE * self.flags.element_size()
        return start, start + _LINE * self.flags.element_size()

    def run(self, launch: Callable[[], None]) -> None:
        """Launches the graph that has these hand-overs, and runs their functions. Raises DeviceLost
        if the GPU does not get to them."""
        self.reset()
        try:
            launch()
            self.serve(0, self.count)
        finally:  # whatever happens, the stream does not wait for ever
            self.release()

    def reset(self) -> None:
        self._values[: self.count] = 0

    def release(self) -> None:
        self._values[: self.count, 1] = 1

    def serve(self, start: int, stop: int) -> None:
        """Runs the functions of these hand-overs when the GPU has got there. Raises DeviceLost."""
        serving = self._serving
        serving.query_us, serving.timeout_us = QUERY_US, round(1e6 * TIMEOUT_S)
        served, status = library.serve(self._structs, start, stop, serving)
        if served == stop - start:
            return
        where = f"hand-over {start + served + 1} of {self.count}"
        why = f"the GPU failed (CUDA error {status})"
        if status == cuda_runtime.NOT_READY:
            why = f"the GPU did not get there within {TIMEOUT_S:g} s"
        elif status < 0:
            why = "the GPU's step ended without it"
        raise DeviceLost(f"{self._device}: {where} to the CPU: {why}")

    def clear(self) -> None:
        """Forgets all hand-overs, of which none must be under way."""
        self.count = 0
        self._kept.clear()


class DoorbellStream(CudaStream):
    """A CUDA stream that hands over by flags.

    Outside of a capture, `join` serves at once: the host submits no further, as a stream that waits
    takes only about a thousand submissions more before it blocks the thread that submits them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._memory = cuda_runtime.stream_memory()
        self._submitted = Handovers(self.stream, self._memory.query)
        self._served = 0  # of those submitted outside of a capture
        self._captured: Handovers | None = None

    def start(self, node: HostNode) -> int:
        handovers = self._captured or self._submitted
        number = handovers.add(node)
        with torch.cuda.device(self.stream.device):
            self._memory.write(self.stream.cuda_stream, handovers.addresses(number)[0], 1)
        return number

    def join(self, handed: int) -> None:
        handovers = self._captured or self._submitted
        if self._captured is None and handed >= self._served:
            start, self._served = self._served, handed + 1
            handovers.serve(start, self._served)
        with torch.cuda.device(self.stream.device):
            self._memory.wait(self.stream.cuda_stream, handovers.addresses(handed)[1], 1)

    @contextmanager
    def collected(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        handovers = self._captured = Handovers(self.stream, self._memory.query)
        try:
            yield handovers.run
        finally:
            self._captured = None

    def finish(self, *, sleeps: bool = False) -> None:
        if not (sleeps and self._ends_soon()):
            super().finish(sleeps=sleeps)
        self._submitted.clear()
        self._served = 0

    def _ends_soon(self) -> bool:
        """True if everything submitted ends within POLL_S: to sleep and to be woken takes
        longer."""
        self._end.record(self.stream)
        until = perf_counter() + POLL_S
        while perf_counter() < until:
            if self._end.query():
                return True
        return False
