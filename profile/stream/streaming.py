"""Runs many windows of text through a model one layer at a time.

All windows go through a layer before the next layer is loaded, so that a pass over all windows
reads a model larger than memory once, not once per window. Chunks and arithmetic are those of
Engine.hidden: observers see the same values of each layer bit for bit, in another order.

    with LayerStream(model, plan, say) as stream:
        for step in stream.steps(windows):
            step.advance(0, len(windows))

Letters: T tokens of a chunk, N tokens of all windows, D model width."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import DEFAULT_CONTEXT, is_predictor, layer_tensors
from hotsplit.costs.pass_length import SHORT_CHUNK
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, prefetch, release
from hotsplit.model.modes import Mode, runs_predictors
from hotsplit.model.spec import LayerSpec
from hotsplit.profile.corpus.corpus import WINDOW
from hotsplit.profile.memory import FREE_SHARE, Needs, Room, needs_of, room_of, trim
from hotsplit.profile.predictors.candidates import Choices
from hotsplit.profile.stream.beside import Beside, why_whole
from hotsplit.profile.stream.states import FileStates, MemoryStates, States
from hotsplit.runtime.cache.state_slots import slots_in_turn
from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.model.loader import Builder
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.attention.rotary import Turns
from hotsplit.runtime.ops.embed import embed
from hotsplit.runtime.ops.observers import Observation, Observe, Observers, Wants
from hotsplit.runtime.step.decoder import as_tensor, run_layer
from hotsplit.runtime.step.native_layers import NativeLayers, shows_all
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.runtime.weights.matrix import matrix_of
from hotsplit.system.sizes import format_bytes
from hotsplit.system.system_memory import free_memory_bytes

CPU = torch.device("cpu")
OnTokens = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """How a model is streamed: the device, the memory limit, and the folder for spilled states."""

    device: torch.device
    needs: Needs
    max_memory_bytes: int | None
    folder: Path  # for hidden states


def plan_stream(
    model: ModelFile,
    *,
    device: torch.device,
    max_memory_bytes: int | None,
    choices: Choices | None,
    folder: Path,
) -> StreamPlan | None:
    """Plans streaming; None if the whole model fits. `choices`: of predictors to train, if any.

    Raises HotsplitError if not even one layer fits."""
    longest = model.spec.context_length
    needs = needs_of(
        model,
        window=min(WINDOW, longest),
        context_length=min(DEFAULT_CONTEXT, longest),
        choices=choices,
    )
    plan = StreamPlan(device=device, needs=needs, max_memory_bytes=max_memory_bytes, folder=folder)
    room = room_of(device, max_memory_bytes)
    if needs.whole_bytes <= room.num_bytes:
        return None
    if why := why_whole(model.spec):
        size = format_bytes(room.taken_bytes + needs.whole_bytes)
        why = f"{why} are not profiled one at a time"
        raise HotsplitError(f"{model.path}: {room.says}, {size} are needed: {why}; give that much")
    _room(model, plan)
    return plan


def _room(model: ModelFile, plan: StreamPlan) -> Room:
    """The room available now. Raises HotsplitError if it is not enough for a layer."""
    room = room_of(plan.device, plan.max_memory_bytes)
    if plan.needs.layer_bytes > room.num_bytes:
        raise HotsplitError(
            f"{model.path}: {room.says}, one layer at a time takes"
            f" {format_bytes(room.taken_bytes + plan.needs.layer_bytes)}; give that much memory,"
            " or, if predictors are trained, a small --predictor-rank"
        )
    return room


class LayerStream:
    """A model with one layer on the device at a time. Stands in for an Engine where only `model`,
    `codec`, `context_length` and `observe` are used."""

    def __init__(
        self,
        model: ModelFile,
        plan: StreamPlan,
        say: Callable[[str], None] = lambda line: None,
        *,
        mode: Mode = "dense",
    ) -> None:
        self.model, self.plan, self.say = model, plan, say
        info = model.predictor if runs_predictors(mode) else None
        self.input_layer_offset = info.input_layer_offset if info else 0
        self.context_length = min(model.spec.context_length, DEFAULT_CONTEXT)
        self.codec = TextCodec.of(model)
        self.observers = Observers()
        self.builder = Builder(
            model,
            Placement.on_one_device(model.spec.num_layers, plan.device),
            mode,
            min(WINDOW, model.spec.context_length),
        )
        self.beside = Beside(self.builder)

    def observe(self, observe: Observe, wants: Wants | None = None) -> Observation:
        """Does what Engine.observe does."""
        return self.observers.add(observe, wants)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.plan.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, windows: Sequence[Tensor], on_tokens: OnTokens = lambda count: None) -> None:
        """Runs every window through every layer; after each window of a layer, `on_tokens` gets the
        window's number of tokens divided by the number of layers."""
        keeps_inputs = self.input_layer_offset == 1
        for step in self.steps(windows, on_tokens, keeps_inputs=keeps_inputs):
            step.advance(0, len(windows))

    def steps(
        self,
        windows: Sequence[Tensor],
        on_tokens: OnTokens = lambda count: None,
        *,
        keeps_inputs: bool = False,
    ) -> Iterator["StreamedLayer"]:
        """Yields the layers in order, each with all windows waiting to go through it.

        Advance every window before taking the next layer, which frees this one. `keeps_inputs`
        keeps the feed-forward inputs for one more layer."""
        waiting = self._waiting(windows, on_tokens, keeps_inputs)
        try:
            self._embed(waiting)
            for index in range(self.model.spec.num_layers):
                step = self._load(index, waiting)
                if index == 0:
                    self._say_plan(step)
                yield step
                step.close()
                for entry in self._entries(index):
                    release(entry)
        finally:
            waiting.close()

    def _waiting(
        self, windows: Sequence[Tensor], on_tokens: OnTokens, keeps_inputs: bool
    ) -> "Waiting":
        """Allocates the hidden states: in the device's memory if they fit; otherwise, for a GPU, in
        main memory if they fit there; otherwise in a file."""
        width, plan, room = self.model.spec.hidden_size, self.plan, _room(self.model, self.plan)
        starts = [0, *accumulate(len(ids_T) for ids_T in windows)]
        wanted = (2 if keeps_inputs else 1) * starts[-1] * plan.needs.state_row_bytes
        device: torch.device | None = plan.device
        if wanted > room.num_bytes - plan.needs.layer_bytes:
            is_host_free = wanted < FREE_SHARE / 2 * free_memory_bytes()
            device = CPU if plan.device.type == "cuda" and is_host_free else None

        def make() -> States:
            if device is None:
                return FileStates(starts[-1], width, plan.folder)
            return MemoryStates(starts[-1], width, device)

        return Waiting(
            windows=windows,
            starts=starts,
            states=make(),
            inputs=make() if keeps_inputs else None,
            where="a file" if device is None else f"{device.type.upper()} memory",
            room=room,
            on_tokens=on_tokens,
        )

    @torch.inference_mode()
    def _embed(self, waiting: "Waiting") -> None:
        """Stores all windows' embeddings; drops the matrix's mapped pages after each chunk."""
        entry = self.model.tensors["token_embd.weight"]
        embedding = matrix_of(entry, CPU)
        learned = self.model.tensors.get("position_embd.weight")
        positions = matrix_of(learned, CPU) if learned else None
        for window, ids_T in enumerate(waiting.windows):
            if ids_T.max() >= embedding.num_rows:
                raise HotsplitError(
                    f"{self.model.path}: its tokenizer gives token {int(ids_T.max())}, its"
                    f" embedding has {embedding.num_rows}; convert the checkpoint again"
                )
            for start in range(0, len(ids_T), SHORT_CHUNK):
                x_TD = embed(
                    embedding, positions, ids_T[start : start + SHORT_CHUNK], start,
                    scale=self.model.spec.embedding_scale,
                )  # fmt: skip
                self.observers.show("embedding", None, x_TD)
                waiting.states.write(waiting.starts[window] + start, x_TD)
                release(entry)

    def _entries(self, index: int) -> list[TensorEntry]:
        tensors = layer_tensors(self.model, index).items()
        return [entry for name, entry in tensors if not is_predictor(name)]

    def _load(self, index: int, waiting: "Waiting") -> "StreamedLayer":
        """Reads a layer and prefetches the next one."""
        began = time.perf_counter()
        for entry in self._entries(index):
            _touch(entry)
        layer = self.builder.layer(index)
        layer = replace(layer, own={kind: own.of_layer(index) for kind, own in layer.own.items()})
        if self.plan.device.type == "cuda":  # the device has its own copy
            for entry in self._entries(index):
                release(entry)
        seconds = time.perf_counter() - began
        if index + 1 < self.model.spec.num_layers:
            for entry in self._entries(index + 1):
                prefetch(entry)
        return StreamedLayer(self, index, layer, waiting, seconds)

    def _say_plan(self, step: "StreamedLayer") -> None:
        """Announces the plan and an estimate of the time, from the time to read layer 0 and the
        time of one product."""
        layers, plan, waiting = self.model.spec.num_layers, self.plan, step.waiting
        entries, num_tokens = self._entries(0), waiting.starts[-1]
        num_bytes = sum(e.num_bytes for e in entries)
        values = sum(prod(e.shape) for e in entries if len(e.shape) == 2)
        values += _used_values(self.model.spec.layers[0], entries)
        flops, rate = 2 * layers * num_tokens * values, _flops_per_s(step.layer)
        self.say(
            f"streaming {layers} layers of {format_bytes(num_bytes)}, one at a time:"
            f" {waiting.room.says}, all at once take"
            f" {format_bytes(waiting.room.taken_bytes + plan.needs.whole_bytes)};"
            f" {format_bytes(num_tokens * plan.needs.state_row_bytes)} of hidden states in"
            f" {waiting.where}"
        )
        self.say(
            f"about {_duration(step.load_s * layers + flops / rate)} for {num_tokens:,} tokens:"
            f" {layers * num_bytes / 1e9:.1f} GB to read at"
            f" {num_bytes / step.load_s / 1e9:.1f} GB/s, {flops / 1e12:.1f} TFLOP at"
            f" {rate / 1e9:.0f} GFLOP/s"
        )


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """All windows of a pass, and their hidden states between two layers."""

    windows: Sequence[Tensor]
    starts: list[int]  # first row of each window, and the number of all rows
    states: States
    inputs: States | None  # of the previous layer's feed-forward part
    where: str
    room: Room
    on_tokens: OnTokens

    def close(self) -> None:
        for store in (self.states, self.inputs):
            if store is not None:
                store.close()


class StreamedLayer:
    """One layer on the device, and all windows; `is_through` tells which have gone through it."""

    def __init__(
        self, stream: LayerStream, index: int, layer: Layer, waiting: Waiting, load_s: float
    ) -> None:
        self.stream, self.index, self.waiting, self.load_s = stream, index, waiting, load_s
        self._layer: Layer | None = layer
        self._native: NativeLayers | None = None
        self.is_through = [False] * len(waiting.windows)
        # For the current chunk: the previous layer's feed-forward input, if it is kept.
        self.before_TD: Tensor | None = None

    @property
    def layer(self) -> Layer:
        assert self._layer is not None, f"layer {self.index} is no longer loaded"
        return self._layer

    def advance(self, first: int, last: int) -> None:
        """Runs the windows from `first` up to `last` through the layer, each once."""
        for window in range(first, last):
            assert not self.is_through[window], (self.index, window)
            self._run(window)
            self.is_through[window] = True
            share = 1 / self.stream.model.spec.num_layers
            self.waiting.on_tokens(len(self.waiting.windows[window]) * share)

    @torch.inference_mode()
    def _run(self, window: int) -> None:
        waiting, observers = self.waiting, self.stream.observers
        length = len(waiting.windows[window])
        native = self._native_layer()
        for start in range(0, length, SHORT_CHUNK):
            count = min(SHORT_CHUNK, length - start)
            at = waiting.starts[window] + start
            if waiting.inputs and self.index:
                self.before_TD = waiting.inputs.read(at, at + count).to(self.layer.device)
            x_TD = waiting.states.read(at, at + count).to(self.layer.device)
            before_TD = self.before_TD if self.stream.input_layer_offset else None
            ids_T = waiting.windows[window][start : start + count]
            beside = self.stream.beside.of_layer(self.index, ids_T)
            slots = slots_in_turn(start // SHORT_CHUNK, count)
            if native is not None:
                x_TD, ffn_input_TD = native.run(
                    self.index, x_TD, start=start, slots=slots, predictor_input_TD=before_TD,
                    beside=beside, observers=observers,
                )  # fmt: skip
            else:
                found = run_layer(
                    self.index, self.layer, x_TD, start=start, turns=Turns(start, count),
                    slots=slots, predictor_input=before_TD, beside=beside,
                    observers=observers,
                )  # fmt: skip
                x_TD, ffn_input_TD = map(as_tensor, found)
            waiting.states.write(at, x_TD)
            if waiting.inputs:
                waiting.inputs.write(at, ffn_input_TD)
            del x_TD, ffn_input_TD
            if self.layer.device.type == "cpu":
                trim()

    def _native_layer(self) -> NativeLayers | None:
        """The layer in native operations, if they can show what observers want and support all
        layers, so that a streamed model and one in memory take the same path."""
        stream = self.stream
        wanted = stream.observers.wanted_in_layers(stream.model.spec.num_layers)
        if not shows_all(wanted):
            return None
        if self._native is None:
            layers = {self.index: self.layer}
            self._native = NativeLayers.build(layers, stream.model.spec.value_sizes)
        return self._native

    def close(self) -> None:
        """Frees the layer. Every window must be through."""
        assert all(self.is_through), (self.index, self.is_through.index(False))
        self._layer = self._native = self.before_TD = None


def _touch(entry: TensorEntry) -> None:
    """Reads a byte of every page of a mapped tensor in order, so that disk reads are sequential."""
    flat = entry.read().reshape(-1).view(np.uint8)
    if len(flat):
        flat[::4096].max()


def _used_values(layer: LayerSpec, entries: Sequence[TensorEntry]) -> int:
    """Values of the experts that a token uses, of a layer's tensors."""
    route = layer.route
    if route is None:
        return 0
    stored = sum(prod(e.shape) for e in entries if len(e.shape) == 3)
    return stored * route.num_used // route.num_experts


def _flops_per_s(layer: Layer) -> float:
    """FLOP/s of a product like those of the pass, unpacking included; the second run is timed."""
    experts = layer.ffn.experts
    gate = experts[0].gate.linear(0) if experts else layer.ffn.blocks[0].gate
    x_TD = torch.ones(SHORT_CHUNK, gate.weight.width, device=layer.device)
    for _ in range(2):
        began = time.perf_counter()
        gate.apply(x_TD)[0, 0].item()  # synchronises with the device
        seconds = time.perf_counter() - began
    return 2 * x_TD.numel() * gate.weight.num_rows / seconds


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
