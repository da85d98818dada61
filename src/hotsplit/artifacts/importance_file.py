"""Importance matrices: the mean square of every input of a model's matrices on a text, by which
`convert` weighs errors.

The files are llama.cpp's (tools/imatrix/imatrix.cpp), of which two formats are read: a GGUF with a
sum of squares and a count of tokens for each matrix, which `save` writes, and the older .dat. Both
are read without trusting any length in them.

Letters: E matrices of a tensor (experts; else 1), M values of a row."""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import require_file
from hotsplit.files.gguf_file import TensorEntry, Value, array_entry, read_gguf, write_gguf
from hotsplit.files.gguf_reader import MAX_NAME_BYTES, MAX_TENSORS
from hotsplit.files.mapped_files import map_whole
from hotsplit.files.typed import shown

FIRST_BYTES = 9  # that tell a .dat from other files
WHAT = "importance matrix (hotsplit profile --imatrix, or llama.cpp's)"
TYPE = "imatrix"  # general.type
DATASETS, NUM_CHUNKS, CHUNK_TOKENS = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
SQUARES, COUNTS = ".in_sum2", ".counts"
IGNORED = ".in_sum"  # sums of the inputs themselves, which newer llama.cpp adds


@dataclass(frozen=True, eq=False)
class Importance:
    """What is known of one tensor: f32 sums of squares, flat, and the tokens that each part of them
    counts: one number, or one for each of E experts."""

    squares: np.ndarray  # [E * M]
    count: np.ndarray  # [1] or [E]

    def mean(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """f32 [E, M] for a tensor [N, M] or [E, N, M]; None if the sizes differ. As llama.cpp has
        it, it is 1 for experts that no token chose."""
        parts = shape[0] if len(shape) == 3 else 1
        if self.squares.size != parts * shape[-1] or parts % self.count.size:
            return None
        return self.means().reshape(parts, shape[-1])

    def means(self) -> np.ndarray:
        """f32, a row for each number in `count`."""
        sums = self.squares.reshape(self.count.size, -1)
        count = self.count[:, None]
        return np.divide(sums, count, out=np.ones_like(sums), where=count > 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Importances:
    """`tensors` by their names in llama.cpp's layout; `datasets` are the names of the texts."""

    path: Path
    tensors: Mapping[str, Importance]
    datasets: tuple[str, ...] = ()
    num_chunks: int = 0
    chunk_tokens: int = 0  # 0: unknown

    @classmethod
    def load(cls, path: Path) -> "Importances":
        """Raises HotsplitError for a file that is damaged, of another kind, or empty, and for
        values that cannot be mean squares."""
        require_file(path, WHAT)
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        found = _of_gguf(path, *read_gguf(path, WHAT)) if is_gguf else _of_dat(path)
        if not found.tensors:
            raise HotsplitError(f"{path}: an importance matrix of no tensors; make it again")
        for name, each in found.tensors.items():
            if not (np.isfinite(each.squares).all() and np.isfinite(each.count).all()):
                raise _wrong(path, name, "NaN or infinite values")
            if (each.squares < 0).any() or (each.count < 0).any():
                raise _wrong(path, name, "negative values")
        if not any(each.squares.any() for each in found.tensors.values()):
            raise HotsplitError(f"{path}: an importance matrix of nothing but zeros; make it again")
        return found

    def save(self, path: Path) -> None:
        """Writes the GGUF that llama.cpp's quantiser reads."""
        keys: dict[str, Value] = {
            "general.type": TYPE,
            DATASETS: list(self.datasets),
            NUM_CHUNKS: np.uint32(self.num_chunks),
            CHUNK_TOKENS: np.uint32(self.chunk_tokens),
        }
        entries: dict[str, TensorEntry] = {}
        for name, each in sorted(self.tensors.items()):
            entries[name + SQUARES] = array_entry(each.squares.reshape(each.count.size, -1), "f32")
            entries[name + COUNTS] = array_entry(each.count[:, None], "f32")
        write_gguf(path, TYPE, keys, entries)


def _wrong(path: Path, name: str, what: str) -> HotsplitError:
    return HotsplitError(f"{path}: importances of {shown(name)}: {what}; make the file again")


def _of_gguf(
    path: Path, keys: Mapping[str, Value], entries: Mapping[str, TensorEntry]
) -> Importances:
    if keys.get("general.type") != TYPE:
        raise HotsplitError(
            f"{path}: a GGUF of type {shown(keys.get('general.type'))}; wanted an {WHAT}"
        )
    tensors = {}
    for name, entry in entries.items():
        if name.endswith((COUNTS, IGNORED)):
            continue
        if not name.endswith(SQUARES):
            raise HotsplitError(
                f"{path}: unknown tensor {shown(name)}; wanted names that end in {SQUARES},"
                f" {COUNTS} or {IGNORED}"
            )
        stem = name.removesuffix(SQUARES)
        count = entries.get(stem + COUNTS)
        if count is None or {entry.kind, count.kind} != {"f32"}:
            raise _wrong(path, stem, f"no tensor {stem + COUNTS!r} of type f32 beside the squares")
        parts = 1 if len(entry.shape) == 1 else entry.shape[0]
        if len(entry.shape) > 2 or count.shape not in ((parts,), (parts, 1)):
            raise _wrong(
                path, stem, f"counts {list(count.shape)} of sums {list(entry.shape)}, wanted [E, 1]"
            )
        tensors[stem] = Importance(entry.read().reshape(-1), count.read().reshape(-1))
    datasets = keys.get(DATASETS, [])
    if not isinstance(datasets, list) or not all(isinstance(each, str) for each in datasets):
        raise HotsplitError(f"{path}: {DATASETS} is {shown(datasets)}, wanted texts")
    return Importances(
        path=path,
        tensors=tensors,
        datasets=tuple(map(str, datasets)),
        num_chunks=_number(path, keys, NUM_CHUNKS),
        chunk_tokens=_number(path, keys, CHUNK_TOKENS),
    )


def _number(path: Path, keys: Mapping[str, Value], name: str) -> int:
    value = keys.get(name, np.uint32(0))
    if not isinstance(value, np.integer) or value < 0:
        raise HotsplitError(f"{path}: {name} is {shown(value)}, wanted a number of 0 or more")
    return int(value)


def is_dat(start: bytes) -> bool:
    """True if a file with these FIRST_BYTES may be an old importance matrix: a number of entries,
    and the length and the first letter of a name."""
    if len(start) < FIRST_BYTES:
        return False
    num_entries, length = struct.unpack_from("<2i", start)
    is_name = 0 < length <= MAX_NAME_BYTES and start[8:9].isalpha()
    return 0 < num_entries <= MAX_TENSORS and is_name


def _of_dat(path: Path) -> Importances:
    """i32 number of entries; of each: i32 length of the name, name, i32 calls, i32 number of
    values, f32 sums of squares; then i32 chunks, i32 length of the text's name, name (both may be
    missing)."""
    try:
        with path.open("rb") as file:
            read = _Dat(path, map_whole(file))
    except (ValueError, OSError) as error:  # ValueError: the file is empty
        raise HotsplitError(f"{path}: cannot be read ({error}); wanted an {WHAT}") from error
    (num_entries,) = read.ints(1, "the number of entries")
    if not 0 < num_entries <= MAX_TENSORS:
        raise read.wrong(f"{num_entries} entries, wanted 1 to {MAX_TENSORS}")
    tensors: dict[str, Importance] = {}
    for _ in range(num_entries):
        name = read.text(f"the name of entry {len(tensors)}")
        if name in tensors:
            raise read.wrong(f"{shown(name)} is there twice")
        calls, count = read.ints(2, f"the sizes of {shown(name)}")
        if count < 1 or calls < 0:
            raise read.wrong(f"{shown(name)} has {count} values of {calls} calls")
        values = np.frombuffer(read.take(4 * count, f"the values of {shown(name)}"), "<f4")
        tensors[name] = Importance(values, np.array([max(1, calls)], np.float32))
    if read.is_at_end:
        return Importances(path=path, tensors=tensors)
    (num_chunks,) = read.ints(1, "the number of chunks")
    dataset = "" if read.is_at_end else read.text("the name of the text", may_be_empty=True)
    if not read.is_at_end or num_chunks < 0:
        raise read.wrong(f"{num_chunks} chunks, or bytes after the end")
    return Importances(
        path=path, tensors=tensors, datasets=(dataset,) if dataset else (), num_chunks=num_chunks
    )


class _Dat:
    """A position in the bytes; every read is checked against their end and advances it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.offset = path, data, 0

    @property
    def is_at_end(self) -> bool:
        return self.offset == len(self.data)

    def wrong(self, what: str) -> HotsplitError:
        return HotsplitError(f"{self.path}: not a whole one ({what}); wanted an {WHAT}")

    def take(self, num_bytes: int, what: str) -> bytes:
        start, self.offset = self.offset, self.offset + num_bytes
        if self.offset > len(self.data):
            raise self.wrong(f"{what} at byte {start} takes {num_bytes} bytes, beyond the end")
        return self.data[start : self.offset]

    def ints(self, count: int, what: str) -> tuple[int, ...]:
        return struct.unpack(f"<{count}i", self.take(4 * count, what))

    def text(self, what: str, *, may_be_empty: bool = False) -> str:
        (length,) = self.ints(1, what)
        if not (0 if may_be_empty else 1) <= length <= MAX_NAME_BYTES:
            raise self.wrong(f"{what} has {length} bytes")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.wrong(f"{what} is not text") from error
