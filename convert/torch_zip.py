"""The container that torch.save writes: a zip file of stored entries under one folder.

    NAME/data.pkl     a pickle that describes the tensors (see torch_pickle)
    NAME/byteorder    "little"; absent before torch 2.1
    NAME/data/KEY     the bytes of one storage

Everything is checked before use: a zip's directory can claim sizes that do not exist, and a
compressed entry can be a thousand times larger than its file."""

import mmap
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

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
        raise Broken(f"its directory claims {size} bytes, wanted at most {MAX_DIRECTORY_BYTES}")


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
        raise Broken(f"an entry has {size} bytes, wanted at most {most}")
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
