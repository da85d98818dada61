"""Compares the C++ kernels for products, sums of rows and unpacking with numpy, in every layout of
every type. Needs no torch: a doctor looks at the kernels where torch is broken, too.

The library compares its levels with each other (kernels/cpu/probe.cpp); this is the comparison with
something else.

Letters: F rows, D values in a row."""

import ctypes
from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from hotsplit.model.weight_types import TYPES, Form, WeightType
from hotsplit.runtime.kernels.cpu.shared_library import LEVELS

D = 512
NUM_ROWS: dict[Form | None, int] = {None: 37, "planar": 37, "tiled": 48, "grouped": 64}
_NOT_OFFERED: dict[Form | None, str] = {"tiled": "sums of rows", "grouped": "products"}
# Integers of 16 bits stand for x in products with blocks, and for coefficient times scale in sums of
# rows of small blocks: errors of up to 3e-5 were measured at every level.
DOT_BOUND, SUM_BOUND, UNPACK_BOUND = 2e-4, 2e-4, 1e-5
# Each type as stored in a file, then in its layouts in memory.
KINDS: tuple[tuple[WeightType, Form | None], ...] = tuple(
    (each, form) for each in TYPES for form in (None, *each.forms)
)


def usable_levels(lib: ctypes.CDLL) -> list[str]:
    """The levels that this build has and this processor can run, best first."""
    return [name for name in LEVELS if lib.hs_level_status(name.encode()) == 0]


def faults_of_levels(lib: ctypes.CDLL, tell_at: Callable[[str], None]) -> list[str]:
    """The faults of all usable levels, "level, kind: what"; `tell_at` is called before each. Leaves
    the library at the last level."""
    faults = []
    for level in usable_levels(lib):
        lib.hs_set_level(level.encode())
        for each, form in KINDS:
            name = each.name if form is None else each.kind_in(form)
            tell_at(f"{level}, {name}")
            faults += [f"{level}, {name}: {what}" for what in _faults(lib, each, form)]
    return faults


def _faults(lib: ctypes.CDLL, each: WeightType, form: Form | None) -> list[str]:
    """The faults of the current level with matrices of one kind."""
    code = each.code if form is None else each.code_in(form)
    random = np.random.default_rng(code)
    data, exact_FD = rows_of(lib, each, form, random)
    num_rows, stride = len(data), data.shape[1] * data.itemsize
    x_D, weight_F = (_as_bf16(random.standard_normal(n, dtype=np.float32)) for n in (D, num_rows))
    y_F, y_D = np.full(num_rows, np.nan, np.float32), np.full(D, np.nan, np.float32)
    out_FD = np.full((num_rows, D), np.nan, np.float32)
    matrix = (code, data.ctypes.data, stride, num_rows, D)
    operations = {
        "products": lambda: lib.hs_dot_rows(
            *matrix, x_D.ctypes.data, 1, None, num_rows, y_F.ctypes.data
        ),
        "sums of rows": lambda: lib.hs_accumulate_rows(
            *matrix, weight_F.ctypes.data, None, num_rows, y_D.ctypes.data
        ),
        "unpacking": lambda: lib.hs_unpack_rows(*matrix, None, num_rows, out_FD.ctypes.data),
    }
    compared = {
        "products": (y_F, exact_FD @ x_D.astype(np.float64), DOT_BOUND),
        "sums of rows": (y_D, weight_F.astype(np.float64) @ exact_FD, SUM_BOUND),
        "unpacking": (out_FD, exact_FD, UNPACK_BOUND),
    }
    faults = []
    for what, (got, want, bound) in compared.items():
        if what == _NOT_OFFERED.get(form):
            continue
        if operations[what]():
            faults.append(f"{what} are refused")
            continue
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        if not error <= bound:
            faults.append(f"{what} are off by {error:.2g}")
    return faults


def _as_bf16(values: np.ndarray) -> np.ndarray:
    """Values that some levels do not need to round for rows of bf16."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def rows_of(
    lib: ctypes.CDLL, each: WeightType, form: Form | None, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(random rows as stored, float64 [F, D])."""
    data, exact_FD = _rows_in_file(each, NUM_ROWS[form], random)
    if form is None:
        return data, exact_FD
    size = data.shape[1] * data.itemsize
    packed = np.zeros((len(data), size), np.uint8)
    lib.hs_pack_rows(
        each.code,
        each.code_in(form),
        data.ctypes.data,
        len(data),
        D,
        None,
        len(data),
        packed.ctypes.data,
        size,
    )
    return packed, exact_FD


def _rows_in_file(
    each: WeightType, num_rows: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    values = random.standard_normal((num_rows, D), dtype=np.float32)
    if each.name == "bf16":
        stored = (values.view(np.uint32) >> 16).astype(np.uint16)
        return stored, (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if each.is_float:
        stored = values.astype({"f32": np.float32, "f16": np.float16}[each.name])
        return stored, stored.astype(np.float64)
    number = GGMLQuantizationType[each.name.upper()]
    if not each.has_integer_sums:
        data = _random_blocks(each, num_rows, random)
    else:
        data = quantize(values, number)
    return data, dequantize(data, number).astype(np.float64)


def _random_blocks(each: WeightType, num_rows: int, random: np.random.Generator) -> np.ndarray:
    """Random blocks with fixed f16 numbers, or with exponents of about 1."""
    blocks = random.integers(
        0, 256, (num_rows, D // each.block_values, each.block_bytes), dtype=np.uint8
    )
    if each.halves is None:
        blocks[..., 0] = random.integers(124, 132, blocks.shape[:2])
    else:
        start, stop = each.halves
        blocks[..., start:stop] = np.array([0.01, 0.02], np.float16).view(np.uint8)[: stop - start]
    return blocks.reshape(num_rows, -1)
