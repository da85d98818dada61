"""Lowers the host's operations in a step program to those of kernels/cpu/step.h."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import Structure, c_float, c_int32

from hotsplit.runtime.model.layers import Layer
from hotsplit.runtime.step.program import Op, name_of

# In the order of the enums in step.h.
OP_KINDS = (
    "embed", "norm", "add", "add bias", "attention", "predict", "neurons", "head norm", "head",
    "attend", "route", "shared", "delta", "layer inputs", "per layer",
    "low rank", "begin planes", "predict planes", "correct planes", "add to planes", "end planes",
)  # fmt: skip
VALUES = (
    "x", "attn_in", "ffn_in.0", "ffn_in.1", "attn_out", "ffn_out", "hot_out", "cold_out", "qkv",
    "heads", "named", "routed", "shared_out", "per_layer", "active", "laurel_out",
)  # fmt: skip
# Values that are not read any more when these are written, in the same memory.
ALIASES = {"head_in": "attn_in", "route_in": "attn_in", "shared_in": "attn_out",
           "per_layer_out": "attn_out"}  # fmt: skip
_VALUE = {name: number for number, name in enumerate(VALUES)}
_VALUE |= {name: _VALUE[other] for name, other in ALIASES.items()}
_NONE = len(VALUES)


class OpStruct(Structure):
    _fields_ = [("kind", c_int32), ("layer", c_int32), ("part", c_int32),
                ("in", c_int32), ("in_2", c_int32), ("out", c_int32), ("factor", c_float),
                ("scale", c_float)]  # fmt: skip


def native_ops(ops: Iterable[Op], layers: Mapping[int, Layer]) -> Iterator[list[OpStruct]]:
    """The native operations for each of `ops`; none for a bias, which the sum that reads it adds.
    `layers`: those of the step, in order, by index."""
    row_L = {index: row for row, index in enumerate(layers)}
    for op in ops:
        names = [name_of(value) for value in op.reads]
        out = name_of(op.writes[0])
        layer = len(row_L) if op.layer is None else row_L[op.layer]
        if op.kind == "add":
            yield list(_sum(layer, names, out, op.factor, op.times * scale_of(op, layers)))
        elif op.kind == "norm" and op.layer is None:
            yield [_op("head norm", layer, names[0], out=out)]
        elif op.kind == "norm":
            assert op.layer is not None
            part = list(layers[op.layer].norms).index(op.part)
            yield [_op("norm", layer, names[0], out=out, part=part)]
        elif op.kind == "head":  # without an output norm, "head norm" only gathers the rows
            gather = (
                [] if names[0] == "head_in" else [_op("head norm", layer, names[0], out="head_in")]
            )
            yield [*gather, _op("head", layer, "head_in")]
        elif op.kind == "neurons":
            named = names[1] if len(names) > 1 else None
            yield [_op("neurons", layer, names[0], named, out, part=int(op.part == "cold"))]
        elif op.kind in ("predict planes", "correct planes", "add to planes"):
            yield [_op(op.kind, layer, names[0], names[-1] if len(names) > 1 else None, out=out)]
        elif op.kind in ("attention", "delta", "attend", "predict", "route", "shared", "low rank",
                         "begin planes", "end planes"):  # fmt: skip
            yield [_op(op.kind, layer, names[0], out=out)]
        elif op.kind == "per layer":
            yield [_op(op.kind, layer, names[0], names[1], out)]
        elif op.kind in ("embed", "layer inputs"):
            yield [_op(op.kind, layer, None if op.kind == "embed" else names[0], out=out)]
        else:
            assert op.kind == "bias", op
            yield []


def attend_op(layer: int) -> OpStruct:
    """The operation in which a layer's heads attend, with queries, keys and values that a GPU has
    projected; `layer`: index of the layer in the step."""
    return _op("attend", layer, "qkv", out="heads")


def mix_op(layer: int, is_delta: bool) -> OpStruct:
    """The operation of a layer's attention or delta net as a whole."""
    return _op("delta" if is_delta else "attention", layer, "attn_in", out="attn_out")


def overwritten(op: Op) -> tuple[str, ...]:
    """Values that an operation of the host overwrites: a sum of three or more terms accumulates in
    the second, and queries and keys are rotated in place."""
    if op.kind == "attend":
        return op.reads[:1]
    return op.reads[1:2] if op.kind == "add" and len(op.reads) > 2 else ()


def scale_of(op: Op, layers: Mapping[int, Layer] | Sequence[Layer]) -> float:
    """The factor of all of a sum."""
    if not op.part:
        return 1.0
    assert op.layer is not None, op
    return layers[op.layer].scales[op.part]


def _sum(layer: int, terms: list[str], out: str, factor: float, scale: float) -> Iterator[OpStruct]:
    """scale * (the first term + factor * the sum of the others), which accumulates in the second
    term."""
    first, second, *others = terms
    if second == "bias":
        assert not others and factor == scale == 1.0, (terms, factor, scale)
        yield _op("add bias", layer, first, out=out)
        return
    for term in others:
        if term == "bias":
            yield _op("add bias", layer, second, out=second)
        else:
            yield _op("add", layer, second, term, second)
    if out == second:  # a sum writes its first operand, then adds the second
        assert factor == 1.0, (terms, factor)
        first, second = second, first
    yield _op("add", layer, first, second, out, factor=factor, scale=scale)


def _op(
    kind: str, layer: int, x: str | None = None, y: str | None = None, out: str | None = None,
    part: int = 0, factor: float = 1.0, scale: float = 1.0,
) -> OpStruct:  # fmt: skip
    numbers = [_NONE if name is None else _VALUE[name] for name in (x, y, out)]
    return OpStruct(OP_KINDS.index(kind), layer, part, *numbers, factor, scale)
