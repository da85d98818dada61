"""What the launchers say about a matrix: how it lies, and tiles that suit its kind.

Tiles come from shapes and kinds alone, so that results do not depend on the device and nothing is
tuned at run time. Of a tile each thread loads 64 bytes at once, in four loads of 16: with four to
eight programs on a multiprocessor some 32 KiB are under way, what an H200 needs (4.8 TB/s times
0.8 us over 132 multiprocessors are 29 KiB), and a laptop's card many times over. Of kinds with
nibbles it is half of that, as their values fill twice the registers: at 64 bytes the compiler takes
168 to 255 of them, at 32 bytes 72 to 108, with which five programs fit a multiprocessor.

What this module does not know: Triton. Letters: R rows of a tile, U units."""

import math
from dataclasses import dataclass

from sparkinfer.runtime.kernels.stored import StoredMatrix

_FLOAT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_BYTE_KINDS = ("q8_0", "q8_0_planar")
NUM_WARPS = 4
LEAST_PROGRAMS = 512
_TILE_BYTES = {1: 64 * 32 * NUM_WARPS, 2: 32 * 32 * NUM_WARPS}  # by parts of a unit
# Fewer rows do not get longer tiles: laying out x for them would take more than it gives.
_LEAST_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Of a matrix, as blocks.rows_at and blocks.values want it."""

    kind: str
    width: int
    parts: int  # of a unit
    unit_bytes: int
    stride: int  # elements from row to row, over `align`
    align: int

    @classmethod
    def of(cls, matrix: StoredMatrix) -> "Layout":
        data, kind = matrix.data, matrix.kind
        parts = 1 if kind in _FLOAT_BYTES or kind in _BYTE_KINDS else 2
        align = 1 if kind in _FLOAT_BYTES else math.gcd(data.stride(0), 16)
        return cls(
            kind=kind,
            width=matrix.width,
            parts=parts,
            unit_bytes=16 * _FLOAT_BYTES.get(kind, 1),
            stride=data.stride(0) // align,
            align=align,
        )

    @property
    def num_units(self) -> int:
        return -(-self.width // (16 * self.parts))

    def units_of_tile(self, num_rows: int) -> int:
        """A power of two: units of so many rows that make a tile, but not more than a row has."""
        wanted = _TILE_BYTES[self.parts] // (max(_LEAST_ROWS, num_rows) * self.unit_bytes)
        return min(wanted, power_of_2(self.num_units))


def power_of_2(number: int) -> int:
    """The least that is not smaller."""
    return 1 << (number - 1).bit_length()


def rows_of_program(num_rows: int, most: int = 4) -> int:
    """Few enough for `LEAST_PROGRAMS`: several on each multiprocessor of an H200 (132)."""
    rows = most
    while rows > 1 and num_rows < LEAST_PROGRAMS * rows:
        rows //= 2
    return rows
