"""A decode step over GPUs and the CPU: who has the hidden state when, and one graph a GPU.

Layers whose attention is on a GPU run there, their cold neurons beside it on the CPU; neighbouring
layers that are wholly on the CPU are one call. GPUs follow one another: each has a graph of its own,
which begins by taking the hidden state over.

What this module does not know: what a layer consists of, where weights came from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from sparkinfer.runtime.feed_forward import NeuronBlock, Traffic
from sparkinfer.runtime.hybrid_device import DeviceBuffers, DeviceProgram, DividedLayer, Take
from sparkinfer.runtime.kernels.gpu.kernels import Kernels
from sparkinfer.runtime.kernels.gpu.ranges import down_parts
from sparkinfer.runtime.loader import Placement, Weights
from sparkinfer.runtime.native_neurons import NativeNeurons, NeuronsStruct, SharedWorkspace
from sparkinfer.runtime.native_parts import HostBuffers, NativeParts
from sparkinfer.runtime.native_step import StepStruct
from sparkinfer.runtime.streams import HostNode, Stream

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


@dataclass(kw_only=True)
class HybridStep:
    host: HostBuffers
    segments: tuple[Segment, ...]
    before: HostNode | None  # on the host, before the first segment: the embedding
    after: HostNode | None  # and after the last: the head
    positions: Tensor | None  # f32 [C, D], where the embedding alone is on a GPU
    meter: "Meter"

    def run(self, token: int, position: int) -> Tensor:
        """f32 [V] behind one token, good until the next step; appends to the cache."""
        host = self.host
        host.token_1[0], host.position_1[0] = token, position
        if self.before:
            self.before.run()
        elif self.positions is not None:
            host.x_D.copy_(self.positions[position])
        event = None
        for segment in self.segments:
            if event is not None:
                segment.main.wait(event)
            segment.run()
            event = segment.main.record()
        self.segments[-1].main.finish()
        if self.after:
            self.after.run()
        self.meter.read()
        return host.logits_V


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


def build(
    weights: Weights,
    placement: Placement,
    input_layer_offset: int,
    traffic: Traffic,
    backend: Backend,
) -> HybridStep:
    """Raises NotNative for what the CPU's kernels do not cover. What `placement` calls a GPU may be
    the CPU, with a backend that says so."""
    return _Builder(weights, placement, input_layer_offset, traffic, backend).step()


class _Builder:
    def __init__(
        self,
        weights: Weights,
        placement: Placement,
        input_layer_offset: int,
        traffic: Traffic,
        backend: Backend,
    ) -> None:
        self.weights, self.placement, self.offset = weights, placement, input_layer_offset
        self.traffic, self.backend = traffic, backend
        num_neurons = weights.layers[0].ffn.num_neurons
        vocab_size, width = weights.head.weight.num_rows, weights.embedding.width
        self.host = HostBuffers.of(width, num_neurons, vocab_size, is_pinned=backend.is_pinned)
        room = SharedWorkspace()
        self.divided = [self._divide(index, room) for index in range(len(weights.layers))]
        room.allocate()
        self.is_whole = [
            not on_gpu and divided.hot is None
            for on_gpu, divided in zip(placement.dense_on_gpu, self.divided, strict=True)
        ]
        # Tied weights are where the head is.
        self.has_embedding = not (
            placement.head_on_gpu and weights.embedding is weights.head.weight
        )
        self.parts = NativeParts.of(
            weights,
            [i for i, is_whole in enumerate(self.is_whole) if is_whole],
            [i for i, on_gpu in enumerate(placement.dense_on_gpu)
             if not on_gpu and not self.is_whole[i]],
            input_layer_offset,
            self.host,
            has_embedding=self.has_embedding,
            has_head=not placement.head_on_gpu,
        )  # fmt: skip
        self.actions: list[tuple[int, Callable[[], None]]] = []

    def _divide(self, index: int, room: SharedWorkspace) -> DividedLayer:
        layer = self.weights.layers[index]
        hot, cold = blocks_of(self.placement, index, layer.ffn.blocks)
        native = None
        if cold is not None and (hot is not None or self.placement.dense_on_gpu[index]):
            native = NativeNeurons.of(
                cold, layer.ffn.gate, layer.ffn.mode, layer.ffn.num_neurons,
                x_D=self.host.ffn_input_D, named_W=self.host.named_W, y_D=self.host.cold_D,
                room=room,
            )  # fmt: skip
        is_partial = hot is not None and not hot.is_whole
        return DividedLayer(
            index=index,
            layer=layer,
            hot=hot,
            hot_id_N=hot.id_N.to(torch.int32) if hot is not None and is_partial else None,
            cold=native,
            num_parts=down_parts(len(hot.id_N), hot.down.width) if hot else 0,
        )

    def step(self) -> HybridStep:
        homes = self.placement.numbers
        self.programs = {number: self._program(number) for number in sorted(set(homes))}
        self._submit_all(homes)
        segments = []
        for number, actions in groupby(self.actions, key=lambda action: action[0]):
            runs = [self.programs[number].begin, *(run for _, run in actions)]
            main = self.programs[number].main

            def submit(runs: list[Callable[[], None]] = runs) -> None:
                for run in runs:
                    run()

            segments.append(Segment(main=main, run=submit))
        for segment in segments:  # kernels are compiled and loaded before anything is captured
            segment.run()
            segment.main.finish()
        prepared = tuple(
            replace(segment, run=self.backend.prepare(segment.main, segment.run))
            for segment in segments
        )
        meter = Meter(
            traffic=self.traffic,
            structs=[d.cold.struct for d in self.divided if d.cold] + [self.parts.step],
        )
        meter.reset()
        is_on_gpu = self.placement.head_on_gpu
        positions = self.weights.positions
        has_rows = positions is not None and not self.has_embedding
        return HybridStep(
            host=self.host,
            segments=prepared,
            before=self.parts.embed() if self.has_embedding else None,
            after=None if is_on_gpu else self.parts.head(),
            positions=positions.data.float() if positions is not None and has_rows else None,
            meter=meter,
        )

    def _program(self, number: int) -> DeviceProgram:
        device = self.placement.gpu(number)
        main, side = self.backend.streams(device)
        mine = [d for d in self.divided if self.placement.numbers[d.index] == number]
        has_head = self.placement.head_on_gpu and self.placement.numbers[-1] == number
        take = self.backend.take(device)
        return DeviceProgram(
            kernels=self.backend.kernels,
            main=main,
            side=side,
            buffers=DeviceBuffers.of(self.weights, mine, take, has_head=has_head),
            host=self.host,
            rotary=self.weights.rotary.get(device),
            input_layer_offset=self.offset,
        )

    def _submit_all(self, homes: Sequence[int]) -> None:
        """Fills `actions`; `at` is the GPU that has the hidden state, None the host."""
        at: int | None = None
        if not self.has_embedding:
            at = homes[-1]
            has_positions = self.weights.positions is not None
            program = self.programs[at]
            self._act(
                at, lambda: program.embed(self.weights.embedding, has_positions=has_positions)
            )
        index, count = 0, len(self.divided)
        while index < count:
            number = homes[index]
            if self.placement.dense_on_gpu[index]:
                at = self._to(number, at, index)
                self._act(number, self._bound(number, self.divided[index]))
                index += 1
                continue
            at = self._to(None, at, index)
            if not self.is_whole[index]:
                self._front_and_back(number, self.divided[index])
                index += 1
                continue
            stop = index
            while stop < count and self.is_whole[stop]:
                stop += 1
            node = self.parts.layers(index, stop - index)
            self._act(number, partial(self.programs[number].main.host, node))
            index = stop
        self._to(homes[-1] if self.placement.head_on_gpu else None, at, count)
        if self.placement.head_on_gpu:
            last = self.programs[homes[-1]]
            self._act(homes[-1], lambda: last.head(self.weights))

    def _act(self, number: int, run: Callable[[], None]) -> None:
        self.actions.append((number, run))

    def _bound(self, number: int, divided: DividedLayer) -> Callable[[], None]:
        return lambda: self.programs[number].run(divided)

    def _to(self, target: int | None, at: int | None, layer: int) -> int | None:
        """Moves the hidden state to a GPU or the host, before `layer`."""
        if target == at:
            return target
        if at is not None:
            source = self.programs[at]
            self._act(at, source.settle if target is not None else lambda: source.leave(layer))
        if target is not None:
            program = self.programs[target]
            if at is None:
                self._act(target, lambda: program.enter(layer))
            else:
                self._act(target, lambda: program.receive(source, layer))
        return target

    def _front_and_back(self, number: int, divided: DividedLayer) -> None:
        """A layer with attention on the host and hot neurons on a GPU."""
        program, index, cold = self.programs[number], divided.index, divided.cold
        is_predicted = divided.layer.ffn.mode == "predicted"
        front = self.parts.front(index)
        back = self.parts.back(index, has_cold=cold is not None)

        def run() -> None:
            program.main.host(front)
            done = program.start_cold(cold) if cold else None
            program.run_hot(divided, is_predicted=is_predicted)
            if cold:
                program.main.wait(done)
            program.main.host(back)

        self._act(number, run)


def blocks_of(
    placement: Placement, index: int, blocks: Sequence[NeuronBlock]
) -> tuple[NeuronBlock | None, NeuronBlock | None]:
    """A layer's hot block and its cold one."""
    if placement.hot is None:
        return (blocks[0], None) if placement.dense_on_gpu[index] else (None, blocks[0])
    has_hot = len(placement.hot[index]) > 0
    has_cold = len(blocks) > has_hot
    return blocks[0] if has_hot else None, blocks[-1] if has_cold else None
