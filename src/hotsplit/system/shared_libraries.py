"""Opens the package's C++ libraries. Needs no torch."""

import ctypes
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from hotsplit.errors import HotsplitError

POINTER, SIZE, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
# By function: the type that it returns, and those that it takes, as in its header.
Signatures = Mapping[str, tuple[Any, tuple[Any, ...]]]


def open_library(name: str, signatures: Signatures) -> ctypes.CDLL:
    """The library that is installed like a module of this name, its functions with their types.
    Raises HotsplitError if it is not built, OSError for a file that cannot be loaded and
    AttributeError for one that lacks functions."""
    spec = find_spec(name)  # finds the file in every kind of install
    if spec is None or spec.origin is None:
        raise HotsplitError(
            "hotsplit's C++ library is missing: install the package again, or run make build in the"
            " repository, which needs a C++ compiler (apt install g++, or the like)"
        )
    lib = ctypes.CDLL(spec.origin)
    for function, (returned, taken) in signatures.items():
        getattr(lib, function).restype = returned
        getattr(lib, function).argtypes = list(taken)
    return lib
