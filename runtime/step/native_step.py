"""The native step: one call of step.h runs the whole model for one or several rows.

Models that it does not support run layer by layer in decoder.py; `build` returns the reason."""

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotsplit.options.key_selection import SUMMARIES, KeySelection
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.cache.key_tables import KeyTables
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.attention import Rotary
from hotsplit.runtime.model.feed_forward import NeuronBlock, Traffic
from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.model.native_structs import (
    ACTIVATIONS,
    MAX_ROWS,
    MODES,
    BlockStruct,
    MatrixStruct,
    NormStruct,
    NotNative,
    Structs,
)
from hotsplit.runtime.neuron_cache.cycle import NeuronCache
from hotsplit.runtime.step.batch import LogitsMemory, Row
from hotsplit.runtime.step.forms import host_form
from hotsplit.runtime.step.native_ops import VALUES, OpStruct, native_ops
from hotsplit.runtime.step.program import step_program

_PREDICTORS = ("linear", "relu", "gate")


class LayerStruct(Structure):
    _fields_ = [("norm", POINTER(NormStruct)), ("num_norms", c_int64),
                ("query_norm", NormStruct), ("key_norm", NormStruct),
                ("input", MatrixStruct * 3), ("output", MatrixStruct),
                ("predictor_down", MatrixStruct), ("predictor_up", MatrixStruct),
                ("down_bias", c_void_p), ("key", c_void_p), ("value", c_void_p),
                ("summary", c_void_p), ("code", c_void_p), ("summary_unit", c_void_p),
                ("code_factor", c_void_p),
                ("block", POINTER(BlockStruct)), ("num_blocks", c_int64),
                ("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_width", c_int64),
                ("window", c_int64), ("num_neurons", c_int64), ("scale", c_float), ("rotary", c_int32),
                ("activation", c_int32), ("predictor_kind", c_int32),
                ("threshold", c_float), ("predictor_threshold", c_float)]  # fmt: skip


class RotaryStruct(Structure):
    _fields_ = [("frequency", c_void_p), ("magnitude", c_double), ("head_width", c_int64),
                ("is_adjacent", c_int32), ("unused", c_int32)]  # fmt: skip


class TableStruct(Structure):
    _fields_ = [("block", c_void_p), ("num_sequences", c_int64), ("blocks_per_sequence", c_int64),
                ("block_length", c_int64), ("num_blocks", c_int64)]  # fmt: skip


class SelectStruct(Structure):
    _fields_ = [("block", c_int64), ("sinks", c_int64), ("window", c_int64), ("top", c_int64),
                ("candidates", c_int64), ("full", c_int64), ("summary", c_int32), ("is_coded", c_int32),
                ("cos", c_void_p), ("sin", c_void_p)]  # fmt: skip


class StepStruct(Structure):
    _fields_ = [("embedding", MatrixStruct), ("positions", MatrixStruct), ("head", MatrixStruct),
                ("output_norm", NormStruct), ("layer", POINTER(LayerStruct)),
                ("op", POINTER(OpStruct)), ("vector", c_void_p * len(VALUES)),
                ("table", TableStruct), ("select", SelectStruct), ("rotary", POINTER(RotaryStruct)),
                ("workspace", c_void_p), ("times", c_void_p), ("fired", c_void_p),
                ("seen_predicted", c_void_p), ("seen_gate", c_void_p), ("seen_hidden", c_void_p),
                ("num_layers", c_int64), ("num_ops", c_int64), ("num_rotaries", c_int64),
                ("width", c_int64), ("context_length", c_int64), ("num_neurons", c_int64),
                ("max_rows", c_int64),
                ("gate_bytes", c_int64), ("up_bytes", c_int64), ("down_bytes", c_int64),
                ("predictor_bytes", c_int64), ("attention_bytes", c_int64),
                ("mode", c_int32), ("key_kind", c_int32), ("value_kind", c_int32),
                ("is_key_rotated", c_int32), ("is_value_rotated", c_int32),
                ("embedding_scale", c_float)]  # fmt: skip


class RowStruct(Structure):
    _fields_ = [("token", c_int64), ("position", c_int64), ("sequence", c_int32),
                ("has_logits", c_int32), ("source", c_int32), ("unused", c_int32)]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NativeStep:
    """A step of the whole model in one native call."""

    step: StepStruct
    logits: LogitsMemory
    traffic: Traffic
    kept: tuple[Any, ...]  # keeps alive what the structs point to
    neuron_cache: NeuronCache | None = None

    @property
    def max_rows(self) -> int:
        return self.step.max_rows

    def run(self, token: int, position: int, sequence: int = 0) -> Tensor:
        """Logits f32 [V] after one token."""
        logits_V = self.logits.take_row()
        self._run((RowStruct * 1)(RowStruct(token, position, sequence, True, -1)), logits_V, [True])
        return logits_V

    def run_rows(self, rows: Sequence[Row]) -> Tensor:
        """Logits f32 [rows with logits, V]; appends the rows to the cache and counts traffic. If
        weights are finite, a row's result is bit-identical whatever the other rows are.

        Raises IndexError for a token or position out of range, or a position without a block in the
        cache."""
        structs = (RowStruct * len(rows))(*map(_struct_of, rows))
        logits_RV = self.logits.take(sum(row.has_logits for row in rows))
        decoded = [row.has_logits for row in rows if row.source is None]
        self._run(structs, logits_RV, decoded)
        return logits_RV

    def _run(self, rows: Array[RowStruct], logits: Tensor, decoded: list[bool]) -> None:
        """Runs a step. `decoded`: for each computed row, whether it counts as decoded rather than as a
        prompt's: it has logits."""
        if self.neuron_cache is not None:
            self.neuron_cache.before_step()
        library.run_step(self.step, rows, logits)
        if self.neuron_cache is not None:
            self.neuron_cache.after_step(decoded)
        take_traffic(self.step, self.traffic)


def take_traffic(step: StepStruct, traffic: Traffic) -> None:
    """Moves the step's byte counts to `traffic`."""
    traffic.gate += step.gate_bytes
    traffic.up += step.up_bytes
    traffic.down += step.down_bytes
    traffic.predictor += step.predictor_bytes
    traffic.attention += step.attention_bytes
    step.gate_bytes = step.up_bytes = step.down_bytes = 0
    step.predictor_bytes = step.attention_bytes = 0


def _struct_of(row: Row) -> RowStruct:
    source = -1 if row.source is None else row.source
    return RowStruct(row.token, row.position, row.sequence, row.has_logits, source)


def build(
    weights: Weights, traffic: Traffic, neuron_cache: NeuronCache | None = None
) -> NativeStep | str:
    """The native step of this model, or the reason why there is none."""
    if not library.is_available():
        return "the C++ kernels are not built"
    try:
        return StepBuilder().step(weights, traffic, neuron_cache)
    except NotNative as reason:
        return str(reason)


def rounded_scale(scale: float) -> float:
    """The scale of scores as 1 / root in f32, with the root of the head width rounded, too."""
    return 1.0 / c_float(1.0 / scale).value


def step_workspace_bytes(weights: Weights) -> int:
    """Workspace bytes of a native step of these layers; 0 if there is no such step.

    The size does not depend on the number of layers."""
    if not library.is_available():
        return 0
    try:
        return max(0, library.step_bytes(StepBuilder().without_workspace(weights)))
    except NotNative:
        return 0


class StepBuilder(Structs):
    """Builds the structs of a step and its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rotaries: list[Rotary] = []  # of the layers so far, each once

    def step(
        self, weights: Weights, traffic: Traffic, neuron_cache: NeuronCache | None = None
    ) -> NativeStep:
        step = self.without_workspace(weights)
        step.workspace = self.workspace(library.step_bytes(step))
        if neuron_cache is not None:
            num_words = -(-step.num_neurons // 32)
            bits_TLW = torch.zeros(step.max_rows, step.num_layers, num_words, dtype=torch.int32)
            step.fired = self.pointer(bits_TLW, torch.int32)
            neuron_cache.attach(bits_TLW)
        return NativeStep(
            step=step, logits=LogitsMemory(vocab_size=weights.head.weight.num_rows), traffic=traffic,
            kept=tuple(self.kept), neuron_cache=neuron_cache,
        )  # fmt: skip

    def without_workspace(self, weights: Weights) -> StepStruct:
        layers = [self.layer(layer, layer.ffn.blocks) for layer in weights.layers]
        step = self.frame(weights, layers)
        program = step_program(host_form(weights))
        lowered = native_ops(program, dict(enumerate(weights.layers)))
        self.ops(step, [struct for structs in lowered for struct in structs])
        step.max_rows = min(MAX_ROWS, step.context_length * step.table.num_sequences)
        step.embedding = self.matrix(weights.embedding)
        step.head = self.linear(weights.head)
        step.output_norm = self.norm(weights.output_norm)
        return step

    def ops(self, step: StepStruct, structs: list[OpStruct]) -> None:
        ops = (OpStruct * len(structs))(*structs)
        step.op, step.num_ops = ops, len(ops)
        self.kept.append(ops)

    def frame(self, weights: Weights, layer_structs: list[LayerStruct]) -> StepStruct:
        """A step with these layers, without embedding, head, operations and workspace."""
        step = self.frame_of(weights.layers, layer_structs, width=weights.embedding.width)
        step.embedding_scale = weights.embedding_scale
        if weights.positions is not None:
            step.positions = self.matrix(weights.positions)
        return step

    def frame_of(
        self, layers: Sequence[Layer], layer_structs: list[LayerStruct], *, width: int
    ) -> StepStruct:
        """`frame` without learned positions. The structs are of some of the layers, which share a
        block table, the types of the cache and the mode."""
        structs = (LayerStruct * len(layer_structs))(*layer_structs)
        rotaries = (RotaryStruct * len(self.rotaries))(*map(self._rotary, self.rotaries))
        (table,) = {layer.attention.cache.table for layer in layers}
        (types,) = {layer.attention.cache.types for layer in layers}
        (mode,) = {layer.ffn.mode for layer in layers}
        step = StepStruct(
            layer=structs,
            rotary=rotaries,
            num_layers=len(structs),
            num_rotaries=len(rotaries),
            width=width,
            num_neurons=max(layer.ffn.num_neurons for layer in layers),
            table=self.table(table),
            select=self.selection(types.selection),
            context_length=table.context_length,
            max_rows=1,
            key_kind=library.kind_code(types.key.kind),
            value_kind=library.kind_code(types.value.kind),
            is_key_rotated=types.key.is_rotated,
            is_value_rotated=types.value.is_rotated,
            mode=MODES.index(mode),
        )
        self.kept += [structs, rotaries]
        return step

    def _rotary(self, rotary: Rotary) -> RotaryStruct:
        return RotaryStruct(
            frequency=self.pointer(rotary.frequency_W, torch.float64),
            magnitude=rotary.magnitude,
            head_width=2 * len(rotary.frequency_W),
            is_adjacent=rotary.is_adjacent,
        )

    def _index(self, rotary: Rotary | None) -> int:
        """The index of a rotary embedding among those of the step; -1 for none."""
        if rotary is None:
            return -1
        for index, each in enumerate(self.rotaries):
            if each is rotary:
                return index
        self.rotaries.append(rotary)
        return len(self.rotaries) - 1

    def table(self, table: BlockTable) -> TableStruct:
        return TableStruct(
            block=self.pointer(table.block_SN, torch.int32),
            num_sequences=table.num_sequences,
            blocks_per_sequence=table.block_SN.shape[1],
            block_length=table.block_length,
            num_blocks=table.num_blocks,
        )

    def tables(self, tables: KeyTables | None) -> dict[str, int]:
        """The fields of LayerStruct for these tables."""
        names = ("summary", "summary_unit", "code", "code_factor")
        found = () if tables is None else tables.tensors
        return {
            name: self.pointer(tensor, tensor.dtype)
            for name, tensor in zip(names, found, strict=False)
        }

    def selection(self, rule: KeySelection | None) -> SelectStruct:
        if rule is None:
            return SelectStruct()
        cos = sin = None
        if rule.is_capped and self.rotaries:
            (rotary,) = self.rotaries  # engine_options.cache_types_of refuses others
            turn = rotary.turn(0, rule.longest)
            cos, sin = self.vector(turn.cos), self.vector(turn.sin)
        return SelectStruct(
            cos=cos,
            sin=sin,
            block=rule.block,
            sinks=rule.sinks,
            window=rule.window,
            top=rule.top,
            candidates=max(1, rule.candidates),
            full=rule.full,
            summary=SUMMARIES.index(rule.summary),
            is_coded=rule.is_coded,
        )

    def layer(self, layer: Layer, neuron_blocks: Sequence[NeuronBlock]) -> LayerStruct:
        """The struct of a layer with these neuron blocks."""
        attention, ffn = layer.attention, layer.ffn
        inputs = [self.linear(linear) for linear in attention.inputs]
        blocks = (BlockStruct * len(neuron_blocks))(*map(self.block, neuron_blocks))
        norms = (NormStruct * len(layer.norms))(*map(self.norm, layer.norms.values()))
        predictor = ffn.predictor
        down = None if predictor is None else predictor.down
        self.kept += [blocks, norms]
        return LayerStruct(
            **self.attended(layer),
            norm=norms,
            num_norms=len(norms),
            input=(MatrixStruct * 3)(*inputs),
            output=self.linear(attention.output),
            predictor_down=MatrixStruct() if down is None else self.linear(down),
            predictor_up=MatrixStruct() if predictor is None else self.linear(predictor.up),
            down_bias=self.vector(ffn.down_bias_D),
            block=blocks,
            num_blocks=len(blocks),
            num_neurons=ffn.num_neurons,
            activation=ACTIVATIONS.index(ffn.gate.activation),
            predictor_kind=0 if predictor is None else _PREDICTORS.index(predictor.kind),
            threshold=ffn.gate.threshold,
            predictor_threshold=0.0 if predictor is None else predictor.threshold,
        )

    def heads(self, layer: Layer) -> LayerStruct:
        """The struct of a layer whose heads attend on the host while its weights are on a GPU."""
        return LayerStruct(**self.attended(layer))

    def attended(self, layer: Layer) -> dict[str, Any]:
        """The fields of LayerStruct that attention needs besides its weights."""
        attention = layer.attention
        cache = attention.cache
        return {
            "query_norm": self.norm(attention.query_norm),
            "key_norm": self.norm(attention.key_norm),
            "num_heads": attention.num_heads,
            "num_kv_heads": cache.num_kv_heads,
            "head_width": cache.head_width,
            "window": attention.window or 0,
            "scale": rounded_scale(attention.score_scale),
            "rotary": self._index(attention.rotary),
            "key": self.pointer(cache.key_BKPX, cache.key_BKPX.dtype),
            "value": self.pointer(cache.value_BKPX, cache.value_BKPX.dtype),
            **self.tables(cache.tables),
        }
