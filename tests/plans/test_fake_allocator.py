"""The allocator of the fake CUDA runtime follows torch's rules: pools, segments, what is left of
blocks, workspaces of products, and the numbers of a graph's generator."""

import threading

import pytest
import torch
from fake_cuda import library
from fake_cuda.libraries import HOPPER_WORKSPACE
from fake_cuda.torch_cuda import fake_cuda

pytestmark = pytest.mark.skipif(
    not library.can_be_built(), reason="needs a C++ compiler, and Linux"
)
MIB = 1 << 20


@pytest.fixture
def allocator():
    with fake_cuda(total_bytes=256 * MIB) as cuda:
        yield cuda.allocators[0]


def taken(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def test_pools_have_segments_of_their_own(allocator):
    small = taken(MIB)
    assert allocator.reserved == 2 * MIB
    medium = taken(MIB + 1)
    assert allocator.reserved == 22 * MIB
    large = taken(19 * MIB)
    assert allocator.reserved == 42 * MIB
    again = taken(MIB), taken(3 * MIB)  # what is left of the first two segments
    assert allocator.reserved == 42 * MIB
    del small, medium, large, again
    assert allocator.reserved == 42 * MIB and not allocator.allocated
    torch.cuda.empty_cache()
    assert not allocator.reserved


def test_a_tensor_takes_the_smallest_block_and_all_of_it_if_little_is_left(allocator):
    first, second, third = taken(4 * MIB), taken(8 * MIB), taken(2 * MIB)
    starts = second.data_ptr(), first.data_ptr()
    del first, second  # 12 MiB before the third, 6 after it
    fitting = taken(5 * MIB)
    assert fitting.data_ptr() not in starts and fitting.data_ptr() > third.data_ptr()
    assert allocator.allocated == 8 * MIB  # the last MiB of 6 goes with 5
    small, other = taken(512), taken(1024)
    assert allocator.allocated == 8 * MIB + 1536
    del small, other


def test_each_threads_products_take_a_workspace_per_stream(allocator, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:1:16:8")
    size, square = 4 * MIB + (128 << 10), torch.zeros(8, 8, device="cuda")
    before = allocator.allocated
    square @ square
    square @ square
    assert size <= allocator.allocated - before < size + 2048
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        square @ square
    assert 2 * size <= allocator.allocated - before < 2 * size + 2048
    for _ in range(2):  # the second thread takes the handle of the first
        thread = threading.Thread(target=lambda: square @ square)
        thread.start()
        thread.join()
        assert 3 * size <= allocator.allocated - before < 3 * size + 4096
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    assert allocator.allocated - before < 4096
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    square @ square
    assert allocator.allocated - before >= HOPPER_WORKSPACE == 32 * MIB


def test_a_graph_takes_two_numbers_on_its_stream(allocator):
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    x = torch.zeros(64, device="cuda")
    torch.cuda.synchronize()
    for number in range(2):  # the second graph adds none
        with torch.cuda.graph(graph, stream=stream):
            x.add_(1)
        (segment,) = [
            s for s in allocator.segments if s.stream == stream.cuda_stream and not s.pool
        ]
        assert segment.num_bytes == 2 * MIB and not segment.is_free
        kept, graph = graph, torch.cuda.CUDAGraph()
        assert allocator.allocated == 3 * 512, number
    del kept, graph, segment
    torch.cuda.empty_cache()
    assert allocator.reserved == 2 * MIB


def test_a_pool_of_graphs_has_memory_of_its_own(allocator):
    """Graphs share it, its free memory stays with it, and it is free when pool and graphs are
    gone."""
    pool, stream = torch.cuda.MemPool(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
        kept = torch.zeros(64, device="cuda")
        taken(MIB)
    assert allocator.reserved == 2 * MIB
    taken(MIB)  # not from the pool
    torch.cuda.empty_cache()
    assert allocator.reserved == 2 * MIB and kept.numel()
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool.id, stream=stream):
            kept += torch.ones(128 << 10, device="cuda")[:64]
    assert allocator.reserved == 4 * MIB  # and the numbers of the generator
    for _ in range(3):
        for graph in graphs:
            graph.replay()
    assert kept.tolist() == [6.0] * 64
    del graphs, graph, pool, kept
    torch.cuda.empty_cache()
    assert not allocator.reserved
