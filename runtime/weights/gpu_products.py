"""Matrix products of several tokens on a GPU: tiles of rows, accumulated in f32.

Tiles are f16; bf16 for matrices in bf16, whose values may exceed f16's range; and f32 for matrices
in f32, whose results are compared with other programs'. Tensor cores multiply the 16-bit types and
return f32. f16 ends at 65,504, and hidden values of a feed-forward layer may be larger: each
token's values are divided by a power of two before they are rounded to f16, and the result is
multiplied by it, which is exact. This is left out for values that are known to be small, such as
those of nearly every norm.

Letters: T tokens, D row width, A rows of a tile, N all rows, K values of a factor: D or N."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.model.weight_types import file_kind
from hotsplit.runtime.kernels.stored import MOST_TOGETHER, StoredMatrix

if TYPE_CHECKING:
    from hotsplit.runtime.kernels.gpu.kernels import Kernels

Tiles = Iterable[tuple[int, Tensor]]
# Bytes of a tile of 16-bit values: it is unpacked and multiplied by a few launches, which 1,024 rows
# of 4,096 values amortise.
TILE_BYTES = 8 << 20
LEAST_TILE_ROWS = MOST_TOGETHER
# Values whose magnitude does not exceed this are rounded to f16 as they are.
MOST_SMALL = 2.0**15


def tile_rows(width: int) -> int:
    """Rows of a tile of a matrix of this width: whole tiles and groups of any layout."""
    return max(1, TILE_BYTES // (2 * width) // LEAST_TILE_ROWS) * LEAST_TILE_ROWS


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def tile_dtype(kind: str) -> torch.dtype:
    """The type of the tiles of a matrix of this kind."""
    return {"f32": torch.float32, "bf16": torch.bfloat16}.get(file_kind(kind), torch.float16)


# Faults that the check of this process's devices found (runtime.check), for all engines.
_replaced: set[str] = set()  # names of kernels that torch computes instead
_in_f32_only: set[torch.dtype] = set()  # types that tensor cores must not multiply


def replace_kernels(names: Iterable[str]) -> None:
    """Lets torch compute these kernels from now on."""
    _replaced.update(names)


def multiply_in_f32(dtype: torch.dtype) -> None:
    """Converts tiles of this type to f32 before multiplying them, from now on."""
    _in_f32_only.add(dtype)


def kernels() -> "Kernels":
    """Triton's kernels, except those replaced by torch's. Raises HotsplitError if Triton is
    needed but missing."""
    return _kernels(frozenset(_replaced))


@cache
def _kernels(replaced: frozenset[str]) -> "Kernels":
    from hotsplit.runtime.kernels.gpu.kernels import triton_kernels
    from hotsplit.runtime.kernels.gpu.torch_kernels import mixed, torch_kernels

    plain = torch_kernels()
    if all(each.name in replaced for each in fields(plain)):
        return plain
    try:
        return mixed(triton_kernels(), plain, replaced)
    except ImportError as error:
        raise HotsplitError(
            f"a GPU needs Triton, which is missing ({error}); install it or use --device cpu"
        ) from error


def unpack(matrix: StoredMatrix, out_AD: Tensor, index_A: Tensor | None) -> None:
    """Runs kernels.unpack on the device of the matrix."""
    with made_current(out_AD.device):
        kernels().unpack(matrix, out_AD, index_A)


def dot(matrix: StoredMatrix, x_D: Tensor, out_N: Tensor) -> None:
    """Runs kernels.dot on the device of the matrix."""
    with made_current(out_N.device):
        kernels().dot(matrix, None, x_D, out_N)


def made_current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device current: Triton launches on the current device, not its arguments'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def product(x: "Tensor | Factor", num_rows: int, tiles: Tiles, out: Tensor | None = None) -> Tensor:
    """f32 [T, N]: every token times every row; `out`, if given, takes them."""
    factor = Factor.of(x)
    for start, rows_AD in tiles:
        if out is None and len(rows_AD) == num_rows:
            return factor.times(rows_AD.T)
        out = factor.new(num_rows) if out is None else out
        factor.times(rows_AD.T, out=out[:, start : start + len(rows_AD)])
    return factor.new(0) if out is None else out


def add_many(sum_TD: Tensor, weight_TN: Tensor, tiles: Tiles) -> Tensor:
    """Adds every row times its weight to f32 `sum_TD`, and returns it."""
    factor = Factor.of(weight_TN)
    for start, rows_AD in tiles:
        factor.add_times(sum_TD, rows_AD, slice(start, start + len(rows_AD)))
    return sum_TD


class Factor:
    """[T, K] in f32 or f16, rounded on first use to each type of tiles that it is multiplied by.
    One factor serves all matrices with the same input, because rounding takes up to four launches.
    `is_small`: f16 takes the values as they are (Norm.fits_f16); f16 values are taken so, too."""

    def __init__(self, values_TK: Tensor, *, is_small: bool = False) -> None:
        self.values_TK = values_TK
        self._is_small = is_small or values_TK.dtype == torch.float16
        self._rounded: dict[torch.dtype, tuple[Tensor, Tensor | None]] = {}

    @classmethod
    def of(cls, values: "Tensor | Factor") -> "Factor":
        return values if isinstance(values, Factor) else cls(values)

    def __len__(self) -> int:
        return len(self.values_TK)

    def new(self, num_columns: int) -> Tensor:
        """Uninitialised, f32 [T, N]."""
        return self.values_TK.new_empty(len(self), num_columns, dtype=torch.float32)

    def times(self, tile: Tensor, out: Tensor | None = None) -> Tensor:
        """f32 [T, columns of `tile`]: the factor times `tile`."""
        left, power_T1 = self._as(tile.dtype)
        if tile.dtype == torch.float32:
            return torch.mm(left, tile, out=out)
        y = _in_f32(left, tile)
        if power_T1 is not None:
            return torch.mul(y, power_T1, out=y if out is None else out)
        return y if out is None else out.copy_(y)

    def add_times(self, sum_TD: Tensor, tile: Tensor, columns: slice) -> None:
        """Adds these columns of the factor times `tile` to f32 `sum_TD`."""
        left, power_T1 = self._as(tile.dtype)
        left = left[:, columns]
        if tile.dtype == torch.float32:
            sum_TD.addmm_(left, tile)
        elif power_T1 is None:
            sum_TD += _in_f32(left, tile)
        else:
            sum_TD.addcmul_(_in_f32(left, tile), power_T1)

    def _as(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """(the values in this type, the power of two of each token by which they were divided)."""
        if dtype not in self._rounded:
            if dtype == torch.float16 and not self._is_small:
                self._rounded[dtype] = self._in_f16()
            else:
                self._rounded[dtype] = self.values_TK.to(dtype), None
        return self._rounded[dtype]

    def _in_f16(self) -> tuple[Tensor, Tensor]:
        values_TK = self.values_TK
        largest_T1 = torch.linalg.vector_norm(values_TK, torch.inf, dim=1, keepdim=True)
        # The exponent's bits alone are the power of two at or below a number; those of zero, of
        # infinity and of NaN are not, and are limited to powers of two.
        bits_T1 = largest_T1.view(torch.int32).bitwise_and_(0x7F800000)
        power_T1 = bits_T1.view(torch.float32).clamp_(2.0**-126, 2.0**126)
        half_TK = torch.empty_like(values_TK, dtype=torch.float16)
        return torch.div(values_TK, power_T1, out=half_TK), power_T1


def _in_f32(left: Tensor, right: Tensor) -> Tensor:
    """A product of two 16-bit types with f32 sums and results, which torch has only on CUDA."""
    if left.is_cuda and left.dtype not in _in_f32_only:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
