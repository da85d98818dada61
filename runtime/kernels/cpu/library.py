"""Calls the C++ kernels in this folder on torch tensors.

A weight matrix is stored row by row as in a GGUF file: `kind` "f32", "f16" and "bf16" are tensors
[F, D] of that dtype; the others are uint8 [F, row_bytes] (hotsplit.model.weight_types). Kinds that
end in "_planar", "_tiled" and "_grouped" are the layouts that `pack_rows` makes
(runtime.kernels.planar, tiled and grouped). Weights are unpacked in registers and all arithmetic is
f32, with three exceptions: if the weights are in blocks, `dot_rows` quantises x to blocks of 16-bit
integers (kernels.h, Input); for small blocks `accumulate_rows` rounds coefficients times scales to
16 bits (planar_template.h); and for bf16, the levels amx and avx512bf16 round x and
coefficients (bf16_pairs.h). Results do not depend on the number of threads.

Rows of a matrix may be strided. A list of rows, index_A, is int32 [A], in any order, repeats
allowed; None means all rows, A = F. Functions raise ValueError for a wrong dtype, shape or layout,
and IndexError for a row that W lacks.

If the C++ is not built, importing this raises HotsplitError.

Shapes: F rows of the matrix, D values in a row, A chosen rows."""

import ctypes
import logging
import os
from typing import Literal, NamedTuple, NoReturn

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.model.weight_types import GRID_NAMES, TYPES, Form
from hotsplit.runtime.kernels.cpu.shared_library import LEVEL_VARIABLE, LEVELS, open_library
from hotsplit.runtime.kernels.grouped import is_grouped
from hotsplit.runtime.kernels.stored import FLOATS, ROWS_TOGETHER, rows_together
from hotsplit.runtime.kernels.tiled import is_tiled
from hotsplit.system.processors import processors

log = logging.getLogger(__name__)


class _Layout(NamedTuple):
    code: int  # enum Kind in kernels.h
    dtype: torch.dtype
    unit_elements: int  # elements of the tensor that hold unit_values weights
    unit_values: int
    head: int = 0  # elements of a row before them


def _layouts() -> dict[str, _Layout]:
    """The layouts of all kinds. Rows of floats are elements of their dtype; all others are bytes,
    in units of 32 values if a group of rows shares them. Types with grids are last: they have no
    kernels but those of tiles, on some processors (`reads_grids`)."""
    layouts: dict[str, _Layout] = {}
    for each in TYPES:
        dtype = FLOATS.get(each.name, torch.uint8)
        size = 1 if each.is_float else each.block_bytes
        layouts[each.name] = _Layout(each.code, dtype, size, each.block_values, each.row_head)
    for each in TYPES:
        unit = 32 if each.is_float else each.block_values
        size = unit // each.block_values * each.block_bytes
        for form in each.forms:
            code = each.code_in(form)
            layouts[each.kind_in(form)] = _Layout(code, torch.uint8, size, unit, each.row_head)
    for suffix in ("", "_tiled"):
        for name in GRID_NAMES:
            values, size = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
            layouts[f"{name}{suffix}"] = _Layout(len(layouts), torch.uint8, size, values)
    return layouts


_LAYOUTS = _layouts()

# Of enum Status in kernels.h.
_OK, _BAD_ARGUMENT, _INDEX_OUT_OF_RANGE, _NO_THREADS, _NO_MEMORY = 0, 1, 2, 5, 6


def _load() -> ctypes.CDLL:
    """The shared library. Torch's threads, which share its processors and of which torch starts one
    per processor of the machine, are limited as its own."""
    if torch.get_num_threads() > (here := processors()).usable:
        torch.set_num_threads(here.threads)
    lib = open_library()
    if (faulty := lib.hs_faulty_level()) is not None:
        log.warning(
            f"the processor advertises {faulty.decode()} but its instructions fail here;"
            f" using {lib.hs_level().decode()}"
        )
    return lib


_lib = _load()


def level() -> str:
    """The instruction set in use, one of LEVELS."""
    name: bytes = _lib.hs_level()
    return name.decode()


def usable_levels() -> list[str]:
    """The LEVELS that this build has and this processor can run, best first."""
    return [name for name in LEVELS if _lib.hs_level_status(name.encode()) == _OK]


def prefers_tiles() -> bool:
    """True if products of tiled rows, and sums of grouped ones, are faster than those of planar
    rows on this level. Both give bit-identical results on every level."""
    return level() != "generic"


def reads_grids() -> bool:
    """True if this level multiplies tiles of the types with grids (grid_formats.h), after
    `set_grid`."""
    return bool(_lib.hs_reads_grids())


def set_grid(kind: str, codes: np.ndarray) -> None:
    """Sets the grid of a type of GRID_NAMES, before its tiles are multiplied. codes: uint8
    [entries, 4 or 8], of values without signs."""
    assert codes.dtype == np.uint8 and codes.flags.c_contiguous, (kind, codes.dtype)
    status = _lib.hs_set_grid(kind_code(kind), codes.ctypes.data, len(codes))
    assert status == _OK, (kind, codes.shape)


def set_level(name: str) -> None:
    """Switches the instruction set. Raises ValueError if it is unknown or unusable."""
    if _lib.hs_set_level(name.encode()) != _OK:
        what = "this machine cannot run" if name in LEVELS else "there is no"
        raise ValueError(f"{what} CPU level {name!r}; usable here: {', '.join(usable_levels())}")


def num_threads() -> int:
    """Number of threads that share a job, including the caller's; by default that of
    system.processors."""
    return int(_lib.hs_num_threads())


def set_threads(num_threads: int) -> None:
    """Lets this many threads, 1 to 1024, share each job from now on. More than there are processors
    do not spin."""
    status = _BAD_ARGUMENT
    if 1 <= num_threads <= 1024:
        status = _lib.hs_set_threads(num_threads, processors().usable)
    if status == _BAD_ARGUMENT:
        raise ValueError(f"num_threads must be 1 to 1024, got {num_threads}")
    if status == _NO_THREADS:
        raise HotsplitError(
            f"the system refused to start {num_threads} threads; use fewer (--threads), or raise"
            " the limits on processes and address space (ulimit -u, ulimit -v)"
        )


def set_spin_time(microseconds: int = 50) -> None:
    """Lets an idle thread wait this long for a job before it sleeps; at first it waits as long as
    by default."""
    _lib.hs_set_spin_time(microseconds)


def knows_prefetch_distance() -> bool:
    """True if the kernels know how far ahead this processor should prefetch; if not,
    runtime.kernels.prefetch_distance measures it."""
    return bool(_lib.hs_knows_prefetch_distance())


def prefetch_distance() -> int:
    """How many bytes ahead a product prefetches matrices in tiles; 0 leaves that to the
    hardware."""
    return int(_lib.hs_prefetch_distance())


def set_prefetch_distance(num_bytes: int) -> None:
    """Sets `prefetch_distance`, on which only the speed depends."""
    if num_bytes < 0:
        raise ValueError(f"num_bytes must not be negative, got {num_bytes}")
    _lib.hs_set_prefetch_distance(num_bytes)


def evict(data: Tensor) -> None:
    """Evicts a contiguous tensor from the processor's caches, for measurements."""
    assert data.is_contiguous() and data.device.type == "cpu"
    _lib.hs_evict(data.data_ptr(), data.nbytes)


def _use_level_from_environment() -> None:
    name = os.environ.get(LEVEL_VARIABLE)
    if name is None:
        return
    if name not in LEVELS:
        raise HotsplitError(f"{LEVEL_VARIABLE}={name!r}: must be one of {', '.join(LEVELS)}")
    try:
        set_level(name)
    except ValueError as error:
        raise HotsplitError(f"{LEVEL_VARIABLE}={name!r}: {error}") from None


_use_level_from_environment()


def _layout(weight: Tensor, kind: str) -> tuple[int, int, int, int, int]:
    """(code of `kind`, address, row stride in bytes, F, D), after checking that `weight` is such a
    matrix."""
    layout = _LAYOUTS.get(kind)
    if layout is None:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(_LAYOUTS)}")
    code, dtype, unit_elements, unit_values, head = layout
    if (
        weight.dtype != dtype
        or weight.dim() != 2
        or weight.stride(1) != 1
        or weight.stride(0) < weight.shape[1]
        or not weight.is_cpu
        or (weight.shape[1] - head) % unit_elements
    ):
        unit = f" in rows of whole {unit_elements}-byte blocks" if unit_elements > 1 else ""
        _refuse(f"{kind} weight", f"2-d {dtype} with contiguous rows{unit}", weight)
    num_rows, num_elements = weight.shape
    stride = weight.stride(0) * weight.element_size()
    together = rows_together(kind)
    if num_rows % together or (together > 1 and not weight.is_contiguous()):
        what = "tiles" if is_tiled(kind) else "groups"
        _refuse(f"{kind} weight", f"contiguous {what} of {together} rows", weight)
    columns = (num_elements - head) // unit_elements * unit_values
    return code, weight.data_ptr(), stride, num_rows, columns


def _check_vector(name: str, t: Tensor, dtype: torch.dtype, length: int) -> int:
    """The address of t, after checking that it has `length` values of this type."""
    if t.dtype != dtype or t.shape != (length,) or not t.is_contiguous() or not t.is_cpu:
        _refuse(name, f"contiguous {dtype} of {length} values", t)
    return t.data_ptr()


def _check_list(index_A: Tensor | None, num_rows: int) -> tuple[int, int | None]:
    """(A, the address of the list of rows), after checking its type; None: all rows."""
    if index_A is None:
        return num_rows, None
    return index_A.numel(), _check_vector("index_A", index_A, torch.int32, index_A.numel())


def _refuse(name: str, wanted: str, t: Tensor) -> NoReturn:
    raise ValueError(
        f"{name}: wanted {wanted} on the CPU, got {t.dtype} {tuple(t.shape)} with strides "
        f"{t.stride()} on {t.device}"
    )


def kind_code(kind: str) -> int:
    """The number of a kind in enum Kind of kernels.h."""
    return _LAYOUTS[kind].code


def operation_kind(kind: str) -> int:
    """The number of an operation that is in a file of its own (operation.h), by its kind in the
    step program; -1 if there is none."""
    return int(_lib.hs_operation_kind(kind.encode()))


def step_bytes(step: ctypes.Structure) -> int:
    """Workspace bytes of a step described by native_step.py; -1 if it is inconsistent."""
    return int(_lib.hs_step_bytes(ctypes.addressof(step)))


def run_step(step: ctypes.Structure, rows: ctypes.Array, logits: Tensor) -> None:
    """Runs a step of these rows (structs HsRow, see step.h). `logits`: f32, one row for each row
    of the step that asks for logits.

    Raises IndexError for an impossible token or position, or a position without a block in the
    cache."""
    status = _lib.hs_step(
        ctypes.addressof(step), ctypes.addressof(rows), len(rows), logits.data_ptr()
    )
    if status == _INDEX_OUT_OF_RANGE:
        first, last = rows[0], rows[-1]
        raise IndexError(
            "a row of the step has a token or position outside the model, or no block in the cache;"
            f" the first row has position {first.position}, the last {last.position}"
        )
    assert status == _OK, status


def run_part(part: ctypes.Structure) -> None:
    """Runs a part of a step, a struct of native_parts.py; step_bytes must have checked the step,
    and the caller its rows."""
    _lib.hs_part(ctypes.addressof(part))


def open_drive(drive: ctypes.Structure) -> None:
    """Starts the threads of a DriveStruct (runtime.weights.drive); close_drive ends them. Raises
    HotsplitError if the system refuses."""
    if _lib.hs_open_drive(ctypes.addressof(drive)) != _OK:
        raise HotsplitError(
            f"no {drive.num_threads} threads that read experts (ulimit -u); raise the limit"
        )


def close_drive(drive: ctypes.Structure) -> None:
    """Waits for the reads under way. No step may run any more."""
    _lib.hs_close_drive(ctypes.addressof(drive))


def neurons_bytes(neurons: ctypes.Structure) -> int:
    """Workspace bytes of neurons or experts described by ops/neurons/native.py; -1 if they are
    inconsistent."""
    return int(_lib.hs_neurons_bytes(ctypes.addressof(neurons)))


def serve(
    handovers: ctypes.Array, start: int, stop: int, serving: ctypes.Structure
) -> tuple[int, int]:
    """Runs the functions of these hand-overs (step_server.h) on the caller's thread, which shares
    the kernels' jobs. Returns (how many it has run, the status of the one that did not come, 0 if
    all did)."""
    status = ctypes.c_int32()
    size = ctypes.sizeof(handovers) // len(handovers)
    served = _lib.hs_serve(
        ctypes.addressof(handovers) + start * size,
        stop - start,
        ctypes.addressof(serving),
        ctypes.addressof(status),
    )
    return int(served), status.value


HostFunction = Literal["hs_part", "hs_neurons", "hs_copy_rows"]


def address_of(function: HostFunction) -> int:
    """The address of a function void (*)(void*): of those that run a part of a step, or neurons or
    experts (`step_bytes` or `neurons_bytes` must have checked their structs), and of the one that
    makes the copies of neuron_cache/neuron_rows.py."""
    found = ctypes.cast(getattr(_lib, function), ctypes.c_void_p).value
    assert found is not None
    return found


def _check_status(status: int, index_A: Tensor | None, num_rows: int) -> None:
    if status == _INDEX_OUT_OF_RANGE and index_A is not None:
        low, high = (int(v) for v in torch.aminmax(index_A))
        raise IndexError(f"index_A holds {low} to {high}, the weight has rows 0 to {num_rows - 1}")
    if status == _NO_MEMORY:
        raise MemoryError("no memory for the quantised vectors")
    assert status == _OK, f"the C++ kernels refused checked arguments, status {status}"


def dot_rows(weight: Tensor, kind: str, x: Tensor, index_A: Tensor | None = None) -> Tensor:
    """y [..., A] f32, y[..., a] = sum over d of x[..., d] * W_FD[index_A[a]][d].

    weight: the matrix W_FD as `kind` stores it. x: f32 [D] or [T, D], contiguous; a vector's result
    is bit-identical whatever the others are."""
    *_, num_rows, num_columns = matrix = _layout(weight, kind)
    if is_grouped(kind):
        raise ValueError(f"rows of {kind} are not multiplied; they are for sums of rows")
    num_vectors = x.shape[0] if x.dim() == 2 else 1
    is_whole = x.dim() in (1, 2) and x.shape[-1] == num_columns and num_vectors > 0
    if x.dtype != torch.float32 or not is_whole or not x.is_contiguous() or not x.is_cpu:
        _refuse("x", f"contiguous {torch.float32} of {num_columns} values a vector", x)
    num_active, index = _check_list(index_A, num_rows)
    y = torch.empty(*x.shape[:-1], num_active, dtype=torch.float32, device="cpu")
    vectors = x.data_ptr(), num_vectors
    status = _lib.hs_dot_rows(*matrix, *vectors, index, num_active, y.data_ptr())
    _check_status(status, index_A, num_rows)
    return y


def accumulate_rows(
    weight: Tensor, kind: str, coefficient_A: Tensor, index_A: Tensor | None = None
) -> Tensor:
    """y_D [D] f32, y_D[d] = sum over a of coefficient_A[a] * W_FD[index_A[a]][d].

    If W is the transposed down matrix, this is the down projection of the active neurons.
    coefficient_A: f32 [A]. Rows are added in the order of index_A. Raises ValueError for tiles, and
    for a list of grouped rows."""
    *_, num_rows, num_columns = matrix = _layout(weight, kind)
    if is_tiled(kind):
        raise ValueError(f"rows of {kind} are not summed; they are for products")
    if is_grouped(kind) and index_A is not None:
        raise ValueError(f"rows of {kind} are summed all at once, got a list")
    num_active, index = _check_list(index_A, num_rows)
    coefficient = _check_vector("coefficient_A", coefficient_A, torch.float32, num_active)
    y_D = torch.empty(num_columns, dtype=torch.float32, device="cpu")
    status = _lib.hs_accumulate_rows(*matrix, coefficient, index, num_active, y_D.data_ptr())
    _check_status(status, index_A, num_rows)
    return y_D


def packed_kind_of(kind: str, num_rows: int, width: int, form: Form) -> str:
    """The kind that `pack_rows` returns for so many rows."""
    form = "planar" if num_rows % ROWS_TOGETHER[form] else form
    packed = f"{kind}_{form}"
    is_there = packed in _LAYOUTS and width % _LAYOUTS[packed].unit_values == 0
    return packed if is_there else kind


def pack_rows(
    weight: Tensor, kind: str, index_A: Tensor | None, out: Tensor, form: Form = "planar"
) -> str:
    """Copies rows of a contiguous matrix (index None: all) into `out` [A, row_bytes]. Returns the
    kind of the copies: small blocks take the form, or become planar if A is not a multiple of the
    rows of a tile or group; K-quants become tiled if that is the form and A is a multiple of a
    tile's rows; f16 and bf16 become grouped if that is the form, A is a multiple of a group's rows
    and D of 32; otherwise rows are copied unchanged.

    out: uint8, with contiguous rows; only planar and unchanged rows may be strided. Uses all
    threads. Raises ValueError for tiles and groups."""
    code, data, stride, num_rows, num_columns = _layout(weight, kind)
    if rows_together(kind) > 1:
        raise ValueError(f"rows of {kind} are not packed again")
    row_bytes = weight.shape[1] * weight.element_size()
    if stride != row_bytes and num_rows > 1:
        _refuse(f"{kind} weight", "contiguous rows without gaps", weight)
    num_active, index = _check_list(index_A, num_rows)
    is_ready = out.dtype == torch.uint8 and out.is_cpu and out.shape == (num_active, row_bytes)
    if not is_ready or out.stride(1) != 1 or out.stride(0) < row_bytes:
        _refuse("out", f"uint8 [{num_active}, {row_bytes}] with contiguous rows", out)
    packed_kind = packed_kind_of(kind, num_active, num_columns, form)
    if rows_together(packed_kind) > 1 and not out.is_contiguous():
        _refuse("out", f"contiguous rows for the {form} form", out)
    matrix, target = (data, num_rows, num_columns), (out.data_ptr(), out.stride(0))
    status = _lib.hs_pack_rows(code, kind_code(packed_kind), *matrix, index, num_active, *target)
    _check_status(status, index_A, num_rows)
    return packed_kind


def unpack_rows(weight: Tensor, kind: str, out_AD: Tensor, index_A: Tensor | None = None) -> None:
    """Writes out_AD[a] = W_FD[index_A[a]]; out_AD: f32 [A, D], contiguous."""
    *_, num_rows, num_columns = matrix = _layout(weight, kind)
    num_active, index = _check_list(index_A, num_rows)
    is_right = out_AD.dtype == torch.float32 and out_AD.is_contiguous()
    if not is_right or not out_AD.is_cpu or out_AD.shape != (num_active, num_columns):
        _refuse("out_AD", f"contiguous f32 of {num_active} rows of {num_columns}", out_AD)
    status = _lib.hs_unpack_rows(*matrix, index, num_active, out_AD.data_ptr())
    _check_status(status, index_A, num_rows)
