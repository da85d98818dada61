"""Reads the header of a GGUF file, with every count and length checked before use.

The container is the one specified in ggml's docs/gguf.md, versions 2 and 3, little-endian, and
PowerInfer's, which differs in its first four bytes (`PWRI`) and in the numbers of three types.
gguf's own reader does not check lengths and takes seconds for a large vocabulary."""

import mmap
import struct
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import known_as
from hotsplit.files.foreign_types import foreign_words
from hotsplit.files.gguf_parts import raw_cut_of
from hotsplit.files.gguf_types import GROUPS_OF_TWOS, KINDS, block_sizes, groups_of_twos

Magic = Literal["GGUF", "PWRI"]
# A number outside an array is a numpy scalar of its type in the file.
Value = str | bool | np.number | list[str] | list[int] | list[float] | list[bool]

# Bounds on what a header may make this program allocate: 128 MiB of text are at most 512 MiB of
# str. The largest headers in use have 0.8 million values and 45 MiB (Gemma 3's vocabulary).
MAX_HEADER_BYTES = 128 << 20
MAX_ARRAY_VALUES = 4 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = (1 << 16) - 1  # the limit on keys in the specification
# Larger numbers are more likely to be damage than of a later format.
NEWER_VERSIONS = 100
NEWER_TYPES = 100
STRING, ARRAY = 8, 9
NUMBERS: dict[int, type[np.generic]] = {
    0: np.uint8,
    1: np.int8,
    2: np.uint16,
    3: np.int16,
    4: np.uint32,
    5: np.int32,
    6: np.float32,
    7: np.bool_,
    10: np.uint64,
    11: np.int64,
    12: np.float64,
}
# In PowerInfer's ggml.h these follow Q8_K (15); ggml later gave their numbers to other types.
POWERINFER_TYPES = {16: "i8", 17: "i16", 18: "i32"}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor: its shape (outermost dimension first), its type's name in lower case, and its
    place in the file."""

    shape: tuple[int, ...]
    kind: str
    start: int  # offset in the file
    num_bytes: int


Header = tuple[Magic, dict[str, Value], dict[str, TensorInfo]]


class BrokenGguf(Exception):
    """A damaged or unsupported file; the message says what is wrong, without the file's name."""


class ForeignGguf(BrokenGguf):
    """A file of another kind."""


class UnsupportedGguf(Exception):
    """A file that may be whole, but is not for this program; the message says what to do."""


def read_header(path: Path, what: str, file: mmap.mmap) -> Header:
    """Magic, keys and tensors of a mapped file; `what` describes the file wanted. Names must be
    UTF-8. Strings in arrays may hold other bytes, as some of llama.cpp's vocabularies do; such
    bytes become lone surrogates, which .encode("utf-8", "surrogateescape") turns back. In other
    values (names of authors, ...) they become U+FFFD. Raises HotsplitError for a file that is
    damaged, foreign or of an unknown version, or that has too many tensors or keys."""
    try:
        magic, keys, tensors = _Cursor(file).header()
    except UnsupportedGguf as error:
        raise HotsplitError(f"{path}: {error} (wanted a {what})") from error
    except BrokenGguf as error:
        if (cut := raw_cut_of(path)) is not None:
            raise HotsplitError(f"{path}: {cut} (wanted a {what})") from error
        other = known_as(path)
        if other and "GGUF" not in other:
            raise HotsplitError(f"{path}: {other}; wanted a {what}") from error
        if isinstance(error, ForeignGguf):
            raise HotsplitError(f"{path}: not a GGUF file ({error}); wanted a {what}") from error
        raise HotsplitError(
            f"{path}: not a whole GGUF file ({error}); wanted a {what}; make or copy it again"
        ) from error
    return magic, keys, tensors


def header_reach(file: mmap.mmap) -> int:
    """How many bytes of a file its header takes, as far as it can be read: of a file whose first N
    bytes alone are there, more than N if the header goes on."""
    cursor = _Cursor(file)
    with suppress(BrokenGguf, UnsupportedGguf):
        cursor.header()
    return cursor.offset


class _Cursor:
    """A position in the header; every read is checked against the end and advances it."""

    def __init__(self, file: mmap.mmap) -> None:
        self.file, self.offset = file, 0
        self.end = min(len(file), MAX_HEADER_BYTES)
        self.values_left = MAX_ARRAY_VALUES

    def header(self) -> Header:
        magic = self.magic()
        self.check_version()
        num_tensors = self.count("tensors", MAX_TENSORS, least_bytes=32)
        num_keys = self.count("keys", MAX_KEYS, least_bytes=13)
        keys: dict[str, Value] = {}
        for _ in range(num_keys):
            name = self.name("key", keys)
            keys[name] = self.value(f"key {_short(name)}")
        infos: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name = self.name("tensor", infos)
            infos[name] = self.tensor(f"tensor {_short(name)}", magic)
        return magic, keys, self.placed(infos, _alignment(keys))

    def magic(self) -> Magic:
        found = self.take(4, "the first four bytes").decode("latin-1")
        if found not in get_args(Magic):
            raise ForeignGguf(f"starts with {found!r}, wanted 'GGUF'")
        return cast(Magic, found)

    def check_version(self) -> None:
        version = self.integer("<I", "the version")
        if version in (2, 3):
            return
        if version != 0 and version & 0xFFFF == 0:
            raise UnsupportedGguf("is big-endian; get or make a little-endian file")
        if version == 1:
            raise UnsupportedGguf("is GGUF version 1, of 2023; get or make one of version 2 or 3")
        if 3 < version <= NEWER_VERSIONS:
            raise UnsupportedGguf(
                f"is GGUF version {version}, newer than 3, the last that this program reads;"
                " install a newer hotsplit, or get a file of version 3"
            )
        raise BrokenGguf(f"is version {version}; this program reads versions 2 and 3")

    def take(self, num_bytes: int, what: str) -> bytes:
        start = self.offset
        self.offset += num_bytes
        if self.offset > self.end:
            raise BrokenGguf(self.too_long(f"{what} at byte {start:,} takes {num_bytes:,} bytes"))
        return self.file[start : self.offset]

    def too_long(self, what: str) -> str:
        if self.end < len(self.file):
            return f"{what}, but a header has at most {MAX_HEADER_BYTES:,} bytes"
        return f"{what}, but the file ends at byte {self.end:,}"

    def integer(self, format: str, what: str) -> int:
        return struct.unpack(format, self.take(struct.calcsize(format), what))[0]

    def count(self, what: str, most: int, least_bytes: int) -> int:
        """A number of records, checked against `most` and against the rest of the header, since
        each record takes at least `least_bytes`."""
        count = self.integer("<Q", f"the number of {what}")
        if count > (self.end - self.offset) // least_bytes:
            raise BrokenGguf(f"claims {count} {what}, which is more than it can hold")
        if count > most:
            raise UnsupportedGguf(
                f"has {count} {what}; this program reads up to {most}; get another file"
            )
        return count

    def name(self, what: str, known: Container[str]) -> str:
        data = self.text(f"a {what}'s name", MAX_NAME_BYTES)
        try:
            name = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BrokenGguf(f"a {what}'s name before byte {self.offset} is not UTF-8") from error
        if name in known:
            raise BrokenGguf(f"{what} {_short(name)} appears twice")
        return name

    def text(self, what: str, most: int = MAX_HEADER_BYTES) -> bytes:
        size = self.integer("<Q", what)
        if size > most:
            raise BrokenGguf(
                f"{what} at byte {self.offset:,} claims {size:,} bytes, wanted at most {most:,}"
            )
        return self.take(size, what)

    def value(self, what: str) -> Value:
        type_number = self.integer("<I", what)
        if type_number == STRING:
            return self.text(what).decode("utf-8", "replace")
        if type_number == ARRAY:
            return self.array(what)
        value = self.numbers(type_number, 1, what)[0]
        return bool(value) if isinstance(value, np.bool_) else value

    def array(self, what: str) -> list:
        type_number = self.integer("<I", what)
        if type_number == ARRAY:
            raise BrokenGguf(f"{what} is an array of arrays, which is not supported")
        count = self.integer("<Q", what)
        if count > self.values_left:
            raise BrokenGguf(
                f"{what} claims {count} values; arrays have at most {MAX_ARRAY_VALUES} together"
            )
        self.values_left -= count
        if type_number == STRING:
            return self.strings(count, what)
        return self.numbers(type_number, count, what).tolist()

    def numbers(self, type_number: int, count: int, what: str) -> np.ndarray:
        if type_number not in NUMBERS:
            raise BrokenGguf(f"{what} has the unknown type {type_number}")
        dtype = np.dtype(NUMBERS[type_number]).newbyteorder("<")
        raw = self.take(count * dtype.itemsize, what)
        if dtype == np.bool_ and raw.strip(b"\0\1"):
            raise BrokenGguf(f"{what} has a bool that is neither 0 nor 1")
        return np.frombuffer(raw, dtype)

    def strings(self, count: int, what: str) -> list[str]:
        """Reads strings without calling `text`, because a vocabulary has hundreds of thousands."""
        file, offset, end = self.file, self.offset, self.end
        read_length = struct.Struct("<Q").unpack_from
        values = []
        for _ in range(count):
            start = offset + 8
            if start > end:
                self.offset = start
                raise BrokenGguf(self.too_long(f"{what} has {count} strings"))
            offset = start + read_length(file, offset)[0]
            if offset > end:
                self.offset = offset
                raise BrokenGguf(self.too_long(f"{what} has a string of {offset - start:,} bytes"))
            values.append(file[start:offset].decode("utf-8", "surrogateescape"))
        self.offset = offset
        return values

    def tensor(self, what: str, magic: Magic) -> TensorInfo:
        """Reads one tensor's record; `start` is still relative to the beginning of all data."""
        num_dims = self.integer("<I", what)
        if not 1 <= num_dims <= 4:
            raise BrokenGguf(f"{what} has {num_dims} dimensions, wanted 1 to 4")
        shape = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims, what))[::-1]
        kind = _tensor_type(self.integer("<I", what), magic, what)
        block, block_bytes = block_sizes(kind)
        # A zero dimension must not hide huge ones, which would overflow elsewhere.
        if prod(max(n, 1) for n in shape) >= 1 << 62:
            raise BrokenGguf(f"{what} has the impossible shape {list(shape)}")
        if shape[-1] % block:
            raise BrokenGguf(f"{what} has rows of {shape[-1]} values, not whole blocks of {block}")
        start = self.integer("<Q", what)
        return TensorInfo(
            shape=shape, kind=kind, start=start, num_bytes=prod(shape) // block * block_bytes
        )

    def placed(self, infos: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """The tensors with their place in the file. Raises BrokenGguf unless all are aligned, and
        those that have bytes are disjoint and inside the file."""
        base = -(-self.offset // alignment) * alignment
        placed = {}
        for name, info in infos.items():
            if info.start % alignment:
                raise BrokenGguf(
                    f"tensor {_short(name)} is at {info.start}, not a multiple of {alignment}"
                )
            placed[name] = replace(info, start=base + info.start)
        placed = self.with_groups(placed, alignment)
        end = 0
        filled = [(name, info) for name, info in placed.items() if info.num_bytes]
        for name, info in sorted(filled, key=lambda item: item[1].start):
            if info.start < end:
                raise BrokenGguf(f"tensor {_short(name)} overlaps another")
            end = info.start + info.num_bytes
        if end > len(self.file):
            raise BrokenGguf(f"{end - len(self.file):,} bytes of its tensors are missing")
        return placed

    def with_groups(self, infos: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """The tensors, with those of q2_0 in groups of as many values as their sizes allow. Raises
        BrokenGguf if no such groups fill the room before the next tensor. That at the end of the
        file counts only if it is alone: the file may be cut, or longer."""
        twos = {name: info for name, info in infos.items() if info.kind == "q2_0"}
        end = len(self.file)
        starts = sorted({info.start for info in infos.values()} | {end})
        next_start = dict(pairwise(starts))
        room = {
            name: next_start[info.start] - info.start
            for name, info in twos.items()
            if info.num_bytes and info.start < end
        }
        inner = {name: size for name, size in room.items() if infos[name].start + size < end}
        possible = [*GROUPS_OF_TWOS]
        for name, found in (inner or room).items():
            values, width = prod(infos[name].shape), infos[name].shape[-1]
            fitting = groups_of_twos(values, width, found, alignment)
            possible = [kind for kind in possible if kind in fitting]
            if not possible:
                wanted = values // 128
                raise BrokenGguf(
                    f"tensor {_short(name)} is q2_0 in {found:,} bytes, wanted {36 * wanted:,} in"
                    f" groups of 64 values, or {34 * wanted:,} in groups of 128, as others in the"
                    " file"
                )
        block, size = block_sizes(possible[0])
        return infos | {
            name: replace(info, kind=possible[0], num_bytes=prod(info.shape) // block * size)
            for name, info in twos.items()
        }


def _short(name: str) -> str:
    return repr(name if len(name) <= 64 else name[:61] + "...")


def _tensor_type(number: int, magic: Magic, what: str) -> str:
    if magic == "PWRI" and number in POWERINFER_TYPES:
        return POWERINFER_TYPES[number]
    if magic == "GGUF" and (words := foreign_words(number)) is not None:
        raise UnsupportedGguf(f"{what} is in {words}")
    if magic == "GGUF" and max(KINDS) < number <= max(KINDS) + NEWER_TYPES:
        raise UnsupportedGguf(
            f"{what} has type {number}, newer than {max(KINDS)}, the last that this program knows;"
            " install a newer hotsplit, or get a file of another type"
        )
    if number not in KINDS or (magic == "PWRI" and number > GGMLQuantizationType.Q8_K):
        raise BrokenGguf(f"{what} has the unknown type {number}")
    return KINDS[number]


def _alignment(keys: dict[str, Value]) -> int:
    """The alignment: a power of two, at least 8 by the specification, so that numbers align."""
    value = keys.get("general.alignment", np.uint32(GGUF_DEFAULT_ALIGNMENT))
    if not isinstance(value, np.uint32) or value < 8 or value & (value - 1):
        found = value if isinstance(value, np.number) else f"a {type(value).__name__}"
        raise BrokenGguf(f"general.alignment is {found}, wanted a power of two, at least 8, as u32")
    return int(value)
