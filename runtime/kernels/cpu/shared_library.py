"""Opens the C++ library of this folder, with the types of its functions. Needs no torch."""

import ctypes

from hotsplit.system import shared_libraries
from hotsplit.system.processors import processors
from hotsplit.system.shared_libraries import INT, POINTER, SIZE, Signatures

# Instruction sets, best first.
LEVELS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "generic")
LEVEL_VARIABLE = "HOTSPLIT_CPU_LEVEL"

STATUS, NAME = INT, ctypes.c_char_p
# A stored matrix: kind, data, row stride in bytes, rows, columns.
MATRIX = (INT, POINTER, SIZE, SIZE, SIZE)

SIGNATURES: Signatures = {
    # kernels.h
    "hs_dot_rows": (STATUS, (*MATRIX, POINTER, SIZE, POINTER, SIZE, POINTER)),
    "hs_accumulate_rows": (STATUS, (*MATRIX, POINTER, POINTER, SIZE, POINTER)),
    "hs_pack_rows": (STATUS, (INT, INT, POINTER, SIZE, SIZE, POINTER, SIZE, POINTER, SIZE)),
    "hs_unpack_rows": (STATUS, (*MATRIX, POINTER, SIZE, POINTER)),
    "hs_reads_grids": (INT, ()),
    "hs_set_grid": (STATUS, (INT, POINTER, SIZE)),
    "hs_level": (NAME, ()),
    "hs_faulty_level": (NAME, ()),
    "hs_level_status": (STATUS, (NAME,)),
    "hs_set_level": (STATUS, (NAME,)),
    "hs_num_threads": (INT, ()),
    "hs_set_default_threads": (None, (INT, INT)),
    "hs_set_threads": (STATUS, (INT, INT)),
    "hs_set_spin_time": (None, (INT,)),
    "hs_knows_prefetch_distance": (INT, ()),
    "hs_prefetch_distance": (SIZE, ()),
    "hs_set_prefetch_distance": (None, (SIZE,)),
    "hs_evict": (None, (POINTER, SIZE)),
    # step.h
    "hs_operation_kind": (INT, (NAME,)),
    "hs_step_bytes": (SIZE, (POINTER,)),
    "hs_step": (STATUS, (POINTER, POINTER, SIZE, POINTER)),
    "hs_part": (None, (POINTER,)),
    "hs_open_drive": (STATUS, (POINTER,)),
    "hs_close_drive": (None, (POINTER,)),
    "hs_neurons_bytes": (SIZE, (POINTER,)),
    "hs_neurons": (None, (POINTER,)),
    # row_copies.h
    "hs_copy_rows": (None, (POINTER,)),
    # step_server.h
    "hs_serve": (SIZE, (POINTER, SIZE, POINTER, POINTER)),
}


def open_library() -> ctypes.CDLL:
    """The library, with the default number of threads for its jobs; raises as shared_libraries
    does."""
    lib = shared_libraries.open_library("hotsplit.runtime._cpu", SIGNATURES)
    lib.hs_set_default_threads((here := processors()).threads, here.usable)
    return lib
