"""Lowers the host's operations in a step program to those of kernels/cpu/step.h."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import Structure, c_int32, c_int64, c_void_p

from hotsplit.model.blocks import PLAIN_SUM, SumFactors
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.ops.structs import NotNative, members
from hotsplit.runtime.ops.sums import STRUCT_FIELDS, struct_fields
from hotsplit.runtime.step.program import Op, name_of

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
    "delta",
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
            read = [name for name in names if name != "token"]
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
