"""Arithmetic as PTX defines it, on numpy arrays: fused multiply-add, conversions, flushed denormals
and approximate functions."""

from collections.abc import Callable

import numpy as np

# The relative error that the PTX manual allows each approximate instruction. `lg2.approx` is
# rounded correctly here: near 1 the manual bounds its absolute error, not its relative one.
APPROXIMATE = {
    "ex2": 2.0**-22,
    "rcp": 2.0**-23,
    "sqrt": 2.0**-23,
    "rsqrt": 2.0**-22.9,
    "div.full": 2.0**-22,  # stated as 2 ulp
    "div.approx": 2.0**-22,  # the same
    "tanh": 2.0**-11,
}
_LEAST_NORMAL = np.float32(2.0**-126)
_TIE, _LOW_BITS = np.int64(1 << 28), np.int64((1 << 29) - 1)


def flushed(x: np.ndarray) -> np.ndarray:
    """f32 with denormals replaced by zeros of the same sign; other types unchanged."""
    if x.dtype != np.float32:
        return x
    is_small = np.abs(x) < _LEAST_NORMAL
    return np.where(is_small, np.copysign(np.float32(0), x), x) if is_small.any() else x


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c with one rounding to f32.

    The product is exact in f64. Rounding the sum to f64 first matters only where that sum lies
    halfway between two f32 numbers or is denormal in f32: there it is rounded to odd if inexact."""
    product = a.astype(np.float64) * b
    total = product + c
    bits = np.asarray(total).view(np.int64)
    is_risky = ((bits & _LOW_BITS) == _TIE) | (np.abs(total) < 2.0**-125)
    if is_risky.any():
        total = np.where(is_risky, _odd(total, _sum_error(product, c, total)), total)
    return total.astype(np.float32)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c with one rounding to f64, provided nothing over- or underflows: Boldo and Melquiond,
    "Emulation of a FMA and correctly rounded sums", 2008."""
    high, low = _product(a, b)
    upper = c + low
    lower = _sum_error(c, low, upper)
    total = high + upper
    rest = _sum_error(high, upper, total)
    tail = lower + rest
    tail = _odd(tail, _sum_error(lower, rest, tail))
    plain = a * b + c
    return np.where(np.isfinite(plain) & np.isfinite(high), total + tail, plain)


def _product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rounded product, its error), both f64, by Dekker's method."""
    product = a * b
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scaled = x * 134217729.0
    high = scaled - (scaled - x)
    return high, x - high


def _sum_error(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    part = total - a
    return (a - (total - part)) + (b - part)


def _odd(total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """The f64 sum rounded to odd instead of to nearest."""
    bits = np.asarray(total).view(np.int64)
    is_off = (error != 0) & ((bits & 1) == 0) & np.isfinite(total) & np.isfinite(error)
    step = np.where((error > 0) == (total > 0), 1, -1)
    step = np.where(total == 0, 0, step)  # a sum of 0 has no error
    return np.where(is_off, bits + step, bits).view(np.float64)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """The u16 bits of f32 as bf16, rounded to nearest even."""
    bits = x.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def of_bf16(bits: np.ndarray) -> np.ndarray:
    """f32 from the u16 bits of bf16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def approximate(name: str, exact: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """An f32 function whose results are correctly rounded or off by nearly the stated error, up or
    down, depending on a hash of the first operand; zeros, infinities and NaN are exact."""
    error = APPROXIMATE[name]

    def run(*operands: np.ndarray) -> np.ndarray:
        bits = operands[0].view(np.uint32) * np.uint32(2654435761)
        side = (bits >> 16) % np.uint32(3)
        value = exact(*(operand.astype(np.float64) for operand in operands))
        # Rounded to f32 toward the exact value: rounding to nearest could add to the error.
        return _toward(value, value * (1.0 + error * (side.astype(np.float64) - 1.0)))

    return run


def _toward(exact: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """`wanted` rounded to f32, but one step toward the exact value if rounding moved away from
    it."""
    nearest = exact.astype(np.float32)
    rounded = wanted.astype(np.float32)
    back = np.nextafter(rounded, nearest)
    is_beyond = np.abs(rounded.astype(np.float64) - exact) > np.abs(wanted - exact)
    return np.where(is_beyond, back, rounded)


def to_integer(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts integral floats to an integer type and saturates. NaN becomes 0, or only the highest
    bit if the source is f64 or the result has 64 bits (PTX ISA 9.0, cvt)."""
    bits, least, most = 8 * dtype.itemsize, np.iinfo(dtype).min, np.iinfo(dtype).max
    is_wide = x.dtype == np.float64 or bits == 64
    of_nan = np.array(1 << (bits - 1) if is_wide else 0, f"u{dtype.itemsize}").view(dtype)
    value = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
    inside = np.clip(value, float(least), np.nextafter(float(most), 0) if most > 2**53 else most)
    whole = inside.astype(dtype)
    whole = np.where(value >= float(most), dtype.type(most), whole)
    return np.where(np.isnan(x), of_nan, whole).astype(dtype)
