"""Reads the file of a state dict that torch.save writes, without unpickling: a zip file of stored
entries under one folder.

    NAME/data.pkl     a pickle that describes the tensors
    NAME/byteorder    "little"; absent before torch 2.1
    NAME/data/KEY     the bytes of one storage

Everything is checked before use: a zip's directory can claim sizes that do not exist, and a
compressed entry can be a thousand times larger than its file.

A pickle is a program for a stack machine. torch writes state dicts with few of its instructions and
three functions; those are understood here and all others refused: no class is imported, nothing is
called. No instruction allocates more than a small object or its own argument, so memory is bounded
by the size of the pickle. (torch.load with weights_only=True runs no foreign code either, but it
calls functions that allocate what the file asks for, bytearray and tensors among them.)"""

import mmap
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import require_file
from hotsplit.files.mapped_files import map_whole

# A model of 405 billion parameters has 1,200 tensors; each takes up to about 150 bytes of the
# pickle and of the directory.
MAX_DIRECTORY_BYTES = 8 << 20
MAX_PICKLE_BYTES = 4 << 20
LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., bytes of the name and of extra fields
# signature, ..., size and place of the directory, size of the comment
END = struct.Struct("<4s8xLLH")
END_64_BYTES, LOCATOR_64_BYTES = 56, 20
RESAVE = "load it with torch and save it again with torch.save, or as safetensors"


@dataclass(frozen=True, kw_only=True)
class TorchZip:
    """`storages` are (start, size) in the file of the entries data/KEY, by KEY."""

    path: Path
    mapping: mmap.mmap
    pickle: bytes
    storages: dict[str, tuple[int, int]]


class Broken(Exception):
    """What is wrong with a file, without its name."""


def open_torch_zip(path: Path, what: str) -> TorchZip:
    """Maps a file written by torch.save and reads its directory and its pickle's bytes.

    Raises HotsplitError for a missing, truncated, compressed, big-endian or foreign file."""
    require_file(path, what)
    try:
        with path.open("rb") as stream:
            mapping = map_whole(stream)
            if mapping[:4] != b"PK\3\4":
                raise HotsplitError(
                    f"{path}: not a whole {what} (not a zip file: saved before torch 1.6, or something"
                    f" else); {RESAVE}"
                )
            _check_directory_size(mapping)
            with zipfile.ZipFile(stream) as archive:
                return _checked(path, archive, mapping)
    except (Broken, OSError, zipfile.BadZipFile, ValueError, NotImplementedError, EOFError,
            struct.error) as error:  # fmt: skip
        # zipfile raises ValueError for names that are not text, NotImplementedError for unknown
        # versions, struct.error for truncated extra fields.
        raise HotsplitError(
            f"{path}: not a whole {what} ({_line(error)}); download it again"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _check_directory_size(mapping: mmap.mmap) -> None:
    """Raises Broken for a directory above MAX_DIRECTORY_BYTES or larger than the file, and for a
    file that does not end with one: zipfile makes an object for every 46 bytes of a directory
    before it checks them."""
    end = len(mapping) - END.size
    if end < 0:
        raise Broken("it is cut short")
    signature, size, _, comment = END.unpack_from(mapping, end)
    if signature != b"PK\5\6" or comment:
        raise Broken("it is cut short: it does not end with a zip directory")
    locator = end - LOCATOR_64_BYTES
    if locator >= END_64_BYTES and mapping[locator : locator + 4] == b"PK\6\7":
        size = max(size % 0xFFFFFFFF, *struct.unpack_from("<Q", mapping, locator - 16))
    if size > min(MAX_DIRECTORY_BYTES, len(mapping)):
        raise Broken(f"its directory claims {size:,} bytes, wanted at most {MAX_DIRECTORY_BYTES:,}")


def _checked(path: Path, archive: zipfile.ZipFile, mapping: mmap.mmap) -> TorchZip:
    places: dict[str, tuple[int, int]] = {}
    for entry in archive.infolist():
        _, _, name = entry.filename.partition("/")
        if name in places:
            raise Broken(f"entry {entry.filename[:64]!r} appears twice")
        places[name] = _place(entry, mapping, path)
    if "data.pkl" not in places:
        raise Broken("it has no data.pkl")
    if read(mapping, places.get("byteorder", (0, 0)), 16) not in (b"", b"little"):
        raise HotsplitError(f"{path}: is big-endian; {RESAVE} on a little-endian machine")
    return TorchZip(
        path=path,
        mapping=mapping,
        pickle=read(mapping, places["data.pkl"], MAX_PICKLE_BYTES),
        storages={n.removeprefix("data/"): p for n, p in places.items() if n.startswith("data/")},
    )


def read(mapping: mmap.mmap, place: tuple[int, int], most: int) -> bytes:
    start, size = place
    if size > most:
        raise Broken(f"an entry has {size:,} bytes, wanted at most {most:,}")
    return mapping[start : start + size]


def _place(entry: zipfile.ZipInfo, mapping: mmap.mmap, path: Path) -> tuple[int, int]:
    """Start and size of an entry's bytes; the name and extra fields before them may have other
    sizes than in the directory (torch pads with them)."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise HotsplitError(f"{path}: is a compressed zip, which cannot be mapped; {RESAVE}")
    if entry.flag_bits & 1:
        raise Broken("it is encrypted")
    header = entry.header_offset
    if not 0 <= header <= len(mapping) - LOCAL_HEADER.size:
        raise Broken(f"entry {entry.filename[:64]!r} is outside the file")
    signature, name_bytes, extra_bytes = LOCAL_HEADER.unpack_from(mapping, header)
    start = header + LOCAL_HEADER.size + name_bytes + extra_bytes
    if signature != b"PK\3\4" or start + entry.file_size > len(mapping):
        raise Broken(f"entry {entry.filename[:64]!r} is cut short")
    return start, entry.file_size


# By storage class: the name of its type in safetensors, and bytes per value.
DTYPES = {
    "FloatStorage": ("F32", 4), "HalfStorage": ("F16", 2), "BFloat16Storage": ("BF16", 2),
    "DoubleStorage": ("F64", 8), "LongStorage": ("I64", 8), "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2), "CharStorage": ("I8", 1), "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
}  # fmt: skip
MAX_DIMS = 8


@dataclass(frozen=True, kw_only=True)
class Global:
    """The name of a class or function; it is never looked up."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Storage:
    key: str
    dtype: str
    value_bytes: int
    num_values: int


@dataclass(frozen=True, kw_only=True)
class View:
    """A tensor: `shape` and `stride` in values, starting at value `offset` of its storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def read_views(pickle: bytes) -> dict[str, View]:
    """The tensors of a pickled state dict, by name. Raises Broken for anything else."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(pickle):
            step = _STEPS.get(opcode.name)
            if step is None:
                raise Broken(f"its pickle has {opcode.name}, which no state dict has")
            step(machine, argument)
    except (ValueError, IndexError) as error:  # genops; pops from an empty stack
        raise Broken(f"its pickle is damaged ({' '.join(str(error).split())[:80]})") from error
    [*rest, state] = machine.stack or [None]
    if rest or machine.marks or not isinstance(state, dict):
        raise Broken(f"holds {_kind(state)}, wanted a dict of tensors")
    for name, value in state.items():
        if not isinstance(value, View):
            raise Broken(
                f"{_short(name)} is {_kind(value)}, wanted tensors only: the state dict alone"
            )
    return state


def _short(name: str) -> str:
    return repr(name if len(name) <= 64 else name[:61] + "...")


def _kind(value: object) -> str:
    names: dict[type, str] = {View: "a tensor", Global: "a class or function"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


class _Machine:
    """The stack, the positions of marks in it, and the memo."""

    def __init__(self) -> None:
        self.stack: list = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop_from(self, start: int) -> list:
        if not 0 <= start <= len(self.stack):
            raise Broken("its pickle pops more values than its stack holds")
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def pop_to_mark(self) -> list:
        return self.pop_from(self.marks.pop())

    def pop(self, size: int) -> list:
        return self.pop_from(len(self.stack) - size)

    def memoize(self, key: int | None) -> None:
        self.memo[len(self.memo) if key is None else key] = self.stack[-1]

    def recall(self, key: int) -> None:
        if key not in self.memo:
            raise Broken(f"its pickle recalls {key}, which it never stored")
        self.push(self.memo[key])

    def set_items(self, items: list) -> None:
        target = self.stack[-1]
        keys, values = items[::2], items[1::2]
        if not isinstance(target, dict) or len(keys) != len(values):
            raise Broken("its pickle sets items of something other than a dict")
        for key, value in zip(keys, values, strict=True):
            if not isinstance(key, str) or key in target:
                raise Broken("a name in it is not a string, or appears twice")
            target[key] = value

    def append(self, values: list) -> None:
        if not isinstance(self.stack[-1], list):
            raise Broken("its pickle appends to something other than a list")
        self.stack[-1].extend(values)

    def stack_global(self) -> None:
        module, name = self.pop(2)
        # Formatting anything else could take time exponential in the pickle's size: nested tuples
        # share their halves through the memo.
        if not isinstance(module, str) or not isinstance(name, str):
            raise Broken("its pickle names a class or function by something other than strings")
        self.push(Global(name=f"{module[:100]} {name[:100]}"))

    def build(self) -> None:
        """Ignores attributes of a dict, where torch keeps version numbers of modules."""
        target, _ = self.pop(2)
        if not isinstance(target, dict):
            raise Broken("its pickle sets attributes of something other than a dict")
        self.push(target)

    def persistent(self) -> None:
        """Replaces a reference ("storage", class, key, device, num_values) by its storage."""
        match self.stack.pop():
            case ("storage", Global(name=name), str(key), str(), int(count)) if count >= 0:
                module, _, kind = name.partition(" ")
                if module != "torch" or kind not in DTYPES:
                    raise Broken(f"has a storage of the unknown type {name!r}")
                dtype, size = DTYPES[kind]
                self.push(Storage(key=key, dtype=dtype, value_bytes=size, num_values=count))
            case _:
                raise Broken("a reference in its pickle is not to a storage")

    def reduce(self) -> None:
        function, arguments = self.pop(2)
        match function, arguments:
            case Global(name="collections OrderedDict"), ():
                self.push({})
            case (Global(name="torch._utils _rebuild_tensor_v2"),
                  (Storage() as storage, offset, shape, stride, *_)):  # fmt: skip
                self.push(_view(storage, offset, shape, stride))
            case Global(name="torch._utils _rebuild_parameter"), (View() as view, *_):
                self.push(view)
            case Global(name=name), _:
                raise Broken(f"its pickle calls {name!r}, which no state dict needs")
            case _:
                raise Broken("its pickle calls something other than a function")


def _view(storage: Storage, offset: Any, shape: Any, stride: Any) -> View:
    """Raises Broken unless the view lies inside its storage and has no more values than it."""
    sizes = [offset, *shape, *stride] if _is_tuple(shape) and _is_tuple(stride) else [None]
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in sizes) or len(shape) != len(stride):
        raise Broken("a tensor's shape is damaged")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if prod(shape) and not (last < storage.num_values and prod(shape) <= storage.num_values):
        raise Broken(
            f"a tensor of shape {list(shape)} does not fit into its {storage.num_values} values"
        )
    return View(storage=storage, offset=offset, shape=shape, stride=stride)


def _is_tuple(value: object) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_DIMS


_STEPS: dict[str, Callable] = {
    "PROTO": lambda m, _: None,
    "FRAME": lambda m, _: None,
    "STOP": lambda m, _: None,
    "MARK": lambda m, _: m.marks.append(len(m.stack)),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE": lambda m, _: m.push(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, _: m.push(tuple(m.pop(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.pop(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.pop(3))),
    "SETITEM": lambda m, _: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
    "APPEND": lambda m, _: m.append([m.stack.pop()]),
    "APPENDS": lambda m, _: m.append(m.pop_to_mark()),
    "MEMOIZE": lambda m, _: m.memoize(None),
    "GLOBAL": lambda m, name: m.push(Global(name=name[:200])),
    "STACK_GLOBAL": lambda m, _: m.stack_global(),
    "BINPERSID": lambda m, _: m.persistent(),
    "REDUCE": lambda m, _: m.reduce(),
    "BUILD": lambda m, _: m.build(),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda m, key: m.memoize(key)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, key: m.recall(key)),
    **dict.fromkeys(
        ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        lambda m, value: m.push(value),
    ),
}
