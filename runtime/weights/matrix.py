"""Stored matrices with the products that the CPU needs outside of native steps, in the file's types
and with f32 sums.

Letters: N rows, D row width, A chosen rows, T tokens."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hotsplit.costs.part_bytes import tile_rows
from hotsplit.files.gguf_file import TensorEntry, chosen_rows, release
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.stored import StoredMatrix, rows_together, unpack


@dataclass(frozen=True, kw_only=True)
class Matrix(StoredMatrix):
    """A stored matrix with the products that a decoder needs, on any device."""

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
        """f32 [N]: the rows times one vector, on the CPU."""
        return library.dot_rows(self.data, self.kind, x_D)

    def product(self, x_TD: Tensor, index_A: Tensor | None = None) -> Tensor:
        """f32 [T, A]: every token times the chosen rows (None: all), on the CPU."""
        rows = None if index_A is None else index_A.to(torch.int32)
        return library.dot_rows(self.data, self.kind, x_TD.contiguous(), rows)

    def combine_many(self, weight_TN: Tensor) -> Tensor:
        """f32 [T, D]: for every token the weighted sum of the rows, on the CPU, in pieces of
        rows."""
        sum_TD = weight_TN.new_zeros(len(weight_TN), self.width)
        size = tile_rows(self.width)
        size -= size % rows_together(self.kind)
        rows_AD = torch.empty(min(size, self.num_rows), self.width)
        for start in range(0, self.num_rows, size):
            stop = min(start + size, self.num_rows)
            library.unpack_rows(self.data[start:stop], self.kind, rows_AD[: stop - start])
            sum_TD.addmm_(weight_TN[:, start:stop], rows_AD[: stop - start])
        return sum_TD


@dataclass(frozen=True, kw_only=True)
class Linear:
    """x W^T + b, with or without b."""

    weight: Matrix
    bias_N: Tensor | None = None

    def apply(self, x_TD: Tensor) -> Tensor:
        """f32 [T, N], on the CPU."""
        y_TN = self.weight.product(x_TD)
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


def matrix_of(entry: TensorEntry, device: torch.device, rows: np.ndarray | None = None) -> Matrix:
    """A matrix of a model file, or some of its rows, on a device.

    On the CPU and without `rows`, it is a view of the mapped file, unless the entry is packed."""
    source = entry if rows is None else chosen_rows(entry, rows)
    raw = source.read()
    if entry.packed_from is not None:
        release(entry)
    if 1 in raw.shape:  # numpy leaves the stride of a single row or column open
        raw = raw.copy(order="C")
    data = torch.from_numpy(raw)
    if entry.kind == "bf16":
        data = data.view(torch.bfloat16)
    return Matrix(data=data.to(device), kind=entry.kind, width=entry.shape[-1])


def vector_of(entry: TensorEntry, device: torch.device) -> Tensor:
    """A norm's weights, a bias, or several of them, which every model file has as f32: copied out
    of the file."""
    data = torch.from_numpy(entry.read())
    assert (entry.kind, data.shape) == ("f32", entry.shape), (entry, data.shape)
    return data.to(device, copy=True)
