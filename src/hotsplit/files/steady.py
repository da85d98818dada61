"""Checks that inputs stay unchanged while an output is made, and that no other run writes it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from hotsplit.files.gguf_parts import part_paths

# Suffixes of checkpoints, predictors and texts; other files in an input folder may change.
_READ = ".safetensors .bin .pt .json .jsonl .ndjson .txt .text .md .parquet .model .jinja"
READ = {*_READ.split()}
_Stamp = tuple[int, int, int]  # inode, bytes, time of the last change in nanoseconds
_inputs: ContextVar[dict[Path, _Stamp | None] | None] = ContextVar("inputs")
_new: ContextVar[set[Path]] = ContextVar("new")


@contextmanager
def reading(*paths: Path | None, new: Sequence[Path] = ()) -> Iterator[None]:
    """Within the block, `partial_file` and `partial_folder` refuse to write if an input has changed
    since the block began, or if another run has written one of `new`, outputs that did not exist
    when the block began. Of an input folder, only files with a suffix in READ are checked, and only
    those that were there at the beginning. Blocks cannot be nested. Without this, truncation could
    pass unnoticed: in a mapping, the bytes from the new end to the end of that page read as
    zeros."""
    assert _inputs.get(None) is None, "reading() within reading()"
    files = [file for path in paths if path is not None for file in _files_of(path)]
    stamps = {(real := _real(file)): _stamp(real) for file in files}
    tokens = _inputs.set(stamps), _new.set({_real(path) for path in new})
    try:
        yield
    finally:
        _inputs.reset(tokens[0])
        _new.reset(tokens[1])


@contextmanager
def suspended() -> Iterator[None]:
    """Within the block, `reading` may be called although it was called before."""
    tokens = _inputs.set(None), _new.set(set())
    try:
        yield
    finally:
        _inputs.reset(tokens[0])
        _new.reset(tokens[1])


def _files_of(path: Path) -> list[Path]:
    with suppress(OSError):
        if path.is_dir():
            return [file for file in path.rglob("*") if file.suffix.lower() in READ]
        if path.is_file():
            return part_paths(path)
    return []


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def changed_inputs() -> list[Path]:
    """The inputs of `reading` that have changed."""
    return [path for path, stamp in (_inputs.get(None) or {}).items() if _stamp(path) != stamp]


def wrote(path: Path) -> None:
    """Called after an output was renamed into place. Stops checking that path, and all within it,
    which may be in an input folder."""
    real, inputs = _real(path), _inputs.get(None) or {}
    for file in [file for file in inputs if file == real or real in file.parents]:
        del inputs[file]
    _new.get(set()).discard(real)


def is_new(path: Path) -> bool:
    """True for an output that did not exist before and that this run has not written yet."""
    return _real(path) in _new.get(set())


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
