"""GGUF v3 in and out, through the `gguf` package, with errors a person can act on.

What the keys and tensors mean is not known here: see model_file and split_file."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from io import FileIO
from math import prod
from pathlib import Path

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
)

from sparkinfer.errors import SparkinferError
from sparkinfer.files import partial_file, require_file
from sparkinfer.pipeline import in_order, num_threads

# Values read, encoded and written at a time. On 2 busy cores a q4_0 file took 4.1-5.1, 2.4-4.3,
# 2.1-3.2 and 2.2-3.8 s with 1, 2, 4 and 8 Mi; from 4 MiB on numpy asks for huge pages.
PIECE_VALUES = 4 << 20

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
    """Writes a file whole or not at all; `on_bytes` hears of every piece of a tensor written.

    Tensors are read in the order of the mapping, in pieces of whole rows, by several threads: so
    `read_rows` must bear that. A few pieces are in memory at a time, never a large tensor."""
    with partial_file(path) as unfinished:
        _write_header(unfinished, architecture, keys, tensors)
        pieces = [piece for entry in tensors.values() for piece in _pieces(entry)]
        tasks = (partial(p.entry.read_rows, p.start, p.stop) for p in pieces)
        results = in_order(tasks, num_threads())
        with unfinished.open("ab", buffering=0) as file, closing(results):
            for piece, data in zip(pieces, results, strict=True):
                assert data.nbytes == piece.num_bytes, (piece, data.nbytes)
                _write_all(file, data)
                if piece.is_last:
                    _pad(file)
                on_bytes(data.nbytes)


def _write_header(
    path: Path, architecture: str, keys: Mapping[str, Value], tensors: Mapping[str, TensorEntry]
) -> None:
    """All that stands before the data of the tensors."""
    writer = GGUFWriter(path, architecture)
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
    finally:
        writer.close()
    with path.open("ab", buffering=0) as file:
        _pad(file)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Rows `start` to `stop` of a tensor."""

    entry: TensorEntry
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.entry.num_bytes // self.entry.shape[0]

    @property
    def is_last(self) -> bool:
        return self.stop == self.entry.shape[0]


def _pieces(entry: TensorEntry) -> Iterator[_Piece]:
    """All rows, PIECE_VALUES values at a time, or a row where that is longer."""
    num_rows = entry.shape[0]
    step = max(1, PIECE_VALUES // prod(entry.shape[1:]))
    for start in range(0, num_rows, step):
        yield _Piece(entry=entry, start=start, stop=min(start + step, num_rows))


def _write_all(file: FileIO, data: np.ndarray) -> None:
    """A raw file may take less than it is given (2 GiB at most on Linux)."""
    rest = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    while rest:
        rest = rest[file.write(rest) :]


def _pad(file: FileIO) -> None:
    file.write(bytes(-file.tell() % GGUF_DEFAULT_ALIGNMENT))


_NUMBERS = {dtype: kind for kind, dtype in GGUFReader.gguf_scalar_to_np.items()}


def _value(field) -> Value:  # type: ignore[no-untyped-def]  # gguf's ReaderField
    value = field.contents()
    if isinstance(value, str | bool | list):
        return value
    return GGUFReader.gguf_scalar_to_np[field.types[0]](value)  # type: ignore[return-value]


def _add_key(writer: GGUFWriter, name: str, value: Value) -> None:
    if isinstance(value, list):
        if value:  # gguf has no empty arrays; untold, it takes 1.4 times as long over the types
            kind = GGUFValueType.get_type(value[0])
            writer.add_key_value(name, value, GGUFValueType.ARRAY, sub_type=kind)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    else:
        writer.add_key_value(name, value.item(), _NUMBERS[type(value)])
