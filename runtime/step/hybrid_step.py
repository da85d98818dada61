"""A decode step over GPUs and the CPU: one graph per GPU, run in sequence. hybrid_builder.py builds
it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparkinfer.runtime.device.streams import HostNode, Stream
from sparkinfer.runtime.kernels.gpu.kernels import Kernels
from sparkinfer.runtime.kernels.gpu.slots import SlotKernels
from sparkinfer.runtime.model.feed_forward import Traffic
from sparkinfer.runtime.model.native_neurons import NeuronsStruct
from sparkinfer.runtime.step.hybrid_device import Take
from sparkinfer.runtime.step.native_parts import HostBuffers
from sparkinfer.runtime.step.native_step import StepStruct

# Turns a submission to a stream into a function that is called for every token.
Prepare = Callable[[Stream, Callable[[], None]], Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The kernels, streams and memory that a step runs on."""

    kernels: Kernels
    streams: Callable[[torch.device], tuple[Stream, Stream]]  # main and side
    take: Callable[[torch.device], Take]  # zeroed memory for buffers
    prepare: Prepare
    is_pinned: bool
    slot_kernels: SlotKernels | None = None  # of a neuron cache; None: there are none


class StepHooks(Protocol):
    """Called before a step is submitted, and after it has finished."""

    def before_step(self) -> None: ...
    def after_step(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive work on one GPU."""

    main: Stream
    run: Callable[[], None]
    is_graph: bool


@dataclass(kw_only=True)
class HybridStep:
    """A decode step over GPUs and the CPU."""

    host: HostBuffers
    segments: tuple[Segment, ...]
    before: HostNode | None  # the embedding, if it is on the host
    after: HostNode | None  # the head, if it is on the host
    positions: Tensor | None  # f32 [C, D] on the host, if the embedding is on a GPU
    meter: "Meter"
    kept: tuple[object, ...]  # keeps alive what graphs refer to by address
    neuron_cache: StepHooks | None = None

    def run(self, token: int, position: int) -> Tensor:
        """Logits f32 [V] after one token, valid until the next step; appends to the cache."""
        host = self.host
        host.token_1[0], host.position_1[0] = token, position
        if self.before:
            self.before.run()
        elif self.positions is not None:
            host.x_D.copy_(self.positions[position])
        if self.neuron_cache is not None:
            self.neuron_cache.before_step()
        try:
            self._submit()
        finally:  # even after an interrupt, nothing keeps running
            for segment in self.segments:
                segment.main.finish()
        if self.after:
            self.after.run()
        if self.neuron_cache is not None:
            self.neuron_cache.after_step()
        self.meter.read()
        return host.logits_V

    def _submit(self) -> None:
        event = None
        for segment in self.segments:
            segment.main.follow()  # wait for a prompt's keys and values
            if event is not None:
                segment.main.wait(event)
            segment.run()
            event = segment.main.record()


@dataclass(frozen=True, kw_only=True)
class Meter:
    """Adds to `traffic` the bytes of neurons that the CPU reads. Those that a GPU reads are not
    counted: only the GPU knows them."""

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
