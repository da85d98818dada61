"""The CUDA backend of a hybrid step: a stream per GPU, and CUDA graphs of a GPU's segments."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hotsplit.runtime.device.streams import CudaStream, Stream
from hotsplit.runtime.step.doorbells import DoorbellStream
from hotsplit.runtime.step.hybrid_device import Take
from hotsplit.runtime.step.plain_backend import Backend, allocated, submitted

_OVERLAPPING = 9  # compute capability


def cuda_backend(
    take: Callable[[torch.device], Take] | None = None,
    *,
    has_graph: bool,
    has_doorbells: bool = False,
    overlaps: bool = False,
) -> Backend:
    """Builds the backend. `take` allocates on a device; None is torch's allocator. Without a graph,
    every step launches its kernels one by one: slower, with the same results. `has_doorbells`: the
    CPU's parts are handed over by flags instead of callbacks (doorbells.py). `overlaps`: a kernel
    begins before the last one has ended.

    Raises ImportError if Triton is not installed."""
    from hotsplit.runtime.kernels.gpu.kernels import overlapped, triton_kernels

    kernels = triton_kernels()
    return Backend(
        kernels=overlapped(kernels) if overlaps else kernels,
        stream=DoorbellStream if has_doorbells else CudaStream,
        take=take or allocated,
        prepare=_captured if has_graph else submitted,
        is_pinned=True,
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
