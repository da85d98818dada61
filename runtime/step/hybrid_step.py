"""A decode step over GPUs and the CPU, as it is run: a graph a GPU, one after the other.

What this module does not know: which part of a model is where (hybrid_builder.py), what a layer
consists of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkinfer.runtime.device.streams import HostNode, Stream
from sparkinfer.runtime.kernels.gpu.kernels import Kernels
from sparkinfer.runtime.model.feed_forward import Traffic
from sparkinfer.runtime.model.native_neurons import NeuronsStruct
from sparkinfer.runtime.step.hybrid_device import Take
from sparkinfer.runtime.step.native_parts import HostBuffers
from sparkinfer.runtime.step.native_step import StepStruct

# Makes of what is submitted to a stream something to be called for every token.
Prepare = Callable[[Stream, Callable[[], None]], Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What a step runs on."""

    kernels: Kernels
    streams: Callable[[torch.device], tuple[Stream, Stream]]  # main and side
    take: Callable[[torch.device], Take]  # zeroed memory for buffers
    prepare: Prepare
    is_pinned: bool


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What follows one another on one GPU."""

    main: Stream
    run: Callable[[], None]
    is_graph: bool


@dataclass(kw_only=True)
class HybridStep:
    host: HostBuffers
    segments: tuple[Segment, ...]
    before: HostNode | None  # on the host, before the first segment: the embedding
    after: HostNode | None  # and after the last: the head
    positions: Tensor | None  # f32 [C, D], where the embedding alone is on a GPU
    meter: "Meter"
    kept: tuple[object, ...]  # a graph knows addresses alone: whatever is there

    def run(self, token: int, position: int) -> Tensor:
        """f32 [V] behind one token, good until the next step; appends to the cache."""
        host = self.host
        host.token_1[0], host.position_1[0] = token, position
        if self.before:
            self.before.run()
        elif self.positions is not None:
            host.x_D.copy_(self.positions[position])
        try:
            self._submit()
        finally:  # an interrupt, too, leaves nothing behind that still runs
            for segment in self.segments:
                segment.main.finish()
        if self.after:
            self.after.run()
        self.meter.read()
        return host.logits_V

    def _submit(self) -> None:
        event = None
        for segment in self.segments:
            segment.main.follow()  # a prompt's keys and values
            if event is not None:
                segment.main.wait(event)
            segment.run()
            event = segment.main.record()


@dataclass(frozen=True, kw_only=True)
class Meter:
    """Adds to `traffic` the bytes of the neurons that the CPU reads. What a GPU reads is known to
    nobody but the GPU, and is not asked for."""

    traffic: Traffic
    structs: Sequence[NeuronsStruct | StepStruct]

    def read(self) -> None:
        for struct in self.structs:
            self.traffic.gate += struct.gate_bytes
            self.traffic.up += struct.up_bytes
            self.traffic.down += struct.down_bytes
        self.reset()

    def reset(self) -> None:
        for struct in self.structs:
            struct.gate_bytes = struct.up_bytes = struct.down_bytes = 0
