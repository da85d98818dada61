"""Reads and writes GGUF files: `gguf_reader` checks the header, the `gguf` package writes version
3.

Keys and tensors are interpreted in model_file and split_file."""

import errno
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from math import isfinite, prod
from pathlib import Path
from typing import cast

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_file, require_file
from hotsplit.files.gguf_parts import SPLIT_KEYS, GgufPart, check_parts, other_parts
from hotsplit.files.gguf_reader import NUMBERS, Magic, TensorInfo, Value, read_header
from hotsplit.files.gguf_types import GROUPED_TWOS, block_sizes, number_of
from hotsplit.files.low_bit_blocks import (
    bit_values,
    scaled_rows,
    scaled_values,
    smaller_groups,
    twos_of_trits,
)
from hotsplit.files.mapped_files import map_whole
from hotsplit.files.pipeline import in_order, num_threads
from hotsplit.files.table_blocks import pack_table_blocks, table_values
from hotsplit.model.weight_types import BY_NAME, IN_MEMORY, TABLE_NAMES
from hotsplit.system.system_memory import advice_on_memory

# Values read, encoded and written at a time. On 2 busy cores a file of 4-bit blocks took 4.1-5.1,
# 2.4-4.3, 2.1-3.2 and 2.2-3.8 s with 1, 2, 4 and 8 Mi; from 4 MiB on numpy asks for huge pages.
PIECE_VALUES = 4 << 20

# Types whose values are numpy's; arrays of all others hold bytes.
_DTYPES: dict[str, type[np.number]] = {
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
}
_VALUE_TYPES = {dtype: GGUFValueType(number) for number, dtype in NUMBERS.items()}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor: its shape (outermost dimension first), its type, and access to its bytes. `kind`
    is the type's name in lower case ("f32", "q8_0", "i32"). `read_rows(start, stop)` returns the
    bytes of some rows (of a vector: of the blocks with these values) as an array. For a file that
    was read it is a view of the mapped file; for one to be written it may be computed."""

    shape: tuple[int, ...]
    kind: str
    read_rows: Callable[[int, int], np.ndarray]
    part: Path | None = None  # the file that it is in, of a model in several files
    part_of: str | None = None  # the file's tensor of which this is a part, if it is not whole
    # The file's tensor, from which this one, of a type in memory, is packed when it is read.
    packed_from: "TensorEntry | None" = None
    # Of nvfp4: what its products are multiplied by, f32 [1] or one of each expert. A file has it in
    # a tensor of its own.
    scale: np.ndarray | None = None

    def read(self) -> np.ndarray:
        """All bytes, in an array with the tensor's rows."""
        return self.read_rows(0, self.shape[0])

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.shape[-1], self.kind)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes

    @property
    def in_file(self) -> "TensorEntry":
        """The tensor as a file has it."""
        return self.packed_from or self


_COMPARED = 64 << 20  # bytes read at a time


def is_equal(a: TensorEntry, b: TensorEntry) -> bool:
    """True if two tensors have the same shape, type, scale and bytes. Ends at the first difference,
    which the first and last rows often have."""
    a, b = a.in_file, b.in_file
    scales = [entry.scale if entry.scale is None else entry.scale.tolist() for entry in (a, b)]
    if (a.shape, a.kind) != (b.shape, b.kind) or scales[0] != scales[1]:
        return False
    num_rows, step = a.shape[0], max(1, _COMPARED // (a.num_bytes // a.shape[0]))
    ends = [(0, min(16, num_rows)), (max(0, num_rows - 16), num_rows)]
    pieces = [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
    return all(
        np.array_equal(a.read_rows(*piece), b.read_rows(*piece)) for piece in (*ends, *pieces)
    )


def chosen_rows(entry: TensorEntry, rows: np.ndarray) -> TensorEntry:
    """A matrix of some rows of another, in this order; a view of it if they follow one another. Of
    a packed one these rows alone are packed."""
    if entry.packed_from is not None:
        return in_memory(chosen_rows(entry.packed_from, rows))
    first, is_run = int(rows[0]), bool((np.diff(rows) == 1).all())

    def read_rows(start: int, stop: int) -> np.ndarray:
        if is_run:
            return entry.read_rows(first + start, first + stop)
        return entry.read()[rows[start:stop]]

    scale = entry.scale if entry.scale is None or len(entry.scale) == 1 else entry.scale[rows]
    return replace(entry, shape=(len(rows), *entry.shape[1:]), read_rows=read_rows, scale=scale)


def row_range(entry: TensorEntry, begin: int, end: int) -> TensorEntry:
    """The matrix of rows begin .. end - 1 of another."""

    def read_rows(start: int, stop: int) -> np.ndarray:
        return entry.read_rows(begin + start, begin + stop)

    packed_from = entry.packed_from and row_range(entry.packed_from, begin, end)
    shape = end - begin, *entry.shape[1:]
    return replace(entry, shape=shape, read_rows=read_rows, packed_from=packed_from)


def joined_rows(entry: TensorEntry) -> TensorEntry:
    """Matrices of one tensor, [H, N, M], as one with the rows of all, [H N, M]."""
    count, num_rows, width = entry.shape

    def read_rows(start: int, stop: int) -> np.ndarray:
        first, last = start // num_rows, -(-stop // num_rows)
        raw = entry.read_rows(first, last)
        begin = first * num_rows
        found: np.ndarray = raw.reshape(-1, raw.shape[-1])[start - begin : stop - begin]
        return found

    packed_from = entry.packed_from and joined_rows(entry.packed_from)
    shape = (count * num_rows, width)
    return replace(entry, shape=shape, read_rows=read_rows, packed_from=packed_from)


def stacked(entries: Sequence[TensorEntry]) -> TensorEntry:
    """Matrices of one type and shape as one, numbered by its first dimension: a view if they lie at
    equal distances in a mapped file, otherwise copied when it is read."""

    def read_rows(start: int, stop: int) -> np.ndarray:
        each = [entry.read() for entry in entries[start:stop]]
        places = [_mapped_at(raw) for raw in each]
        mapping, begin = places[0]
        steps = np.diff([place for _, place in places])
        is_even = all(own is mapping for own, _ in places) and len({*steps.tolist()}) <= 1
        if (
            mapping is None
            or not is_even
            or (steps < 0).any()
            or not all(r.flags.c_contiguous for r in each)
        ):
            return np.stack(each)
        first, step = each[0], int(steps[0]) if len(steps) else each[0].nbytes
        shape, strides = (len(each), *first.shape), (step, *first.strides)
        return np.ndarray(shape, first.dtype, mapping, begin, strides)

    scales = [entry.scale for entry in entries if entry.scale is not None]
    return replace(
        entries[0],
        shape=(len(entries), *entries[0].shape),
        read_rows=read_rows,
        scale=np.concatenate(scales) if scales else None,
    )


def in_memory(entry: TensorEntry) -> TensorEntry:
    """The tensor as kernels read it: of a type that has none, in its type in memory."""
    if entry.kind not in IN_MEMORY:
        return entry

    def read_rows(start: int, stop: int) -> np.ndarray:
        rows = entry.read_rows(start, stop)
        if entry.kind == "nvfp4":
            return scaled_rows(rows, _scale_of_rows(entry, start, stop))
        return packed_rows(rows, entry.kind)

    return replace(
        entry, kind=IN_MEMORY[entry.kind], read_rows=read_rows, packed_from=entry, scale=None
    )


def packed_rows(rows: np.ndarray, kind: str) -> np.ndarray:
    """Rows of a file's type in IN_MEMORY, except nvfp4, as rows of the type in memory."""
    if kind == "tq1_0":
        return twos_of_trits(rows)
    if kind == GROUPED_TWOS:
        return smaller_groups(rows)
    return pack_table_blocks(rows, kind)


def _scale_of_rows(entry: TensorEntry, start: int, stop: int) -> np.ndarray:
    """The scale of rows of nvfp4, of the matrices of experts, or of a vector; 1 if the file has
    none."""
    if len(entry.shape) == 1:
        return np.array(1 if entry.scale is None else entry.scale[0], np.float32)
    count = stop - start
    shape = (count, *entry.shape[1:-1])
    if entry.scale is None:
        return np.ones(shape, np.float32)
    own = entry.scale if len(entry.scale) == 1 else entry.scale[start:stop]
    return np.broadcast_to(own.reshape(-1, *[1] * (len(shape) - 1)), shape)


_BIT_TYPES = ("q1_0", "q2_0", GROUPED_TWOS)  # which `gguf` does not unpack


def type_of(kind: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[kind.upper()]


def can_unpack(kind: str) -> bool:
    """True if blocks of this type can be turned into values."""
    if kind in _BIT_TYPES:
        return True
    block = np.zeros((1, block_sizes(kind)[1]), np.uint8)
    try:
        dequantize(block, type_of(kind))
    except NotImplementedError:
        return False
    return True


def values_of(data: np.ndarray, kind: str) -> np.ndarray:
    """The f32 values of stored rows, or of a vector, as `gguf` unpacks them. Raises HotsplitError
    for a type that it cannot unpack."""
    assert kind != "nvfp4", "values need the tensor's scale: in_memory()"
    if kind in TABLE_NAMES:
        return table_values(data, kind)
    if kind == "nvfp4_scaled":
        return scaled_values(data)
    if kind in _BIT_TYPES:
        return bit_values(data, kind)
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # a damaged scale may be infinite
            return data if kind == "f32" else dequantize(data, type_of(kind))
    except NotImplementedError as error:
        raise HotsplitError(
            f"tensors of type {kind} cannot be unpacked; use a file of another type"
        ) from error


def unpacked(entry: TensorEntry) -> TensorEntry:
    """The tensor in f32, unpacked when it is read, a matrix row by row."""
    if entry.kind == "f32":
        return entry
    entry = in_memory(entry)

    def read_rows(start: int, stop: int) -> np.ndarray:
        if len(entry.shape) == 1:
            return values_of(entry.read(), entry.kind)[start:stop]
        return values_of(entry.read_rows(start, stop), entry.kind)

    return replace(entry, kind="f32", read_rows=read_rows)


def is_whole_blocks(width: int, kind: str) -> bool:
    """True if rows of `width` values can have this type."""
    return width % block_sizes(kind)[0] == 0


def row_bytes(width: int, kind: str) -> int:
    """Bytes of one row of `width` values; asserts that it is a whole number of blocks."""
    block, size = block_sizes(kind)
    assert width % block == 0, (width, kind)
    head = BY_NAME[kind].row_head if kind in BY_NAME else 0
    return head + width // block * size


def array_entry(array: np.ndarray, kind: str) -> TensorEntry:
    """An entry for values in memory, stored as f64, f32, f16 or i32."""
    dtype = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "i32": np.int32}[kind]
    values = np.ascontiguousarray(array, dtype=dtype)
    return TensorEntry(shape=values.shape, kind=kind, read_rows=lambda a, b: values[a:b])


def release(entry: TensorEntry) -> None:
    """Drops a mapped tensor's pages, which are read again when needed; does nothing for a tensor
    that is not mapped. Pages shared with a neighbouring tensor are dropped too. A mapped tensor
    must never be written to, since the changes would be lost here."""
    _advise(entry, "MADV_DONTNEED")


def prefetch(entry: TensorEntry) -> None:
    """Prefetches a mapped tensor into the page cache, asynchronously."""
    _advise(entry, "MADV_WILLNEED")


def place_in_file(entry: TensorEntry) -> tuple[int, int] | None:
    """(where the first matrix of a stored tensor of matrices [E, N, D] begins in its file, bytes
    from there to the next); None unless each is contiguous there."""
    raw = entry.read()
    mapping, begin = _mapped_at(raw)
    is_whole = raw.ndim == 3 and raw[:1].flags.c_contiguous
    return (begin, raw.strides[0]) if mapping is not None and is_whole else None


def _advise(entry: TensorEntry, advice: str) -> None:
    """Calls madvise on a tensor's pages if it is mapped and the system knows this advice."""
    raw = entry.in_file.read()
    mapping, begin = _mapped_at(raw)
    if mapping is None or not hasattr(mmap, advice) or not raw.nbytes:
        return
    start = begin - begin % mmap.PAGESIZE
    steps = zip(raw.shape, raw.strides, strict=True)  # of a view there may be gaps between rows
    end = begin + raw.itemsize + sum((count - 1) * stride for count, stride in steps)
    mapping.madvise(getattr(mmap, advice), start, end - start)


def _mapped_at(raw: np.ndarray) -> tuple[mmap.mmap | None, int]:
    """The mapping of which an array is a view (or None), and its place there in bytes."""
    base: object = raw
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    mapping = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapping, mmap.mmap):
        return None, 0
    begin = np.frombuffer(mapping, np.uint8, 1).__array_interface__["data"][0]
    return mapping, raw.__array_interface__["data"][0] - begin


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """The content of a file. `magic` is its first four bytes: `PWRI` is PowerInfer's container,
    whose keys and tensors have other meanings than llama.cpp's."""

    magic: Magic
    keys: dict[str, Value]
    tensors: dict[str, TensorEntry]


def read_gguf(path: Path, what: str) -> tuple[dict[str, Value], dict[str, TensorEntry]]:
    """Keys and tensors of a file; tensors are views of the mapped file. Raises HotsplitError for a
    missing, truncated or foreign file, including PowerInfer's."""
    file = open_gguf(path, what)
    if file.magic != "GGUF":
        raise HotsplitError(
            f"{path}: is a PowerInfer file ({file.magic}); wanted a {what}; convert the"
            " checkpoint it was made from"
        )
    return file.keys, file.tensors


def open_gguf(path: Path, what: str) -> GgufFile:
    """Like `read_gguf`, but accepts PowerInfer's files too, and returns the magic. Part 1 of a
    model in several files gives the whole model, without the keys of the division; raises
    HotsplitError for another part, and for parts that are missing or of another model."""
    file = _open_one(path, what)
    part = GgufPart.of(path, file.keys)
    files = {path: file}
    if part is not None:
        files |= {other: _open_one(other, what) for other in other_parts(path, part)}
        check_parts(files)
    tensors = {
        name: entry if part is None else replace(entry, part=holder)
        for holder, each in files.items()
        for name, entry in each.tensors.items()
    }
    return GgufFile(
        magic=file.magic,
        keys={name: value for name, value in file.keys.items() if name not in SPLIT_KEYS},
        tensors=_with_scales(path, tensors),
    )


def _with_scales(path: Path, tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors, with the scales of nvfp4 in those that they belong to: `X.scale` or
    `X.weight.scale`, of a matrix or of each expert. Scales of inputs are for activations of 4 bits.
    Raises HotsplitError for a scale that is missing where others have one, or of a wrong shape."""
    found = dict(tensors)
    scales: dict[str, TensorEntry | None] = {}
    for name, entry in tensors.items():
        if entry.kind != "nvfp4":
            continue
        stem = name.removesuffix(".weight")
        for end in ("input_scale", "weight.input_scale"):
            found.pop(f"{stem}.{end}", None)
        own = [found.pop(f"{stem}.{end}", None) for end in ("scale", "weight.scale")]
        scales[name] = own[0] or own[1]
    for name, scale in scales.items():
        num_experts = tensors[name].shape[0] if len(tensors[name].shape) == 3 else 1
        if scale is None and not any(scales.values()):
            continue
        if scale is None:
            raise HotsplitError(
                f"{path}: {name} is nvfp4 without a scale ({name.removesuffix('.weight')}.scale),"
                " which others in the file have; download it again, or get another"
            )
        if scale.kind != "f32" or scale.shape not in ((1,), (num_experts,)):
            raise HotsplitError(
                f"{path}: the scale of {name} is {scale.kind} {list(scale.shape)}, wanted f32 [1]"
                f"{f' or [{num_experts}]' if num_experts > 1 else ''}; get another file"
            )
        values = np.array(scale.read())
        if not np.isfinite(values).all():
            raise HotsplitError(
                f"{path}: the scale of {name} is not all finite; download the file again"
            )
        found[name] = replace(found[name], scale=values)
    return found


def _open_one(path: Path, what: str) -> GgufFile:
    """The content of one file. The mapping is copy-on-write, because torch warns of read-only
    arrays."""
    require_file(path, what)
    try:
        with path.open("rb") as stream:
            mapping = map_whole(stream)
    except ValueError:
        raise HotsplitError(
            f"{path}: is empty; wanted a {what}; make or download it again"
        ) from None
    except OSError as error:
        wanted = advice_on_memory() if error.errno == errno.ENOMEM else f"wanted a {what}"
        raise HotsplitError(f"{path}: cannot be read ({error}); {wanted}") from error
    magic, keys, infos = read_header(path, what, mapping)
    tensors = {name: _entry(mapping, info) for name, info in infos.items()}
    return GgufFile(magic=magic, keys=keys, tensors=tensors)


def _entry(mapping: mmap.mmap, info: TensorInfo) -> TensorEntry:
    """An entry whose rows are numbers for numpy's types, and bytes for all others."""
    kind = info.kind
    dtype, block = np.dtype(_DTYPES.get(kind, np.uint8)), block_sizes(kind)[0]
    width = row_bytes(info.shape[-1], kind) // dtype.itemsize
    if info.num_bytes:
        flat = np.frombuffer(mapping, dtype, info.num_bytes // dtype.itemsize, info.start)
    else:
        flat = np.empty(0, dtype)
    if len(info.shape) == 1:
        of_block = row_bytes(block, kind) // dtype.itemsize

        def read_values(start: int, stop: int) -> np.ndarray:
            return flat[start // block * of_block : -(-stop // block) * of_block]

        return TensorEntry(shape=info.shape, kind=kind, read_rows=read_values)
    data = flat.reshape(*info.shape[:-1], width)
    return TensorEntry(shape=info.shape, kind=kind, read_rows=lambda a, b: data[a:b])


def write_gguf(
    path: Path,
    architecture: str,
    keys: Mapping[str, Value],
    tensors: Mapping[str, TensorEntry],
    *,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    check: Callable[[Path], None] = lambda written: None,
) -> None:
    """Writes a file whole or not at all; `on_bytes` is called for every piece of a tensor written,
    and `check` gets the whole file before it is renamed. Tensors are read in the order of the
    mapping, in pieces of whole rows, by several threads, so `read_rows` must be thread-safe. Only a
    few pieces are in memory at a time."""
    tensors = _with_scale_tensors(tensors)
    with partial_file(path) as unfinished:
        _write_header(unfinished, architecture, keys, tensors)
        pieces = [(e, start, stop) for e in tensors.values() for start, stop in _pieces(e)]
        tasks = (partial(entry.read_rows, start, stop) for entry, start, stop in pieces)
        results = in_order(tasks, num_threads())
        with unfinished.open("ab", buffering=0) as file, closing(results):
            for (entry, start, stop), data in zip(pieces, results, strict=True):
                wanted = (stop - start) * entry.num_bytes // entry.shape[0]
                assert data.nbytes == wanted, (entry, start, stop, data.nbytes)
                rest = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
                while rest:  # one call on a raw file may write fewer bytes (2 GiB on Linux)
                    rest = rest[file.write(rest) :]
                if stop == entry.shape[0]:
                    _pad(file)
                on_bytes(data.nbytes)
        check(unfinished)


def _with_scale_tensors(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors, each followed by its scale, if it has one, as a file has them."""
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        found[name] = entry
        if entry.scale is not None:
            found[f"{name.removesuffix('.weight')}.scale"] = array_entry(entry.scale, "f32")
    return found


def _write_header(
    path: Path, architecture: str, keys: Mapping[str, Value], tensors: Mapping[str, TensorEntry]
) -> None:
    writer = GGUFWriter(path, architecture)
    try:
        for name, value in keys.items():
            _add_key(writer, name, value)
        for name, entry in tensors.items():
            writer.add_tensor_info(
                name,
                entry.shape,
                np.dtype(np.float32),
                entry.num_bytes,
                cast(GGMLQuantizationType, number_of(entry.kind)),
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    with path.open("ab", buffering=0) as file:
        _pad(file)


def _pieces(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of pieces of up to PIECE_VALUES values, but at least one row."""
    num_rows = entry.shape[0]
    step = max(1, PIECE_VALUES // prod(entry.shape[1:]))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def _pad(file: FileIO) -> None:
    file.write(bytes(-file.tell() % GGUF_DEFAULT_ALIGNMENT))


def _add_key(writer: GGUFWriter, name: str, value: Value) -> None:
    if isinstance(value, list):
        if value:  # the writer drops empty arrays
            values, kind = _array(value)
            writer.add_key_value(name, values, GGUFValueType.ARRAY, kind)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    else:
        writer.add_key_value(name, value.item(), _VALUE_TYPES[type(value)])


def _array(values: list) -> tuple[list, GGUFValueType]:
    """An array ready to pack, and its type. Surrogates in text become the original bytes again, and
    integers get the first type that holds all of them."""
    if isinstance(values[0], str):
        return [v.encode("utf-8", "surrogateescape") for v in values], GGUFValueType.STRING
    if isinstance(values[0], bool):
        return values, GGUFValueType.BOOL
    least, most = min(values), max(values)
    if isinstance(values[0], float):
        largest = max((abs(v) for v in values if isfinite(v)), default=0.0)
        is_wide = largest > float(np.finfo(np.float32).max)
        return values, GGUFValueType.FLOAT64 if is_wide else GGUFValueType.FLOAT32
    for dtype in (np.int32, np.uint32, np.int64):
        if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
            return values, _VALUE_TYPES[dtype]
    return values, GGUFValueType.UINT64
