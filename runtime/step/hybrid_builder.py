"""Builds a hybrid decode step from loaded weights and a plan: the program of the step, the vectors and
streams of each device, and the segments that the program is submitted in.

Layers whose attention is on a GPU run there, their cold neurons concurrently on the CPU;
neighbouring layers that are wholly on the CPU are one call. GPUs run in sequence: each has its own
graph, which starts by receiving the hidden state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby

import torch

from sparkinfer.runtime.device.streams import HostNode, Stream
from sparkinfer.runtime.kernels.gpu.ranges import down_parts
from sparkinfer.runtime.model.feed_forward import Traffic
from sparkinfer.runtime.model.layers import Weights
from sparkinfer.runtime.model.native_neurons import NativeNeurons, SharedWorkspace
from sparkinfer.runtime.model.placement import Placement
from sparkinfer.runtime.neuron_cache.cycle import NeuronCache
from sparkinfer.runtime.step.forms import placed_form
from sparkinfer.runtime.step.hybrid_device import DeviceBuffers, DeviceKernels, DividedLayer
from sparkinfer.runtime.step.hybrid_lowering import (
    Lowering,
    StreamKey,
    Submission,
    is_in_line,
    waits,
)
from sparkinfer.runtime.step.hybrid_step import Backend, HybridStep, Meter, Segment
from sparkinfer.runtime.step.native_parts import HostBuffers, NativeParts
from sparkinfer.runtime.step.program import HOST, gpu, step_program
from sparkinfer.runtime.step.step_cache import StepCache
from sparkinfer.runtime.weights.neuron_block import by_role


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
        self.weights, self.placement = weights, placement
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
        self.form = placed_form(weights, placement, input_layer_offset, self._bits())
        self.program = step_program(self.form)
        self.parts = NativeParts.of(
            weights, [op for op in self.program if is_in_line(op)], self.host
        )

    def _bits(self) -> list[tuple[bool, bool]]:
        cache = self.cache
        if cache is None:
            return [(False, False)] * len(self.divided)
        return [
            (d.hot_bits is not None, cache.bits_of_gpu(d.index) is not None) for d in self.divided
        ]

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
                x_D=self.host.ffn_in_2D[index % 2], named_W=named_W,
                y_D=self.host.ffn_out_D if hot is None else self.host.cold_out_D,
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
        devices = {gpu(n): self._device(n) for n in sorted(set(self.placement.numbers))}
        self.submissions = Lowering(
            program=self.program,
            weights=self.weights,
            devices=devices,
            divided=self.divided,
            host=self.host,
            parts=self.parts,
            bits_of_gpu=lambda layer: self.cache.bits_of_gpu(layer) if self.cache else None,
            is_whole_L=[form.is_whole_on_host for form in self.form.layers],
        ).submissions()
        if self.cache is not None:
            numbers = sorted(set(self.placement.numbers))
            self.cache.connect({number: devices[gpu(number)].main for number in numbers})
        segments = self._segments(devices)
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
        positions = self.weights.positions
        has_rows = positions is not None and self.form.embedding != HOST
        before, after = (self._outside(kinds) for kinds in (("embed",), ("norm", "head")))
        return HybridStep(
            host=self.host,
            segments=prepared,
            before=before,
            after=after,
            positions=positions.data.float() if positions is not None and has_rows else None,
            meter=meter,
            kept=(devices, self.divided, self.submissions),
            neuron_cache=self.cache,
        )

    def _outside(self, kinds: Sequence[str]) -> HostNode | None:
        """The host's function before or after the work of all GPUs; None if there is none."""
        ops = [op for op in self.parts.ranges if op.home == HOST and op.kind in kinds]
        return self.parts.node(ops) if ops else None

    def _segments(self, devices: Mapping[str, DeviceKernels]) -> list[Segment]:
        """Each GPU's consecutive work. Whether a graph may copy between GPUs depends on how they are
        connected: such copies are segments of their own."""

        def stream(key: StreamKey) -> Stream:
            device = devices[key[0]]
            return device.side if key[1] else device.main

        def ordered(each: Submission, others: Sequence[StreamKey]) -> Callable[[], None]:
            own, before = stream(each.stream), [stream(other) for other in others]

            def run() -> None:
                for other in before:
                    own.wait(other.record())
                each.run()

            return run

        def together(runs: Sequence[Callable[[], None]]) -> Callable[[], None]:
            def run_all() -> None:
                for run in runs:
                    run()

            return run_all

        pairs = zip(self.submissions, waits(self.submissions), strict=True)
        return [
            Segment(
                main=devices[home].main,
                run=together([ordered(*pair) for pair in group]),
                is_graph=is_graph,
            )
            for (home, is_graph), group in groupby(
                pairs, key=lambda pair: (pair[0].home, pair[0].is_graph)
            )
        ]

    def _device(self, number: int) -> DeviceKernels:
        device = self.placement.gpu(number)
        main, side = self.backend.streams(device)
        mine = [d for d in self.divided if self.placement.numbers[d.index] == number]
        take = self.backend.take(device)
        return DeviceKernels(
            kernels=self.backend.kernels,
            main=main,
            side=side,
            buffers=DeviceBuffers.of(
                self.weights, mine, take, has_head=self.form.head == gpu(number)
            ),
            rotary=self.weights.rotary.get(device),
            slot_kernels=self.backend.slot_kernels,
        )
