"""Floating-point instructions and conversions."""

from functools import reduce

import numpy as np

from ptx import arithmetic, fields
from ptx.arithmetic import approximate, flushed
from ptx.faults import UnknownInstruction
from ptx.fields import no_more
from ptx.operands import DTYPE, pure
from ptx.text import BYTES

KINDS = ("f16x2", "bf16x2", "f16", "bf16", "f32", "f64", "f32x2")
_FLOATS = ("f32", "f64")


def _extreme(pick, is_max: bool, keeps_nan: bool):
    """Numbers win over NaN, unless `.NaN` is given; -0 is less than +0."""

    def compute(a, b):
        value = pick(a, b)
        zero = (a == 0) & (b == 0)
        if np.any(zero):
            is_negative = np.signbit(a) & np.signbit(b) if is_max else np.signbit(a) | np.signbit(b)
            value = np.where(zero, np.where(is_negative, -0.0, 0.0).astype(value.dtype), value)
        return np.where(np.isnan(a) | np.isnan(b), a + b, value) if keeps_nan else value

    return compute


def binary(name, modifiers, operands, registers):
    """add, sub, mul, div, and min and max of two or three values."""
    *rest, kind = modifiers
    if kind == "f32x2" and name in ("add", "sub", "mul"):
        return _pairs(_ARITHMETIC[name], rest, operands, registers)
    fields.of(kind, _FLOATS)
    no_more(rest, ("rn", "ftz", "NaN", "full", "approx") if kind == "f32" else ("rn",))
    if name == "div":
        compute = _quotient(rest, kind)
    elif name in ("min", "max"):
        pick = np.fmin if name == "min" else np.fmax
        of_two = _extreme(pick, name == "max", "NaN" in rest)

        def compute(*values):
            return reduce(of_two, values)

    else:
        compute = _ARITHMETIC[name]
    target, *sources = operands
    if not 2 <= len(sources) <= (3 if name in ("min", "max") and kind == "f32" else 2):
        raise ValueError(f"{len(sources)} operands")
    return pure(target, [(x, kind) for x in sources], _flushing(compute, rest), registers)


_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _pairs(compute, rest, operands, registers):
    """An instruction on pairs of f32, each pair in a 64-bit register."""
    no_more(rest, ("rn", "ftz"))
    compute = _flushing(compute, rest)
    target, *sources = operands

    def both(*values):
        values = np.broadcast_arrays(*values)
        parts = (np.ascontiguousarray(value).view(np.float32) for value in values)
        return compute(*parts).view(np.uint64)

    def traced(*undefined):
        """Traces each half separately."""
        found = np.bitwise_or.reduce(np.broadcast_arrays(*undefined))
        low, high = (found & np.uint8(0x0F)) != 0, (found & np.uint8(0xF0)) != 0
        return low * np.uint8(0x0F) | high * np.uint8(0xF0)

    return pure(target, [(text, "f32x2") for text in sources], both, registers, traced)


def _quotient(rest: list[str], kind: str):
    if "full" in rest or "approx" in rest:
        return approximate("div.full" if "full" in rest else "div.approx", np.divide)
    if "rn" not in rest:
        raise UnknownInstruction("div without a rounding")
    return np.divide


def _flushing(compute, rest: list[str]):
    if "ftz" not in rest:
        return compute
    return lambda *operands: flushed(compute(*(flushed(x) for x in operands)))


def fused(name, modifiers, operands, registers):
    *rest, kind = modifiers
    if kind == "f32x2" and "rn" in rest:
        return _pairs(arithmetic.fma32, rest, operands, registers)
    if kind not in _FLOATS or "rn" not in rest:
        raise UnknownInstruction("fma." + ".".join(modifiers))
    no_more(rest, ("rn", "ftz"))
    compute = arithmetic.fma32 if kind == "f32" else arithmetic.fma64
    target, *sources = operands
    assert len(sources) == 3, operands
    pairs = [(text, kind) for text in sources]
    return pure(target, pairs, _flushing(compute, rest), registers)


def unary(name, modifiers, operands, registers):
    """neg, abs."""
    *rest, kind = modifiers
    fields.of(kind, (*_FLOATS, "f16"))
    no_more(rest, ("ftz",))
    compute = np.negative if name == "neg" else np.abs
    return pure(operands[0], [(operands[1], kind)], _flushing(compute, rest), registers)


def function(name, modifiers, operands, registers):
    """ex2, lg2, rcp, sqrt, rsqrt, tanh of f32, approximate or rounded."""
    *rest, kind = modifiers
    if kind != "f32":
        raise UnknownInstruction(f"type .{kind}")
    no_more(rest, ("approx", "ftz", "rn"))
    exact = {
        "ex2": np.exp2,
        "lg2": np.log2,
        "rcp": np.reciprocal,
        "sqrt": np.sqrt,
        "rsqrt": lambda x: 1.0 / np.sqrt(x),
        "tanh": np.tanh,
    }[name]
    if "approx" in rest and name in arithmetic.APPROXIMATE:
        compute = approximate(name, exact)
    elif "rn" in rest and name in ("sqrt", "rcp") or name == "lg2":
        compute = lambda x: exact(x.astype(np.float64)).astype(np.float32)  # noqa: E731
    else:
        raise UnknownInstruction(f"{name} without .approx")
    pairs = [(operands[1], kind)]
    return pure(operands[0], pairs, _flushing(compute, rest), registers)


# ---- conversions ---------------------------------------------------------------------------

_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def conversion(name, modifiers, operands, registers):
    *rest, to, of = modifiers
    no_more(rest, ("rn", "rz", "rni", "rzi", "rmi", "rpi", "ftz", "sat"))
    target, *sources = operands
    if to in ("f16x2", "bf16x2"):
        return _pair(to, rest, of, target, sources, registers)
    compute = _conversion(to, of, [m for m in rest if m != "ftz"], "ftz" in rest)
    narrows = "f" not in to + of and BYTES[to] <= BYTES[of]
    traced = (lambda u: u & np.uint8((1 << BYTES[to]) - 1)) if narrows else None
    return pure(target, [(sources[0], of)], compute, registers, traced)


def _pair(to, rest, of, target, sources, registers):
    """Packs two f32 into a word; the first operand goes into the upper half."""
    if of != "f32" or rest != ["rn"]:
        raise UnknownInstruction("cvt." + ".".join([*rest, to, of]))
    narrow = _conversion(to[:-2], "f32", ["rn"], False)

    def compute(high, low):
        high, low = (
            narrow(np.atleast_1d(x)).view(np.uint16).astype(np.uint32) for x in (high, low)
        )
        return (high << np.uint32(16)) | low

    return pure(target, [(text, "f32") for text in sources], compute, registers)


def _conversion(to: str, of: str, rest: list[str], flushes: bool):
    dtype, is_float = np.dtype(DTYPE[to]), {kind: "f" in kind for kind in (to, of)}
    if rest and rest[0] in _WHOLE and is_float[of]:
        whole = _WHOLE[rest[0]]
        if is_float[to]:
            if to != of or len(rest) > 1:
                raise UnknownInstruction(f"cvt to .{to} of .{of}")
            return lambda x: whole(flushed(x) if flushes else x)
        return lambda x: arithmetic.to_integer(whole(flushed(x) if flushes else x), dtype)
    if "sat" in rest or "rz" in rest or (is_float[of] and not is_float[to]):
        raise UnknownInstruction(f"cvt.{'.'.join(rest)} to .{to} of .{of}")
    if of == "bf16":
        return lambda x: arithmetic.of_bf16(x).astype(dtype)
    if to == "bf16":
        if of != "f32":
            raise UnknownInstruction(f"cvt to .bf16 of .{of}")
        return arithmetic.bf16_bits
    if is_float[to] and not is_float[of]:
        return lambda x: _rounded(x, dtype)
    if flushes:
        return lambda x: flushed(flushed(x).astype(dtype))
    return lambda x: x.astype(dtype)


def _rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts an integer to a float with one rounding."""
    if dtype == np.float16:
        return x.astype(np.float64).astype(dtype)  # 32-bit integers are exact in f64
    return x.astype(dtype)


FLOAT = {
    "fma": fused,
    "cvt": conversion,
    **dict.fromkeys(("ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh"), function),
}
