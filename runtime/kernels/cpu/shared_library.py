"""Opens the C++ library of this folder, with the types of its functions. Needs no torch."""

import ctypes
from importlib.util import find_spec
from typing import Any

from hotsplit.errors import HotsplitError
from hotsplit.system.processors import processors

# Instruction sets, best first.
LEVELS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "generic")
LEVEL_VARIABLE = "HOTSPLIT_CPU_LEVEL"

_POINTER, _SIZE, _STATUS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_INT, _NAME = ctypes.c_int32, ctypes.c_char_p
# A stored matrix: kind, data, row stride in bytes, rows, columns.
_MATRIX = (_INT, _POINTER, _SIZE, _SIZE, _SIZE)

# The types that functions return and take, as in their headers.
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    # kernels.h
    "hs_dot_rows": (_STATUS, (*_MATRIX, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER)),
    "hs_accumulate_rows": (_STATUS, (*_MATRIX, _POINTER, _POINTER, _SIZE, _POINTER)),
    "hs_pack_rows": (
        _STATUS,
        (_INT, _INT, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _SIZE),
    ),
    "hs_unpack_rows": (_STATUS, (*_MATRIX, _POINTER, _SIZE, _POINTER)),
    "hs_level": (_NAME, ()),
    "hs_faulty_level": (_NAME, ()),
    "hs_level_status": (_STATUS, (_NAME,)),
    "hs_set_level": (_STATUS, (_NAME,)),
    "hs_num_threads": (_INT, ()),
    "hs_set_default_threads": (None, (_INT, _INT)),
    "hs_set_threads": (_STATUS, (_INT, _INT)),
    "hs_set_spin_time": (None, (_INT,)),
    "hs_knows_prefetch_distance": (_INT, ()),
    "hs_prefetch_distance": (_SIZE, ()),
    "hs_set_prefetch_distance": (None, (_SIZE,)),
    "hs_evict": (None, (_POINTER, _SIZE)),
    # step.h
    "hs_operation_kind": (_INT, (_NAME,)),
    "hs_step_bytes": (_SIZE, (_POINTER,)),
    "hs_step": (_STATUS, (_POINTER, _POINTER, _SIZE, _POINTER)),
    "hs_part": (None, (_POINTER,)),
    "hs_neurons_bytes": (_SIZE, (_POINTER,)),
    "hs_neurons": (None, (_POINTER,)),
    "hs_chosen_bytes": (_SIZE, (_POINTER,)),
    "hs_chosen": (None, (_POINTER,)),
    # row_copies.h
    "hs_copy_rows": (None, (_POINTER,)),
    # step_server.h
    "hs_serve": (_SIZE, (_POINTER, _SIZE, _POINTER, _POINTER)),
}


def open_library() -> ctypes.CDLL:
    """The library, its functions with their types, and the default number of threads for its jobs. Raises
    HotsplitError if it is not built, OSError for a file that cannot be loaded and AttributeError for one
    that lacks functions."""
    spec = find_spec("hotsplit.runtime._cpu")  # finds the file in every kind of install
    if spec is None or spec.origin is None:
        raise HotsplitError(
            "hotsplit's C++ library is missing: install the package again, or run make build in the"
            " repository, which needs a C++ compiler (apt install g++, or the like)"
        )
    lib = ctypes.CDLL(spec.origin)
    for name, (returned, taken) in SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = returned, list(taken)
    lib.hs_set_default_threads((here := processors()).threads, here.usable)
    return lib
