"""Layers in native operations, one layer in each call, for passes whose tensors observers see.

`of` takes a model, whose passes have the bits of its native step; `build` takes some layers alone, where a
model is streamed. Tensors that native operations do not show go through torch (decoder.run_layer).

Letters: T tokens, D model width, F neurons of a layer, L layers, K experts of a token."""

from collections.abc import Collection, Mapping, Sequence
from ctypes import Array, addressof, c_int64, pointer
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.cache.state_slots import StateRun
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.ops.structs import MAX_ROWS, NotNative
from hotsplit.runtime.step.batch import Row, slots_of
from hotsplit.runtime.step.forms import host_form, host_place, roles_of
from hotsplit.runtime.step.native_ops import OpStruct
from hotsplit.runtime.step.native_parts import PartStruct
from hotsplit.runtime.step.native_step import RowStruct, StepBuilder, StepStruct, take_traffic
from hotsplit.runtime.step.program import Op, ffn_in, layer_ops, name_of, step_program

# The tensors within a layer that observers of these passes can see.
SHOWN = frozenset(
    {
        "attn_norm",
        "attn_heads",
        "ffn_norm",
        "ffn_predicted",
        "ffn_experts",
        "ffn_gate",
        "ffn_hidden",
        "ffn_shared_hidden",
        "layer_out",
    }
)
# Those within operations, with the field of the step that says where they are written.
_WITHIN = {
    "attn_heads": "seen_heads",
    "ffn_predicted": "seen_predicted",
    "ffn_gate": "seen_gate",
    "ffn_hidden": "seen_hidden",
    "ffn_shared_hidden": "seen_shared",
}


@dataclass(kw_only=True)
class NativeLayers:
    """Layers on the CPU, by index."""

    step: StepStruct
    ranges: Mapping[int, tuple[int, int]]  # of native operations, for each layer
    tables: tuple[BlockTable, ...]
    x_TD: Tensor
    attn_in_TD: Tensor
    ffn_in_2TD: Tensor
    own: Mapping[str, Tensor]  # the values of position-wise operations, flat
    routed_TR: Tensor  # numbers of experts, and their weights; a layer's own rows are [2 K]
    num_used: Mapping[int, int]  # K, by layer; 0 without a router
    mixed: Mapping[int, str]  # the input of attention or of the delta net, by layer
    widths: Mapping[int, Mapping[str, int]]  # of the tensors within operations, by layer and name
    seen: Mapping[str, Tensor]  # f32, by name, with room for [max_rows, width] of the widest layer
    traffic: Traffic
    kept: tuple[object, ...]
    weights: Weights | None = None  # of a whole model
    outside: tuple[int, int, int] = (
        0,
        0,
        0,
    )  # the ends of embedding, of other first and of last operations
    _rows: Array[RowStruct] | None = field(default=None, repr=False)
    # Sequence, first position, number and slots of the rows.
    _place: tuple[int, int, int, StateRun | None] | None = None

    @classmethod
    def of(cls, weights: Weights) -> "NativeLayers | None":
        """All of a model, from token ids to logits; None if the native operations do not support it."""
        layers = dict(enumerate(weights.layers))
        if not all(map(_is_supported, weights.layers)):
            return None
        try:
            return cls._build(layers, weights.spec.value_sizes, weights)
        except NotNative:
            return None

    @classmethod
    def build(
        cls, layers: Mapping[int, Layer], value_sizes: Mapping[str, int]
    ) -> "NativeLayers | None":
        """None if the native operations do not support one of the layers. `value_sizes`: those of the
        model's spec."""
        if not all(map(_is_supported, layers.values())):
            return None
        try:
            return cls._build(layers, value_sizes)
        except NotNative:
            return None

    @classmethod
    def _build(
        cls,
        layers: Mapping[int, Layer],
        value_sizes: Mapping[str, int],
        weights: Weights | None = None,
    ) -> "NativeLayers":
        builder, all_layers = StepBuilder(value_sizes), tuple(layers.values())
        (width,) = {layer.mixer.output.num_outputs for layer in all_layers}
        structs = [builder.layer(layer) for layer in layers.values()]
        before: Sequence[Op] = ()
        after: Sequence[Op] = ()
        if weights is None:
            step = builder.frame_of(all_layers, structs, width=width)
        else:
            step = builder.with_ends(weights, structs)
            outer = [op for op in step_program(host_form(weights)) if op.layer is None]
            before, after = outer[: 1 + len(weights.first)], outer[1 + len(weights.first) :]
        outside = {} if weights is None else weights.outer
        step.max_rows = min(MAX_ROWS, step.context_length)
        x_TD = torch.zeros(step.max_rows, step.x_size or width)
        attn_in_TD, ffn_in_2TD = (
            torch.zeros(step.max_rows, width),
            torch.zeros(2, step.max_rows, width),
        )
        num_used = {
            i: layer.router.spec.num_used if layer.router else 0 for i, layer in layers.items()
        }
        routed_TR = torch.zeros(step.max_rows, 2 * max(num_used.values()))
        own_values = {n: torch.zeros(step.max_rows * v) for n, v in builder.values.own.items()}
        shared = {
            "x": x_TD,
            "attn_in": attn_in_TD,
            "ffn_in.0": ffn_in_2TD[0],
            "ffn_in.1": ffn_in_2TD[1],
            "routed": routed_TR,
        }
        for name, values in (shared | own_values).items():
            step.vector[builder.values.number(name)] = values.data_ptr()
        first = list(chain.from_iterable(builder.lowered(before, layers, outside)))
        ops: list[OpStruct] = list(first)
        ranges: dict[int, tuple[int, int]] = {}
        mixed: dict[int, str] = {}
        for index, layer in layers.items():
            begin = len(ops)
            own = list(layer_ops(index, layer.spec, host_place(roles_of(layer))))
            (mixer,) = (op for op in own if op.kind in ("attention", "delta"))
            mixed[index] = name_of(mixer.reads[0])
            ops += chain.from_iterable(builder.lowered(own, layers, {}))
            ranges[index] = (begin, len(ops))
        ops += chain.from_iterable(builder.lowered(after, layers, outside))
        builder.ops(step, ops)
        step.workspace = builder.workspace(library.step_bytes(step))
        widths = {index: _widths(layer) for index, layer in layers.items()}
        most = {
            name: max(of_layer.get(name, 0) for of_layer in widths.values()) for name in _WITHIN
        }
        (traffic,) = {id(layer.ffn.traffic): layer.ffn.traffic for layer in all_layers}.values()
        return cls(
            step=step,
            ranges=ranges,
            tables=tuple(builder.tables.each),
            x_TD=x_TD,
            attn_in_TD=attn_in_TD,
            ffn_in_2TD=ffn_in_2TD,
            routed_TR=routed_TR,
            own=own_values,
            num_used=num_used,
            mixed=mixed,
            widths=widths,
            seen={name: torch.empty(step.max_rows * size) for name, size in most.items()},
            traffic=traffic,
            kept=tuple(builder.kept),
            weights=weights,
            outside=(min(1, len(first)), len(first), len(ops)),
        )

    def logits(self, rows: Sequence[Row], observers: Observers) -> Tensor:
        """Logits f32 [R, V] of consecutive rows of one sequence that have them, with the bits of the native
        step; appends to the cache, which must have room."""
        assert self.weights is not None
        spec, slots = self.weights.spec, slots_of(rows)
        self._set_rows(rows[0].sequence, rows[0].position, len(rows), slots)
        assert self._rows is not None
        for struct, row in zip(self._rows, rows, strict=True):
            struct.token, struct.has_logits = row.token, row.has_logits
        embedded, first, last = self.outside
        self._run(0, embedded)
        if observers.want("embedding", None):
            x = self.x_TD if spec.embedded == "x" else self.own[spec.embedded]
            size = len(rows) * self.step.width
            found = x.flatten()[:size].view(len(rows), -1).clone()
            observers.show("embedding", None, found)
        self._run(embedded, first)
        for index in self.ranges:
            self._layer(index, observers)
        logits_RV = torch.empty(sum(row.has_logits for row in rows), spec.vocab_size)
        self._run(max(end for _, end in self.ranges.values()), last, logits_RV)
        if len(logits_RV):
            observers.show("output_norm", None, self.attn_in_TD[: len(logits_RV)].clone())
            observers.show("logits", None, logits_RV)
        return logits_RV

    def _run(self, begin: int, end: int, logits_RV: Tensor | None = None) -> None:
        assert self._rows is not None
        count = c_int64(len(self._rows))
        library.run_part(
            PartStruct(
                step=pointer(self.step),
                row=addressof(self._rows),
                num_rows=addressof(count),
                named=None,
                logits=None if logits_RV is None else logits_RV.data_ptr(),
                begin=begin,
                end=end,
            )
        )

    def run(
        self,
        index: int,
        x_TD: Tensor,
        *,
        sequence: int = 0,
        start: int,
        slots: StateRun | None,
        predictor_input_TD: Tensor | None,
        beside: Mapping[str, Tensor],
        observers: Observers,
    ) -> tuple[Tensor, Tensor]:
        """Does what decoder.run_layer does."""
        T = len(x_TD)
        assert self.step.max_rows >= T, T
        self._set_rows(sequence, start, T, slots)
        self.x_TD[:T].copy_(x_TD)
        if predictor_input_TD is not None:
            self._ffn_in(index - 1)[:T].copy_(predictor_input_TD)
        for name, values in beside.items():
            self.own[name][: values.numel()].copy_(values.flatten())
        self._layer(index, observers)
        return self.x_TD[:T].clone(), self._ffn_in(index)[:T].clone()

    def _layer(self, index: int, observers: Observers) -> None:
        """Runs a layer on the values in the buffers."""
        assert self._rows is not None
        T = len(self._rows)
        reads_x = self.mixed[index] == "x" and observers.want("attn_norm", index)
        x_TD = self.x_TD[:T].clone() if reads_x else self.x_TD
        wanted = [name for name in self.widths[index] if observers.want(name, index)]
        for name, place in _WITHIN.items():
            setattr(self.step, place, self.seen[name].data_ptr() if name in wanted else None)
        self._run(*self.ranges[index])
        take_traffic(self.step, self.traffic)
        self._show(index, x_TD, self._ffn_in(index)[:T].clone(), wanted, observers)
        if observers.want("layer_out", index):
            observers.show("layer_out", index, self.x_TD[:T].clone())

    def _show(
        self,
        index: int,
        x_TD: Tensor,
        ffn_in_TD: Tensor,
        wanted: Collection[str],
        observers: Observers,
    ) -> None:
        T, num_used = len(ffn_in_TD), self.num_used[index]
        if observers.want("attn_norm", index):
            inputs = {"x": x_TD, "attn_in": self.attn_in_TD[:T].clone()}
            observers.show("attn_norm", index, inputs.get(self.mixed[index], ffn_in_TD))
        observers.show("ffn_norm", index, ffn_in_TD)
        if num_used:
            routed_TR = self.routed_TR.flatten()[: T * 2 * num_used].view(T, -1)
            observers.show("ffn_experts", index, routed_TR[:, :num_used].long())
        for name in wanted:
            size = T * self.widths[index][name]
            observers.show(name, index, self.seen[name][:size].view(T, -1).clone())

    def _ffn_in(self, index: int) -> Tensor:
        """f32 [T, D], of even or of odd layers."""
        return self.ffn_in_2TD[int(ffn_in(index).rpartition(".")[2])]

    def _set_rows(self, sequence: int, start: int, count: int, slots: StateRun | None) -> None:
        """Sets the rows of the next call. Raises IndexError for positions without a block in the
        cache."""
        if not all(table.reads(sequence, start, start + count) for table in self.tables):
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
    """True if native layers can show these tensors within layers."""
    return SHOWN.issuperset(wanted)


def _is_supported(layer: Layer) -> bool:
    devices = (
        layer.device,
        *(b.device for b in layer.ffn.blocks),
        *(b.device for b in layer.ffn.experts),
    )
    return all(device.type == "cpu" for device in devices)


def _widths(layer: Layer) -> dict[str, int]:
    """The values per token of a layer's tensors within operations, by name."""
    num_neurons = layer.ffn.num_neurons
    if layer.router is not None:
        num_neurons = layer.router.spec.num_used * len(layer.ffn.experts[0].id_F)
    found = {
        "attn_heads": layer.mixer.widths[1],
        "ffn_gate": num_neurons,
        "ffn_hidden": num_neurons,
    }
    if layer.spec.predict:
        found["ffn_predicted"] = num_neurons
    if layer.shared is not None:
        found["ffn_shared_hidden"] = layer.shared.ffn.num_neurons
    return found
