"""Wrong uses of CUDA, each with the line by which the fake runtime rejects it. They go through
hotsplit's classes where these can be misused, else through the calls that these make. Every misuse
gets the FakeCuda."""

import ctypes
import gc
from collections.abc import Callable
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_void_p

import torch
from fake_cuda import library
from fake_cuda.devices import FakeCuda
from fake_cuda.library import call, made

from hotsplit.runtime.device import huge_pages
from hotsplit.runtime.device.streams import CudaStream, HostNode
from hotsplit.runtime.step.backend import _captured

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
COUNT = 64
LEGACY = 1  # the handle cudaStreamLegacy


# By name: the regular expression of the line that rejects it, and the misuse.
MISUSES: dict[str, tuple[str, Callable[[FakeCuda], object]]] = {}


def rejected(line: str) -> Callable[[Callable[[FakeCuda], None]], Callable[[FakeCuda], None]]:
    """Registers a misuse by its name."""

    def enter(misuse: Callable[[FakeCuda], None]) -> Callable[[FakeCuda], None]:
        MISUSES[misuse.__name__] = line, misuse
        return misuse

    return enter


def zeros(device=GPU, count=COUNT):
    return torch.zeros(count, device=device)


def pinned(count=COUNT):
    return torch.zeros(count, pin_memory=True)


def streams(device=GPU):
    """A main and a side stream, which have waited for what torch has launched so far."""
    found = CudaStream(device), CudaStream(device)
    for stream in found:
        stream.follow()
    return found


def raw(device=0):
    """The address of memory from cudaMalloc."""
    with torch.cuda.device(device):
        return made("cudaMalloc", 4 * COUNT)


def copy(target, source, stream):
    call("cudaMemcpyAsync", target, source, 4 * COUNT, 4, stream.stream.cuda_stream)


def captured(submit: Callable[[CudaStream, CudaStream], object], before=lambda main, side: None):
    """Captures what `submit` submits to two streams, in the way a step is captured."""
    main, side = streams()
    before(main, side)
    return _captured(main, lambda: submit(main, side))


def kernel(stream, tensor):
    stream.launch(lambda: tensor.add_(1), reads=[tensor], writes=[tensor])


def a_graph(cuda):
    """The handle of a graph of one kernel, which streams 1 and 2 were made for."""
    x = zeros()
    replay = captured(lambda main, side: kernel(main, x))
    cuda.kept = x, replay
    return cuda.graphs[-1].handle


@contextmanager
def raw_capture(stream, mode=0):
    call("cudaStreamBeginCapture", stream.stream.cuda_stream, mode)
    yield
    library.made_after("cudaStreamEndCapture", stream.stream.cuda_stream)


def node(function, reads=(), writes=()):
    call_it = CFUNCTYPE(None, c_void_p)(function)
    address = ctypes.cast(call_it, c_void_p).value
    return HostNode(function=address, argument=address, reads=reads, writes=writes, kept=(call_it,))


# ---- in a capture


# What is submitted to two streams while the first is captured. torch's allocator relaxes the
# capture's mode for its own calls of cudaMalloc; the fake allocator does not.
IN_A_CAPTURE = {
    "cudaStreamSynchronize: stream 1 is captured": lambda main, side: main.finish(),
    "cudaDeviceSynchronize: stream 1 is captured": lambda main, side: torch.cuda.synchronize(),
    "cudaEventSynchronize: the event was recorded": lambda main, side: main.record().synchronize(),
    "cudaHostAlloc: not allowed while stream 1 is captured": lambda main, side: pinned(),
    "cudaMalloc: not allowed while stream 1 is captured": lambda main, side: raw(),
}
MISUSES |= {
    line.partition(":")[0]: (line, lambda cuda, submit=submit: captured(submit))
    for line, submit in IN_A_CAPTURE.items()
}


@rejected("cudaStreamSynchronize: stream 1 is captured")
def reading_a_value(cuda):
    x = zeros()

    def submit(main, side):
        with torch.cuda.stream(main.stream):
            x[0].item()

    captured(submit)


@rejected("cudaHostRegister: not allowed while stream 1 is captured")
def pinning(cuda):
    mapping, memory = huge_pages.untouched(4096)
    captured(lambda main, side: mapping.pin(memory.data_ptr(), 4096))


@rejected("cudaHostUnregister: not allowed while stream 1 is captured")
def collecting_pinned_weights(cuda):
    kept = [huge_pages.untouched(4096)]
    kept[0][0].pin(kept[0][1].data_ptr(), 4096)

    def submit(main, side):
        kept.clear()
        gc.collect()

    captured(submit)


@rejected("torch's add_: the default stream is used while stream 1 is")
def work_on_the_default_stream(cuda):
    x = zeros()
    captured(lambda main, side: x.add_(1) if set_default() else None)


def set_default():
    torch.cuda.set_stream(torch.cuda.default_stream())
    return True


@rejected("stream 2 was not joined: its torch's add_ is not waited for")
def a_fork_that_is_not_joined(cuda):
    x = zeros()

    def submit(main, side):
        kernel(main, x)
        side.wait(main.record())
        kernel(side, x)

    captured(submit)


@rejected("stream 1, which is captured, waits for an event from outside")
def an_event_from_before_it(cuda):
    found = []
    captured(
        lambda main, side: main.wait(found[0]),
        before=lambda main, side: found.append(side.record()),
    )


@rejected("waits for an event of a capture that has ended")
def an_event_of_it_afterwards(cuda):
    found = []
    captured(lambda main, side: found.append(main.record()))
    CudaStream(GPU).wait(found[0])


@rejected("stream 1 waits for an event of another capture")
def an_event_of_another_capture(cuda):
    main, side = streams()
    with raw_capture(main), raw_capture(side):
        main.wait(side.record())


@rejected("256 bytes of memory that is not pinned, while stream 1 is captured")
def copying_unpinned_memory(cuda):
    x, host = zeros(), torch.zeros(COUNT)
    captured(lambda main, side: main.copy(x, host))


@rejected("cudaGraphLaunch: stream 3 is captured")
def launching_a_graph_in_it(cuda):
    exec_handle, (main, _) = a_graph(cuda), streams()
    with raw_capture(main):
        call("cudaGraphLaunch", exec_handle, main.stream.cuda_stream)


@rejected("cudaGraphLaunch: the default stream is used while stream 3 is captured")
def launching_a_graph_on_the_default_stream(cuda):
    exec_handle, (main, _) = a_graph(cuda), streams()
    with raw_capture(main):
        call("cudaGraphLaunch", exec_handle, LEGACY)


# ---- graphs and what they refer to


@rejected("a graph is launched after memory of its copy was freed")
def a_freed_buffer_in_a_graph(cuda):
    kept = [zeros(), pinned()]
    replay = captured(lambda main, side: main.copy(kept[1], kept[0]))
    del kept[0]
    replay()


@rejected("of its copy was freed and given away again")
def a_buffer_given_to_another_in_a_graph(cuda):
    kept = [zeros(), pinned()]
    replay = captured(lambda main, side: main.copy(kept[1], kept[0]))
    address = kept[0].data_ptr()
    del kept[0]
    other = zeros()
    assert other.data_ptr() == address
    replay()


@rejected("a graph is launched after memory of its copy was freed or unpinned")
def unpinned_memory_in_a_graph(cuda):
    mapping, memory = huge_pages.untouched(4096)
    mapping.pin(memory.data_ptr(), 4096)
    x, host = zeros(), memory[: 4 * COUNT].view(torch.float32)
    replay = captured(lambda main, side: main.copy(x, host))
    call("cudaHostUnregister", memory.data_ptr())
    mapping._pinned_at = None
    replay()


@rejected("cudaGraphLaunch: a graph that was destroyed")
def a_graph_after_its_end(cuda):
    x, y = zeros(), zeros()
    replay = captured(lambda main, side: main.copy(x, y))
    call("cudaGraphExecDestroy", cuda.graphs[-1].handle)
    replay()


# ---- memory


@rejected("some kernel: 256 bytes at .* are memory that was freed")
def a_kernel_on_what_was_freed(cuda):
    x = zeros()
    address = x.data_ptr()
    del x
    library.launch("some kernel", 0, lambda: None, [(address, 4 * COUNT, False)])


@rejected("copy: 256 bytes at .* are memory beyond an allocation's end")
def copying_past_the_end(cuda):
    first, second, stream = raw(), raw(), streams()[0]
    copy(first + 4, second, stream)


@rejected("some kernel: 32 bytes at .* are memory of the host that is not pinned")
def a_kernel_on_the_host(cuda):
    library.launch("some kernel", 0, lambda: None, [(torch.zeros(8).data_ptr(), 32, True)])


@rejected("cudaHostUnregister: copy on stream 1 still uses")
def unpinning_under_a_copy(cuda):
    mapping, memory = huge_pages.untouched(4096)
    mapping.pin(memory.data_ptr(), 4096)
    x, stream = zeros(), streams()[0]
    stream.copy(x, memory[: 4 * COUNT].view(torch.float32))
    del mapping, memory


@rejected("pinned memory is freed while copy on stream 1 still uses")
def freeing_pinned_memory_under_a_copy(cuda):
    x, host, stream = zeros(), pinned(), streams()[0]
    stream.copy(x, host)
    del host


# ---- streams and events


@rejected("stream 1 waits for an event that was never recorded")
def an_event_that_was_never_recorded(cuda):
    streams()[0].wait(torch.cuda.Event())


@rejected("cudaStreamSynchronize: a stream that was destroyed")
def a_destroyed_stream(cuda):
    handle = made("cudaStreamCreateWithFlags", 1)
    call("cudaStreamDestroy", handle)
    call("cudaStreamSynchronize", handle)


@rejected("on a stream of device 1, the current device is 0")
def a_stream_of_another_device(cuda):
    x, there = zeros(), CudaStream(OTHER)
    start = x.data_ptr()
    library.launch("some kernel", there.stream.cuda_stream, print, [(start, 4 * COUNT, True)])


@rejected("is memory of device 1, the stream is of device 0")
def memory_of_another_device(cuda):
    x = zeros(OTHER)
    library.launch("some kernel", 0, lambda: None, [(x.data_ptr(), 4 * COUNT, True)])


@rejected("an event of device 0 on a stream of device 1")
def an_event_of_another_device(cuda):
    event = torch.cuda.Event()
    event.record(streams()[0].stream)
    event.record(streams(OTHER)[0].stream)


@rejected("torch's add_ on stream 1 and torch's add_ on stream 2 use the")
def two_streams_without_an_event(cuda):
    x, (main, side) = zeros(), streams()
    kernel(main, x)
    kernel(side, x)


@rejected("copy on stream 1 and host function on stream 2 use the")
def a_host_function_that_nothing_orders(cuda):
    x, host, (main, side) = zeros(), pinned(), streams()
    main.copy(host, x)
    side.host(node(lambda argument: None, reads=(host,)))


@rejected("torch's add_ on stream 2 and torch's zeros on stream 0")
def a_tensor_freed_under_another_stream(cuda):
    """The next tensor gets its memory at once, since nothing tells the allocator of the use."""
    x, side = zeros(), streams()[1]
    kernel(side, x)
    del x
    zeros()


@rejected("cudaStreamSynchronize: called from a host function")
def a_host_function_that_calls_cuda(cuda):
    found = []
    it = node(lambda argument: found.append(library.load().cudaStreamSynchronize(0)))
    main = streams()[0]
    main.host(it)
    main.finish()
    assert found == [800]


@rejected("some kernel failed as it ran on stream 0")
def going_on_after_a_failure(cuda):
    def fail():
        raise ArithmeticError("a kernel's own error")

    library.launch("some kernel", 0, fail, [])
    try:
        torch.cuda.synchronize()
    except ArithmeticError:
        torch.cuda.synchronize()
