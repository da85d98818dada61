"""The native step: one call of step.h runs the whole model for one or several rows.

Models that it does not support run layer by layer in decoder.py; `build` returns the reason."""

from collections.abc import Mapping, Sequence
from ctypes import POINTER, Array, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from hotsplit.options.cache_types import CacheTypes
from hotsplit.runtime.cache.block_table import BlockTable
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.layers import Layer, Weights
from hotsplit.runtime.ops.attention.native import (
    AttentionStruct,
    SelectStruct,
    Tables,
    TableStruct,
    attention_struct,
    select_struct,
)
from hotsplit.runtime.ops.attention.rotary import Rotaries, RotaryStruct
from hotsplit.runtime.ops.delta.native import DeltaStruct, delta_struct
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.ops.neurons.native import (
    FeedForwardStruct,
    feed_forward_struct,
    mixture_struct,
)
from hotsplit.runtime.ops.norm import NormStruct, norm_struct
from hotsplit.runtime.ops.position_wise import Loaded
from hotsplit.runtime.ops.predict import PredictorStruct, predictor_struct
from hotsplit.runtime.ops.route import RouteStruct, route_struct
from hotsplit.runtime.ops.structs import MAX_ROWS, MatrixStruct, Structs
from hotsplit.runtime.step.batch import LogitsMemory, Row
from hotsplit.runtime.step.forms import host_form
from hotsplit.runtime.step.native_ops import NUM_OWN, NUM_VALUES, OpStruct, StepValues, native_ops
from hotsplit.runtime.step.program import Op, step_program

_MOST_POSITIONS = (1 << 31) - 1  # of a step


class LayerStruct(Structure):
    _fields_ = [
        ("norm", POINTER(NormStruct)),
        ("num_norms", c_int64),
        ("attention", AttentionStruct),
        ("delta", DeltaStruct),
        ("predictor", PredictorStruct),
        ("feed_forward", FeedForwardStruct),
        ("route", RouteStruct),
        ("shared", FeedForwardStruct),
        ("shared_gate", MatrixStruct),
    ]


class StepStruct(Structure):
    _fields_ = [
        ("embedding", MatrixStruct),
        ("positions", MatrixStruct),
        ("head", MatrixStruct),
        ("output_norm", NormStruct),
        ("layer", POINTER(LayerStruct)),
        ("op", POINTER(OpStruct)),
        ("vector", c_void_p * NUM_VALUES),
        ("table", POINTER(TableStruct)),
        ("select", SelectStruct),
        ("rotary", POINTER(RotaryStruct)),
        ("workspace", c_void_p),
        ("times", c_void_p),
        ("fired", c_void_p),
        ("seen_heads", c_void_p),
        ("seen_predicted", c_void_p),
        ("seen_gate", c_void_p),
        ("seen_hidden", c_void_p),
        ("seen_shared", c_void_p),
        ("num_layers", c_int64),
        ("num_ops", c_int64),
        ("num_rotaries", c_int64),
        ("num_tables", c_int64),
        ("width", c_int64),
        ("context_length", c_int64),
        ("num_neurons", c_int64),
        ("max_rows", c_int64),
        ("x_size", c_int64),
        ("own_size", c_int64 * NUM_OWN),
        ("gate_bytes", c_int64),
        ("up_bytes", c_int64),
        ("down_bytes", c_int64),
        ("predictor_bytes", c_int64),
        ("attention_bytes", c_int64),
        ("key_kind", c_int32),
        ("value_kind", c_int32),
        ("is_key_rotated", c_int32),
        ("is_value_rotated", c_int32),
        ("embedding_scale", c_float),
        ("logit_cap", c_float),
    ]


class RowStruct(Structure):
    _fields_ = [
        ("token", c_int64),
        ("position", c_int64),
        ("sequence", c_int32),
        ("has_logits", c_int32),
        ("source", c_int32),
        ("reads", c_int32),
        ("writes", c_int32),
        ("unused", c_int32),
    ]


@dataclass(frozen=True, kw_only=True)
class NativeStep:
    """A step of the whole model in one native call."""

    step: StepStruct
    values: StepValues
    placed: Sequence[tuple[Op, tuple[int, int]]]  # the program, with the native operations of each
    logits: LogitsMemory
    traffic: Traffic
    kept: tuple[Any, ...]  # keeps alive what the structs point to

    @property
    def max_rows(self) -> int:
        return self.step.max_rows

    def run(self, token: int, position: int, sequence: int = 0) -> Tensor:
        """Logits f32 [V] after one token."""
        logits_V = self.logits.take_row()
        row = Row(token=token, position=position, sequence=sequence, has_logits=True)
        self._run((RowStruct * 1)(row_struct(row)), logits_V)
        return logits_V

    def run_rows(self, rows: Sequence[Row]) -> Tensor:
        """Logits f32 [rows with logits, V]; appends the rows to the cache and counts traffic. If
        weights are finite, a row's result is bit-identical whatever the other rows are.

        Raises IndexError for a token or position out of range, or a position without a block in the
        cache."""
        structs = (RowStruct * len(rows))(*map(row_struct, rows))
        logits_RV = self.logits.take(sum(row.has_logits for row in rows))
        self._run(structs, logits_RV)
        return logits_RV

    def _run(self, rows: Array[RowStruct], logits: Tensor) -> None:
        library.run_step(self.step, rows, logits)
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


def row_struct(row: Row) -> RowStruct:
    source = -1 if row.source is None else row.source
    return RowStruct(
        row.token, row.position, row.sequence, row.has_logits, source, row.reads, row.writes
    )


def build(weights: Weights, traffic: Traffic) -> NativeStep:
    """The native step of this model. Raises NotNative for one that the kernels do not cover."""
    return StepBuilder(weights.spec.value_sizes).step(weights, traffic)


def types_of(layers: Sequence[Layer]) -> CacheTypes:
    """The types of the cache, which layers with attention share; if there are none, of a cache that is
    not used."""
    found = {layer.attention.cache.types for layer in layers if layer.delta is None}
    (types,) = found or {CacheTypes.of("f32")}
    return types


def _own_neurons(layer: Layer) -> int:
    """Neurons of a block: of the layer, or of an expert."""
    experts = layer.ffn.experts
    return len(experts[0].id_F) if experts else layer.ffn.num_neurons


def _most_neurons(layer: Layer) -> int:
    """Neurons of the layer that are computed together."""
    own = _own_neurons(layer)
    return own if layer.shared is None else max(own, layer.shared.ffn.num_neurons)


class StepBuilder(Structs):
    """Builds the structs of a step and its layers."""

    def __init__(self, value_sizes: Mapping[str, int]) -> None:
        """`value_sizes`: those of the model's spec."""
        super().__init__()
        self.rotaries, self.tables = Rotaries(), Tables()  # of the layers so far
        self.values = StepValues(value_sizes)

    def step(self, weights: Weights, traffic: Traffic) -> NativeStep:
        step, placed = self.without_workspace(weights)
        step.workspace = self.workspace(library.step_bytes(step))
        return NativeStep(
            step=step,
            values=self.values,
            placed=placed,
            logits=LogitsMemory(vocab_size=weights.head.weight.num_rows),
            traffic=traffic,
            kept=tuple(self.kept),
        )

    def without_workspace(
        self, weights: Weights
    ) -> tuple[StepStruct, Sequence[tuple[Op, tuple[int, int]]]]:
        """The whole model, and its operations with the native ones of each."""
        step = self.frame(weights, [self.layer(layer) for layer in weights.layers])
        step.embedding = self.matrix(weights.embedding)
        step.head = self.linear(weights.head)
        step.output_norm = self.output_norm(weights)
        program = step_program(host_form(weights))
        lowered = self.lowered(program, dict(enumerate(weights.layers)), weights.outer)
        self.ops(step, [struct for structs in lowered for struct in structs])
        step.max_rows = min(MAX_ROWS, step.context_length * self.tables.each[0].num_sequences)
        ends = accumulate(map(len, lowered), initial=0)
        return step, list(zip(program, pairwise(ends), strict=True))

    def output_norm(self, weights: Weights) -> NormStruct:
        spec = weights.spec.output_norm
        return NormStruct() if spec is None else norm_struct(self, weights.output_norm, spec.size)

    def lowered(
        self, ops: Sequence[Op], layers: Mapping[int, Layer], outer: Mapping[str, Loaded]
    ) -> list[list[OpStruct]]:
        """The native operations for each of `ops`. `outer`: position-wise operations outside the layers."""

        def weights(op: Op) -> int:
            own = outer if op.layer is None else layers[op.layer].own
            return self.address(own[op.kind].struct(self))

        return list(native_ops(ops, layers, self.values, weights))

    def ops(self, step: StepStruct, structs: Sequence[OpStruct]) -> None:
        step.op, step.num_ops = self.array(OpStruct, structs), len(structs)

    def frame(self, weights: Weights, layer_structs: list[LayerStruct]) -> StepStruct:
        """A step with these layers, without embedding, head, operations and workspace."""
        step = self.frame_of(weights.layers, layer_structs, width=weights.embedding.width)
        step.embedding_scale = weights.embedding_scale
        step.logit_cap = weights.spec.logit_cap or 0.0
        if weights.positions is not None:
            step.positions = self.matrix(weights.positions)
        return step

    def frame_of(
        self, layers: Sequence[Layer], layer_structs: list[LayerStruct], *, width: int
    ) -> StepStruct:
        """`frame` without learned positions. The structs are of some of the layers, which share the types
        of the cache."""
        types = types_of(layers)
        attending = [layer.attention for layer in layers if layer.delta is None]
        for table in [a.cache.table for a in attending] or [BlockTable(1, _MOST_POSITIONS)]:
            self.tables.index(table)
        return StepStruct(
            x_size=self.values.x_size,
            own_size=self.values.own_size,
            layer=self.array(LayerStruct, layer_structs),
            rotary=self.rotaries.structs(self),
            num_layers=len(layer_structs),
            num_rotaries=len(self.rotaries.each),
            width=width,
            num_neurons=max(map(_most_neurons, layers)),
            table=self.tables.structs(self),
            num_tables=len(self.tables.each),
            select=select_struct(types.selection),
            context_length=self.tables.each[0].context_length,
            max_rows=1,
            key_kind=library.kind_code(types.key.kind),
            value_kind=library.kind_code(types.value.kind),
            is_key_rotated=types.key.is_rotated,
            is_value_rotated=types.value.is_rotated,
        )

    def layer(self, layer: Layer, *, has_neurons: bool = True) -> LayerStruct:
        """The struct of a layer, with its blocks of neurons or experts unless others compute them."""
        ffn, sizes = layer.ffn, {name: norm.size for name, norm in layer.spec.norms.items()}
        norms = [norm_struct(self, norm, sizes[name]) for name, norm in layer.norms.items()]
        struct = LayerStruct(
            norm=self.array(NormStruct, norms),
            num_norms=len(norms),
            attention=AttentionStruct()
            if layer.delta
            else attention_struct(self, layer.attention, self.rotaries, self.tables, projects=True),
            delta=delta_struct(self, layer.delta),
            predictor=predictor_struct(self, ffn.predictor),
            route=route_struct(self, layer.router),
            feed_forward=mixture_struct(self, ffn.gate, ffn.experts)
            if ffn.experts and has_neurons
            else feed_forward_struct(
                self, ffn.gate, _own_neurons(layer), ffn.blocks if has_neurons else ()
            ),
        )
        bias = self.vector(ffn.down_bias_D, layer.mixer.output.num_outputs)
        struct.feed_forward.down_bias = bias
        if layer.shared is not None:
            own, gate = layer.shared.ffn, layer.shared.gate
            struct.shared = feed_forward_struct(self, own.gate, own.num_neurons, own.blocks)
            struct.shared_gate = MatrixStruct() if gate is None else self.linear(gate)
        return struct

    def mixer(self, layer: Layer, *, projects: bool) -> LayerStruct:
        """The struct of a layer of which only attention, or the delta net, is on the host, without its
        projections unless it `projects`."""
        if layer.delta:
            return LayerStruct(delta=delta_struct(self, layer.delta))
        return LayerStruct(
            attention=attention_struct(
                self, layer.attention, self.rotaries, self.tables, projects=projects
            )
        )
