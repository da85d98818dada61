"""Instructions that move data: mov, cvta, ld and st."""

import numpy as np

from ptx.faults import UnknownInstruction
from ptx.operands import BITS, DTYPE, address, is_register, pure, source, vector
from ptx.text import BYTES

_SPACES = ("global", "shared", "local", "param", "const")
# Cache hints, memory orders and scopes. They change nothing here: an access takes effect at once.
_HINTS = ("nc", "volatile", "relaxed", "weak", "gpu", "cta", "sys")
_HINTS += ("ca", "cg", "cs", "lu", "cv", "wb", "wt")


def move(name, modifiers, operands, registers):
    (kind,) = modifiers
    target, value = operands
    if kind not in DTYPE or kind in ("b8", "u8", "s8"):
        raise UnknownInstruction(f"type .{kind}")
    if value.startswith("{"):
        return _packed(target, vector(value), kind, registers)
    if target.startswith("{"):
        return _unpacked(vector(target), value, kind, registers)
    if is_register(value) and value in registers.number:
        number, of = registers.find(target), registers.find(value)
        if registers.dtype(number) == registers.dtype(of):
            # A register's array is never changed in place, so two registers can share it.
            return lambda machine, mask: machine.write(
                number, machine.value[of], machine.undefined[of], mask
            )
    return pure(target, [(value, kind)], np.array, registers, lambda u: u)


def _packed(target, members, kind, registers):
    """Packs {low, ..., high} into one register."""
    bits = 8 * BYTES[kind] // len(members)
    part, whole = f"u{bits}", np.dtype(BITS[BYTES[kind]])

    def compute(*values):
        found = whole.type(0)
        for at, value in enumerate(values):
            found = found | (value.astype(whole) << whole.type(at * bits))
        return found

    size = bits // 8

    def traced(*undefined):
        found = np.uint8(0)
        for at, u in enumerate(undefined):
            found = found | (u & np.uint8((1 << size) - 1)) << np.uint8(at * size)
        return found

    return pure(target, [(text, part) for text in members], compute, registers, traced)


def _unpacked(members, value, kind, registers):
    bits, whole = 8 * BYTES[kind] // len(members), np.dtype(BITS[BYTES[kind]])
    getter, read = source(value, "b" + kind[1:], registers)
    numbers = [None if text == "_" else registers.find(text) for text in members]
    part = BITS[bits // 8]

    def step(machine, mask):
        both, undefined = getter(machine), machine.undefined_of(read)
        for at, number in enumerate(numbers):
            if number is not None:
                value = (both >> whole.type(at * bits)).astype(part)
                own = None
                if undefined is not None:
                    own = undefined >> np.uint8(at * bits // 8) & np.uint8((1 << bits // 8) - 1)
                machine.write(number, value, own, mask)

    return step


def to_space(name, modifiers, operands, registers):
    """cvta: generic addresses equal those of global memory here; those of shared memory are not
    supported."""
    if modifiers not in (["to", "global", "u64"], ["global", "u64"]):
        raise UnknownInstruction("cvta." + ".".join(modifiers))
    return pure(operands[0], [(operands[1], "b64")], np.array, registers)


def _split(name: str, modifiers: list[str]) -> tuple[str, int, str]:
    """(space, number of values, type)."""
    *rest, kind = modifiers
    rest = [m for m in rest if m not in _HINTS and not m.startswith("L1::")]
    spaces = [m for m in rest if m in _SPACES]
    rest = [m for m in rest if m not in _SPACES]
    counts = [m for m in rest if m in ("v2", "v4")]
    if len(rest) > len(counts) or len(counts) > 1 or len(spaces) > 1 or kind not in BYTES:
        raise UnknownInstruction(f"{name}." + ".".join(modifiers))
    return (spaces or ["global"])[0], int(counts[0][1]) if counts else 1, kind


def as_bits(unwritten: np.ndarray) -> np.ndarray:
    """u8 [lanes] from bool [lanes, bytes]."""
    return np.packbits(unwritten, axis=1, bitorder="little")[:, 0]


def as_bytes(undefined: np.ndarray, size: int) -> np.ndarray:
    """bool [lanes, bytes] from u8 [lanes]."""
    return np.unpackbits(undefined[:, None], axis=1, bitorder="little")[:, :size].astype(bool)


def load(name, modifiers, operands, registers):
    space, count, kind = _split(name, modifiers)
    targets = vector(operands[0])
    assert len(targets) == count, operands
    numbers = [registers.find(text) for text in targets]
    if space == "param":
        return _parameter(numbers[0], operands[1], kind, registers)
    getter, read = address(operands[1], registers)
    dtype = np.dtype(DTYPE[kind])
    held = [registers.dtype(number) for number in numbers]
    size = dtype.itemsize * count

    def step(machine, mask):
        lanes, places = machine.places(getter(machine), read, mask)
        data, unwritten = machine.load(space, places, lanes, size)
        values = data.view(dtype)
        for at, number in enumerate(numbers):
            value = values[:, at]
            if value.dtype.itemsize != held[at].itemsize:
                value = value.astype(held[at])
            undefined = None
            if unwritten is not None:
                undefined = as_bits(unwritten[:, at * dtype.itemsize : (at + 1) * dtype.itemsize])
            value = np.ascontiguousarray(value).view(held[at])
            machine.write_lanes(number, value, undefined, lanes)

    return step


def _parameter(number, text, kind, registers):
    name, _, offset = text.strip("[] ").partition("+")
    held = registers.dtype(number)
    dtype = np.dtype(DTYPE[kind])

    def step(machine, mask):
        value = machine.parameter(name.strip(), int(offset or 0), dtype)
        bits = np.full(machine.num_lanes, value).astype(dtype)
        if dtype.itemsize != held.itemsize:
            bits = bits.astype(held)
        machine.write(number, bits.view(held), None, mask)

    return step


def store(name, modifiers, operands, registers):
    space, count, kind = _split(name, modifiers)
    if space in ("param", "const"):
        raise UnknownInstruction(f"st.{space}")
    getter, read = address(operands[0], registers)
    texts = vector(operands[1])
    assert len(texts) == count, operands
    pairs = [source(text, kind, registers) for text in texts]
    dtype = np.dtype(DTYPE[kind])

    def step(machine, mask):
        lanes, places = machine.places(getter(machine), read, mask)
        data = np.empty((len(places), count), dtype)
        unwritten = None
        for at, (get, numbers) in enumerate(pairs):
            value = get(machine)
            data[:, at] = value if lanes is None or np.ndim(value) == 0 else value[lanes]
            if (found := machine.undefined_of(numbers)) is not None:
                found = found if lanes is None else found[lanes]
                if unwritten is None:
                    unwritten = np.zeros((len(places), count, dtype.itemsize), bool)
                unwritten[:, at] = as_bytes(found, dtype.itemsize)
        if unwritten is not None:
            unwritten = unwritten.reshape(len(places), -1) if unwritten.any() else None
        machine.store(space, places, lanes, data.view(np.uint8), unwritten)

    return step


MOVE = {"mov": move, "cvta": to_space, "ld": load, "st": store}
