"""Layers in native operations, one layer in each call, for passes whose tensors observers see.

`build` takes all layers of a model or, where a model is streamed, one of them; results are the same
to the bit. What it does not support goes through torch (decoder.run_layer).

Letters: T tokens, D model width, F neurons of a layer, L layers."""

from collections.abc import Collection, Mapping
from ctypes import addressof, c_int64, pointer
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.model.attention import Rotary
from sparkinfer.runtime.model.feed_forward import Traffic
from sparkinfer.runtime.model.layers import Layer
from sparkinfer.runtime.model.native_structs import MAX_ROWS, NotNative
from sparkinfer.runtime.model.observers import Observers
from sparkinfer.runtime.step.forms import layer_form
from sparkinfer.runtime.step.native_ops import VALUES, OpStruct, native_ops
from sparkinfer.runtime.step.native_parts import PartStruct
from sparkinfer.runtime.step.native_step import RowStruct, StepBuilder, StepStruct, take_traffic
from sparkinfer.runtime.step.program import ffn_in, layer_ops

# The tensors within a layer that observers of these passes can see.
SHOWN = frozenset({"ffn_norm", "ffn_gate", "ffn_hidden", "layer_out"})


@dataclass(kw_only=True)
class NativeLayers:
    """Layers on the CPU in mode dense or exact, by index."""

    step: StepStruct
    ranges: Mapping[int, tuple[int, int]]  # of native operations, for each layer
    block_SN: Tensor  # int32, the cache blocks of each sequence
    block_length: int
    x_TD: Tensor
    ffn_in_2TD: Tensor
    gate_TF: Tensor
    hidden_TF: Tensor
    traffic: Traffic
    kept: tuple[object, ...]
    _rows: object = field(default=None, repr=False)  # RowStruct * T
    _place: tuple[int, int, int] | None = None  # sequence, first position and number of the rows

    @classmethod
    def build(cls, layers: Mapping[int, Layer], rotary: Rotary | None) -> "NativeLayers | None":
        """None if the native operations do not support one of the layers."""
        is_supported = library.is_available() and all(map(_is_supported, layers.values()))
        if not is_supported:
            return None
        try:
            return cls._build(layers, rotary)
        except NotNative:
            return None

    @classmethod
    def _build(cls, layers: Mapping[int, Layer], rotary: Rotary | None) -> "NativeLayers":
        builder, first = StepBuilder(), next(iter(layers.values()))
        width, num_neurons = len(first.attn_norm.weight_D), first.ffn.num_neurons
        structs = [builder.layer(layer, layer.ffn.blocks) for layer in layers.values()]
        step = builder.frame_of(first, structs, width=width, rotary=rotary)
        step.max_rows = min(MAX_ROWS, step.context_length)
        x_TD = torch.zeros(step.max_rows, width)
        ffn_in_2TD = torch.zeros(2, step.max_rows, width)
        for name, shared in {
            "x": x_TD,
            "ffn_in.0": ffn_in_2TD[0],
            "ffn_in.1": ffn_in_2TD[1],
        }.items():
            step.vector[VALUES.index(name)] = shared.data_ptr()
        ops: list[OpStruct] = []
        ranges: dict[int, tuple[int, int]] = {}
        row_L = {index: row for row, index in enumerate(layers)}
        for index, layer in layers.items():
            begin = len(ops)
            for lowered in native_ops(layer_ops(index, layer_form(layer), 0), row_L):
                ops += lowered
            ranges[index] = (begin, len(ops))
        builder.ops(step, ops)
        step.workspace = builder.workspace(library.step_bytes(step))
        table = first.attention.cache.table
        return cls(
            step=step, ranges=ranges, block_SN=table.block_SN, block_length=table.block_length,
            x_TD=x_TD, ffn_in_2TD=ffn_in_2TD,
            gate_TF=torch.empty(step.max_rows, num_neurons),
            hidden_TF=torch.empty(step.max_rows, num_neurons),
            traffic=first.ffn.traffic, kept=tuple(builder.kept),
        )  # fmt: skip

    def run(
        self, index: int, x_TD: Tensor, *, sequence: int, start: int, observers: Observers
    ) -> tuple[Tensor, Tensor]:
        """Does what decoder.run_layer does, for at least two tokens."""
        T = len(x_TD)
        assert 1 < T <= self.step.max_rows, T
        self._set_rows(sequence, start, T)
        self.x_TD[:T].copy_(x_TD)
        seen = {
            name: tensor_TF
            for name, tensor_TF in (("ffn_gate", self.gate_TF), ("ffn_hidden", self.hidden_TF))
            if observers.want(name, index)
        }
        self.step.seen_gate = seen["ffn_gate"].data_ptr() if "ffn_gate" in seen else None
        self.step.seen_hidden = seen["ffn_hidden"].data_ptr() if "ffn_hidden" in seen else None
        begin, end = self.ranges[index]
        count = c_int64(T)
        library.run_part(
            PartStruct(
                step=pointer(self.step), row=addressof(self._rows), num_rows=addressof(count),
                named=None, logits=None, begin=begin, end=end,
            )
        )  # fmt: skip
        take_traffic(self.step, self.traffic)
        number = int(ffn_in(index).rpartition(".")[2])
        ffn_in_TD, out_TD = self.ffn_in_2TD[number, :T].clone(), self.x_TD[:T].clone()
        observers.show("ffn_norm", index, ffn_in_TD)
        for name, tensor_TF in seen.items():
            observers.show(name, index, tensor_TF[:T].clone())
        observers.show("layer_out", index, out_TD)
        return out_TD, ffn_in_TD

    def _set_rows(self, sequence: int, start: int, count: int) -> None:
        """Sets the rows of the next calls. Raises IndexError for positions without a block in the
        cache."""
        if self._place == (sequence, start, count):
            return
        last = (start + count - 1) // self.block_length
        blocks_N = self.block_SN[sequence]
        if start + count > self.step.context_length or (blocks_N[: last + 1] < 0).any():
            raise IndexError(f"positions {start} to {start + count - 1} have no block in the cache")
        rows = (RowStruct(0, start + t, sequence, False, -1) for t in range(count))
        self._rows = (RowStruct * count)(*rows)
        self._place = (sequence, start, count)


def shows_all(wanted: Collection[str]) -> bool:
    """True if native layers can show these tensors within layers. Not if nothing is wanted: such a
    pass goes through torch, as the reference."""
    return bool(wanted) and SHOWN.issuperset(wanted)


def _is_supported(layer: Layer) -> bool:
    ffn = layer.ffn
    if ffn.mode == "predicted" or len(ffn.blocks) > 1:
        return False
    (block,) = ffn.blocks
    return block.is_whole and not block.is_transposed and layer.device.type == "cpu"
