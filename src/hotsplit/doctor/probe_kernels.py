"""Child process: compares the C++ kernels for products, sums of rows and unpacking with numpy, at
every level that the processor can run.

It needs numpy and gguf, not torch.

Letters: F rows, D values in a row."""

import ctypes
import os
from importlib.util import find_spec
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from hotsplit.doctor.children import leave_no_core, tell_at, tell_done

LEVELS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "generic")
LEVEL_VARIABLE = "HOTSPLIT_CPU_LEVEL"
# enum Kind in kernels.h; the planar kinds are packed from the plain ones.
KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "q4_0_planar", "q8_0_planar")
_BLOCK_BYTES = {"q4_k": 144, "q5_k": 176, "q6_k": 210}
F, D = 37, 512
# Integers of 16 bits stand for x in products with blocks, and for coefficient times scale in sums of
# q8_0 and q4_0 rows: errors of up to 3e-5 were measured at every level.
DOT_BOUND, SUM_BOUND, UNPACK_BOUND = 2e-4, 2e-4, 1e-5
_SIZE, _INT, _POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p


def main() -> None:
    leave_no_core()
    spec = find_spec("hotsplit.runtime._cpu")
    if spec is None or spec.origin is None:
        tell_done({"is_built": False})
        return
    tell_at("loading the library")
    lib = _load(spec.origin)
    tell_at("choosing a level")
    faulty = lib.hs_faulty_level()
    usable = [name for name in LEVELS if lib.hs_level_status(name.encode()) == 0]
    found: dict[str, Any] = {
        "is_built": True,
        "level": lib.hs_level().decode(),
        "faulty": None if faulty is None else faulty.decode(),
        "usable": usable,
        "forced": os.environ.get(LEVEL_VARIABLE),
        "num_threads": int(lib.hs_num_threads()),
    }
    wrong = []
    for level in usable:
        lib.hs_set_level(level.encode())
        for code, kind in enumerate(KINDS):
            tell_at(f"{level}, {kind}")
            wrong += [f"{level}, {kind}: {what}" for what in _faults(lib, code, kind)]
    tell_done({**found, "wrong": wrong, "num_tried": len(usable) * len(KINDS)})


def _load(path: str) -> ctypes.CDLL:
    lib = ctypes.CDLL(path)
    lib.hs_dot_rows.argtypes = [
        _INT, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER,
    ]  # fmt: skip
    lib.hs_accumulate_rows.argtypes = [
        _INT, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER,
    ]  # fmt: skip
    lib.hs_pack_rows.argtypes = [
        _INT, _INT, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _SIZE,
    ]  # fmt: skip
    lib.hs_unpack_rows.argtypes = [
        _INT, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER,
    ]  # fmt: skip
    lib.hs_level.restype = lib.hs_faulty_level.restype = ctypes.c_char_p
    for function in (lib.hs_level_status, lib.hs_set_level):
        function.argtypes = [ctypes.c_char_p]
    return lib


def _faults(lib: ctypes.CDLL, code: int, kind: str) -> list[str]:
    """The faults of the current level with matrices of one kind."""
    random = np.random.default_rng(code)
    data, exact_FD = _rows(lib, kind, random)
    stride = data.shape[1] * data.itemsize
    x_D, weight_F = (_as_bf16(random.standard_normal(n, dtype=np.float32)) for n in (D, F))
    y_F, y_D = np.full(F, np.nan, np.float32), np.full(D, np.nan, np.float32)
    out_FD = np.full((F, D), np.nan, np.float32)
    at, end = data.ctypes.data, F
    statuses = (
        lib.hs_dot_rows(code, at, stride, F, D, x_D.ctypes.data, 1, None, end, y_F.ctypes.data),
        lib.hs_accumulate_rows(
            code, at, stride, F, D, weight_F.ctypes.data, None, end, y_D.ctypes.data
        ),
        lib.hs_unpack_rows(code, at, stride, F, D, None, end, out_FD.ctypes.data),
    )
    compared = (
        ("products", y_F, exact_FD @ x_D.astype(np.float64), DOT_BOUND),
        ("sums of rows", y_D, weight_F.astype(np.float64) @ exact_FD, SUM_BOUND),
        ("unpacking", out_FD, exact_FD, UNPACK_BOUND),
    )
    faults = []
    for status, (what, got, want, bound) in zip(statuses, compared, strict=True):
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        if status or not error <= bound:
            faults.append(f"{what} are off by {error:.2g}" if not status else f"{what} are refused")
    return faults


def _as_bf16(values: np.ndarray) -> np.ndarray:
    """Values that some levels do not need to round for rows of bf16."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _rows(
    lib: ctypes.CDLL, kind: str, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(random rows as stored, float64 [F, D])."""
    values = random.standard_normal((F, D), dtype=np.float32)
    if kind == "f32":
        return values, values.astype(np.float64)
    if kind == "f16":
        return (stored := values.astype(np.float16)), stored.astype(np.float64)
    if kind == "bf16":
        stored = (values.view(np.uint32) >> 16).astype(np.uint16)
        return stored, (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    in_file = kind.removesuffix("_planar")
    qtype = GGMLQuantizationType[in_file.upper()]
    data = _k_quants(in_file, random) if in_file in _BLOCK_BYTES else quantize(values, qtype)
    exact_FD = dequantize(data, qtype).astype(np.float64)
    if kind != in_file:
        packed = np.zeros_like(data)
        code, to_code, size = KINDS.index(in_file), KINDS.index(kind), data.shape[1]
        at, to = data.ctypes.data, packed.ctypes.data
        lib.hs_pack_rows(code, to_code, at, F, D, None, F, to, size)
        data = packed
    return data, exact_FD


def _k_quants(kind: str, random: np.random.Generator) -> np.ndarray:
    """Random blocks of 256 values, with fixed f16 scales."""
    size = _BLOCK_BYTES[kind]
    blocks = random.integers(0, 256, (F, D // 256, size), dtype=np.uint8)
    scale = np.array([0.01, 0.02], np.float16).view(np.uint8)
    if kind == "q6_k":
        blocks[..., -2:] = scale[:2]
    else:
        blocks[..., :4] = scale
    return blocks.reshape(F, -1)


if __name__ == "__main__":
    main()
