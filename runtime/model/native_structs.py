"""Mirrors the structs of matrices, norms and neuron blocks in kernels/cpu/step.h field by field,
and builds them from parts of a model.

They point at the tensors of the model, which `Structs.kept` keeps alive."""

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.model.attention import Norm
from hotsplit.runtime.weights.matrix import Linear, Matrix
from hotsplit.runtime.weights.neuron_block import NeuronBlock

# In the order of step.h's enums.
ACTIVATIONS = ("relu", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh")
MODES = ("dense", "exact", "predicted")
_ALIGNMENT = 64
MAX_ROWS = 128  # in step.h: most computed rows of a step, whose products read each weight once


class MatrixStruct(Structure):
    _fields_ = [("data", c_void_p), ("bias", c_void_p), ("num_rows", c_int64),
                ("num_columns", c_int64), ("stride", c_int64), ("kind", c_int32),
                ("unused", c_int32)]  # fmt: skip


class NormStruct(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_float),
                ("unused", c_int32)]  # fmt: skip


class BlockStruct(Structure):
    _fields_ = [("gate", MatrixStruct), ("up", MatrixStruct), ("down", MatrixStruct), ("id", c_void_p),
                ("row", c_void_p), ("gate_limit", c_void_p), ("num_neurons", c_int64),
                ("is_by_output", c_int32)]  # fmt: skip


class NotNative(Exception):
    """Raised with the reason why a part of a model cannot be computed natively."""


class Structs:
    """Converts parts of a model to structs; `kept` keeps alive the memory that they point at."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def workspace(self, num_bytes: int) -> int:
        if num_bytes < 0:
            raise NotNative(
                "the C++ library rejects the model's sizes (if it is out of date, run make build)"
            )
        memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
        self.kept.append(memory)
        return -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT

    def block(self, block: NeuronBlock) -> BlockStruct:
        return BlockStruct(
            gate=self.linear(block.gate),
            up=MatrixStruct() if block.up is None else self.linear(block.up),
            down=self.matrix(block.down),
            id=None if block.is_whole else self.indices(block.id_N),
            row=None if block.row_N is None else self.indices(block.row_N),
            gate_limit=self.vector(block.gate_limit_N),
            num_neurons=len(block.id_N),
            is_by_output=block.is_by_output,
        )

    def linear(self, linear: Linear) -> MatrixStruct:
        matrix = self.matrix(linear.weight)
        matrix.bias = self.vector(linear.bias_N)
        return matrix

    def matrix(self, matrix: Matrix) -> MatrixStruct:
        return MatrixStruct(
            data=self.pointer(matrix.data, matrix.data.dtype),
            num_rows=matrix.num_rows,
            num_columns=matrix.width,
            stride=matrix.stride_bytes,
            kind=library.kind_code(matrix.kind),
        )

    def norm(self, norm: Norm | None) -> NormStruct:
        if norm is None:
            return NormStruct()
        weight, bias = self.vector(norm.weight_D), self.vector(norm.bias_D)
        return NormStruct(weight=weight, bias=bias, epsilon=norm.epsilon)

    def indices(self, index_N: Tensor) -> int:
        return self.pointer(index_N.to(torch.int32), torch.int32)

    def vector(self, vector: Tensor | None) -> int | None:
        return None if vector is None else self.pointer(vector, torch.float32)

    def pointer(self, tensor: Tensor, dtype: torch.dtype) -> int:
        if tensor.device.type != "cpu":
            raise NotNative(f"a part of the model is on {tensor.device}")
        is_in_rows = tensor.dim() == 2 and tensor.stride(1) == 1
        if tensor.dtype != dtype or not (tensor.is_contiguous() or is_in_rows):
            raise NotNative(f"a tensor is {tensor.dtype} with strides {tensor.stride()}")
        self.kept.append(tensor)
        return tensor.data_ptr()
