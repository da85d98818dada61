"""Opens the C++ library of this folder. Needs no torch."""

import ctypes
from importlib.util import find_spec

from hotsplit.runtime.kernels.cpu import signatures

# Instruction sets, best first.
LEVELS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "generic")
LEVEL_VARIABLE = "HOTSPLIT_CPU_LEVEL"


def open_library() -> ctypes.CDLL | None:
    """The library, its functions with their types; None if it is not built. Raises OSError for a
    file that cannot be loaded and AttributeError for one that lacks functions."""
    spec = find_spec("hotsplit.runtime._cpu")  # finds the file in every kind of install
    if spec is None or spec.origin is None:
        return None
    lib = ctypes.CDLL(spec.origin)
    signatures.declare(lib)
    return lib
