"""Matrix products of several tokens on a GPU, accumulated in f32.

Matrices of floats are multiplied by torch, as they are. Those in blocks are multiplied by a kernel
that unpacks their weights in registers (kernels.gpu.products), in one launch; on a GPU without tensor
cores, they are unpacked to tiles of rows, which torch multiplies in some three launches each.

Weights are rounded to f16; bf16 stays, because its values may exceed f16's range, and so does f32,
whose results are compared with other programs'. Tensor cores multiply the 16-bit types and return
f32. f16 ends at 65,504, and hidden values of a feed-forward layer may be larger: each
token's values are divided by a power of two before they are rounded to f16, and the result is
multiplied by it, which is exact. This is left out for values that are known to be small, such as
those of nearly every norm.

Letters: T tokens, D row width, A rows of a tile, N all rows, K values of a factor: D or N."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hotsplit.model.weight_types import file_kind
from hotsplit.runtime.device.device_memory import has_bf16
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.expert_pairs import Pairs
from hotsplit.runtime.kernels.gpu.launch import has_tensor_cores
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


@cache
def kernels() -> "Kernels":
    """Triton's kernels. Raises ImportError if it is missing."""
    from hotsplit.runtime.kernels.gpu.kernels import triton_kernels

    return triton_kernels()


def multiplies_blocks(device: torch.device) -> bool:
    """True if kernels multiply matrices in blocks on a device, without tiles."""
    return has_tensor_cores(device)


def multiply(matrix: StoredMatrix, x: "Tensor | Factor", out: Tensor | None = None) -> Tensor:
    """f32 [T, N]: every token times every row of a matrix in blocks; `out`, if given, takes them."""
    factor = Factor.of(x)
    left, power_T = factor.rounded(torch.float16)
    out = factor.new(matrix.num_rows) if out is None else out
    with made_current(out.device):
        kernels().multiply(matrix, None, left, power_T, out)
    return out


def multiply_down(
    matrix: StoredMatrix, weight_TN: "Tensor | Factor", sum_TD: Tensor | None
) -> Tensor:
    """Adds every row of a matrix in blocks times its weight to f32 `sum_TD`, and returns it; None:
    to zeros."""
    factor, is_added = Factor.of(weight_TN), sum_TD is not None
    left, power_T = factor.rounded(torch.float16)
    sum_TD = factor.new(matrix.width) if sum_TD is None else sum_TD
    with made_current(sum_TD.device):
        kernels().multiply_down(matrix, left, power_T, sum_TD, is_added=is_added)
    return sum_TD


def multiply_experts(
    matrix: StoredMatrix, bias_N: Tensor | None, x: "Factor", pairs: Pairs, num_rows: int
) -> Tensor:
    """f32 [P, N]: for each pair its token times the `num_rows` rows of its expert, of those in
    `matrix`."""
    left, power_T = x.rounded(tile_dtype(matrix.kind))
    out_PN = torch.empty(pairs.number, num_rows, device=left.device)
    with made_current(left.device):
        kernels().multiply(
            matrix,
            bias_N,
            left,
            power_T,
            out_PN,
            tile_G3=pairs.tile_G3,
            row_2P=pairs.in_2P,
            tile_size=pairs.tile_size,
        )
    return out_PN


def multiply_experts_down(
    matrix: StoredMatrix,
    bias_N: Tensor | None,
    hidden: "Factor",
    pairs: Pairs,
    weight_P: Tensor,
    out_PD: Tensor,
    *,
    is_by_output: bool,
) -> None:
    """Writes each pair's output, times its weight, to its row of `out_PD`; weights and rows are those of
    all pairs. `is_by_output`: an expert has a row for each output, not for each hidden value."""
    left, power_P = hidden.rounded(tile_dtype(matrix.kind))
    given = {"tile_G3": pairs.tile_G3, "row_2P": pairs.out_2P, "factor_P": weight_P}
    with made_current(out_PD.device):
        if is_by_output:
            kernels().multiply(
                matrix, bias_N, left, power_P, out_PD, **given, tile_size=pairs.tile_size
            )
        else:
            kernels().multiply_down(
                matrix,
                left,
                power_P,
                out_PD,
                is_added=False,
                bias_D=bias_N,
                **given,
                tile_size=pairs.tile_size,
            )


def hidden_values(
    gate: Gate, gate_TN: Tensor, up_TN: Tensor | None, named_TN: Tensor | None, dtype: torch.dtype
) -> "Factor":
    """The hidden values of neurons, in one launch, as a factor of products in a type; those of neurons that
    are not named are 0."""
    out_TN, power_T = new_rounded(gate_TN, dtype)
    with made_current(gate_TN.device):
        kernels().hidden_tokens(gate_TN, up_TN, named_TN, gate, out_TN, power_T)
    return Factor.of_rounded(out_TN, power_T)


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


def add_many(sum_TD: Tensor | None, weight_TN: "Tensor | Factor", tiles: Tiles) -> Tensor:
    """Adds every row times its weight to f32 `sum_TD`, and returns it; None: to zeros."""
    factor = Factor.of(weight_TN)
    for start, rows_AD in tiles:
        columns = slice(start, start + len(rows_AD))
        if sum_TD is None:
            sum_TD = factor.times(rows_AD, columns=columns)
        else:
            factor.add_times(sum_TD, rows_AD, columns)
    assert sum_TD is not None
    return sum_TD


class Factor:
    """[T, K] in f32 or f16, rounded on first use to each type that it is multiplied in; one factor
    serves all matrices with the same input. `is_small`: f16 takes the values as they are
    (Norm.fits_f16); f16 values are taken so, too."""

    def __init__(self, values_TK: Tensor, *, is_small: bool = False) -> None:
        self._values_TK = values_TK
        self._is_small = is_small or values_TK.dtype == torch.float16
        self._rounded: dict[torch.dtype, tuple[Tensor, Tensor | None]] = {}

    @classmethod
    def of(cls, values: "Tensor | Factor", *, is_small: bool = False) -> "Factor":
        return values if isinstance(values, Factor) else cls(values, is_small=is_small)

    @classmethod
    def of_rounded(cls, values_TK: Tensor, power_T: Tensor | None) -> "Factor":
        """A factor that can be multiplied in the type of these values alone."""
        factor = cls(values_TK)
        factor._rounded[values_TK.dtype] = values_TK, power_T
        return factor

    def __len__(self) -> int:
        return len(self._values_TK)

    @property
    def device(self) -> torch.device:
        return self._values_TK.device

    def values(self) -> Tensor:
        """f32 [T, K], or f16 as given."""
        return self._values_TK

    def new(self, num_columns: int) -> Tensor:
        """Uninitialised, f32 [T, N]."""
        return torch.empty(len(self), num_columns, device=self.device)

    def times(
        self, tile: Tensor, out: Tensor | None = None, columns: slice = slice(None)
    ) -> Tensor:
        """f32 [T, columns of `tile`]: the factor, or these columns of it, times `tile`."""
        left, power_T = self.rounded(tile.dtype)
        left = left[:, columns]
        if tile.dtype == torch.float32:
            return torch.mm(left, tile, out=out)
        y = _in_f32(left, tile)
        if power_T is not None:
            return torch.mul(y, power_T[:, None], out=y if out is None else out)
        return y if out is None else out.copy_(y)

    def add_times(self, sum_TD: Tensor, tile: Tensor, columns: slice) -> None:
        """Adds these columns of the factor times `tile` to f32 `sum_TD`."""
        left, power_T = self.rounded(tile.dtype)
        left = left[:, columns]
        if tile.dtype == torch.float32:
            sum_TD.addmm_(left, tile)
        elif power_T is None:
            sum_TD += _in_f32(left, tile)
        else:
            sum_TD.addcmul_(_in_f32(left, tile), power_T[:, None])

    def rounded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """(the values in this type, [T, K]; the powers of two by which they were divided, [T])."""
        if dtype not in self._rounded:
            self._rounded[dtype] = self._round(dtype)
        return self._rounded[dtype]

    def _round(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        values_TK = self._values_TK
        assert not self._rounded or values_TK.dtype == torch.float32, (values_TK.dtype, dtype)
        if dtype != torch.float16 or self._is_small:
            return values_TK.to(dtype), None
        out_TK, power_T = new_rounded(values_TK, dtype)
        with made_current(values_TK.device):
            kernels().round_tokens(values_TK, None, None, None, 0.0, out_TK, power_T, None)
        return out_TK, power_T


def new_rounded(
    like_TK: Tensor, dtype: torch.dtype, *, is_small: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Uninitialised values of a type, and powers of two if they are to be divided."""
    has_power = dtype == torch.float16 and not is_small
    power_T = torch.empty(len(like_TK), device=like_TK.device) if has_power else None
    return torch.empty_like(like_TK, dtype=dtype), power_T


class OnDevice(Protocol):
    @property
    def device(self) -> torch.device: ...


def is_on(x: OnDevice, device: torch.device) -> bool:
    """True if a value is on a device, where no index means the first one."""
    return (x.device.type, x.device.index or 0) == (device.type, device.index or 0)


def as_tensor(x: Tensor | Factor) -> Tensor:
    return x.values() if isinstance(x, Factor) else x


def _in_f32(left: Tensor, right: Tensor) -> Tensor:
    """A product of two 16-bit types with f32 sums and results, which torch has only on CUDA, and for bf16
    not on every card."""
    if left.is_cuda and (left.dtype != torch.bfloat16 or has_bf16(left.device)):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
