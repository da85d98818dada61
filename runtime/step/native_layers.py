"""Layers in native operations, one layer in each call, for passes whose tensors observers see.

`build` takes all layers of a model or, where a model is streamed, one of them; results are the same
to the bit if native layers support all of them. What they do not support goes through torch
(decoder.run_layer).

Letters: T tokens, D model width, F neurons of a layer, L layers."""

from collections.abc import Collection, Mapping
from ctypes import Array, addressof, c_int64, pointer
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from hotsplit.runtime.cache.state_slots import StateRun
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.ops.structs import MAX_ROWS, NotNative
from hotsplit.runtime.step.forms import host_place, roles_of
from hotsplit.runtime.step.native_ops import VALUES, OpStruct, native_ops
from hotsplit.runtime.step.native_parts import PartStruct
from hotsplit.runtime.step.native_step import (
    RowStruct,
    StepBuilder,
    StepStruct,
    table_and_types,
    take_traffic,
)
from hotsplit.runtime.step.program import ffn_in, layer_ops

# The tensors within a layer that observers of these passes can see.
SHOWN = frozenset({"ffn_norm", "ffn_predicted", "ffn_gate", "ffn_hidden", "layer_out"})
# Those of all neurons, with the field of the step that says where they are written.
_OF_NEURONS = {
    "ffn_predicted": "seen_predicted", "ffn_gate": "seen_gate", "ffn_hidden": "seen_hidden",
}  # fmt: skip


@dataclass(kw_only=True)
class NativeLayers:
    """Layers on the CPU, by index."""

    step: StepStruct
    ranges: Mapping[int, tuple[int, int]]  # of native operations, for each layer
    block_SN: Tensor  # int32, the cache blocks of each sequence
    block_length: int
    x_TD: Tensor
    ffn_in_2TD: Tensor
    num_neurons: Mapping[int, int]  # F, by layer
    seen: Mapping[str, Tensor]  # f32, by name, with room for [max_rows, F] of the widest layer
    traffic: Traffic
    kept: tuple[object, ...]
    _rows: Array[RowStruct] | None = field(default=None, repr=False)
    # Sequence, first position, number and slots of the rows.
    _place: tuple[int, int, int, StateRun | None] | None = None

    @classmethod
    def build(cls, layers: Mapping[int, Layer]) -> "NativeLayers | None":
        """None if the native operations do not support one of the layers."""
        is_supported = library.is_available() and all(map(_is_supported, layers.values()))
        if not is_supported:
            return None
        try:
            return cls._build(layers)
        except NotNative:
            return None

    @classmethod
    def _build(cls, layers: Mapping[int, Layer]) -> "NativeLayers":
        builder, all_layers = StepBuilder(), tuple(layers.values())
        (width,) = {layer.mixer.output.num_outputs for layer in all_layers}
        structs = [builder.layer(layer) for layer in layers.values()]
        step = builder.frame_of(all_layers, structs, width=width)
        step.max_rows = min(MAX_ROWS, step.context_length)
        x_TD = torch.zeros(step.max_rows, width)
        ffn_in_2TD = torch.zeros(2, step.max_rows, width)
        shared = {"x": x_TD, "ffn_in.0": ffn_in_2TD[0], "ffn_in.1": ffn_in_2TD[1]}
        for name, values in shared.items():
            step.vector[VALUES.index(name)] = values.data_ptr()
        ops: list[OpStruct] = []
        ranges: dict[int, tuple[int, int]] = {}
        for index, layer in layers.items():
            begin = len(ops)
            own = layer_ops(index, layer.spec, host_place(roles_of(layer)))
            ops += chain.from_iterable(native_ops(own, layers))
            ranges[index] = (begin, len(ops))
        builder.ops(step, ops)
        step.workspace = builder.workspace(library.step_bytes(step))
        table, _ = table_and_types(all_layers)
        has_scores = any(layer.spec.predict for layer in all_layers)
        names = set(_OF_NEURONS) - (set() if has_scores else {"ffn_predicted"})
        (traffic,) = {id(layer.ffn.traffic): layer.ffn.traffic for layer in all_layers}.values()
        return cls(
            step=step, ranges=ranges, block_SN=table.block_SN, block_length=table.block_length,
            x_TD=x_TD, ffn_in_2TD=ffn_in_2TD,
            num_neurons={index: layer.ffn.num_neurons for index, layer in layers.items()},
            seen={name: torch.empty(step.max_rows * step.num_neurons) for name in names},
            traffic=traffic, kept=tuple(builder.kept),
        )  # fmt: skip

    def run(
        self,
        index: int,
        x_TD: Tensor,
        *,
        sequence: int = 0,
        start: int,
        slots: StateRun | None,
        predictor_input_TD: Tensor | None,
        observers: Observers,
    ) -> tuple[Tensor, Tensor]:
        """Does what decoder.run_layer does, for at least two tokens."""
        T = len(x_TD)
        assert 1 < T <= self.step.max_rows, T
        self._set_rows(sequence, start, T, slots)
        self.x_TD[:T].copy_(x_TD)
        if predictor_input_TD is not None:
            self._ffn_in(index - 1)[:T].copy_(predictor_input_TD)
        wanted = [name for name in _OF_NEURONS if name in self.seen and observers.want(name, index)]
        for name, place in _OF_NEURONS.items():
            setattr(self.step, place, self.seen[name].data_ptr() if name in wanted else None)
        assert self._rows is not None
        begin, end = self.ranges[index]
        count = c_int64(T)
        library.run_part(
            PartStruct(
                step=pointer(self.step), row=addressof(self._rows), num_rows=addressof(count),
                named=None, logits=None, begin=begin, end=end,
            )
        )  # fmt: skip
        take_traffic(self.step, self.traffic)
        ffn_in_TD, out_TD = self._ffn_in(index)[:T].clone(), self.x_TD[:T].clone()
        observers.show("ffn_norm", index, ffn_in_TD)
        for name in wanted:
            size = T * self.num_neurons[index]
            observers.show(name, index, self.seen[name][:size].view(T, -1).clone())
        observers.show("layer_out", index, out_TD)
        return out_TD, ffn_in_TD

    def _ffn_in(self, index: int) -> Tensor:
        """f32 [T, D], of even or of odd layers."""
        return self.ffn_in_2TD[int(ffn_in(index).rpartition(".")[2])]

    def _set_rows(self, sequence: int, start: int, count: int, slots: StateRun | None) -> None:
        """Sets the rows of the next call. Raises IndexError for positions without a block in the
        cache."""
        last = (start + count - 1) // self.block_length
        blocks_N = self.block_SN[sequence, : last + 1]
        if start + count > self.step.context_length or bool((blocks_N < 0).any()):
            raise IndexError(f"positions {start} to {start + count - 1} have no block in the cache")
        if self._place == (sequence, start, count, slots):
            return
        reads, writes_T = (-1, (-1,) * count) if slots is None else (slots.reads, slots.writes)
        rows = (
            RowStruct(0, start + t, sequence, False, -1, reads, writes_T[t]) for t in range(count)
        )
        self._rows = (RowStruct * count)(*rows)
        self._place = (sequence, start, count, slots)


def shows_all(wanted: Collection[str]) -> bool:
    """True if native layers can show these tensors within layers. Not if nothing is wanted: such a
    pass goes through torch, as the reference."""
    return bool(wanted) and SHOWN.issuperset(wanted)


def _is_supported(layer: Layer) -> bool:
    """Layers with experts are not: torch shows their tensors."""
    return layer.router is None and all(
        d.type == "cpu" for d in (layer.device, *(b.device for b in layer.ffn.blocks))
    )
