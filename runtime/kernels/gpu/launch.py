"""Layouts, tile sizes and groups of rows that launchers pass to kernels.

Tiles depend only on shapes and kinds; nothing is tuned at run time. In a tile of four or more long
rows, each thread has 64 bytes in flight, in four loads of 16. With four to eight
programs per multiprocessor that is 32 to 64 KiB: as much as an H200 needs (4.8 TB/s times 0.8 us,
over 132 multiprocessors, is 28 KiB) and far more than a laptop's card does. Kinds with nibbles have
half of that in flight, because their values take twice the registers: with 64 bytes the compiler
uses 168 to 255, with 32 bytes 72 to 108, so that four to seven programs fit on a multiprocessor.

A step of T rows runs in groups: a program holds the sums of one group's rows and reads each weight
once for them (`down` once per row if it skips zeros). A row's sum adds the same terms in the same
order for every T.

Letters: T rows of a step."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hotsplit.model.weight_types import TYPES
from hotsplit.runtime.kernels.stored import StoredMatrix

ROWS = (1, 2, 4, 8, 16, 32)  # T of a step
_FLOAT_BYTES: dict[str, int] = {each.name: each.block_bytes for each in TYPES if each.is_float}
_BYTE_KINDS = {
    kind
    for each in TYPES
    if each.has_small_blocks and not each.has_nibbles
    for kind in (each.name, each.gpu_kind)
}
NUM_WARPS = 4
LEAST_PROGRAMS = 512
_TILE_BYTES = {1: 64 * 32 * NUM_WARPS, 2: 32 * 32 * NUM_WARPS}  # by parts of a unit
# Most rows of a step whose sums fit into the registers of a program of `dot_rows`, which then uses
# up to 255. Floats have 16 sums where kinds with blocks have one.
GROUP, FLOAT_GROUP = 4, 2
# With fewer rows, tiles do not get longer: rearranging x for them would cost more than it gains.
_LEAST_ROWS = 4


# Compute capability from which Triton uses tensor cores.
_TENSOR_CORES = 8


@cache
def has_tensor_cores(device: torch.device) -> bool:
    """True if Triton multiplies 16-bit types by tensor cores on a device, as it does where the CPU
    emulates one."""
    if device.type != "cuda":
        return True
    return bool(torch.cuda.get_device_properties(device).major >= _TENSOR_CORES)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a matrix, for blocks.rows_at and blocks.values."""

    kind: str
    width: int
    parts: int  # of a unit
    unit_bytes: int
    stride: int  # elements from row to row, over `align`
    align: int

    @classmethod
    def of(cls, matrix: StoredMatrix) -> "Layout":
        return _layout(matrix.kind, matrix.width, matrix.data.stride(0))

    @property
    def group(self) -> int:
        """Most rows of a step per program of `dot_rows`."""
        return FLOAT_GROUP if self.kind in _FLOAT_BYTES else GROUP

    @property
    def num_units(self) -> int:
        return -(-self.width // (16 * self.parts))

    def units_of_tile(self, num_rows: int) -> int:
        """Units of a tile of `num_rows` rows, a power of two; at most those of a row, rounded
        up."""
        wanted = _TILE_BYTES[self.parts] // (max(_LEAST_ROWS, num_rows) * self.unit_bytes)
        return min(wanted, power_of_2(self.num_units))

    def constants(self, rows: int, units: int | None = None) -> dict[str, int | str]:
        """The constants of a kernel whose tiles have so many rows and units (None:
        `units_of_tile`)."""
        return {
            "KIND": self.kind,
            "WIDTH": self.width,
            "PARTS": self.parts,
            "ALIGN": self.align,
            "ROWS": rows,
            "UNITS": self.units_of_tile(rows) if units is None else units,
        }


@cache
def _layout(kind: str, width: int, stride: int) -> Layout:
    align = 1 if kind in _FLOAT_BYTES else math.gcd(stride, 16)
    return Layout(
        kind=kind,
        width=width,
        parts=1 if kind in _FLOAT_BYTES or kind in _BYTE_KINDS else 2,
        unit_bytes=16 * _FLOAT_BYTES.get(kind, 1),
        stride=stride // align,
        align=align,
    )


class _Overlap(threading.local):
    is_on = False


_overlap = _Overlap()


@contextmanager
def overlapping() -> Iterator[None]:
    """Launches of this thread begin while the kernel before still runs: see overlap.py."""
    _overlap.is_on = True
    try:
        yield
    finally:
        _overlap.is_on = False


def overlap_options() -> dict[str, bool]:
    """The options of a launch that depend on `overlapping`."""
    return {"OVERLAPS": _overlap.is_on, "launch_pdl": _overlap.is_on}


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The rows of a step in `count` groups of `size`."""

    size: int
    count: int

    @classmethod
    def of(cls, vector: Tensor, most: int) -> "Groups":
        """Divides the rows of a vector into groups of at most `most`."""
        num_rows = step_rows(vector)
        size = min(most, num_rows)
        return cls(size=size, count=num_rows // size)

    @property
    def constants(self) -> dict[str, int]:
        return {"GROUP": self.size, "NUM_GROUPS": self.count}


def step_rows(vector: Tensor) -> int:
    """T of a vector [T, D]; 1 for a vector [D]."""
    num_rows = 1 if vector.dim() == 1 else len(vector)
    is_step = num_rows & (num_rows - 1) == 0 and num_rows
    assert is_step or num_rows % 64 == 0, (
        f"{num_rows} rows, wanted a power of 2, or a multiple of 64"
    )
    return num_rows


def ceil_div(count: int, size: int) -> int:
    """The number of blocks of `size` that hold `count`; triton.cdiv takes some 2 us in Python."""
    return -(-count // size)


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()


def rows_of_program(num_rows: int, most: int = 4) -> int:
    """Rows per program: `most`, halved down to 1 while there would be fewer than LEAST_PROGRAMS
    programs."""
    rows = most
    while rows > 1 and num_rows < LEAST_PROGRAMS * rows:
        rows //= 2
    return rows
