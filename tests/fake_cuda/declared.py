"""Passes hotsplit's declarations on to the fake CUDA: the memory of host functions, which CUDA
cannot see, and that of kernels, whose declarations must cover what they access."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fake_cuda import library
from fake_cuda.library import Range
from fake_cuda.tensors import ranges_of

from hotsplit.runtime.device.streams import CudaStream, HostNode
from hotsplit.runtime.step.backend import Handovers

_open: list[list[Range]] = []  # the declaration of the launch that is being submitted


class Undeclared(AssertionError):
    """A kernel accesses memory that its launch does not declare."""


def check(name: str, ranges: list[Range]) -> None:
    """Raises Undeclared if a kernel of a CudaStream accesses more than its launch declares."""
    for start, size, is_written in ranges if _open else ():
        inside = [
            first <= start and start + size <= first + count and (may_write or not is_written)
            for first, count, may_write in _open[-1]
        ]
        if size and not any(inside):
            what = "writes" if is_written else "reads"
            raise Undeclared(f"{name} {what} {size} bytes that its launch does not declare")


def written() -> list[Range] | None:
    """The memory that the launch under way declares to write; None outside of such a launch."""
    return [each for each in _open[-1] if each[2]] if _open else None


@contextmanager
def declarations() -> Iterator[None]:
    host, launch, add = CudaStream.host, CudaStream.launch, Handovers.add

    def declaring_host(stream: CudaStream, node: HostNode) -> None:
        library.declare(node.argument, ranges_of(node.reads, node.writes))
        host(stream, node)

    def declaring_add(handovers: Handovers, node: HostNode) -> int:
        number = add(handovers, node)
        library.declare(node.argument, ranges_of(node.reads, node.writes))
        library.load().fakeHandover(*handovers.addresses(number), node.argument)
        return number

    def declaring_launch(stream: CudaStream, run, *, reads, writes) -> None:
        _open.append(ranges_of(reads, writes))
        try:
            launch(stream, run, reads=reads, writes=writes)
        finally:
            _open.pop()

    with (
        mock.patch.object(CudaStream, "host", declaring_host),
        mock.patch.object(CudaStream, "launch", declaring_launch),
        mock.patch.object(Handovers, "add", declaring_add),
    ):
        yield
