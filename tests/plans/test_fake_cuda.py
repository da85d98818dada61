"""The fake CUDA runtime rejects every planted misuse with the message listed for it and accepts
correct use; work that it runs late, in any allowed order, gives the results of running in
order."""

import re

import pytest
import torch
from cuda_misuses import (
    COUNT,
    GPU,
    LEGACY,
    MISUSES,
    OTHER,
    a_graph,
    captured,
    kernel,
    node,
    pinned,
    raw,
    raw_capture,
    streams,
    zeros,
)
from fake_cuda import library
from fake_cuda.declared import Undeclared
from fake_cuda.torch_cuda import fake_cuda

from hotsplit.errors import HotsplitError
from hotsplit.runtime.device import cuda_runtime, huge_pages
from hotsplit.runtime.device.staging import Staging
from hotsplit.runtime.device.streams import CudaStream
from hotsplit.runtime.step.backend import cuda_backend

pytestmark = pytest.mark.skipif(
    not library.can_be_built(), reason="needs a C++ compiler, and Linux"
)


@pytest.fixture
def cuda():
    with fake_cuda(num_devices=2, total_bytes=64 << 20) as found:
        yield found


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_rejected_with_its_message(cuda, name):
    """The wrong call or the next one raises; destructors cannot, so the first recorded message
    counts."""
    line, misuse = MISUSES[name]
    try:
        misuse(cuda)
    except (RuntimeError, HotsplitError) as error:
        assert "\n" not in str(error)
    lines = library.text("violations")
    assert lines, "accepted"
    assert re.search(line, lines[0]), lines


def test_a_kernel_that_writes_beyond_its_declaration_is_rejected(cuda):
    x, y, main = zeros(), zeros(), streams()[0]
    run = cuda_backend(has_graph=False).kernels.add_norm
    with pytest.raises(Undeclared, match="add_norm writes 256 bytes that its launch does not"):
        main.launch(lambda: run(x, None, None, None, 0.0, None, y), reads=[x], writes=[])


@pytest.mark.parametrize("misuse", ["allocation", "default stream", "synchronisation"])
def test_a_misuse_invalidates_all_captures_that_forbid_it(cuda, misuse):
    both = [stream.stream.cuda_stream for stream in streams()]
    for handle in both:
        library.call("cudaStreamBeginCapture", handle, 0)
    with pytest.raises(library.CudaError, match="stream 2 is captured"):
        if misuse == "allocation":
            raw()
        elif misuse == "default stream":
            library.call("cudaStreamSynchronize", None)
        else:
            library.call("cudaDeviceSynchronize")
    for handle in both:
        with pytest.raises(library.CudaError, match="the capture is invalid"):
            library.made_after("cudaStreamEndCapture", handle)


@pytest.mark.parametrize("is_default", [False, True])
def test_a_graph_launched_during_a_capture_invalidates_it(cuda, is_default):
    exec_handle, (main, _) = a_graph(cuda), streams()
    handle = main.stream.cuda_stream
    library.call("cudaStreamBeginCapture", handle, 0)
    with pytest.raises(library.CudaError, match="cudaGraphLaunch: "):
        library.call("cudaGraphLaunch", exec_handle, None if is_default else handle)
    with pytest.raises(library.CudaError, match="the capture is invalid: cudaGraphLaunch"):
        library.made_after("cudaStreamEndCapture", handle)


def test_a_refused_kernel_is_forgotten(cuda):
    with pytest.raises(library.CudaError, match="never made"):
        library.launch("some kernel", 12345, lambda: None, [])
    assert not library._kernels


def test_a_kernels_error_is_raised_when_it_is_waited_for(cuda):
    def fail():
        raise ArithmeticError("a kernel's own error")

    library.launch("some kernel", 0, fail, [])
    with pytest.raises(ArithmeticError, match="own error"):
        torch.cuda.synchronize()


# ---- correct uses


@pytest.fixture
def accepted(cuda):
    yield cuda
    assert not library.text("violations")


def test_streams_that_fork_and_join_are_captured_as_a_graph(accepted):
    x, y, host = zeros(), zeros(), pinned()

    def submit(main, side):
        kernel(main, x)
        side.wait(main.record())
        kernel(side, y)
        done = side.record()
        main.wait(done)
        main.copy(host, y)

    replay = captured(submit)  # which replays it once
    for count in (2, 3):
        replay()
        torch.cuda.synchronize()
        assert host.tolist() == [count] * COUNT
        assert x.tolist() == [count] * COUNT
    names = [
        line[2] for line in library.graph_text(accepted.graphs[-1].handle) if line[0] == "node"
    ]
    assert names == ["torch's add_", "torch's add_", "copy"]


def test_a_graph_is_launched_on_the_default_stream(accepted):
    exec_handle = a_graph(accepted)
    x, _ = accepted.kept
    for handle in (None, LEGACY):
        library.call("cudaGraphLaunch", exec_handle, handle)
    torch.cuda.synchronize()
    assert x.tolist() == [3] * COUNT  # captured() has launched it once


def test_a_capture_executes_nothing(accepted):
    x, (main, _) = zeros(), streams()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main.stream):
        kernel(main, x)
    torch.cuda.synchronize()
    assert not x.any()


@pytest.mark.parametrize("seed", range(8))
def test_events_order_work_that_runs_late(accepted, seed):
    library.load().fakeSeed(seed)
    x, host, (main, side) = zeros(), pinned(), streams()
    seen = []
    read = node(lambda argument: seen.append(float(host[0])), reads=(host,))
    for _ in range(10):
        kernel(main, x)
        side.wait(main.record())
        side.copy(host, x)
        side.host(read)
        main.wait(side.record())
    assert not seen  # nothing has waited yet
    main.finish()
    assert seen == list(range(1, 11))


def test_without_an_event_the_order_is_random(cuda):
    """Without the race check, either of two writers may be the last."""
    library.load().fakeCheckRaces(0)
    found = set()
    for seed in range(20):
        x, (main, side) = zeros(), streams()
        torch.cuda.synchronize()
        library.load().fakeSeed(seed)
        main.launch(lambda x=x: x.fill_(1), reads=[], writes=[x])
        side.launch(lambda x=x: x.fill_(2), reads=[], writes=[x])
        torch.cuda.synchronize()
        found.add(float(x[0]))
    assert found == {1.0, 2.0}


def test_pinned_memory_is_copied_from_and_unregistered_in_the_end(accepted):
    mapping, memory = huge_pages.untouched(4096)
    memory.fill_(7)
    mapping.pin(memory.data_ptr(), 4096)
    assert memory.is_pinned() and not torch.zeros(8).is_pinned()
    x, main = zeros(), streams()[0]
    main.copy(x.view(torch.uint8), memory[: 4 * COUNT])
    main.finish()
    del mapping, memory
    assert set(x.view(torch.uint8).tolist()) == {7}
    assert "registered 4096" not in library.text("left")


def test_rows_are_copied_through_two_buffers(accepted):
    stream = CudaStream(GPU)
    staging = Staging(256, stream, is_pinned=True)
    targets = [torch.empty(256, dtype=torch.uint8, device=GPU) for _ in range(5)]
    stream.follow()
    for value, target in enumerate(targets):
        staging.send(target, lambda buffer, value=value: buffer.fill_(value))
    staging.finish()
    assert [set(target.tolist()) for target in targets] == [{0}, {1}, {2}, {3}, {4}]


def test_a_freed_tensors_memory_is_reused_on_its_stream(accepted):
    x = zeros() + 1
    address = x.data_ptr()
    y = x * 2
    del x
    z = zeros()
    assert z.data_ptr() == address and y.tolist() == [2] * COUNT


def test_devices_have_their_own_memory_and_streams(accepted):
    x, there = zeros(GPU) + 1, zeros(OTHER)
    main, other = streams(GPU)[0], streams(OTHER)[0]
    other.wait(main.record())
    other.copy(there, x)
    other.finish()
    assert there.tolist() == [1] * COUNT and there.device == OTHER
    with pytest.raises(RuntimeError, match="same device"):
        x + there


def test_the_allocators_limit_is_enforced_and_the_devices_size_reported(accepted):
    torch.cuda.set_per_process_memory_fraction(0.5)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        zeros(count=10 << 20)
    held = zeros(count=1 << 20)  # 4 MiB, in a segment of 20
    assert torch.cuda.memory_reserved() == 20 << 20
    assert torch.cuda.mem_get_info() == (44 << 20, 64 << 20)
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_hotsplit_uses_the_fake_runtime(accepted):
    raw()
    found = cuda_runtime.load()
    assert "libcudart_fake" in found.library._name
    with pytest.raises(HotsplitError, match="a copy of 8 bytes was refused by CUDA: .*destroyed"):
        main = CudaStream(GPU)
        handle = main.stream.cuda_stream
        library.call("cudaStreamDestroy", handle)
        found.copy(raw(), raw(), 8, handle)
    library.load().fakeReset(2, 64 << 20, 0, 0)


def test_a_relaxed_capture_may_allocate(accepted):
    main = streams()[0]
    with raw_capture(main, mode=2):
        raw()
