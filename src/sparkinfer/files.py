"""Writing files so that nothing half-written is ever seen under its own name."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkinfer.errors import SparkinferError

CHUNK_BYTES = 1 << 20


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Gives `path`.partial to write to; renames it to `path` on success, removes it otherwise.

    It is on the disk before it has its name, and the name is before this returns: a power cut
    leaves the old file or the new one. Raises SparkinferError where the folder cannot be
    written."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except OSError as error:
        raise SparkinferError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        yield partial
        _sync(partial)
        partial.replace(path)
        _sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output(path: Path, *, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuses an output that is an input, exists already (unless `force`), or cannot be written.

    Called before the work starts, so that nobody waits an hour for this answer."""
    if path.is_dir():
        raise SparkinferError(f"{path}: is a folder; give the name of a file")
    if any(path.exists() and other.exists() and path.samefile(other) for other in inputs):
        raise SparkinferError(f"{path}: is read by this command; give the output another name")
    if path.exists() and not force:
        raise SparkinferError(f"{path}: exists already; give another name or --force")
    with partial_file(path.with_name(path.name + ".probe")) as probe:
        probe.write_bytes(b"")
    path.with_name(path.name + ".probe").unlink()


def require_file(path: Path, what: str) -> None:
    """Raises SparkinferError unless `path` is a file; `what` names it, e.g. "profile"."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "no such file"
        raise SparkinferError(f"{path}: {found}; wanted a {what}")


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
