"""Operands of instructions as functions of a machine, and results written to registers.

A machine (lanes.Machine) holds two lists with an entry for each register. In `value` the entry is
an array of the register's bits in each lane. In `undefined` it says which bytes are undefined: None
if there are none, otherwise u8 [lanes] with a bit for each byte."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from ptx.faults import UnknownInstruction
from ptx.text import BYTES

# The numpy types of values; two values in a register, and bf16, are bits.
DTYPE = {
    kind: np.dtype(name).type
    for name, kinds in {
        "u1": "b8 u8",
        "i1": "s8",
        "u2": "b16 u16 bf16",
        "i2": "s16",
        "u4": "b32 u32 f16x2 bf16x2 s16x2 u16x2",
        "i4": "s32",
        "u8": "b64 u64 f32x2",
        "i8": "s64",
        "f2": "f16",
        "f4": "f32",
        "f8": "f64",
        "?": "pred",
    }.items()
    for kind in kinds.split()
}
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SPECIAL = (
    "%laneid",
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
)
_ADDRESS = re.compile(r"\[\s*([\w$%.']+)\s*(?:\+\s*(-?\d+)|-\s*(\d+))?\s*\]")

ALL_BYTES = np.uint8(0xFF)
Reads = tuple[tuple[int, np.uint8], ...]  # registers, and which of their bytes
Getter = Callable[["Machine"], np.ndarray]  # noqa: F821


@dataclass(frozen=True)
class Registers:
    """A kernel's registers: their numbers by name, and their types by number."""

    number: dict[str, int]
    types: list[str]

    @classmethod
    def of(cls, declared: dict[str, str]) -> "Registers":
        return cls({name: at for at, name in enumerate(declared)}, list(declared.values()))

    def find(self, name: str) -> int:
        if name not in self.number:
            raise UnknownInstruction(f"register {name!r}")
        return self.number[name]

    def dtype(self, number: int) -> np.dtype:
        kind = self.types[number]
        return np.dtype(bool if kind == "pred" else BITS[BYTES[kind]])


@cache
def immediate(text: str, kind: str) -> np.generic | None:
    """A constant in the given type, or None if the text is not a constant."""
    dtype = np.dtype(DTYPE[kind])
    if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        bits = np.uint32(int(found[1], 16))
        return _converted(bits, dtype) if dtype.itemsize == 4 else bits.view("f4").astype(dtype)
    if found := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        bits = np.uint64(int(found[1], 16))
        return _converted(bits, dtype) if dtype.itemsize == 8 else bits.view("f8").astype(dtype)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        number = int(text.rstrip("U"), 0)
        if dtype == np.bool_:
            return np.bool_(number != 0)
        size = dtype.itemsize
        return _converted(BITS[size](number % (1 << 8 * size)), dtype)
    return None


def _converted(bits: np.generic, dtype: np.dtype) -> np.generic:
    return bits.view(dtype)


def is_register(text: str) -> bool:
    return text.startswith("%") and "." not in text


def source(text: str, kind: str, registers: Registers) -> tuple[Getter, Reads]:
    """(function that returns the operand's values in a type, the registers that it reads)."""
    dtype = np.dtype(DTYPE[kind])
    if (constant := immediate(text, kind)) is not None:
        return (lambda machine: constant), ()
    if text.startswith("!") and kind == "pred":
        number = registers.find(text[1:])
        return (lambda machine: ~machine.value[number]), ((number, ALL_BYTES),)
    if text in registers.number:
        return _register(registers.number[text], dtype, registers)
    if text.startswith("%"):
        if text not in SPECIAL:
            raise UnknownInstruction(f"register {text!r}")
        return (lambda machine: machine.special(text).astype(dtype, copy=False)), ()
    return (lambda machine: dtype.type(machine.symbol(text))), ()


def _register(number: int, dtype: np.dtype, registers: Registers):
    held = registers.dtype(number)
    if held == dtype:
        return (lambda machine: machine.value[number]), ((number, ALL_BYTES),)
    if held == np.bool_ or dtype == np.bool_ or held.itemsize < dtype.itemsize:
        raise UnknownInstruction(f"a register of {held} as {dtype}")
    if held.itemsize == dtype.itemsize:
        return (lambda machine: machine.value[number].view(dtype)), ((number, ALL_BYTES),)
    if dtype.itemsize > 1:  # there are no registers for bytes
        raise UnknownInstruction(f"a register of {held} as {dtype}")
    narrow, read = BITS[dtype.itemsize], np.uint8((1 << dtype.itemsize) - 1)
    return (lambda machine: machine.value[number].astype(narrow).view(dtype)), ((number, read),)


def address(text: str, registers: Registers) -> tuple[Getter, Reads]:
    """(function that returns u64 addresses, the registers that they depend on)."""
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise UnknownInstruction(f"address {text!r}")
    base, plus, minus = found.groups()
    offset = np.uint64((int(plus or 0) - int(minus or 0)) % (1 << 64))
    if base not in registers.number:
        if base.lstrip("-").isdigit():
            raise UnknownInstruction(f"address {text!r}")
        return (lambda machine: np.uint64(machine.symbol(base)) + offset), ()
    number = registers.number[base]
    if registers.dtype(number).itemsize == 4:  # an address of 32 bits wraps around
        small = np.uint32(int(offset) % (1 << 32))
        get = lambda machine: (machine.value[number] + small).astype(np.uint64)  # noqa: E731
        return get, ((number, ALL_BYTES),)
    return (lambda machine: machine.value[number] + offset), ((number, ALL_BYTES),)


def vector(text: str) -> list[str]:
    """The members of "{a, b}", or the one operand."""
    if text.startswith("{"):
        return [member.strip() for member in text.strip("{} ").split(",")]
    return [text]


def stored_bits(value: np.ndarray, held: np.dtype) -> np.ndarray:
    """A result as the bits of its register. Narrower integers are extended by their sign, if they
    have one, and other narrower values by zeros."""
    if value.dtype == held:
        return value
    if held == np.bool_ or value.dtype == np.bool_:
        raise UnknownInstruction(f"a result of {value.dtype} in a register of {held}")
    if value.dtype.itemsize == held.itemsize:
        return value.view(held)
    if value.dtype.kind == "f":
        value = value.view(BITS[value.dtype.itemsize])
    assert value.dtype.itemsize < held.itemsize, (value.dtype, held)
    return value.astype(held)


def either(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    """The bytes that are undefined in either."""
    if first is None or first is second:
        return second
    return first if second is None else first | second


def spread(undefined: np.ndarray | None) -> np.ndarray | None:
    """All bytes of each lane that has an undefined byte."""
    return None if undefined is None else np.where(undefined != 0, ALL_BYTES, np.uint8(0))


def pure(target: str, sources: list[tuple[str, str]], compute, registers: Registers, traced=None):
    """A step that computes one register from operands, given as (text, type).

    `traced` computes the result's undefined bytes from the operands'; without it, one undefined
    byte makes the whole result undefined."""
    number = registers.find(target)
    held = registers.dtype(number)
    pairs = [source(text, kind, registers) for text, kind in sources]
    getters = [getter for getter, _ in pairs]
    read = tuple({each for _, numbers in pairs for each in numbers})

    def step(machine, mask):
        value = compute(*[getter(machine) for getter in getters])
        undefined = machine.undefined_of(read)
        if undefined is not None:
            if traced is None:
                undefined = spread(undefined)
            else:
                nothing = np.uint8(0)
                every = [machine.undefined_of(numbers) for _, numbers in pairs]
                undefined = traced(*[nothing if u is None else u for u in every])
        machine.write(number, stored_bits(value, held), undefined, mask)

    return step
