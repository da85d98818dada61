"""The matrix products of passes in torch, for weights in the file's types, with f32 sums.

On the CPU, the C++ kernels compute products, and unpack rows for sums of them; they quantise vectors to
blocks of 16-bit integers if the weights are in blocks. On a GPU, products of several tokens are computed as
runtime.weights.gpu_products says.

Letters: N rows, D row width, A chosen rows, T tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hotsplit.costs.part_bytes import tile_rows
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.planar import PLANAR_KIND
from hotsplit.runtime.kernels.stored import FLOATS, StoredMatrix, rows_together, unpack
from hotsplit.runtime.weights import gpu_products


@dataclass(frozen=True, kw_only=True)
class Matrix(StoredMatrix):
    """A stored matrix with the products that a decoder needs, on any device."""

    @property
    def _is_on_gpu(self) -> bool:
        return gpu_products.is_gpu(self.data.device)

    @property
    def is_multiplied_in_blocks(self) -> bool:
        """True if a GPU's kernels multiply it without unpacking it to tiles."""
        is_in_rows = self.kind not in FLOATS and rows_together(self.kind) == 1
        return is_in_rows and gpu_products.multiplies_blocks(self.data.device)

    def part(self, start: int, stop: int) -> "Matrix":
        """A range of consecutive rows, as a view; in a tiled or grouped matrix, whole tiles or
        groups."""
        together = rows_together(self.kind)
        assert start % together == stop % together == 0, (start, stop, together)
        return replace(self, data=self.data[start:stop])

    def rows(self, index_A: Tensor) -> Tensor:
        """f32 [A, D]: the chosen rows, unpacked."""
        if rows_together(self.kind) > 1:
            rows_AD = torch.empty(len(index_A), self.width)
            library.unpack_rows(self.data, self.kind, rows_AD, index_A.to(torch.int32))
            return rows_AD
        return unpack(self.data[index_A], self.kind)

    def dot(self, x_D: Tensor) -> Tensor:
        """f32 [N]: the rows times one vector."""
        if not self._is_on_gpu:
            return library.dot_rows(self.data, self.kind, x_D)
        if self.kind in PLANAR_KIND:
            return self.product(x_D[None])[0]
        y_N = x_D.new_empty(self.num_rows)
        gpu_products.dot(self, x_D, y_N)
        return y_N

    def product(
        self,
        x: Tensor | gpu_products.Factor,
        index_A: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """f32 [T, A]: every token [T, D] times the chosen rows (None: all). A factor and `out` are
        for matrices on a GPU."""
        count = self.num_rows if index_A is None else len(index_A)
        if self._is_on_gpu:
            if self.is_multiplied_in_blocks and index_A is None:
                return gpu_products.multiply(self, x, out)
            return gpu_products.product(x, count, self._gpu_tiles(index_A), out)
        assert isinstance(x, Tensor) and out is None
        rows = None if index_A is None else index_A.to(torch.int32)
        return library.dot_rows(self.data, self.kind, x.contiguous(), rows)

    def combine_many(self, weight_TA: Tensor, index_A: Tensor | None = None) -> Tensor:
        """f32 [T, D]: for every token the weighted sum of the chosen rows (None: all)."""
        sum_TD = weight_TA.new_zeros(len(weight_TA), self.width)
        return self.add_many(sum_TD, weight_TA, index_A)

    def add_many(
        self,
        sum_TD: Tensor | None,
        weight_TA: Tensor | gpu_products.Factor,
        index_A: Tensor | None = None,
    ) -> Tensor:
        """Adds the result of `combine_many` to `sum_TD`, f32, and returns it. None, a new sum, and
        a factor are for matrices on a GPU."""
        if self._is_on_gpu:
            if self.is_multiplied_in_blocks and index_A is None:
                return gpu_products.multiply_down(self, weight_TA, sum_TD)
            tiles = self._gpu_tiles(index_A)
            return gpu_products.add_many(sum_TD, weight_TA, tiles)
        assert isinstance(sum_TD, Tensor) and isinstance(weight_TA, Tensor)
        for start, rows_AD in self._tiles(index_A):
            sum_TD.addmm_(weight_TA[:, start : start + len(rows_AD)], rows_AD)
        return sum_TD

    def _gpu_tiles(self, index_A: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """Yields (first position, rows [A, D]) of tiles in `gpu_products.tile_dtype`. A whole
        matrix of that type is one tile without a copy; otherwise rows are copied or unpacked, and
        each tile overwrites the previous one."""
        dtype = gpu_products.tile_dtype(self.kind)
        count = self.num_rows if index_A is None else len(index_A)
        if not count:
            return
        if index_A is None and FLOATS.get(self.kind) == dtype:
            yield 0, self.data
            return
        size = min(count, gpu_products.tile_rows(self.width))
        buffer = torch.empty(size, self.width, dtype=dtype, device=self.data.device)
        for start in range(0, count, size):
            stop = min(start + size, count)
            out_AD = buffer[: stop - start]
            if index_A is None:
                gpu_products.unpack(self.part(start, stop), out_AD, None)
            else:
                gpu_products.unpack(self, out_AD, index_A[start:stop])
            yield start, out_AD

    def _tiles(self, index_A: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """Yields (first position, rows f32 [A, D]) of pieces small enough for the workspace; a
        whole f32 matrix is one piece, without a copy.

        A piece may overwrite the previous one."""
        count = self.num_rows if index_A is None else len(index_A)
        if self.kind == "f32" and index_A is None:
            yield 0, self.data
            return
        tile = tile_rows(self.width)
        tile -= tile % rows_together(self.kind)
        buffer = torch.empty(min(tile, count), self.width)
        for start in range(0, count, tile):
            piece = slice(start, min(start + tile, count))
            out_AD = buffer[: piece.stop - start]
            if index_A is None:
                library.unpack_rows(self.data[piece], self.kind, out_AD)
            else:
                library.unpack_rows(self.data, self.kind, out_AD, index_A[piece].to(torch.int32))
            yield start, out_AD


@dataclass(frozen=True, kw_only=True)
class Linear:
    """x W^T + b, with or without b."""

    weight: Matrix
    bias_N: Tensor | None = None

    def apply(self, x: Tensor | gpu_products.Factor) -> Tensor:
        """f32 [T, N]; uses the single-token product if T is 1. A factor is for matrices on a
        GPU."""
        if len(x) == 1:
            y_TN = self.weight.dot(gpu_products.as_tensor(x)[0].float().contiguous())[None]
        else:
            y_TN = self.weight.product(x)
        return y_TN if self.bias_N is None else y_TN + self.bias_N

    @property
    def num_outputs(self) -> int:
        return self.weight.num_rows

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes + (0 if self.bias_N is None else self.bias_N.nbytes)

    def part(self, start: int, stop: int) -> "Linear":
        """A range of consecutive outputs, as a view."""
        bias = None if self.bias_N is None else self.bias_N[start:stop]
        return Linear(weight=self.weight.part(start, stop), bias_N=bias)


def side_by_side(
    linears: Sequence[Linear], x: Tensor | gpu_products.Factor, *, is_small: bool = False
) -> Tensor:
    """Outputs of matrices with the same input [T, D], f32 [T, sum of N]. `is_small`: see
    gpu_products.Factor."""
    if not (gpu_products.is_gpu(x.device) and len(x) > 1):
        found = [linear.apply(x) for linear in linears]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)
    factor = gpu_products.Factor.of(x, is_small=is_small)
    if len(linears) == 1:
        return linears[0].apply(factor)
    factor.rounded(
        gpu_products.tile_dtype(linears[0].weight.kind)
    )  # before the result takes memory
    y_TN = factor.new(sum(linear.num_outputs for linear in linears))
    start = 0
    for linear in linears:
        own_TN = y_TN[:, start : start + linear.num_outputs]
        linear.weight.product(factor, out=own_TN)
        if linear.bias_N is not None:
            own_TN += linear.bias_N
        start += linear.num_outputs
    return y_TN


def matrix_of(entry: TensorEntry, device: torch.device, rows: np.ndarray | None = None) -> Matrix:
    """A matrix of a model file, or some of its rows, on a device.

    On the CPU and without `rows`, it is a view of the mapped file."""
    raw = entry.read()
    raw = raw if rows is None else raw[rows]
    if 1 in raw.shape:  # numpy leaves the stride of a single row or column open
        raw = raw.copy(order="C")
    data = torch.from_numpy(raw)
    if entry.kind == "bf16":
        data = data.view(torch.bfloat16)
    return Matrix(data=data.to(device), kind=entry.kind, width=entry.shape[-1])


def vector_of(entry: TensorEntry, device: torch.device) -> Tensor:
    """A norm's weights, a bias, or several of them, which every model file has as f32: copied out of the
    file."""
    data = torch.from_numpy(entry.read())
    assert (entry.kind, data.shape) == ("f32", entry.shape), (entry, data.shape)
    return data.to(device, copy=True)
