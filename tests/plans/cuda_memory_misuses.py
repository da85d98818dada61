"""Wrong uses of memory, streams and events, in the form of cuda_misuses.py."""

import torch
from cuda_misuses import COUNT, OTHER, copy, kernel, node, pinned, raw, rejected, streams, zeros
from fake_cuda import library
from fake_cuda.devices import FakeCuda
from fake_cuda.library import call, made

from hotsplit.runtime.device import huge_pages
from hotsplit.runtime.device.streams import CudaStream

# ---- memory


@rejected("copy: 256 bytes at .* are memory that was freed")
def copying_what_was_freed(cuda):
    first, second, stream = raw(), raw(), streams()[0]
    call("cudaFree", first)
    copy(second, first, stream)


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


def a_kernel_beyond_its_declaration(cuda: FakeCuda):
    from hotsplit.runtime.step.backend import cuda_backend

    x, y, main = zeros(), zeros(), streams()[0]
    run = cuda_backend(has_graph=False).kernels.add_norm
    main.launch(lambda: run(x, None, None, None, 0.0, None, y), reads=[x], writes=[])
