"""Builds a hybrid decode step from loaded weights and a plan: the program of the step, the buffers
and streams of each device, and the segments in which the program is submitted.

In a layer with a part on a GPU, neurons on the CPU run concurrently with the GPU's kernels;
neighbouring layers that are wholly on the CPU are one call. GPUs run in sequence, with a segment
for each copy between them. Steps of several rows have segments of their own, made at first use; the
backend may capture a GPU's segment as a graph."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotsplit.model.weight_types import INEXACT_ROWS
from hotsplit.runtime.device.streams import HostNode, Stream
from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.neuron_cache.neuron_cache import NeuronCache
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.ops.neurons.native import NativeNeurons, NeuronsStruct, SharedWorkspace
from hotsplit.runtime.ops.structs import MAX_ROWS
from hotsplit.runtime.step.backend import Backend
from hotsplit.runtime.step.batch import LogitsMemory
from hotsplit.runtime.step.forms import placed_form
from hotsplit.runtime.step.hybrid_device import (
    DeviceBuffers,
    DeviceKernels,
    DividedLayer,
    hot_sizes,
    output_rows,
    shared_parts,
)
from hotsplit.runtime.step.hybrid_neuron_cache import (
    HybridCache,
    HybridExpertCache,
    HybridNeuronCache,
)
from hotsplit.runtime.step.hybrid_step import HybridStep, Meter, Passes, Segment, Work
from hotsplit.runtime.step.hybrid_submissions import Lowering, Submission, is_in_line, joins
from hotsplit.runtime.step.native_parts import HostBuffers, NativeParts
from hotsplit.runtime.step.native_step import StepStruct
from hotsplit.runtime.step.pass_device import PassKernels, PassSetup, SomeExperts
from hotsplit.runtime.step.program import (
    HOST,
    OUTPUTS,
    StepForm,
    device_of,
    ffn_in,
    gpu,
    name_of,
    pass_programs,
    step_program,
)
from hotsplit.runtime.weights.expert_block import ExpertBlock, UnitBlock
from hotsplit.runtime.weights.neuron_block import NeuronBlock, by_role


def build(
    weights: Weights,
    placement: Placement,
    traffic: Traffic,
    backend: Backend,
    neuron_cache: NeuronCache | None = None,
    max_rows: int = 1,
    passes: PassSetup | None = None,
) -> HybridStep:
    """The hybrid step of this model, for up to `max_rows` rows at a time, or one with a neuron
    cache.

    Raises NotNative for what the kernels of the CPU or GPU do not cover. A "GPU" of `placement` may
    be the CPU, with a backend that runs there."""
    given = weights, placement, traffic, backend, neuron_cache
    return _Builder(*given, max_rows if neuron_cache is None else 1, passes or PassSetup()).step()


class _Builder:
    def __init__(
        self,
        weights: Weights,
        placement: Placement,
        traffic: Traffic,
        backend: Backend,
        neuron_cache: NeuronCache | None,
        max_rows: int,
        passes: PassSetup,
    ) -> None:
        self.weights, self.placement = weights, placement
        on_gpu_L = zip(weights.layers, placement.dense_on_gpu, strict=True)
        if any(layer.recurrent and not is_on_gpu for layer, is_on_gpu in on_gpu_L):
            # The CPU takes more rows in several calls, and only the first would have their state.
            passes = replace(passes, num_rows=min(passes.num_rows, MAX_ROWS))
        self.max_rows, self.passes = max_rows, passes
        self.submissions: list[Sequence[Submission]] = []  # of each number of rows
        # One allocator per device: a second could return the memory of the first again.
        self.traffic, self.backend = traffic, replace(backend, take=cache(backend.take))
        spec = weights.spec
        self.cache: HybridCache | None = None
        if neuron_cache is not None:
            kind = HybridExpertCache if spec.has_experts else HybridNeuronCache
            self.cache = kind(weights, placement, self.backend, neuron_cache)
        self.host = HostBuffers.of(
            spec,
            is_pinned=backend.is_pinned,
            max_rows=max(max_rows, passes.num_rows),
            most_logits=max_rows,
            tables=() if placement.is_cache_on_host else weights.cache.tables,
            attends=placement.is_cache_on_host,
        )
        self.own_rows_L = output_rows(spec)
        room = SharedWorkspace()
        indices = range(len(weights.layers))
        self.divided = [self._divide(index, room, self.cache) for index in indices]
        self.pass_divided = [
            self._of_pass(self._divide(index, room, None) if self.cache else self.divided[index])
            for index in indices
        ]
        self.on_cpu = self._some_experts(room)
        room.allocate()
        has_bits_L = [divided.hot_bits is not None for divided in self.divided]
        self.forms: dict[Work, StepForm] = {"pass": placed_form(weights, placement)}
        if passes.streamed:
            streamed = placed_form(weights, placement, streamed=passes.streamed)
            self.forms["streamed pass"] = streamed
        self.programs = {work: pass_programs(form)[0] for work, form in self.forms.items()}
        self.programs["tail"] = pass_programs(self.forms["pass"])[1]
        self.forms["step"] = self.forms["tail"] = placed_form(weights, placement, has_bits_L)
        self.programs["step"] = step_program(self.forms["step"])
        in_line = [[op for op in ops if is_in_line(op)] for ops in self.programs.values()]
        parts = NativeParts.of(weights, in_line, self.host)
        self.parts = dict(zip(self.programs, parts, strict=True))

    def _of_pass(self, divided: DividedLayer, *, is_streamed: bool = False) -> DividedLayer:
        """A layer in passes: products leave one sum, those with experts one for each expert of a
        row, and streamed ones one more, of the CPU's experts."""
        hot, layer, ids = divided.hot, divided.layer, None
        num_parts, num_cold = int(hot is not None or is_streamed), 0
        if layer.router is not None:
            num_used = layer.router.spec.num_used
            num_parts = num_used + 1 if is_streamed else num_parts * num_used
        else:
            num_cold = int(is_streamed and hot is not None)
        if isinstance(hot, NeuronBlock) and layer.spec.predict is not None:
            ids = hot.id_N.to(torch.int32)
        return replace(
            divided,
            num_parts=num_parts,
            num_cold=num_cold,
            num_shared=min(1, divided.num_shared),
            hot_bits=None,
            hot_id_N=ids,
        )

    def _some_experts(self, room: SharedWorkspace) -> dict[int, SomeExperts]:
        """Calls of the CPU for some of the experts of layers whose others are streamed."""
        found = {}
        for index in self.passes.streamed:
            layer = self.weights.layers[index]
            _, cold = by_role(layer.ffn.blocks)
            if isinstance(cold, ExpertBlock):
                place_E = torch.from_numpy(cold.places.astype(np.int32))
                native = self._native(index, replace(cold, place_E=place_E), room, is_part=True)
                found[index] = SomeExperts(native, place_E)
        return found

    def _native(
        self,
        index: int,
        cold: UnitBlock,
        room: SharedWorkspace,
        *,
        is_part: bool,
        named_W: Tensor | None = None,
        fired_W: Tensor | None = None,
        routed_R: Tensor | None = None,
    ) -> NativeNeurons:
        """The CPU's call for units of a layer, of which a GPU may have a part."""
        host, layer = self.host, self.weights.layers[index]
        own, gate = layer.spec.neurons, layer.ffn.gate
        x_D = host.values[ffn_in(index) if own.reads == "ffn_in" else own.reads]
        y_D = host.values[OUTPUTS[own.writes]["cold" if is_part else "all"]]
        count = layer.ffn.num_neurons
        if layer.router is not None:
            count = layer.router.spec.num_used
            routed_R = host.values["routed"] if routed_R is None else routed_R
        return NativeNeurons.of(
            cold,
            gate,
            count,
            x_D=x_D,
            named_W=named_W,
            routed=routed_R,
            y_D=y_D,
            room=room,
            fired_W=fired_W,
        )

    def _divide(self, index: int, room: SharedWorkspace, cache: HybridCache | None) -> DividedLayer:
        layer, is_on_gpu = self.weights.layers[index], self.placement.dense_on_gpu[index]
        hot, cold = by_role(layer.ffn.blocks)
        is_named, hot_id_N, native = layer.spec.predict is not None, None, None
        named_W, bits_W, hot_bits, routed_R = self.host.values["named"], None, None, None
        if cache is not None:
            bits_W, hot_bits = cache.cold_bits(index), cache.hot_bits(index)
            routed_R = cache.routed(index)
            named_W = bits_W if is_named and bits_W is not None else named_W
        if isinstance(hot, NeuronBlock) and not hot.is_whole:
            hot_id_N = hot.id_N.to(torch.int32)
        if cold is not None and (hot is not None or is_on_gpu):
            bits = {"named_W": named_W} if is_named else {"fired_W": bits_W}
            is_part = hot is not None
            native = self._native(index, cold, room, is_part=is_part, routed_R=routed_R, **bits)
        num_shared, width = 0, self.weights.spec.hidden_size
        if layer.shared is not None and is_on_gpu:
            is_by_output = layer.shared.block.is_by_output
            num_shared = shared_parts(layer.spec, width, is_by_output=is_by_output)
        return DividedLayer(
            index=index,
            layer=layer,
            hot=hot,
            hot_id_N=hot_id_N,
            cold=native,
            num_parts=self._hot_sizes(layer, hot)[1],
            num_shared=num_shared,
            named_W=named_W,
            hot_bits=hot_bits,
            routed_R=routed_R,
            own_rows=self.own_rows_L[index],
        )

    def step(self) -> HybridStep:
        numbers = sorted(set(self.placement.numbers))
        self.devices = {gpu(n): self._device(n) for n in numbers}
        self.pass_devices = {gpu(n): self._pass_device(n) for n in numbers if self.passes.num_rows}
        if self.cache is not None:
            self.cache.connect({number: self.devices[gpu(number)].main for number in numbers})
        with _spared(self.weights):
            single = self._prepared("step", 1)
        streams = {n: s for d in self.pass_devices.values() for n, s in d.streams.items()}
        of_passes = [d.cold.struct for d in self.pass_divided if d.cold and self.cache]
        of_passes += [each.native.struct for each in self.on_cpu.values()]
        of_steps = [d.cold.struct for d in self.divided if d.cold]
        structs: list[NeuronsStruct | StepStruct] = [*of_steps, *of_passes]
        structs.append(self.parts["step"].step)
        for struct in structs:  # of the trial step
            struct.gate_bytes = struct.up_bytes = struct.down_bytes = 0
        positions = None
        if self.weights.positions is not None and self.forms["step"].embedding != HOST:
            positions = self.weights.positions.rows(torch.arange(self.weights.positions.num_rows))
        has_cuda = any(home.type == "cuda" for home in self.placement.homes)
        in_layers = [op for op in self.programs["step"] if op.layer is not None]
        return HybridStep(
            host=self.host,
            cache=self.weights.cache,
            logits=LogitsMemory(vocab_size=self.weights.head.weight.num_rows),
            segments={("step", 1): single},
            prepare=self._prepared,
            passes=Passes(
                lengths=self.passes.lengths,
                streams=streams,
                least_streamed=min((s.least_tokens for s in streams.values()), default=None),
                gather=self._gather,
            ),
            states=self.weights.states,
            hidden=self._hidden,
            has_equal_rows=self._has_equal_rows(),
            has_host_work=has_cuda and any(op.device == HOST for op in in_layers),
            before=self._outside(("embed", *self.weights.first)),
            after=self._outside((*self.weights.last, "norm", "head")),
            positions=positions,
            meter=Meter(traffic=self.traffic, structs=structs),
            kept=(self.devices, self.divided, self.submissions),
            neuron_cache=self.cache,
        )

    def _gather(self, number_R: Sequence[int], num_rows: int, pass_length: int) -> None:
        """Copies the hidden states of rows of a pass to where the work after the last layer reads
        them; the last one again for each further row up to `num_rows`."""
        place = self._home_of_hidden("pass")
        number_R = [*number_R, *[number_R[-1]] * (num_rows - len(number_R))]
        if place == HOST:
            x_TD = self.host.values["x"]
            x_TD[:num_rows] = x_TD[number_R]
            return
        source_TD = self.pass_devices[place].buffers.rows(pass_length)["x"]
        device = self.devices[place]
        target_RD = device.buffers.rows(num_rows)["x"].view(num_rows, -1)
        device.main.follow()
        for target_D, number in zip(target_RD, number_R, strict=True):
            device.main.copy(target_D, source_TD[number])

    def _home_of_hidden(self, work: Work) -> str:
        written = (value for op in reversed(self.programs[work]) for value in op.writes)
        return next((device_of(v) for v in written if name_of(v) == "x"), HOST)

    def _hidden(self, work: Work, num_rows: int) -> Tensor:
        """The last layer's output of the latest work of so many rows, [rows, D] on the host."""
        place = self._home_of_hidden(work)
        if place == HOST:
            return self.host.values["x"][:num_rows]
        buffers = (self.devices if work == "step" else self.pass_devices)[place].buffers
        return buffers.rows(num_rows)["x"].view(num_rows, -1).cpu()

    def _prepared(self, work: Work, num_rows: int) -> tuple[Segment, ...]:
        """The segments of some work for so many rows; the run before capture computes the rows that
        are already filled in."""
        host, is_pass = self.host.rows(num_rows), work in ("pass", "streamed pass")
        devices = _rows(self.pass_devices if is_pass else self.devices, num_rows)
        streamed = self.passes.streamed if work == "streamed pass" else ()
        divided = [
            self._of_pass(each, is_streamed=True) if each.index in streamed else each
            for each in (self.pass_divided if is_pass else self.divided)
        ]
        if is_pass or (work == "step" and self.cache is None):
            divided = [replace(each, named_W=host["named"]) for each in divided]
        submissions = Lowering(
            program=self.programs[work],
            weights=self.weights,
            devices=devices,
            divided=divided,
            host=host,
            parts=self.parts[work],
            bits_of_gpu=lambda layer: self.cache.bits_of_gpu(layer) if self.cache else None,
            is_whole_L=[place.is_whole_on_host for place in self.forms[work].places],
            streamed=streamed,
        ).submissions()
        self.submissions.append(submissions)  # a captured graph does not keep its memory alive
        segments = self._segments(devices, submissions)
        for segment in segments:  # kernels are compiled and loaded before anything is captured
            segment.main.follow()  # wait for weights and zeros being copied
            segment.run()
            segment.main.finish()
        return tuple(
            replace(segment, run=self.backend.prepare(segment.main, segment.run))
            if segment.is_graph
            else segment
            for segment in segments
        )

    def _has_equal_rows(self) -> bool:
        """True if a row's result does not depend on the number of rows: always so on the CPU, and
        on a GPU for all kinds of matrices but INEXACT_ROWS."""
        weights, placement = self.weights, self.placement
        kinds = {weights.head.weight.kind} if placement.head_on_gpu else set()
        for divided in self.divided:
            layer = divided.layer
            if placement.dense_on_gpu[divided.index]:
                linears = [each for own in layer.own.values() for each in own.linears]
                if layer.attending is not None:
                    linears += layer.attention.linears
                kinds |= {linear.weight.kind for linear in linears}
                predictor = layer.ffn.predictor
                if predictor is not None:
                    found = (predictor.down, predictor.up)
                    kinds |= {linear.weight.kind for linear in found if linear is not None}
                if layer.shared is not None:
                    kinds |= {matrix.kind for matrix in layer.shared.block.matrices}
            if isinstance(divided.hot, NeuronBlock):  # experts are computed row by row
                kinds |= {matrix.kind for matrix in divided.hot.matrices}
        return kinds.isdisjoint(INEXACT_ROWS)

    def _outside(self, kinds: Sequence[str]) -> HostNode | None:
        """The host's function before or after the work of all GPUs; None if there is none."""
        ops = [op for op in self.parts["step"].ranges if op.home == HOST and op.kind in kinds]
        return self.parts["step"].node(ops) if ops else None

    def _segments(
        self, devices: Mapping[str, DeviceKernels], submissions: Sequence[Submission]
    ) -> list[Segment]:
        """Each GPU's consecutive work. Whether a graph may copy between GPUs depends on how they
        are connected, so copies between GPUs are segments of their own."""

        needed, found = joins(submissions), []
        numbered = groupby(
            enumerate(submissions), key=lambda pair: (pair[1].home, pair[1].is_graph)
        )
        for (home, is_graph), group in numbered:
            main, own = devices[home].main, dict(group)
            if not self.backend.captures_handovers:
                is_graph &= not any(isinstance(each.work, HostNode) for each in own.values())
            run = partial(_submit, main, own, needed)
            found.append(Segment(main=main, run=run, is_graph=is_graph))
        return found

    def _device(self, number: int) -> DeviceKernels:
        device = self.placement.gpu(number)
        mine = [d for d in self.divided if self.placement.numbers[d.index] == number]
        take = self.backend.take(device)
        return DeviceKernels(
            kernels=self.backend.kernels,
            main=self.backend.stream(device),
            buffers=DeviceBuffers.of(
                self.weights.spec,
                [self._hot_sizes(d.layer, d.hot) for d in mine],
                self.weights.cache.tables,
                take,
                has_head=self.forms["step"].head == gpu(number),
                has_cache=not self.placement.is_cache_on_host,
                max_rows=self.max_rows,
                most_shared=max([d.num_shared for d in mine], default=0),
            ),
        )

    def _pass_device(self, number: int) -> PassKernels:
        """The kernels of passes on a GPU, on the stream of its steps."""
        device, setup = self.placement.gpu(number), self.passes
        main = self.devices[gpu(number)].main
        room = setup.room(self.weights, self.placement, number, is_pinned=self.backend.is_pinned)
        return PassKernels(
            kernels=self.backend.kernels,
            main=main,
            buffers=room.buffers,
            rounded_room=room.rounded,
            power_T=room.power_T,
            hidden_power_T=room.hidden_power_P,
            room=room,
            streams=setup.streams(device, main, room.pieces) if room.pieces else {},
            on_cpu=self.on_cpu,
        )

    def _hot_sizes(self, layer: Layer, hot: UnitBlock | None) -> tuple[int, int]:
        if hot is None:
            return 0, 0
        width = self.weights.spec.hidden_size
        return hot_sizes(layer.spec, hot.num_units, width, is_by_output=hot.is_by_output)


def _submit(main: Stream, submissions: Mapping[int, Submission], needed: Mapping[int, int]) -> None:
    """Submits consecutive work of a GPU, which ends when the CPU's part has ended, too."""
    handed: dict[int, Any] = {}  # what the CPU may not have run yet, by index

    def join(last: int) -> None:
        main.join(handed[last])
        for number in [each for each in handed if each <= last]:
            del handed[number]

    for number, each in submissions.items():
        if needed.get(number) in handed:
            join(needed[number])
        if isinstance(each.work, HostNode):
            handed[number] = main.start(each.work)
        else:
            each.work()
    if handed:
        join(max(handed))


def _rows(devices: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    return {
        name: replace(device, buffers=device.buffers.rows(num_rows))
        for name, device in devices.items()
    }


@contextmanager
def _spared(weights: Weights) -> Iterator[None]:
    """Lets a trial step write to the first position of the first sequence, and restores its keys
    and values afterwards."""
    lent = [table for table in weights.cache.tables if table.lend()]
    caches = [layer for layer in weights.cache.layers if layer.table not in lent]
    kept = [each.read(0, 0, 1) for each in caches]
    try:
        yield
    finally:
        for each, rows in zip(caches, kept, strict=True):
            each.write(0, 0, *rows)
        for table in lent:
            table.take_back()
