"""What the structs of all operations share: matrices, memory, and pointers at a model's tensors.

Each operation mirrors its own struct of kernels/cpu/step.h, or of its own file there, field by
field, beside its reference in torch. They point at the tensors of the model, which `Structs.kept`
keeps alive."""

from collections.abc import Iterable
from ctypes import Array, Structure, addressof, c_float, c_int32, c_int64, c_void_p
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from hotsplit.model.attention import HeadVector
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.stored import Vectors
from hotsplit.runtime.weights.matrix import Linear, Matrix

_ALIGNMENT = 64
MAX_ROWS = 128  # of a step, whose products read each weight once, unless experts are on a drive

S = TypeVar("S", bound=Structure)


def members(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one type of a struct, in order."""
    return [(name, kind) for name in names.split()]


class MatrixStruct(Structure):
    _fields_ = [
        *members(c_void_p, "data bias"),
        *members(c_int64, "num_rows num_columns stride"),
        *members(c_int32, "kind unused"),
    ]


_IN_C = {int: c_int64, float: c_float, bool: c_int32, HeadVector: c_void_p}


@cache
def fields_of(group: type) -> tuple[tuple[str, Any], ...]:
    """The fields of a struct with the numbers, flags and vectors of a dataclass, in its order."""
    found = []
    for name, hint in get_type_hints(group).items():
        (kind,) = {*(get_args(hint) or (hint,))} - {type(None)}
        found.append((name, _IN_C[kind]))
    return tuple(found)


class NotNative(Exception):
    """Raised with the reason why a part of a model cannot be computed natively."""


class Structs:
    """Converts parts of a model to structs; `kept` keeps alive the memory that they point at."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def array(self, kind: type[S], structs: Iterable[S]) -> Array[S]:
        """The structs one after another."""
        each = list(structs)
        found = (kind * len(each))(*each)
        self.kept.append(found)
        return found

    def address(self, struct: Structure) -> int:
        """Where a struct is, which is kept alive."""
        self.kept.append(struct)
        return addressof(struct)

    def workspace(self, num_bytes: int) -> int:
        if num_bytes < 0:
            raise NotNative(
                "the C++ library rejects the model's sizes (if it is out of date, run make build)"
            )
        memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
        self.kept.append(memory)
        return -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT

    def linear(self, linear: Linear) -> MatrixStruct:
        matrix = self.matrix(linear.weight)
        matrix.bias = self.vector(linear.bias_N, linear.num_outputs)
        return matrix

    def matrix(self, matrix: Matrix) -> MatrixStruct:
        return MatrixStruct(
            data=self.pointer(matrix.data, matrix.data.dtype),
            num_rows=matrix.num_rows,
            num_columns=matrix.width,
            stride=matrix.stride_bytes,
            kind=library.kind_code(matrix.kind),
        )

    def numbers(self, group: type, spec: Any, vectors: Vectors) -> dict[str, Any]:
        """The values of `fields_of` a group of an attention's spec; of a spec's None they are 0."""
        own = [name for name, kind in fields_of(group) if kind is c_void_p]
        found = {field.name: getattr(spec, field.name) or 0 for field in fields(group)}
        return found | {name: self.vector(vectors.get(name), spec.num_heads) for name in own}

    def indices(self, index_N: Tensor) -> int:
        return self.pointer(index_N.to(torch.int32), torch.int32)

    def vector(self, vector: Tensor | None, *shape: int) -> int | None:
        """A vector, f32 of the shape that C++ reads."""
        if vector is None:
            return None
        assert vector.shape == shape, (tuple(vector.shape), shape)
        return self.pointer(vector, torch.float32)

    def pointer(self, tensor: Tensor, dtype: torch.dtype) -> int:
        if tensor.device.type != "cpu":
            raise NotNative(f"a part of the model is on {tensor.device}")
        is_in_rows = tensor.dim() == 2 and tensor.stride(1) == 1
        if tensor.dtype != dtype or not (tensor.is_contiguous() or is_in_rows):
            raise NotNative(f"a tensor is {tensor.dtype} with strides {tensor.stride()}")
        self.kept.append(tensor)
        return tensor.data_ptr()
