"""The copies of many rows, which one native call makes.

Letters: C copies, S swaps, L layers, M tensors that hold a part of each neuron."""

from collections.abc import Sequence
from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from hotsplit.costs.cache_bytes import STAGED_ALIGNMENT


class CopiesStruct(Structure):
    _fields_ = [("copy", c_void_p), ("count", c_int64)]


class RowCopies:
    """Copies between addresses, made in order. `kept` keeps the memory alive."""

    def __init__(
        self, source: np.ndarray, target: np.ndarray, num_bytes: np.ndarray, kept: Sequence[Any]
    ) -> None:
        copies = np.empty((*num_bytes.shape, 3), np.int64)  # 0 bytes copy nothing
        copies[..., 0], copies[..., 1], copies[..., 2] = source, target, num_bytes
        self._copy_C3 = copies.reshape(-1, 3)
        self._kept = kept
        self.struct = CopiesStruct(copy=self._copy_C3.ctypes.data, count=len(self._copy_C3))
        self.num_bytes = int(num_bytes.sum())


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """The places of the neurons' rows in the tensors of each layer, int64 [L, M]: address of row 0,
    row stride in bytes, and bytes of a row; 0 for a tensor that a layer does not have."""

    base_LM: np.ndarray
    stride_LM: np.ndarray
    size_LM: np.ndarray
    kept: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensors_L: Sequence[Sequence[Tensor]]) -> "RowTable":
        most = max(map(len, tensors_L))
        base_LM, stride_LM, size_LM = np.zeros((3, len(tensors_L), most), np.int64)
        for layer, tensors in enumerate(tensors_L):
            for number, tensor in enumerate(tensors):
                unit = tensor.element_size()
                width = 1 if tensor.dim() == 1 else tensor.shape[1]
                base_LM[layer, number] = tensor.data_ptr()
                stride_LM[layer, number] = tensor.stride(0) * unit
                size_LM[layer, number] = width * unit
        kept = tuple(tensor for tensors in tensors_L for tensor in tensors)
        return cls(base_LM=base_LM, stride_LM=stride_LM, size_LM=size_LM, kept=kept)

    def addresses(self, layer_S: np.ndarray, row_S: np.ndarray) -> np.ndarray:
        """The addresses of rows, int64 [S, M]."""
        return self.base_LM[layer_S] + row_S[:, None].astype(np.int64) * self.stride_LM[layer_S]

    @cached_property
    def offset_LM(self) -> np.ndarray:
        """The offsets of a neuron's rows in staging."""
        padded_LM = self._padded_LM
        return padded_LM.cumsum(axis=1) - padded_LM

    @cached_property
    def neuron_bytes(self) -> int:
        """Bytes of the largest neuron in staging."""
        return int(self._padded_LM.sum(axis=1).max())

    @property
    def _padded_LM(self) -> np.ndarray:
        return -(-self.size_LM // STAGED_ALIGNMENT) * STAGED_ALIGNMENT
