"""Matrix products of several tokens on a GPU: tiles of rows for tensor cores, sums in f32.

Tiles are f16, and bf16 for matrices in bf16, whose numbers f16 cannot hold; matrices in f32 are
multiplied in f32, as their results are compared with other programs'. Tensor cores add products up
in f32, and f32 is what comes out. f16 ends at 65,504, and hidden values of a feed-forward layer may
be larger: a token's values are divided by a power of two before they are rounded to f16, which
changes no bit of what is left, and the result is multiplied by it again.

What this module does not know: matrices, models. Letters: T tokens, D row width, A rows of a tile,
N all rows."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkinfer.errors import SparkinferError

if TYPE_CHECKING:
    from sparkinfer.runtime.kernels.gpu.kernels import Kernels
    from sparkinfer.runtime.matrix import Matrix

Tiles = Iterable[tuple[int, Tensor]]
# A tile is unpacked and multiplied by a launch each: large enough to be worth both.
TILE_BYTES = 8 << 20


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def tile_dtype(kind: str) -> torch.dtype:
    """Of the tiles of a matrix whose rows are of this kind."""
    return {"f32": torch.float32, "bf16": torch.bfloat16}.get(kind, torch.float16)


def tile_rows(width: int) -> int:
    """Rows that are unpacked at a time."""
    return max(64, TILE_BYTES // (2 * width) // 64 * 64)


@cache
def kernels() -> "Kernels":
    """Raises SparkinferError where Triton is missing."""
    from sparkinfer.runtime.kernels.gpu.kernels import triton_kernels

    try:
        return triton_kernels()
    except ImportError as error:
        raise SparkinferError(
            f"a GPU needs Triton, which is missing ({error}); install it or use --device cpu"
        ) from error


def unpack(matrix: "Matrix", out_AD: Tensor, index_A: Tensor | None) -> None:
    """As kernels.Unpack, on the device of the matrix."""
    with _on_device_of(out_AD):
        kernels().unpack(matrix, out_AD, index_A)


def dot(matrix: "Matrix", x_D: Tensor, out_N: Tensor) -> None:
    """As kernels.Dot, on the device of the matrix."""
    with _on_device_of(out_N):
        kernels().dot(matrix, None, x_D, out_N)


def _on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of its arguments."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def product(x_TD: Tensor, num_rows: int, tiles: Tiles) -> Tensor:
    """f32 [T, N]: every token times every row."""
    y_TN: Tensor | None = None
    for start, rows_AD in tiles:
        y_TA = _multiply(x_TD, rows_AD.T)
        if len(rows_AD) == num_rows:
            return y_TA
        y_TN = x_TD.new_empty(len(x_TD), num_rows) if y_TN is None else y_TN
        y_TN[:, start : start + len(rows_AD)] = y_TA
    return x_TD.new_empty(len(x_TD), 0) if y_TN is None else y_TN


def add_many(sum_TD: Tensor, weight_TN: Tensor, tiles: Tiles) -> Tensor:
    """Adds to f32 `sum_TD` every row times its weight, and returns it."""
    for start, rows_AD in tiles:
        sum_TD += _multiply(weight_TN[:, start : start + len(rows_AD)], rows_AD)
    return sum_TD


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """f32 of f32 times the type of a tile."""
    if right.dtype == torch.float32:
        return left @ right
    if right.dtype == torch.bfloat16:
        return _in_f32(left.to(right.dtype), right)
    exponent_T1 = torch.frexp(left.abs().amax(dim=1, keepdim=True)).exponent
    exponent_T1 = torch.where(exponent_T1.abs() < 126, exponent_T1, 0)  # of what is no number, too
    return torch.ldexp(_in_f32(torch.ldexp(left, -exponent_T1).half(), right), exponent_T1)


def _in_f32(left: Tensor, right: Tensor) -> Tensor:
    """A product of two 16-bit types whose sums and results are f32: torch has it on CUDA alone."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
