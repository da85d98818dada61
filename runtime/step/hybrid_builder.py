"""Builds a hybrid decode step from loaded weights and a plan, following where the hidden state is.

Layers whose attention is on a GPU run there, their cold neurons concurrently on the CPU;
neighbouring layers that are wholly on the CPU are one call. GPUs run in sequence: each has its own
graph, which starts by receiving the hidden state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby

import torch

from sparkinfer.runtime.kernels.gpu.ranges import down_parts
from sparkinfer.runtime.model.feed_forward import Traffic
from sparkinfer.runtime.model.layers import Weights
from sparkinfer.runtime.model.native_neurons import NativeNeurons, SharedWorkspace
from sparkinfer.runtime.model.placement import Placement
from sparkinfer.runtime.neuron_cache.cycle import NeuronCache
from sparkinfer.runtime.step.hybrid_device import DeviceBuffers, DeviceProgram, DividedLayer
from sparkinfer.runtime.step.hybrid_step import Backend, HybridStep, Meter, Segment
from sparkinfer.runtime.step.native_parts import HostBuffers, NativeParts
from sparkinfer.runtime.step.step_cache import StepCache
from sparkinfer.runtime.weights.neuron_block import by_role


@dataclass(frozen=True)
class Action:
    """A submission to the streams of GPU `number` of the plan."""

    number: int
    run: Callable[[], None]
    is_graph: bool


def build(
    weights: Weights,
    placement: Placement,
    input_layer_offset: int,
    traffic: Traffic,
    backend: Backend,
    neuron_cache: NeuronCache | None = None,
) -> HybridStep:
    """The hybrid step of this model. Raises NotNative for what the CPU kernels do not cover. A
    "GPU" of `placement` may be the CPU, with a backend that runs there."""
    builder = _Builder(weights, placement, input_layer_offset, traffic, backend, neuron_cache)
    return builder.step()


class _Builder:
    def __init__(
        self,
        weights: Weights,
        placement: Placement,
        input_layer_offset: int,
        traffic: Traffic,
        backend: Backend,
        neuron_cache: NeuronCache | None,
    ) -> None:
        self.weights, self.placement, self.offset = weights, placement, input_layer_offset
        # A device's buffers are all from one allocator: a second one begins where the first did.
        self.traffic, self.backend = traffic, replace(backend, take=cache(backend.take))
        num_neurons = weights.layers[0].ffn.num_neurons
        self.cache = None
        if neuron_cache is not None:
            self.cache = StepCache(weights, placement, self.backend, neuron_cache)
        vocab_size, width = weights.head.weight.num_rows, weights.embedding.width
        self.host = HostBuffers.of(width, num_neurons, vocab_size, is_pinned=backend.is_pinned)
        room = SharedWorkspace()
        self.divided = [self._divide(index, room) for index in range(len(weights.layers))]
        room.allocate()
        self.is_whole = [
            not on_gpu and divided.hot is None
            for on_gpu, divided in zip(placement.dense_on_gpu, self.divided, strict=True)
        ]
        # Tied weights are on the head's device.
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
        self.actions: list[Action] = []

    def _divide(self, index: int, room: SharedWorkspace) -> DividedLayer:
        layer = self.weights.layers[index]
        hot, cold = by_role(layer.ffn.blocks)
        native, named_W, fired_W, hot_bits = None, self.host.named_W, None, None
        if self.cache is not None:
            hot_bits = self.cache.hot_bits(index)
            if self.cache.is_exact:
                fired_W = self.cache.cold_bits(index)
            else:
                named_W = self.cache.cold_bits(index)
        if cold is not None and (hot is not None or self.placement.dense_on_gpu[index]):
            native = NativeNeurons.of(
                cold, layer.ffn.gate, layer.ffn.mode, layer.ffn.num_neurons,
                x_D=self.host.ffn_input_D, named_W=named_W, y_D=self.host.cold_D,
                room=room, fired_W=fired_W,
            )  # fmt: skip
        is_partial = hot is not None and not hot.is_whole
        return DividedLayer(
            index=index,
            layer=layer,
            hot=hot,
            hot_id_N=hot.id_N.to(torch.int32) if hot is not None and is_partial else None,
            cold=native,
            num_parts=down_parts(len(hot.id_N), hot.down.width) if hot else 0,
            named_W=named_W,
            hot_bits=hot_bits,
        )

    def step(self) -> HybridStep:
        homes = self.placement.numbers
        self.programs = {number: self._program(number) for number in sorted(set(homes))}
        self._submit_all(homes)
        if self.cache is not None:
            self.cache.connect({number: each.main for number, each in self.programs.items()})
        segments = [
            self._segment(number, is_graph, [action.run for action in actions])
            for (number, is_graph), actions in groupby(
                self.actions, key=lambda action: (action.number, action.is_graph)
            )
        ]
        for segment in segments:  # kernels are compiled and loaded before anything is captured
            segment.main.follow()  # wait for weights and zeros being copied
            segment.run()
            segment.main.finish()
        prepared = tuple(
            replace(segment, run=self.backend.prepare(segment.main, segment.run))
            if segment.is_graph
            else segment
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
            kept=(self.programs, self.divided, self.actions),
            neuron_cache=self.cache,
        )

    def _segment(self, number: int, is_graph: bool, runs: Sequence[Callable[[], None]]) -> Segment:
        program = self.programs[number]

        def submit() -> None:
            if is_graph:
                program.begin()
            for run in runs:
                run()

        return Segment(main=program.main, run=submit, is_graph=is_graph)

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
            slot_kernels=self.backend.slot_kernels,
        )

    def _submit_all(self, homes: Sequence[int]) -> None:
        """Fills `actions`; `at` is the GPU that holds the hidden state, None is the host."""
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
                self._copy_bits(number, index)
                index += 1
                continue
            at = self._to(None, at, index)
            if not self.is_whole[index]:
                self._front_and_back(number, self.divided[index])
                self._copy_bits(number, index)
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

    def _act(self, number: int, run: Callable[[], None], *, is_graph: bool = True) -> None:
        self.actions.append(Action(number, run, is_graph))

    def _copy_bits(self, number: int, layer: int) -> None:
        main = self.programs[number].main
        copy = None if self.cache is None else self.cache.copy_of_bits(layer, main)
        if copy is not None:
            self._act(number, copy)

    def _bound(self, number: int, divided: DividedLayer) -> Callable[[], None]:
        return lambda: self.programs[number].run(divided)

    def _to(self, target: int | None, at: int | None, layer: int) -> int | None:
        """Moves the hidden state to GPU `target`, None for the host, before `layer`."""
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
                # Whether a graph may copy between GPUs depends on how they are connected.
                self._act(target, lambda: program.receive(source, layer), is_graph=False)
        return target

    def _front_and_back(self, number: int, divided: DividedLayer) -> None:
        """Submits a layer with attention on the host and hot neurons on a GPU."""
        program, index, cold = self.programs[number], divided.index, divided.cold
        is_predicted = divided.layer.ffn.mode == "predicted"
        front = self.parts.front(index, divided.named_W)
        back = self.parts.back(index, has_cold=cold is not None)

        def run() -> None:
            program.main.host(front)
            done = program.start_cold(cold) if cold else None
            program.run_hot(divided, is_predicted=is_predicted)
            if cold:
                program.main.wait(done)
            program.main.host(back)

        self._act(number, run)
