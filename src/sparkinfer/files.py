"""Writing files so that nothing half-written is ever seen under its own name."""

import fcntl
import glob
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sparkinfer.errors import SparkinferError

CHUNK_BYTES = 1 << 20
PARTIAL = ".partial"
MODEL_SUFFIX = ".gguf"


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Gives an empty file beside `path` to write to; renames it to `path` on success, removes it
    otherwise, and with it the folders that were made for it.

    Its name, `path`.xxxxxxxx.partial with eight random digits, is nobody else's: two runs with
    one output do not meet, and a file that a user has called so is never opened. It is locked
    while it is written, so that the next run tells what a killed one left, and removes that.
    It is on the disk before it has its name, and the name is before this returns: a power cut
    leaves the old file or the new one. Raises SparkinferError where the folder cannot be
    written."""
    with _folders_for(path):
        try:
            remove_stale(path)
            partial, descriptor = _create(path)
        except OSError as error:
            raise SparkinferError(f"{path}: cannot be written: {error.strerror}") from error
        try:
            yield partial
            _sync(partial)
            partial.replace(path)
            _sync(path.parent)
        finally:
            partial.unlink(missing_ok=True)
            os.close(descriptor)


def remove_stale(path: Path) -> None:
    """Removes what killed runs left of `path`: its partial files that nobody has locked."""
    if not path.parent.is_dir():
        return
    for other in path.parent.glob(f"{glob.escape(_stem(path))}.*{PARTIAL}"):
        name = other.name.removeprefix(f"{_stem(path)}.").removesuffix(PARTIAL)
        if len(name) != 8 or set(name) - set("0123456789abcdef") or not other.is_file():
            continue
        with suppress(OSError), other.open("rb") as file:  # another user's, perhaps
            if _lock(file.fileno()):
                other.unlink()


def _stem(path: Path) -> str:
    """What a partial file's name begins with; a name has 255 bytes at most."""
    return path.name.encode()[: 255 - 9 - len(PARTIAL)].decode(errors="ignore")


def _create(path: Path) -> tuple[Path, int]:
    """A new partial file for `path`, and a descriptor that holds its lock."""
    while True:
        partial = path.with_name(f"{_stem(path)}.{secrets.token_hex(4)}{PARTIAL}")
        try:
            descriptor = os.open(partial, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        is_ours = _lock(descriptor)
        # Another run may have taken the file for a stale one before it was locked.
        if is_ours is None or (is_ours and partial.exists()):
            return partial, descriptor
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether the file is now locked by this process; None where files cannot be locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def _folders_for(path: Path) -> Iterator[None]:
    """Makes the folders above `path`; removes them again where that fails, or the work does."""
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SparkinferError(f"{path}: cannot be written: {error.strerror}") from error
        yield
    except BaseException:
        for folder in missing:
            with suppress(OSError):  # not made, or somebody has put something there
                folder.rmdir()
        raise


def _sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """Gives a new folder `path`.partial to fill; on success it takes the place of `path` with all
    it holds (see check_output_folder), otherwise it is removed and `path` is as it was.

    Raises SparkinferError where the folder cannot be made."""
    partial, old = (path.with_name(path.name + end) for end in (PARTIAL, ".old"))
    with _folders_for(path):
        try:
            partial.mkdir()
        except OSError as error:
            raise SparkinferError(f"{partial}: cannot be made: {error.strerror}") from error
        try:
            yield partial
            if path.exists():
                path.replace(old)
            try:
                partial.replace(path)
            except BaseException:
                if old.exists():
                    old.replace(path)
                raise
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def check_output_folder(path: Path, *, force: bool, is_ours: Callable[[str], bool]) -> None:
    """Refuses an output folder that is something else, holds anything (unless `force`), or holds
    what this command would not have written: replacing it would delete that."""
    if path.name in ("", "..") or path.is_symlink() or (path.exists() and not path.is_dir()):
        raise SparkinferError(f"{path}: cannot be replaced by a folder; give the name of a new one")
    found = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    foreign = [name for name in found if not is_ours(name)]
    if foreign:
        raise SparkinferError(
            f"{path}: holds {foreign[0]!r}, which this command has not written; give a new folder"
        )
    if found and not force:
        raise SparkinferError(f"{path}: holds files already; give another name or --force")
    stale = [path.with_name(path.name + end) for end in (PARTIAL, ".old")]
    for other in stale:
        if other.exists():
            raise SparkinferError(f"{other}: is in the way, left by an interrupted run; remove it")


def check_output(
    path: Path, *, force: bool, inputs: Iterable[Path] = (), folders: Iterable[Path] = ()
) -> None:
    """Refuses an output that is an input, exists already (unless `force`), or cannot be written.

    In `folders` all files are inputs but the .gguf ones, and a new file could become one: the
    output may lie there if it ends in .gguf. Called before the work starts, so that nobody waits
    an hour for this answer; leaves nothing behind."""
    if path.is_dir():
        raise SparkinferError(f"{path}: is a folder; give the name of a file")
    inputs = [*inputs, *(file for folder in folders for file in _inputs_in(folder))]
    if any(path.exists() and other.exists() and path.samefile(other) for other in inputs):
        raise SparkinferError(f"{path}: is read by this command; give the output another name")
    for folder in folders:
        if path.suffix != MODEL_SUFFIX and path.parent.resolve() == folder.resolve():
            raise SparkinferError(
                f"{path}: lies among the files that this command reads; give another folder, or a"
                f" name that ends in {MODEL_SUFFIX}"
            )
    if path.exists() and not force:
        raise SparkinferError(f"{path}: exists already; give another name or --force")
    try:
        there = next(folder for folder in path.parents if folder.exists())
        probe, descriptor = _create(there / path.name)
    except OSError as error:
        raise SparkinferError(f"{path}: cannot be written: {error.strerror}") from error
    probe.unlink()
    os.close(descriptor)


def _inputs_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [file for file in folder.iterdir() if file.suffix != MODEL_SUFFIX and file.is_file()]


def require_file(path: Path, what: str) -> None:
    """Raises SparkinferError unless `path` is a file; `what` names it, e.g. "profile"."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "no such file"
        raise SparkinferError(f"{path}: {found}; wanted a {what}")


def known_as(path: Path) -> str | None:
    """What a file of another kind than was wanted is by its first bytes; None where they say
    nothing."""
    with path.open("rb") as file:
        start = file.read(9)
    if start[:4] == b"GGUF":
        return "a GGUF file, as models and splits are"
    if start[:1] == b"{":
        return "a JSON file, as machine files are"
    if start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size:
        return "a safetensors file, as profiles and predictors are"
    return None


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
