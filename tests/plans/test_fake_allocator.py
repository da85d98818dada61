"""The allocator of the fake CUDA runtime follows torch's rules: pools, segments, what is left of
blocks, and the numbers of a graph's generator."""

import pytest
import torch
from fake_cuda import library
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
