"""Streams to which the kernels, copies and host functions of a decode step are submitted.

A stream runs its submissions in order, asynchronously; between two streams, only events impose an
order. Work that is handed over to the CPU (`start`) begins when all earlier submissions have run,
and runs beside the later ones, up to a `join`. Each submission declares the memory that it reads
and writes, so a test can prove that nothing is read before it is written."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hotsplit.runtime.device import cuda_runtime

_HOST_FUNCTION = CFUNCTYPE(None, c_void_p)


@dataclass(frozen=True, kw_only=True)
class HostNode:
    """A C host function `void f(void*)` and its argument, by address."""

    function: int
    argument: int
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    kept: tuple[Any, ...] = ()  # keeps alive what the argument points to

    def run(self) -> None:
        _HOST_FUNCTION(self.function)(self.argument)


class Stream(Protocol):
    """A stream. An event returned by `record` works only with streams of the same kind."""

    def launch(
        self, run: Callable[[], None], *, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        """Launches kernels through `run`, which must not wait for them."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies between contiguous tensors of one type and size. Host memory should be pinned: a
        CUDA copy from other memory is slower and may block."""

    def host(self, node: HostNode) -> None:
        """Runs a function on the host, in stream order."""

    def start(self, node: HostNode) -> Any:
        """Hands a function over to the CPU, and returns what `join` takes. Functions run one after
        the other, in this order."""

    def join(self, handed: Any) -> None:
        """Makes later submissions wait until a function that `start` has handed over has run."""

    def record(self) -> Any:
        """An event that fires when everything submitted so far has run."""

    def wait(self, event: Any) -> None:
        """Makes later submissions wait until the event fires."""

    def follow(self) -> None:
        """Makes later submissions wait for the work now on torch's current stream."""

    def finish(self, *, sleeps: bool = False) -> None:
        """Blocks the caller until everything submitted so far has run. `sleeps`: without using a
        processor."""


class PlainStream:
    """Runs everything on the CPU, immediately and in call order."""

    def launch(
        self, run: Callable[[], None], *, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        run()

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def host(self, node: HostNode) -> None:
        node.run()

    def start(self, node: HostNode) -> None:
        self.host(node)

    def join(self, handed: None) -> None:
        pass

    def record(self) -> None:
        return None

    def wait(self, event: None) -> None:
        pass

    def follow(self) -> None:
        pass

    def finish(self, *, sleeps: bool = False) -> None:
        pass


class CudaStream:
    """A stream of a CUDA device; its calls may be captured into a graph.

    Copies and host functions call the CUDA runtime directly: torch's copies track the use of pinned
    memory, which a captured graph would not update. What is handed over to the CPU runs in `join`,
    which waits on the host and so cannot be captured; runtime.step.backend has a faster way."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._end = torch.cuda.Event(blocking=True)
        self._runtime = cuda_runtime.load()
        self._handed: list[tuple[torch.cuda.Event, HostNode]] = []
        self._num_run = 0  # of those

    def launch(
        self, run: Callable[[], None], *, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        with torch.cuda.stream(self.stream):
            run()

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.nbytes == source.nbytes and target.dtype == source.dtype
        assert target.is_contiguous() and source.is_contiguous()
        with torch.cuda.device(self.stream.device):
            self._runtime.copy(
                target.data_ptr(), source.data_ptr(), target.nbytes, self.stream.cuda_stream
            )

    def host(self, node: HostNode) -> None:
        with torch.cuda.device(self.stream.device):
            self._runtime.host_function(self.stream.cuda_stream, node.function, node.argument)

    def start(self, node: HostNode) -> Any:
        self._handed.append((self.record(), node))
        return len(self._handed) - 1

    def join(self, handed: Any) -> None:
        for event, node in self._handed[self._num_run : handed + 1]:
            event.synchronize()
            node.run()
            self._num_run += 1

    @contextmanager
    def collected(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        """Collects what the block, a capture, hands over to the CPU. Its value is a function that
        launches the graph by the function that it is given."""
        yield lambda launch: launch()

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)

    def follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def finish(self, *, sleeps: bool = False) -> None:
        if sleeps:
            self._end.record(self.stream)
            self._end.synchronize()
        else:
            self.stream.synchronize()
        self._handed.clear()
        self._num_run = 0
