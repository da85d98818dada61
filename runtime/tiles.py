"""Which number type weights are unpacked to for a matrix product over several tokens on the CPU.

f32 everywhere but where the processor multiplies bf16 in hardware (AMX, AVX-512 BF16) and torch's
product of bf16 proves faster here, by a measurement of a few milliseconds when the first product is
asked for. bf16 keeps 8 bits of each weight and activation, as llama.cpp's AMX paths do, so matrices
in f32 always stay f32: their results are compared with other programs' to 1e-4.

What this module does not know: matrices, layouts, kernels."""

import os
import sys
import time
from functools import cache

import torch

from sparkinfer.errors import SparkinferError

TILES_VARIABLE = "SPARKINFER_PREFILL_TILES"
_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# bf16 costs accuracy, so it must be worth something. AMX gives a factor of 4 to 8.
_WORTH_IT = 1.3
_CHILD_S = 10.0


def tile_dtype(kind: str) -> torch.dtype:
    """Of the tiles of a matrix whose rows are of this kind."""
    return torch.float32 if kind == "f32" else _processors_choice()


def asked_dtype() -> torch.dtype | None:
    """By the environment variable. Raises SparkinferError for an unknown value."""
    asked = os.environ.get(TILES_VARIABLE)
    if asked is not None and asked not in _TYPES:
        raise SparkinferError(
            f"{TILES_VARIABLE}={asked!r}: must be one of {', '.join(_TYPES)}, or not set"
        )
    return None if asked is None else _TYPES[asked]


@cache
def _processors_choice() -> torch.dtype:
    asked = asked_dtype()
    if asked is not None:
        return asked
    if not multiplies_bf16():
        return torch.float32
    if not _survives_bf16():
        print("the processor advertises bf16 products but they fail here; using f32",
              file=sys.stderr)  # fmt: skip
        return torch.float32
    is_faster = _seconds(torch.float32) > _WORTH_IT * _seconds(torch.bfloat16)
    return torch.bfloat16 if is_faster else torch.float32


def multiplies_bf16() -> bool:
    """Whether the processor says that it has instructions for it."""
    known = torch.cpu.get_capabilities()
    return bool(known.get("amx_bf16") or known.get("avx512_bf16"))


def _survives_bf16() -> bool:
    """Whether a product of bf16 runs and is right, tried in a child process, as an instruction that
    is advertised may still fault in a virtual machine."""
    if not hasattr(os, "fork"):
        return True
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # those of the parent are not here
            os._exit(0 if _is_right() else 1)
        finally:  # the child must never run on in the parent's code
            os._exit(2)
    deadline = time.monotonic() + _CHILD_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(1e-3)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def _is_right() -> bool:
    """Small integers, which bf16 multiplies exactly."""
    x_TD = (torch.arange(64 * 96) % 5 - 2).reshape(64, 96).float()
    w_AD = (torch.arange(80 * 96) % 7 - 3).reshape(80, 96).float()
    got = (x_TD.bfloat16() @ w_AD.bfloat16().T).float()
    return torch.equal(got, (x_TD @ w_AD.T).bfloat16().float())


def _seconds(dtype: torch.dtype) -> float:
    """Of a product as prefill makes it, the best of three."""
    x_TD, w_AD = torch.ones(256, 1024, dtype=dtype), torch.ones(256, 1024, dtype=dtype)
    best = float("inf")
    for _ in range(4):  # the first makes ready
        began = time.perf_counter()
        x_TD @ w_AD.T
        best = min(best, time.perf_counter() - began)
    return best
