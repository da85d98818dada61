"""Matrix products of several tokens on a GPU: tiles of rows, accumulated in f32.

Tiles are f16; bf16 for matrices in bf16, whose values may exceed f16's range; and f32 for matrices
in f32, whose results are compared with other programs'. Tensor cores multiply the 16-bit types and
return f32. f16 ends at 65,504, and hidden values of a feed-forward layer may be larger: each
token's values are divided by a power of two before they are rounded to f16, and the result is
multiplied by it, which is exact.

Letters: T tokens, D row width, A rows of a tile, N all rows, K values of a factor: D or N."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkinfer.errors import SparkinferError
from sparkinfer.runtime.kernels.stored import StoredMatrix

if TYPE_CHECKING:
    from sparkinfer.runtime.kernels.gpu.kernels import Kernels

Tiles = Iterable[tuple[int, Tensor]]
# A tile is unpacked and multiplied by a few launches, which this many rows amortise. Its bytes grow
# with the model, as the workspace does: 8 MiB of f16 if a row has 4,096 values.
TILE_ROWS = 1024


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def tile_dtype(kind: str) -> torch.dtype:
    """The type of the tiles of a matrix of this kind."""
    return {"f32": torch.float32, "bf16": torch.bfloat16}.get(kind, torch.float16)


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
    """Triton's kernels, except those replaced by torch's. Raises SparkinferError if Triton is
    needed but missing."""
    return _kernels(frozenset(_replaced))


@cache
def _kernels(replaced: frozenset[str]) -> "Kernels":
    from sparkinfer.runtime.kernels.gpu.kernels import triton_kernels
    from sparkinfer.runtime.kernels.gpu.torch_kernels import mixed, torch_kernels

    plain = torch_kernels()
    if all(each.name in replaced for each in fields(plain)):
        return plain
    try:
        return mixed(triton_kernels(), plain, replaced)
    except ImportError as error:
        raise SparkinferError(
            f"a GPU needs Triton, which is missing ({error}); install it or use --device cpu"
        ) from error


def unpack(matrix: StoredMatrix, out_AD: Tensor, index_A: Tensor | None) -> None:
    """Runs kernels.unpack on the device of the matrix."""
    with _on_device_of(out_AD):
        kernels().unpack(matrix, out_AD, index_A)


def dot(matrix: StoredMatrix, x_D: Tensor, out_N: Tensor) -> None:
    """Runs kernels.dot on the device of the matrix."""
    with _on_device_of(out_N):
        kernels().dot(matrix, None, x_D, out_N)


def _on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device current: Triton launches on the current device, not its
    arguments'."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def product(x_TD: Tensor, num_rows: int, tiles: Tiles) -> Tensor:
    """f32 [T, N]: every token times every row."""
    y_TN: Tensor | None = None
    factor: _Factor | None = None
    for start, rows_AD in tiles:
        factor = factor or _Factor(x_TD, rows_AD.dtype)
        y_TA = factor.times(rows_AD.T)
        if len(rows_AD) == num_rows:
            return y_TA
        y_TN = x_TD.new_empty(len(x_TD), num_rows) if y_TN is None else y_TN
        y_TN[:, start : start + len(rows_AD)] = y_TA
    return x_TD.new_empty(len(x_TD), 0) if y_TN is None else y_TN


def add_many(sum_TD: Tensor, weight_TN: Tensor, tiles: Tiles) -> Tensor:
    """Adds every row times its weight to f32 `sum_TD`, and returns it."""
    factor: _Factor | None = None
    for start, rows_AD in tiles:
        factor = factor or _Factor(weight_TN, rows_AD.dtype)
        sum_TD += factor.times(rows_AD, slice(start, start + len(rows_AD)))
    return sum_TD


class _Factor:
    """f32 [T, K], prepared for multiplication by tiles of a type."""

    def __init__(self, values_TK: Tensor, dtype: torch.dtype) -> None:
        self.exponent_T1: Tensor | None = None
        if dtype == torch.float16:
            largest_T1 = torch.linalg.vector_norm(values_TK, torch.inf, dim=1, keepdim=True)
            exponent_T1 = torch.frexp(largest_T1).exponent
            # frexp's exponent is undefined for NaN.
            self.exponent_T1 = torch.where(exponent_T1.abs() < 126, exponent_T1, 0)
            values_TK = torch.ldexp(values_TK, -self.exponent_T1)
        self.values_TK = values_TK.to(dtype)

    def times(self, tile: Tensor, columns: slice = slice(None)) -> Tensor:
        """f32 [T, columns of `tile`]: these columns of the factor times `tile`."""
        left = self.values_TK[:, columns]
        if tile.dtype == torch.float32:
            return left @ tile
        y = _in_f32(left, tile)
        return y if self.exponent_T1 is None else torch.ldexp(y, self.exponent_T1)


def _in_f32(left: Tensor, right: Tensor) -> Tensor:
    """A product of two 16-bit types with f32 sums and results, which torch has only on CUDA."""
    if left.is_cuda and left.dtype not in _in_f32_only:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
