"""The files of a corpus, with random access by block.

Files are read block by block: a block is found by its position, for which only the file's size is
needed (for parquet, its footer)."""

import codecs
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import CHUNK_BYTES, require_file, temporary_folder
from hotsplit.files.typed import shown

BLOCK_BYTES = 8192
BLOCK_ROWS = 8  # of a parquet file
MAX_RECORD_BYTES = 64 << 20  # of a line of JSON
STDIN = Path("-")
TEXT, JSON_LINES, PARQUET = (".txt", ".text", ".md"), (".jsonl", ".ndjson"), (".parquet",)
STRINGS = ("string", "large_string", "string_view")  # types of a text column


@dataclass(frozen=True)
class CorpusFile:
    """A file of `size` bytes as blocks of texts."""

    name: str
    path: Path
    size: int
    is_utf8: ClassVar[bool] = True

    @property
    def num_blocks(self) -> int:
        return -(-self.size // BLOCK_BYTES)

    def texts(self, block: int) -> list[str]:
        """The texts that begin in a block; together, the blocks hold every text once. Raises
        HotsplitError for unreadable content."""
        raise NotImplementedError


class TextSource(CorpusFile):
    """Block k reaches from the first line start at or after byte k * BLOCK_BYTES to the first one
    at or after byte (k + 1) * BLOCK_BYTES. Where no line starts within BLOCK_BYTES after such a
    byte, the line is cut there, between two characters."""

    def texts(self, block: int) -> list[str]:
        with opened(self.path) as file:
            start = self._cut(file, block * BLOCK_BYTES)
            end = self._cut(file, (block + 1) * BLOCK_BYTES)
            file.seek(start)
            data = file.read(end - start)
        return [_decode(data, self.path, start).replace("\r\n", "\n")]

    def _cut(self, file: Any, offset: int) -> int:
        if offset == 0 or offset >= self.size:
            return min(offset, self.size)
        file.seek(offset - 1)
        data = file.read(BLOCK_BYTES + 1)
        newline = data.find(b"\n", 0, BLOCK_BYTES)
        if newline >= 0:
            return offset + newline
        shift = 1
        while shift < min(4, len(data)) and data[shift] & 0xC0 == 0x80:  # inside a character
            shift += 1
        return offset - 1 + shift


@dataclass(frozen=True)
class JsonLinesSource(CorpusFile):
    """Block k has the whole lines that begin in its BLOCK_BYTES bytes, from k * BLOCK_BYTES."""

    text_key: str

    def texts(self, block: int) -> list[str]:
        start, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
        found = []
        with opened(self.path) as file:
            if start:
                file.seek(start - 1)
                self._line(file)  # the rest of the previous line
            while (offset := file.tell()) < min(end, self.size):
                line = self._line(file)
                if line.strip():
                    found.append(self._text(line, offset))
        return found

    def _line(self, file: Any) -> bytes:
        offset = file.tell()
        line = file.readline(MAX_RECORD_BYTES + 1)
        if len(line) > MAX_RECORD_BYTES:
            raise HotsplitError(
                f"{self.path}: byte {offset}: a line longer than {MAX_RECORD_BYTES >> 20} MiB;"
                " wanted one JSON object a line"
            )
        return line

    def _text(self, line: bytes, offset: int) -> str:
        content = _decode(line, self.path, offset)
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise HotsplitError(
                f"{self.path}: byte {offset}: not JSON ({str(error)[:80]});"
                " wanted one JSON object a line"
            ) from error
        text = record.get(self.text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            keys = shown(sorted(record)[:8]) if isinstance(record, dict) else type(record).__name__
            raise HotsplitError(
                f"{self.path}: byte {offset}: no text at key {self.text_key!r}, found {keys};"
                " name the key with --text-key"
            )
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # an unpaired surrogate
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return text


@dataclass(frozen=True)
class ParquetSource(CorpusFile):
    """Up to BLOCK_ROWS rows of one row group, whose earlier rows are decoded and skipped."""

    text_key: str
    places: tuple[tuple[int, int], ...]  # the row group of each block, and its number in it
    is_utf8 = False

    @classmethod
    def open(cls, name: str, path: Path, size: int, text_key: str) -> "ParquetSource":
        """Raises HotsplitError for a file without the column."""
        with _parquet(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            groups = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        names = schema.names
        if text_key not in names or str(schema.field(text_key).type) not in STRINGS:
            raise HotsplitError(
                f"{path}: no text in column {text_key!r}, found {shown(names[:8])};"
                " name the column with --text-key"
            )
        blocks = ((g, i) for g, rows in enumerate(groups) for i in range(-(-rows // BLOCK_ROWS)))
        return cls(name, path, size, text_key, tuple(blocks))

    @property
    def num_blocks(self) -> int:
        return len(self.places)

    def texts(self, block: int) -> list[str]:
        group, index = self.places[block]
        with _parquet(self.path) as file:
            batches = file.iter_batches(BLOCK_ROWS, [group], [self.text_key])
            for number, batch in enumerate(batches):
                if number == index:
                    return [text for text in batch.column(0).to_pylist() if text is not None]
        raise HotsplitError(f"{self.path}: row group {group} ends early; make the file again")


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    if find_spec("pyarrow") is None:
        raise HotsplitError(f"{path}: reading parquet needs pyarrow: pip install pyarrow")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            yield file
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise HotsplitError(f"{path}: not a parquet file ({reason})") from error


def find_sources(paths: Sequence[Path], text_key: str) -> tuple[CorpusFile, ...]:
    """The files given and, sorted, all files of known kinds in the folders given. A file given by
    name may have any suffix: unless it is JSON lines or parquet, it is read as text. In a folder,
    empty files and names that begin with a dot are skipped. Raises HotsplitError for a missing
    path, for a folder that is unreadable or without a corpus, for a parquet file without the column
    `text_key`, and for a file given by name that is refused by `_refuse_blank`."""
    sources: list[CorpusFile] = []
    for path in paths:
        if path.is_dir():
            found = _in_folder(path)
            if not found:
                raise HotsplitError(
                    f"{path}: no corpus in it; wanted files named"
                    f" {', '.join('*' + s for s in TEXT + JSON_LINES + PARQUET)}"
                )
            sources += [_source(f.relative_to(path).as_posix(), f, text_key) for f in found]
        else:
            sources.append(_source(path.name, path, text_key))
            _refuse_blank(sources[-1])
    return tuple(sources)


def _in_folder(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise HotsplitError(f"{error.filename}: cannot be read: {error.strerror}") from error

    found = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            path
            for path in (Path(parent, name) for name in files)
            if path.suffix.lower() in TEXT + JSON_LINES + PARQUET
            and not path.name.startswith(".")
            and path.is_file()
            and path.stat().st_size
        ]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _source(name: str, path: Path, text_key: str) -> CorpusFile:
    require_file(path, "text, .jsonl or .parquet file, or a folder of them")
    size = path.stat().st_size
    if path.suffix.lower() in PARQUET:
        return ParquetSource.open(name, path, size, text_key)
    if path.suffix.lower() in JSON_LINES:
        return JsonLinesSource(name, path, size, text_key)
    return TextSource(name, path, size)


def _refuse_blank(source: CorpusFile) -> None:
    """Raises HotsplitError for a short file without text, and for NUL bytes in the first block."""
    if isinstance(source, TextSource) and "\0" in "".join(_first(source)[:1])[:BLOCK_BYTES]:
        raise HotsplitError(
            f"{source.path}: has NUL bytes, so it is not text; convert it to UTF-8, or leave it out"
        )
    if source.num_blocks < 2 and not any(text.strip() for text in _first(source)):
        raise HotsplitError(f"{source.path}: an empty corpus; give a file with text in it")


def _first(source: CorpusFile) -> list[str]:
    return source.texts(0) if source.num_blocks else []


@contextmanager
def stdin_as_file(paths: Sequence[Path]) -> Iterator[tuple[Path, ...]]:
    """The paths, with `-` replaced by a file copy of standard input, which is removed on exit."""
    if STDIN not in paths:
        yield tuple(paths)
        return
    with temporary_folder("hotsplit-") as folder:
        spooled = folder / "stdin"
        with spooled.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield tuple(spooled if path == STDIN else path for path in paths)


def sha256_of_text(source: CorpusFile) -> str:
    """Hex digest of the file's content, read piece by piece. Raises HotsplitError if a text file
    has bytes that are not UTF-8."""
    digest, total = hashlib.sha256(), 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    with opened(source.path) as file:
        while True:
            chunk = file.read(CHUNK_BYTES)
            digest.update(chunk)
            total += len(chunk)
            if source.is_utf8:
                try:
                    decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:  # its object: what was left over, and the chunk
                    at = total - len(error.object) + error.start
                    raise _not_utf8(source.path, at) from error
            if not chunk:
                return digest.hexdigest()


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, offset + error.start) from error


def _not_utf8(path: Path, offset: int) -> HotsplitError:
    return HotsplitError(f"{path}: not UTF-8 text (byte {offset}); convert it")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise HotsplitError(f"{path}: cannot be read: {error.strerror}") from error
