"""Instructions on the bits of words: shifts, fields, bytes and truth tables."""

import numpy as np

from ptx.faults import UnknownInstruction
from ptx.operands import DTYPE, immediate, pure

_KINDS = ("s16", "u16", "s32", "u32", "s64", "u64", "b16", "b32", "b64")


def of(kind: str, kinds: tuple[str, ...]) -> str:
    if kind not in kinds:
        raise UnknownInstruction(f"type .{kind}")
    return kind


def no_more(modifiers: list[str], known: tuple[str, ...] = ()) -> None:
    """Raises for modifiers other than those that are known."""
    if unknown := [m for m in modifiers if m not in known]:
        raise UnknownInstruction("modifier ." + ".".join(unknown))


def only(modifiers: list[str], kinds: tuple[str, ...]) -> str:
    """The type, which must be the only modifier."""
    no_more(modifiers[:-1])
    return of(modifiers[-1], kinds)


def shift(name, modifiers, operands, registers):
    """Amounts beyond the width leave zeros, or copies of the sign."""
    kind = only(modifiers, _KINDS)
    target, a, b = operands
    dtype = np.dtype(DTYPE[kind])
    width = 8 * dtype.itemsize

    def left(x, amount):
        moved = x << np.minimum(amount, np.uint32(width - 1)).astype(dtype)
        return np.where(amount >= width, dtype.type(0), moved)

    def right(x, amount):
        moved = x >> np.minimum(amount, np.uint32(width - 1)).astype(dtype)
        return moved if dtype.kind == "i" else np.where(amount >= width, dtype.type(0), moved)

    compute = left if name == "shl" else right
    traced = _shifted_bytes(name, int(b, 0)) if immediate(b, "u32") is not None else None
    return pure(target, [(a, kind), (b, "u32")], compute, registers, traced)


def _shifted_bytes(name: str, amount: int):
    """A function that tells which bytes of a result are undefined, for a constant amount. Copies of
    an undefined sign are not marked, only the byte that holds the sign itself."""
    whole, has_rest = amount // 8, amount % 8 > 0

    def traced(u, _):
        u = u.astype(np.uint16)
        if name == "shl":
            moved = u << whole | (u << whole + 1 if has_rest else 0)
        else:
            moved = u >> whole | (u >> whole + 1 if has_rest else 0)
        return (moved & 0xFF).astype(np.uint8)

    return traced


def funnel(name, modifiers, operands, registers):
    side, mode, kind = modifiers
    if side not in "lr" or mode not in ("wrap", "clamp") or kind != "b32":
        raise UnknownInstruction("modifier ." + ".".join(modifiers))

    def compute(low, high, amount):
        amount = amount & np.uint32(31) if mode == "wrap" else np.minimum(amount, np.uint32(32))
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        if side == "r":
            return (both >> amount.astype(np.uint64)).astype(np.uint32)
        return ((both << amount.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)

    target, *sources = operands
    return pure(target, [(text, "b32") for text in sources], compute, registers)


def extract(name, modifiers, operands, registers):
    """bfe: fields that reach beyond the word are filled with its sign or with zeros."""
    kind = only(modifiers, ("u32", "s32", "u64", "s64"))
    dtype = np.dtype(DTYPE[kind])
    width = 8 * dtype.itemsize

    def compute(x, at, length):
        at, length = (np.asarray(v & np.uint32(255)).astype(np.int64) for v in (at, length))
        wide = x.astype(np.int64) if dtype.kind == "i" else x.astype(np.uint64)
        if dtype.kind == "i":
            last = np.minimum(at + length - 1, width - 1)
            sign = (wide >> np.clip(last, 0, 63)) & 1
        moved = wide.astype(np.uint64) >> np.minimum(at, 63).astype(np.uint64)
        moved = np.where(at >= width, np.uint64(0), moved)
        keep = (np.uint64(1) << np.minimum(length, 63).astype(np.uint64)) - np.uint64(1)
        keep = np.where(length >= 64, ~np.uint64(0), keep)
        inside = np.clip(width - at, 0, 63).astype(np.uint64)
        there = np.where(width - at >= 64, ~np.uint64(0), (np.uint64(1) << inside) - np.uint64(1))
        found = moved & keep & there
        if dtype.kind == "i":
            found = np.where((sign == 1) & (length > 0), found | ~(keep & there), found)
        return found.astype(dtype)

    target, a, b, c = operands
    return pure(target, [(a, kind), (b, "u32"), (c, "u32")], compute, registers)


def insert(name, modifiers, operands, registers):
    """bfi."""
    kind = only(modifiers, ("b32", "b64"))
    dtype = np.dtype(DTYPE[kind])
    width = 8 * dtype.itemsize

    def compute(x, into, at, length):
        at, length = at & np.uint32(255), length & np.uint32(255)
        ones = (np.uint64(1) << np.minimum(length, 63).astype(np.uint64)) - np.uint64(1)
        ones = np.where(length >= 64, ~np.uint64(0), ones)
        where = np.where(at >= width, np.uint64(0), ones << np.minimum(at, 63).astype(np.uint64))
        moved = x.astype(np.uint64) << np.minimum(at, 63).astype(np.uint64)
        return ((into.astype(np.uint64) & ~where) | (moved & where)).astype(dtype)

    target, *sources = operands
    kinds = (kind, kind, "u32", "u32")
    constants = [immediate(text, "u32") for text in sources[2:]]
    traced = None
    if None not in constants:
        at, length = (min(int(constant) & 255, width) for constant in constants)
        traced = _inserted_bytes(at, min(at + length, width))
    return pure(target, list(zip(sources, kinds, strict=True)), compute, registers, traced)


def _inserted_bytes(first: int, last: int):
    """A function that tells which bytes of a result are undefined, if bits `first` to `last` - 1
    are taken from the first operand. A byte with bits of both operands is undefined if either
    operand's byte is."""
    moved = _shifted_bytes("shl", first)
    taken = sum(1 << byte for byte in range(8) if first < 8 * byte + 8 and 8 * byte < last)
    covered = sum(1 << byte for byte in range(8) if first <= 8 * byte and 8 * byte + 8 <= last)

    def traced(u, v, *_):
        return moved(u, None) & np.uint8(taken) | v & np.uint8(~covered & 255)

    return traced


def permute(name, modifiers, operands, registers):
    """prmt without a mode."""
    only(modifiers, ("b32",))

    def compute(a, b, selector):
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        found = np.zeros(np.broadcast(a, b, selector).shape, np.uint32)
        for byte in range(4):
            choice = (selector >> np.uint32(4 * byte)) & np.uint32(15)
            one = (both >> ((choice & np.uint32(7)) * np.uint32(8)).astype(np.uint64)) & 0xFF
            sign = np.where(one & 0x80, np.uint64(0xFF), np.uint64(0))
            one = np.where(choice & np.uint32(8), sign, one).astype(np.uint32)
            found = found | (one << np.uint32(8 * byte))
        return found

    target, a, b, selector = operands
    traced = None
    if (constant := immediate(selector, "b32")) is not None:
        choices = [int(constant) >> 4 * byte & 7 for byte in range(4)]

        def traced(u, v, _):
            both = (v & np.uint8(15)) << np.uint8(4) | (u & np.uint8(15))
            found = np.uint8(0)
            for byte, choice in enumerate(choices):
                found = found | ((both >> np.uint8(choice)) & np.uint8(1)) << np.uint8(byte)
            return found

    return pure(target, [(text, "b32") for text in (a, b, selector)], compute, registers, traced)


def any_logic(name, modifiers, operands, registers):
    """lop3: any function of three bits, by its truth table."""
    only(modifiers, ("b32",))
    target, a, b, c, table = operands
    table = int(table, 0)

    def compute(x, y, z):
        found = np.zeros(np.broadcast(x, y, z).shape, np.uint32)
        for row in range(8):
            if table >> row & 1:
                found = found | (
                    (x if row & 4 else ~x) & (y if row & 2 else ~y) & (z if row & 1 else ~z)
                )
        return found

    return pure(target, [(text, "b32") for text in (a, b, c)], compute, registers)
