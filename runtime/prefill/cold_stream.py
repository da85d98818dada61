"""Streams cold weights to a GPU during a prefill pass: pieces of whole neurons through two buffers.

    copier    copy 0 | copy 1 |        copy 2 |        copy 3 | ...
    compute          | multiply 0 | multiply 1 | multiply 2 | ...

A piece is copied while the previous one is multiplied, across layers: the first pieces of the next
layer are prefetched during its attention. Buffer k % 2 holds piece k; a piece is multiplied after
its copy (`ready`), and its buffer is overwritten after that product (`free`). Pinned weights are
copied directly; others go through two staging buffers, pinned if possible, one of which is filled
on the host while the other is copied.

The buffers live from the first piece of a pass to its last; they count as workspace."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hotsplit.runtime.device.staging import Staging
from hotsplit.runtime.device.streams import Stream
from hotsplit.runtime.prefill.cold_spans import ColdBlock
from hotsplit.runtime.weights.neuron_block import NeuronBlock

# A pass of at least this many tokens streams cold weights. The time of their copy does not depend
# on the tokens, the CPU's time for them does. Next to a card of 13 GB/s, copies are estimated to be
# faster from about 24 tokens on. Next to an H100 (55 GB/s), 16 tokens through a 7 B model of which
# 5 GB are cold take 0.25 s. It is a constant because a prompt's bits depend on it.
LEAST_TOKENS = 32


@dataclass
class Slot:
    """A buffer on the device, and the two events that guard its reuse."""

    buffer: Tensor  # uint8
    ready: Any = None  # event: its piece has been copied
    free: Any = None  # event: its piece has been multiplied
    is_filled: bool = False  # a copy was started, and no product has waited for it yet


@dataclass(kw_only=True, eq=False)
class WeightStream:
    """Two buffers on one device, each of which is copied to while the other is multiplied."""

    device: torch.device
    buffers: tuple[Tensor, Tensor]  # uint8, on the device
    compute: Stream  # whose kernels read the buffers
    copier: Stream
    staging: Staging | None  # None: all blocks are pinned
    least_tokens: int = LEAST_TOKENS  # fewest tokens of a pass that streams
    _slots: list[Slot] = field(init=False, repr=False, default_factory=list)

    @property
    def piece_bytes(self) -> int:
        return len(self.buffers[0])

    def _open(self) -> None:
        """Begins to use the buffers, unless they are in use."""
        if self._slots:
            return
        self._slots = [Slot(buffer) for buffer in self.buffers]
        for slot in self._slots:
            slot.free = self.compute.record()  # earlier users of this memory must finish

    def _start_copy(
        self,
        slot: Slot,
        num_bytes: int,
        copy: Callable[[Stream, Tensor], None],
        fill: Callable[[Tensor], None],
    ) -> None:
        """Starts a copy of so many bytes to a buffer: directly by `copy`, or from what `fill`
        writes on the host."""
        self.copier.wait(slot.free)
        slot.is_filled = True
        if self.staging is None:
            copy(self.copier, slot.buffer)
            slot.ready = self.copier.record()
        else:
            slot.ready = self.staging.send(slot.buffer[:num_bytes], fill)

    def _end(self) -> None:
        """Frees the buffers; later launches wait for their last copies."""
        for slot in self._slots:
            self._arrive(slot)
        self._slots = []

    def _arrive(self, slot: Slot) -> None:
        """Orders the next launch after the pending copy into a buffer, if any."""
        if slot.is_filled:
            self.compute.wait(slot.ready)
            slot.is_filled = False


@dataclass(kw_only=True, eq=False)
class ColdStream(WeightStream):
    """The stream of one device; `blocks`: the cold blocks of the layers with that home, in
    order."""

    blocks: dict[int, ColdBlock]
    _pieces: list[tuple[ColdBlock, int, int]] = field(init=False, repr=False)
    _range: dict[int, range] = field(init=False, repr=False)
    _next: int = field(init=False, default=0)  # the piece that is multiplied next

    def __post_init__(self) -> None:
        self._pieces, self._range = [], {}
        for layer, block in self.blocks.items():
            first = len(self._pieces)
            self._pieces += [(block, a, b) for a, b in block.pieces(self.piece_bytes)]
            self._range[layer] = range(first, len(self._pieces))

    def run(self, layer: int, add: Callable[[NeuronBlock], None]) -> None:
        """Calls `add` with the layer's neurons on the device, one piece at a time."""
        numbers = self._range[layer]
        if not self._slots or self._next != numbers.start:
            self._begin(numbers.start)
        for number in numbers:
            slot = self._slots[number % 2]
            block, start, stop = self._pieces[number]
            self._arrive(slot)
            part = block.on_device(slot.buffer, start, stop)
            add(part)
            slot.free = self.compute.record()
            self._next = number + 1
            self._start(number + 2)
        if self._next == len(self._pieces):
            self._end()

    def _begin(self, number: int) -> None:
        """Begins a new pass; an interrupted one is abandoned."""
        self._end()
        self._open()
        self._start(number)
        self._start(number + 1)

    def _start(self, number: int) -> None:
        """Starts the copy of a piece; does nothing after the last one."""
        if number >= len(self._pieces):
            return
        block, start, stop = self._pieces[number]
        self._start_copy(
            self._slots[number % 2],
            block.layout_bytes(stop - start),
            lambda stream, buffer: block.copy(stream, buffer, start, stop),
            lambda host: block.fill(host, start, stop),
        )
