"""Streams rows from the host to a device through two buffers, pinned if possible: one is filled
while the other is copied."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotsplit.runtime.device.streams import CudaStream, PlainStream, Stream


def copy_stream(device: torch.device) -> Stream:
    """A stream used only for copies to the device."""
    return CudaStream(device) if device.type == "cuda" else PlainStream()


def finish(event: Any) -> None:
    """Waits on the host for an event; None, the event of a plain stream, has always fired."""
    if event is not None:
        event.synchronize()


class Staging:
    def __init__(self, num_bytes: int, stream: Stream, *, is_pinned: bool) -> None:
        self.stream = stream
        self._buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)
        ]
        self._copied: list[Any] = [None, None]
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of one buffer."""
        return len(self._buffers[0])

    def send(self, target: Tensor, fill: Callable[[Tensor], None]) -> Any:
        """Lets `fill` write a staging buffer of the target's size (uint8, one dimension), and
        starts the copy to the target. Returns the event that marks the copy's end."""
        turn = self._turn
        finish(self._copied[turn])
        buffer = self._buffers[turn][: len(target)]
        fill(buffer)
        self.stream.copy(target, buffer)
        self._copied[turn] = self.stream.record()
        self._turn = 1 - turn
        return self._copied[turn]

    def finish(self) -> None:
        """Waits until all copies are done."""
        for event in self._copied:
            finish(event)
