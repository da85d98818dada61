"""The native step: one call of step.h runs the whole model for one or several rows. The host's
operations in a step program are lowered to those of step.h (`native_ops`); `timed_parts` measures
the time and bytes of steps by part.

Letters: L layers, P parts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Array, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hotsplit.model.blocks import PLAIN_SUM, SumFactors
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
from hotsplit.runtime.ops.loaded_op import LoadedOp
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.ops.neurons.native import FeedForwardStruct, feed_forward_struct
from hotsplit.runtime.ops.norm import NormStruct, norm_struct
from hotsplit.runtime.ops.predict import PredictorStruct, predictor_struct
from hotsplit.runtime.ops.route import RouteStruct, route_struct
from hotsplit.runtime.ops.structs import MAX_ROWS, MatrixStruct, NotNative, Structs, members
from hotsplit.runtime.ops.sums import STRUCT_FIELDS, struct_fields
from hotsplit.runtime.step.batch import LogitsMemory, Row
from hotsplit.runtime.step.forms import host_form
from hotsplit.runtime.step.program import Op, name_of, step_program
from hotsplit.runtime.weights.drive import Drive

# In the order of the enums in step.h.
OP_KINDS = (
    "embed",
    "norm",
    "add",
    "add bias",
    "attention",
    "predict",
    "neurons",
    "head norm",
    "head",
    "attend",
    "route",
    "shared",
)
VALUES = (
    "x",
    "attn_in",
    "ffn_in.0",
    "ffn_in.1",
    "attn_out",
    "ffn_out",
    "hot_out",
    "cold_out",
    "qkv",
    "heads",
    "named",
    "routed",
    "shared_out",
)
NUM_OWN = 8  # further values, of operations in C++ files of their own
NUM_VALUES = len(VALUES) + NUM_OWN
# Values that are not read any more when these are written, in the same memory.
ALIASES = {"head_in": "attn_in", "route_in": "attn_in", "shared_in": "attn_out"}
NONE = NUM_VALUES
MOST_READ, MOST_WRITTEN = 3, 2  # values of an operation in a C++ file of its own


class OpStruct(Structure):
    _fields_ = [
        *members(c_int32, "kind layer part in in_2 out"),
        *STRUCT_FIELDS,
        *members(c_int32, "in_3 out_2"),
        ("weights", c_void_p),
    ]


class StepValues:
    """The values of a step: those of step.h, and those that operations in C++ files of their own
    have."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes`: floats per token of the latter by name, and of "x" if they are not the hidden
        size."""
        known = {name.partition(".")[0] for name in (*VALUES, *ALIASES)}
        self.own = {name: size for name, size in sizes.items() if name not in known}
        if len(self.own) > NUM_OWN:
            raise NotNative(
                f"its operations have {len(self.own)} values; at most {NUM_OWN} are supported"
            )
        self.x_size = sizes.get("x", 0)
        self.own_size = (c_int64 * NUM_OWN)(*self.own.values())
        self.names = (*VALUES, *self.own)
        self._number = {name: number for number, name in enumerate(self.names)}
        self._number |= {name: self._number[other] for name, other in ALIASES.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._number

    def number(self, name: str | None) -> int:
        return NONE if name is None else self._number[name]

    def op(
        self,
        kind: str,
        layer: int,
        x: str | None = None,
        y: str | None = None,
        out: str | None = None,
        part: int = 0,
        factors: SumFactors = PLAIN_SUM,
    ) -> OpStruct:
        """An operation of step.h."""
        numbers = map(self.number, (x, y, out))
        return OpStruct(
            OP_KINDS.index(kind), layer, part, *numbers, *struct_fields(factors), NONE, NONE, None
        )

    def own_op(
        self, kind: str, layer: int, reads: Sequence[str], writes: Sequence[str], weights: int
    ) -> OpStruct:
        """An operation in a C++ file of its own. `weights`: the address of their struct."""
        number = library.operation_kind(kind)
        if number < 0:
            raise NotNative(
                f"the C++ library has no operation {kind!r} (if it is out of date, run make build)"
            )
        if len(reads) > MOST_READ or len(writes) > MOST_WRITTEN:
            raise NotNative(f"operation {kind!r} has {len(reads)} inputs and {len(writes)} outputs")
        x, y, z = map(self.number, (*reads, *[None] * (MOST_READ - len(reads))))
        out, out_2 = map(self.number, (*writes, *[None] * (MOST_WRITTEN - len(writes))))
        return OpStruct(number, layer, 0, x, y, out, *struct_fields(PLAIN_SUM), z, out_2, weights)


_STEP_VALUES = StepValues({})


def native_ops(
    ops: Iterable[Op],
    layers: Mapping[int, Layer],
    values: StepValues = _STEP_VALUES,
    weights: Callable[[Op], int] | None = None,
) -> Iterator[list[OpStruct]]:
    """The native operations for each of `ops`; none for a bias, which the sum that reads it adds.
    `layers`: those of the step, in order, by index. `weights`: the address of the struct of weights
    of an operation that is in a C++ file of its own."""
    row_L = {index: row for row, index in enumerate(layers)}
    for op in ops:
        names = [name_of(value) for value in op.reads]
        written = [name_of(value) for value in op.writes]
        out = written[0]
        layer = len(row_L) if op.layer is None else row_L[op.layer]
        if op.kind == "add":
            yield list(_sum(values, layer, names, out, op.factors))
        elif op.kind == "norm" and op.layer is None:
            yield [values.op("head norm", layer, names[0], out=out)]
        elif op.kind == "norm":
            assert op.layer is not None
            part = list(layers[op.layer].norms).index(op.part)
            yield [values.op("norm", layer, names[0], out=out, part=part)]
        elif op.kind == "head":  # without an output norm, "head norm" only gathers the rows
            is_gathered = names[0] == "head_in"
            gather = [] if is_gathered else [values.op("head norm", layer, names[0], out="head_in")]
            yield [*gather, values.op("head", layer, "head_in")]
        elif op.kind == "neurons":
            named = names[1] if len(names) > 1 else None
            yield [values.op("neurons", layer, names[0], named, out, part=int(op.part == "cold"))]
        elif op.kind == "embed":
            yield [values.op("embed", layer, out=out)]
        elif op.kind == "bias":
            yield []
        elif op.kind in OP_KINDS:
            yield [values.op(op.kind, layer, names[0], out=out)]
        else:
            assert weights is not None, op
            read = [name for name in names if name in values]  # without the token, and states
            written = [name for name in written if name in values]
            yield [values.own_op(op.kind, layer, read, written, weights(op))]


def overwritten(op: Op) -> tuple[str, ...]:
    """Values that an operation of the host overwrites: a sum of three or more terms accumulates in
    the second, and queries and keys are rotated in place."""
    if op.kind == "attend":
        return op.reads[:1]
    return op.reads[1:2] if op.kind == "add" and len(op.reads) > 2 else ()


def _sum(
    values: StepValues, layer: int, terms: list[str], out: str, factors: SumFactors
) -> Iterator[OpStruct]:
    """A sum, whose terms but the first accumulate in the second."""
    first, second, *others = terms
    if second == "bias":
        assert not others and factors == PLAIN_SUM, (terms, factors)
        yield values.op("add bias", layer, first, out=out)
        return
    for term in others:
        if term == "bias":
            yield values.op("add bias", layer, second, out=second)
        else:
            yield values.op("add", layer, second, term, second)
    if out == second:  # a sum writes its first operand, then adds the second
        assert factors.treats_alike, (terms, factors)
        first, second = second, first
    yield values.op("add", layer, first, second, out, factors=factors)


_MOST_POSITIONS = (1 << 31) - 1  # of a step


class LayerStruct(Structure):
    _fields_ = [
        ("norm", POINTER(NormStruct)),
        ("num_norms", c_int64),
        ("attention", AttentionStruct),
        ("predictor", PredictorStruct),
        ("feed_forward", FeedForwardStruct),
        ("route", RouteStruct),
        ("shared", FeedForwardStruct),
        ("shared_gate", MatrixStruct),
    ]


class StepStruct(Structure):
    _fields_ = [
        *members(MatrixStruct, "embedding positions head"),
        ("output_norm", NormStruct),
        ("layer", POINTER(LayerStruct)),
        ("op", POINTER(OpStruct)),
        ("vector", c_void_p * NUM_VALUES),
        ("table", POINTER(TableStruct)),
        ("select", SelectStruct),
        ("rotary", POINTER(RotaryStruct)),
        *members(c_void_p, "workspace times seen_heads seen_predicted seen_gate seen_hidden"),
        ("seen_shared", c_void_p),
        *members(c_int64, "num_layers num_ops num_rotaries num_tables width context_length"),
        *members(c_int64, "num_neurons max_rows x_size"),
        ("own_size", c_int64 * NUM_OWN),
        *members(c_int64, "gate_bytes up_bytes down_bytes predictor_bytes attention_bytes"),
        *members(c_int32, "key_kind value_kind is_key_rotated is_value_rotated"),
        *members(c_float, "embedding_scale logit_cap"),
    ]


class RowStruct(Structure):
    _fields_ = [
        *members(c_int64, "token position"),
        *members(c_int32, "sequence has_logits source reads writes again num_again begins keeps"),
    ]


@dataclass(frozen=True, kw_only=True)
class NativeStep:
    """A step of the whole model in one native call."""

    step: StepStruct
    values: StepValues
    placed: Sequence[tuple[Op, tuple[int, int]]]  # the program, with the native operations of each
    num_ids: int
    logits: LogitsMemory
    traffic: Traffic
    shared: Mapping[str, Tensor]  # f32 [max_rows, size], values that others read or write
    kept: tuple[Any, ...]  # keeps alive what the structs point to
    drive: Drive | None = None  # that steps read experts from

    @property
    def max_rows(self) -> int:
        return self.step.max_rows

    def limit_ids(self, num_ids: int | None) -> None:
        """Later steps compute the logits of the first `num_ids` ids alone, a multiple of 16, with
        the same bits; None: of all."""
        num_rows = self.num_ids if num_ids is None else num_ids
        if num_rows != self.step.head.num_rows:
            self.step.head.num_rows = num_rows
            self.logits.limit(num_rows)

    def run_rows(self, rows: Sequence[Row]) -> Tensor:
        """Logits f32 [rows with logits, V]; appends the rows to the cache and counts traffic. If
        weights are finite, a row's result is bit-identical whatever the other rows are.

        Raises HotsplitError if experts cannot be read, and IndexError for a token or position
        out of range, or a position without a block in the cache."""
        structs = (RowStruct * len(rows))(*map(row_struct, rows))
        return self.run_structs(structs, sum(row.has_logits for row in rows))

    def run_structs(self, structs: Array[RowStruct], num_logits: int) -> Tensor:
        """The same of rows as structs, so many of which want logits."""
        logits_RV = self.logits.take(num_logits)
        library.run_step(self.step, structs, logits_RV)
        if self.drive is not None:
            self.drive.check()
        take_traffic(self.step, self.traffic)
        return logits_RV


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
        *(row.token, row.position, row.sequence, row.has_logits, source, row.reads, row.writes),
        *(row.again.start, len(row.again), row.begins, row.keeps),
    )


def build(weights: Weights, traffic: Traffic, shared: Sequence[str] = ()) -> NativeStep:
    """The native step of this model, with memory of their own for `shared` values. Raises NotNative
    for a model that the kernels do not cover."""
    builder = StepBuilder(weights.spec.value_sizes)
    step, placed = builder.without_workspace(weights)
    sizes = {name: builder.values.own.get(name, weights.spec.hidden_size) for name in shared}
    values = {name: torch.zeros(step.max_rows, size) for name, size in sizes.items()}
    for name, value in values.items():
        step.vector[builder.values.number(name)] = value.data_ptr()
    step.workspace = builder.workspace(library.step_bytes(step))
    return NativeStep(
        step=step,
        values=builder.values,
        placed=placed,
        num_ids=step.head.num_rows,
        logits=LogitsMemory(vocab_size=step.head.num_rows),
        traffic=traffic,
        shared=values,
        kept=tuple(builder.kept),
        drive=weights.drive,
    )


def types_of(layers: Sequence[Layer]) -> CacheTypes:
    """The types of the cache, which layers with attention share; if there are none, of a cache that
    is not used."""
    found = {layer.attending.cache.types for layer in layers if layer.attending is not None}
    (types,) = found or {CacheTypes.of("f32")}
    return types


def _most_neurons(layer: Layer) -> int:
    """Neurons of the layer that are computed together."""
    own = layer.spec.neurons.of_expert
    return own if layer.shared is None else max(own, layer.shared.block.num_units)


class StepBuilder(Structs):
    """Builds the structs of a step and its layers."""

    def __init__(self, value_sizes: Mapping[str, int]) -> None:
        """`value_sizes`: those of the model's spec."""
        super().__init__()
        self.rotaries, self.tables = Rotaries(), Tables()  # of the layers so far
        self.values = StepValues(value_sizes)

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
        most = MAX_ROWS if weights.drive is None else weights.drive.most_rows
        step.max_rows = min(most, step.context_length * self.tables.each[0].num_sequences)
        ends = accumulate(map(len, lowered), initial=0)
        return step, list(zip(program, pairwise(ends), strict=True))

    def output_norm(self, weights: Weights) -> NormStruct:
        spec = weights.spec.output_norm
        return NormStruct() if spec is None else norm_struct(self, weights.output_norm, spec.size)

    def lowered(
        self, ops: Sequence[Op], layers: Mapping[int, Layer], outer: Mapping[str, LoadedOp]
    ) -> list[list[OpStruct]]:
        """The native operations for each of `ops`. `outer`: position-wise operations outside the
        layers."""

        def weights(op: Op) -> int:
            own = outer if op.layer is None else layers[op.layer].own
            return self.address(own[op.kind].struct(self))

        return list(native_ops(ops, layers, self.values, weights))

    def ops(self, step: StepStruct, structs: Sequence[OpStruct]) -> None:
        step.op, step.num_ops = self.array(OpStruct, structs), len(structs)

    def frame(self, weights: Weights, layer_structs: list[LayerStruct]) -> StepStruct:
        """A step with these layers, all or some of the model's, without embedding, head, operations
        and workspace."""
        types = types_of(weights.layers)
        attending = [x.attending for x in weights.layers if x.attending is not None]
        for table in [a.cache.table for a in attending] or [BlockTable(1, _MOST_POSITIONS)]:
            self.tables.index(table)
        step = StepStruct(
            x_size=self.values.x_size,
            own_size=self.values.own_size,
            layer=self.array(LayerStruct, layer_structs),
            rotary=self.rotaries.structs(self),
            num_layers=len(layer_structs),
            num_rotaries=len(self.rotaries.each),
            width=weights.embedding.width,
            num_neurons=max(map(_most_neurons, weights.layers)),
            table=self.tables.structs(self),
            num_tables=len(self.tables.each),
            select=select_struct(types.selection),
            context_length=self.tables.each[0].context_length,
            max_rows=1,
            key_kind=library.kind_code(types.key.kind),
            value_kind=library.kind_code(types.value.kind),
            is_key_rotated=types.key.is_rotated,
            is_value_rotated=types.value.is_rotated,
            embedding_scale=weights.spec.embedding_scale,
            logit_cap=weights.spec.logit_cap or 0.0,
        )
        if weights.positions is not None:
            step.positions = self.matrix(weights.positions)
        return step

    def layer(self, layer: Layer, *, has_neurons: bool = True) -> LayerStruct:
        """The struct of a layer, with its blocks of units unless others compute them."""
        ffn, sizes = layer.ffn, {name: norm.size for name, norm in layer.spec.norms.items()}
        norms = [norm_struct(self, norm, sizes[name]) for name, norm in layer.norms.items()]
        struct = LayerStruct(
            norm=self.array(NormStruct, norms),
            num_norms=len(norms),
            attention=AttentionStruct()
            if layer.attending is None
            else attention_struct(self, layer.attending, self.rotaries, self.tables, projects=True),
            predictor=predictor_struct(self, ffn.predictor),
            route=route_struct(self, layer.router),
            feed_forward=feed_forward_struct(
                self, ffn.gate, layer.spec.neurons.of_expert, ffn.blocks if has_neurons else ()
            ),
        )
        struct.feed_forward.down_bias = self.vector(ffn.down_bias_D, max(sizes.values(), default=0))
        if layer.shared is not None:
            own, gate = layer.shared, layer.shared.gate
            struct.shared = feed_forward_struct(self, own.rule, own.block.num_units, (own.block,))
            struct.shared_gate = MatrixStruct() if gate is None else self.linear(gate)
        return struct

    def attending(self, layer: Layer) -> LayerStruct:
        """The struct of a layer of which only attention, without its projections, is on the
        host."""
        return LayerStruct(
            attention=attention_struct(
                self, layer.attention, self.rotaries, self.tables, projects=False
            )
        )


# Matches enum Timed in kernels/cpu/step.h. A layer's first block of neurons is "neurons", the
# others are "neurons_2"; "other" is the embedding, norms and sums.
PARTS = ("inputs", "attend", "output", "predictor", "neurons", "neurons_2", "head", "other")


@contextmanager
def timed_parts(native: NativeStep) -> Iterator[Tensor]:
    """Yields int64 [L + 1, P, 2]: the nanoseconds, and the bytes of weights as Traffic counts them,
    of all steps inside the `with` block; the last row is for parts outside the layers.

    The clock is read between parts, so that their times sum to that of the native call. Without
    an array, a step does not read the clock; logits are bit-identical either way."""
    counts_LP2 = torch.zeros(native.step.num_layers + 1, len(PARTS), 2, dtype=torch.int64)
    assert native.step.times is None, "the step is being timed already"
    native.step.times = counts_LP2.data_ptr()
    try:
        yield counts_LP2
    finally:
        native.step.times = None
