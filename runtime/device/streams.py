"""What a decode step is submitted to: kernels, copies and functions of the host, in order.

A stream runs what it is given one after the other and some time later; what two streams run is
ordered by events alone. Everything says which memory it reads and writes, so that a test can prove
that nothing is read before it is there.

What this module does not know: what is computed."""

from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sparkinfer.runtime.device import cuda_runtime

_HOST_FUNCTION = CFUNCTYPE(None, c_void_p)


@dataclass(frozen=True, kw_only=True)
class HostNode:
    """A C function `void f(void*)` and its argument, by their addresses."""

    function: int
    argument: int
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    kept: tuple[Any, ...] = ()  # whatever the argument points at

    def run(self) -> None:
        _HOST_FUNCTION(self.function)(self.argument)


class Stream(Protocol):
    """`Event` is whatever `record` gives; only streams of the same kind understand it."""

    def launch(
        self, run: Callable[[], None], *, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        """Kernels that `run` launches; it must not wait for them."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Contiguous tensors of the same type and size, on any devices; host memory is pinned."""

    def host(self, node: HostNode) -> None: ...

    def record(self) -> Any:
        """The event that everything so far has run."""

    def wait(self, event: Any) -> None:
        """Lets nothing that follows run before the event."""

    def follow(self) -> None:
        """Lets nothing that follows run before what torch's current stream has been given."""

    def finish(self) -> None:
        """Lets the caller wait until everything so far has run."""


class PlainStream:
    """Runs everything at once, in the order of the calls: on the CPU."""

    def launch(
        self, run: Callable[[], None], *, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        run()

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def host(self, node: HostNode) -> None:
        node.run()

    def record(self) -> None:
        return None

    def wait(self, event: None) -> None:
        pass

    def follow(self) -> None:
        pass

    def finish(self) -> None:
        pass


class CudaStream:
    """A stream of a CUDA device, which may be one whose calls are being captured into a graph.

    Copies and host functions go to the CUDA runtime directly: torch's own copy keeps books on
    pinned memory, which a captured graph would not."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._runtime = cuda_runtime.load()

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

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)

    def follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def finish(self) -> None:
        self.stream.synchronize()
