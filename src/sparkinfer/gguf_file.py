"""GGUF v3 in and out, through the `gguf` package, with errors a person can act on.

What the keys and tensors mean is not known here: see model_file and split_file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter

from sparkinfer.errors import SparkinferError
from sparkinfer.files import partial_file, require_file

# The type of a number in the file is the type of its numpy scalar.
Value = str | bool | np.number | list[str] | list[int] | list[float] | list[bool]


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor: its shape (outermost dimension first), its type, and how to get its bytes.

    `kind` is the type's name in lower case ("f32", "q8_0", "i32"); `read_rows(start, stop)` gives
    the bytes of some rows (of a vector: values) as an array: a view of the mapped file for a file
    that was read, computed on demand for one that is being written."""

    shape: tuple[int, ...]
    kind: str
    read_rows: Callable[[int, int], np.ndarray]

    def read(self) -> np.ndarray:
        """All bytes, in an array whose rows are the rows of the tensor."""
        return self.read_rows(0, self.shape[0])

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.shape[-1], self.kind)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


def type_of(kind: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[kind.upper()]


def row_bytes(width: int, kind: str) -> int:
    """Bytes of one row of `width` values; asserts that it is a whole number of blocks."""
    block, size = GGML_QUANT_SIZES[type_of(kind)]
    assert width % block == 0, (width, kind)
    return width // block * size


def array_entry(array: np.ndarray, kind: str) -> TensorEntry:
    """An entry for values in memory, for f32, f16 and i32."""
    dtype = {"f32": np.float32, "f16": np.float16, "i32": np.int32}[kind]
    values = np.ascontiguousarray(array, dtype=dtype)
    return TensorEntry(shape=values.shape, kind=kind, read_rows=lambda a, b: values[a:b])


def read_gguf(path: Path, what: str) -> tuple[dict[str, Value], dict[str, TensorEntry]]:
    """Keys and tensors of a file; tensors are views of the mapped file.

    Raises SparkinferError for a missing, truncated or foreign file."""
    require_file(path, what)
    try:
        reader = GGUFReader(path, "c")  # copy on write: torch takes no read-only arrays
        keys = {name: _value(field) for name, field in reader.fields.items()}
        entries = {tensor.name: _entry(tensor) for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, OSError) as error:
        raise SparkinferError(
            f"{path}: not a whole GGUF file ({error}); wanted a {what}; make or copy it again"
        ) from error
    return keys, entries


def _entry(tensor) -> TensorEntry:  # type: ignore[no-untyped-def]  # gguf's ReaderTensor
    shape = tuple(int(n) for n in reversed(tensor.shape))
    data = tensor.data
    kind = tensor.tensor_type.name.lower()
    return TensorEntry(shape=shape, kind=kind, read_rows=lambda a, b: data[a:b])


def write_gguf(
    path: Path,
    architecture: str,
    keys: Mapping[str, Value],
    tensors: Mapping[str, TensorEntry],
    *,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Writes a file whole or not at all; `on_bytes` hears of every tensor written.

    Tensors are read one at a time, in the order of the mapping: at most one is in memory."""
    with partial_file(path) as partial:
        writer = GGUFWriter(partial, architecture)
        try:
            for name, value in keys.items():
                _add_key(writer, name, value)
            for name, entry in tensors.items():
                writer.add_tensor_info(
                    name, entry.shape, np.dtype(np.float32), entry.num_bytes, type_of(entry.kind)
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, entry in tensors.items():
                data = entry.read()
                assert data.nbytes == entry.num_bytes, (name, data.nbytes, entry.num_bytes)
                writer.write_tensor_data(data)
                on_bytes(data.nbytes)
        finally:
            writer.close()


_NUMBERS = {dtype: kind for kind, dtype in GGUFReader.gguf_scalar_to_np.items()}


def _value(field) -> Value:  # type: ignore[no-untyped-def]  # gguf's ReaderField
    value = field.contents()
    if isinstance(value, str | bool | list):
        return value
    return GGUFReader.gguf_scalar_to_np[field.types[0]](value)  # type: ignore[return-value]


def _add_key(writer: GGUFWriter, name: str, value: Value) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    else:
        writer.add_key_value(name, value.item(), _NUMBERS[type(value)])
