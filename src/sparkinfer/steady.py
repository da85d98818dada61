"""Inputs that must stay as they are while an output is made from them.

What this module does not know: what is read, and how outputs are written (files)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

# Of checkpoints, predictors and texts; others in the same folder may come and go.
READ = {".safetensors", ".bin", ".pt", ".json", ".jsonl", ".ndjson", ".txt", ".text", ".md", ".parquet",
        ".model", ".jinja"}  # fmt: skip
_Stamp = tuple[int, int, int]  # inode, bytes, time of the last change in nanoseconds
_inputs: ContextVar[dict[Path, _Stamp | None]] = ContextVar("inputs")


@contextmanager
def reading(*paths: Path | None) -> Iterator[None]:
    """Within its block nothing is written from inputs that have changed since its beginning:
    `partial_file` and `partial_folder` refuse. Of a folder, the files count that are read of one.

    A file that is mapped and cut short reads as zeros up to the end of its last page."""
    files = [file for path in paths if path is not None for file in _files_of(path)]
    stamps = {(real := Path(os.path.realpath(file))): _stamp(real) for file in files}
    token = _inputs.set(_inputs.get({}) | stamps)
    try:
        yield
    finally:
        _inputs.reset(token)


def _files_of(path: Path) -> list[Path]:
    with suppress(OSError):
        if path.is_dir():
            return [file for file in path.rglob("*") if file.suffix.lower() in READ]
        if path.is_file():
            return [path]
    return []


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def changed_inputs() -> list[Path]:
    """Those of `reading` that are not as they were."""
    return [path for path, stamp in _inputs.get({}).items() if _stamp(path) != stamp]


def wrote(path: Path) -> None:
    """An output has its name now, and may lie in a folder that is read."""
    _inputs.get({}).pop(Path(os.path.realpath(path)), None)
