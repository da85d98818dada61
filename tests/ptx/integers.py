"""Instructions on integers, bits and predicates.

A factory takes an instruction's name, modifiers and operands and the kernel's registers, and
returns what it does as a function of (machine, mask of active lanes: None if all are)."""

import numpy as np

from ptx import fields, floats
from ptx.faults import UnknownInstruction
from ptx.fields import no_more, of, only
from ptx.operands import ALL_BYTES, DTYPE, either, immediate, pure, source, spread, stored_bits

WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
UNTYPED = ("b16", "b32", "b64", "pred")


def binary(compute):
    """Plain instructions of two integers; `floats` handles those of the same name on floats."""

    def factory(name, modifiers, operands, registers):
        kind = modifiers[-1]
        if kind in floats.KINDS:
            return floats.binary(name, modifiers, operands, registers)
        if kind in ("s16x2", "u16x2"):
            return _pairs(compute, modifiers, operands, registers)
        only(modifiers, INTEGERS)
        target, a, b = operands
        return pure(target, [(a, kind), (b, kind)], compute, registers)

    return factory


def _pairs(compute, modifiers, operands, registers):
    """An instruction on pairs of 16-bit numbers, each pair in a word."""
    no_more(modifiers[:-1])
    target, a, b = operands
    half = DTYPE[modifiers[-1][:3]]

    def both(x, y):
        x, y = np.broadcast_arrays(x, y)
        parts = [
            compute((x >> s).astype(np.uint16).view(half), (y >> s).astype(np.uint16).view(half))
            for s in (np.uint32(0), np.uint32(16))
        ]
        low, high = (part.view(np.uint16).astype(np.uint32) for part in parts)
        return low | (high << np.uint32(16))

    return pure(target, [(a, "b32"), (b, "b32")], both, registers)


def bitwise(compute, dominant: bool | None):
    """and, or, xor; `dominant` is the predicate value that decides the result alone, even if the
    other operand is undefined."""

    def factory(name, modifiers, operands, registers):
        target, a, b = operands
        kind = only(modifiers, UNTYPED)
        if kind == "pred":
            return _deciding(target, a, b, compute, dominant, registers)
        kept = _bytes_that_count(name, b, kind)
        traced = lambda u, v: (u | v) & kept  # noqa: E731
        return pure(target, [(a, kind), (b, kind)], compute, registers, traced)

    return factory


def _bytes_that_count(name: str, text: str, kind: str) -> np.uint8:
    """The bytes of a result, as bits, that depend on the first operand if the second is a
    constant."""
    constant = immediate(text, kind) if name != "xor" else None
    if constant is None:
        return ALL_BYTES
    deciding = 0 if name == "and" else 255
    each = constant.tobytes()
    return np.uint8(sum(1 << at for at, byte in enumerate(each) if byte != deciding))


def _deciding(target, a, b, compute, dominant, registers):
    number = registers.find(target)
    (get_a, read_a), (get_b, read_b) = (source(x, "pred", registers) for x in (a, b))

    def step(machine, mask):
        x, y = get_a(machine), get_b(machine)
        u, v = machine.undefined_of(read_a), machine.undefined_of(read_b)
        undefined = either(u, v)
        if undefined is not None and dominant is not None:
            decided_x = (x == dominant) & (True if u is None else u == 0)
            decided_y = (y == dominant) & (True if v is None else v == 0)
            undefined = np.where(decided_x | decided_y, np.uint8(0), undefined)
        machine.write(number, compute(x, y), undefined, mask)

    return step


def inverted(name, modifiers, operands, registers):
    kind = only(modifiers, UNTYPED)
    return pure(operands[0], [(operands[1], kind)], np.invert, registers)


def unary(compute):
    def factory(name, modifiers, operands, registers):
        kind = modifiers[-1]
        if kind in floats.KINDS:
            return floats.unary(name, modifiers, operands, registers)
        only(modifiers, INTEGERS)
        return pure(operands[0], [(operands[1], kind)], compute, registers)

    return factory


def bit_count(name, modifiers, operands, registers):
    """popc, whose result is u32, of b32 or b64."""
    kind = only(modifiers, ("b32", "b64"))
    compute = lambda x: np.bitwise_count(x).astype(np.uint32)  # noqa: E731
    return pure(operands[0], [(operands[1], kind)], compute, registers)


# ---- products ------------------------------------------------------------------------------


def _high(a, b):
    """The upper half of a product."""
    if a.dtype.itemsize == 8:
        return _high_of_64(a, b)
    wide = {2: "4", 4: "8"}[a.dtype.itemsize]
    product = a.astype(a.dtype.kind + wide) * b.astype(a.dtype.kind + wide)
    return (product >> product.dtype.type(8 * a.dtype.itemsize)).astype(a.dtype)


def _high_of_64(a, b):
    """From products of halves (Warren, Hacker's Delight, 8-2)."""
    (u, v), half = (np.asarray(each).view(np.uint64) for each in (a, b)), np.uint64(32)
    low_u, low_v = (each & np.uint64(0xFFFFFFFF) for each in (u, v))
    high_u, high_v = u >> half, v >> half
    first = high_u * low_v + (low_u * low_v >> half)
    second = low_u * high_v + (first & np.uint64(0xFFFFFFFF))
    high = high_u * high_v + (first >> half) + (second >> half)
    if a.dtype.kind == "i":
        high -= np.where(a < 0, v, np.uint64(0)) + np.where(b < 0, u, np.uint64(0))
    return high.view(a.dtype)


def product(name, modifiers, operands, registers):
    """mul and mad; for integers with .lo, .hi or .wide."""
    kind = modifiers[-1]
    if kind in floats.KINDS:
        return floats.binary(name, modifiers, operands, registers)
    part, *rest = modifiers[:-1]
    no_more(rest, ("cc",))
    of(kind, INTEGERS)
    if "cc" in rest:
        return _carrying(part, kind, operands, registers, adds_carry=False, sets_carry=True)
    kinds = [kind, kind] + ([WIDE[kind] if part == "wide" else kind] if name == "mad" else [])
    if part == "wide":
        dtype = np.dtype(DTYPE[WIDE[kind]])

        def multiply(a, b):
            return a.astype(dtype) * b.astype(dtype)

    elif part in ("lo", "hi"):
        multiply = np.multiply if part == "lo" else _high
    else:
        raise UnknownInstruction(f"modifier .{part}")
    compute = multiply if name == "mul" else (lambda a, b, c: multiply(a, b) + c)
    target, *sources = operands
    return pure(target, list(zip(sources, kinds, strict=True)), compute, registers)


def product_with_carry(name, modifiers, operands, registers):
    part, *rest, kind = modifiers
    no_more(rest, ("cc",))
    return _carrying(part, kind, operands, registers, adds_carry=True, sets_carry="cc" in rest)


def sum_with_carry(name, modifiers, operands, registers):
    """add.cc and addc."""
    *rest, kind = modifiers
    no_more(rest, ("cc",))
    target, a, b = operands
    return _carrying(
        "lo",
        kind,
        [target, a, "1", b],
        registers,
        adds_carry=name == "addc",
        sets_carry="cc" in rest,
    )


def _carrying(part, kind, operands, registers, *, adds_carry: bool, sets_carry: bool):
    of(kind, ("u32", "s32"))
    number = registers.find(operands[0])
    pairs = [source(text, kind, registers) for text in operands[1:]]
    read = tuple(register for _, numbers in pairs for register in numbers)
    if part not in ("lo", "hi"):
        raise UnknownInstruction(f"modifier .{part} with a carry")

    def step(machine, mask):
        a, b, c = (getter(machine) for getter, _ in pairs)
        undefined = machine.undefined_of(read)
        x = a * b if part == "lo" else _high(a, b)
        total = x.view(np.uint32).astype(np.uint64) + c.view(np.uint32)
        if adds_carry:
            total = total + machine.carry
            undefined = either(undefined, machine.carry_undefined)
        total = np.broadcast_to(total, machine.num_lanes)
        if sets_carry:
            machine.set_carry((total >> np.uint64(32)).astype(np.uint64), spread(undefined), mask)
        machine.write(number, total.astype(np.uint32), spread(undefined), mask)

    return step


# ---- comparisons and choices ---------------------------------------------------------------

_ORDERS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
_ORDERS |= {"gt": np.greater, "ge": np.greater_equal}
# Of unsigned numbers.
_ORDERS |= {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_JOINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(order: str, kind: str):
    """The function that compares two values of a type, in an order such as `lt`."""
    if kind[0] != "f":
        if order not in _ORDERS:
            raise UnknownInstruction(f"comparison .{order}")
        return _ORDERS[order]
    if order == "num" or order == "nan":
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (order == "nan")
    plain = order[:-1] if order.endswith("u") else order
    if plain not in ("eq", "ne", "lt", "le", "gt", "ge"):
        raise UnknownInstruction(f"comparison .{order}")
    compare, is_unordered_true = _ORDERS[plain], order.endswith("u")

    def compute(a, b):
        is_nan = np.isnan(a) | np.isnan(b)
        return (compare(a, b) | is_nan) if is_unordered_true else (compare(a, b) & ~is_nan)

    return compute


def set_predicate(name, modifiers, operands, registers):
    order, *rest, kind = modifiers
    flushes = "ftz" in rest
    joins = [m for m in rest if m in _JOINED]
    no_more(rest, (*_JOINED, "ftz"))
    of(kind, (*INTEGERS, "b16", "b32", "b64", "f32", "f64"))
    compare = comparison(order, kind)
    target, a, b, *more = operands
    if "|" in target:
        raise UnknownInstruction("setp with two results")
    sources = [(a, kind), (b, kind), *((text, "pred") for text in more)]

    def compute(x, y, *other):
        if flushes:
            x, y = floats.flushed(x), floats.flushed(y)
        found = compare(x, y)
        return _JOINED[joins[0]](found, *other) if joins else found

    return pure(target, sources, compute, registers)


def select(name, modifiers, operands, registers):
    """selp; an undefined operand that is not chosen does no harm."""
    kind = modifiers[-1]
    no_more(modifiers[:-1])
    target, a, b, which = operands
    number = registers.find(target)
    held = registers.dtype(number)
    (get_a, read_a), (get_b, read_b) = (source(x, kind, registers) for x in (a, b))
    get_which, read_which = source(which, "pred", registers)

    def step(machine, mask):
        choice = get_which(machine)
        value = np.where(choice, get_a(machine), get_b(machine))
        u, v = machine.undefined_of(read_a), machine.undefined_of(read_b)
        undefined = spread(machine.undefined_of(read_which))
        if u is not None or v is not None:
            nothing = np.uint8(0)
            chosen = np.where(choice, nothing if u is None else u, nothing if v is None else v)
            undefined = either(undefined, chosen)
        machine.write(number, stored_bits(value, held), undefined, mask)

    return step


INTEGER = {
    "add": binary(np.add),
    "sub": binary(np.subtract),
    "min": binary(np.minimum),
    "max": binary(np.maximum),
    "and": bitwise(np.bitwise_and, False),
    "or": bitwise(np.bitwise_or, True),
    "xor": bitwise(np.bitwise_xor, None),
    "not": inverted,
    "neg": unary(np.negative),
    "abs": unary(np.abs),
    "mul": product,
    "mad": product,
    "madc": product_with_carry,
    "addc": sum_with_carry,
    "shl": fields.shift,
    "shr": fields.shift,
    "shf": fields.funnel,
    "bfe": fields.extract,
    "bfi": fields.insert,
    "prmt": fields.permute,
    "lop3": fields.any_logic,
    "div": floats.binary,
    "setp": set_predicate,
    "selp": select,
    "popc": bit_count,
}
