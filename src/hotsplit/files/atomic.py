"""Writes files and folders such that none is ever visible half-written under its final name."""

import errno
import fcntl
import glob
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from hotsplit.errors import HotsplitError, writing
from hotsplit.files import mapped_files
from hotsplit.files.renaming import OLD, put_folder, put_new
from hotsplit.files.steady import changed_inputs, is_new, wrote

CHUNK_BYTES = 1 << 20
PARTIAL = ".partial"
_OURS = re.compile(rf"[0-9a-f]{{8}}({re.escape(PARTIAL)}|{re.escape(OLD)})")  # after the stem
TRIES = 100  # to make a folder that other runs may remove; in /proc, say, no try ever succeeds
MODEL_SUFFIX = ".gguf"
# Errors that only writing raises: disk full, quota or file size limit reached, read-only disk.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# What Git LFS (docs/spec.md) and git-annex (doc/internals/pointer_file) put in a file's place.
POINTER_BYTES = 1024  # a pointer is shorter
POINTERS = {
    "Git LFS": (
        re.compile(rb"version https?://\S+/spec/v?\d+\n(?:[\w.-]+ .*\n)*?size (\d{1,18})\n"),
        "git lfs pull",
    ),
    "git-annex": (re.compile(rb"/annex/objects/[A-Z0-9_]+-s(\d{1,18})\S*\s*$"), "git annex get"),
}
_unfinished: set[Path] = set()  # partial files and folders of this process
_written: ContextVar[list[Path]] = ContextVar("written")  # new outputs, within all_or_none


# ---- whole or not at all --------------------------------------------------------------------


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Yields an empty file next to `path` to write to; renames it to `path` on success, otherwise
    removes it and the folders that were made for it.

    Its name, `path`.xxxxxxxx.partial with eight random hex digits, is unique, so that two runs with
    the same output do not collide. It is locked while it is written; the next run with this output
    removes files of such names that are not locked, since only a killed run leaves them. The caller
    must therefore write into this file and not replace it with another one. Its bytes are synced to
    disk before the rename, and the rename before this returns, so that a power cut leaves either
    the old file or the new one. Raises HotsplitError if the folder cannot be written, if the disk
    is full, if an input of `steady.reading` has changed, or if another run has written `path`."""
    with _made(path, _new_file) as partial:
        yield partial
        _sync(partial)
        _put(partial, path, os.replace)


@contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """Like partial_file, for a folder to fill. An existing folder `path` is replaced as a whole
    (see check_output_folder), atomically if the system can exchange two names, as Linux can."""
    with _made(path, _new_folder) as partial:
        yield partial
        for path_within in (*partial.rglob("*"), partial):
            _sync(path_within)
        _put(partial, path, put_folder)


@contextmanager
def all_or_none() -> Iterator[None]:
    """Removes the new outputs that were written within the block if it fails, so that the same
    command can be run again. An output that replaced an older file stays."""
    token = _written.set([])
    try:
        yield
    except BaseException:
        for path in _written.get():
            _remove(path)
        raise
    finally:
        _written.reset(token)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder in the system's place for temporary files, which is removed at the end of the
    block, and by `remove_unfinished`."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        folder = Path(name)
        _begin(folder)
        try:
            yield folder
        finally:
            _end(folder)


def remove_stale(path: Path) -> None:
    """Removes what killed runs left next to `path`: its partial files and folders that are not
    locked. If such a run had moved the old folder aside without replacing it, renames it back."""
    if not path.parent.is_dir():
        return
    for other in path.parent.glob(f"{glob.escape(_stem(path))}.*"):
        name = other.name.removeprefix(f"{_stem(path)}.")
        if not _OURS.fullmatch(name) or other.is_symlink():
            continue
        with suppress(OSError):  # it may be another user's
            descriptor = os.open(other, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                if _lock(descriptor):
                    if name.endswith(OLD) and not path.exists():
                        other.rename(path)
                    else:
                        _remove(other)
            finally:
                os.close(descriptor)


@contextmanager
def _made(path: Path, make: Callable[[Path], int]) -> Iterator[Path]:
    """Yields a new locked file or folder next to `path`; removes it unless it was renamed."""
    with _folders_for(path):
        with writing(path):
            remove_stale(path)
            partial, descriptor = _create(path, make)
        try:
            yield partial
        except OSError as error:
            if error.errno in NO_ROOM:
                raise HotsplitError(
                    f"{path}: cannot be written ({error.strerror or 'no room'}); free space or"
                    " write elsewhere"
                ) from error
            if os.fspath(error.filename or "").startswith(str(partial)):
                raise HotsplitError(f"{path}: cannot be written: {error.strerror}") from error
            raise
        finally:
            _remove(partial)
            _end(partial)
            os.close(descriptor)


def _begin(path: Path) -> None:
    _unfinished.add(path)
    mapped_files.set_unfinished(_unfinished)


def _end(path: Path) -> None:
    _unfinished.discard(path)
    mapped_files.set_unfinished(_unfinished)


def remove_unfinished() -> None:
    """Removes the partial files and folders of this process. Called when a command fails or is
    interrupted, since a signal can come before a `with` block has been entered."""
    for partial in [*_unfinished]:
        _remove(partial)


def _put(partial: Path, path: Path, replace: Callable[[Path, Path], None]) -> None:
    if changed := changed_inputs():
        raise HotsplitError(
            f"{changed[0]}: was changed while it was read, so {path} was not written; run the"
            " command again"
        )
    was_there = os.path.lexists(path)
    try:
        (put_new if is_new(path) else replace)(partial, path)
    except FileExistsError as error:
        raise HotsplitError(
            f"{path}: was written by another run meanwhile; give another name or --force"
        ) from error
    wrote(path)
    if not was_there:
        _written.get([]).append(path)
    _sync(path.parent)


def _stem(path: Path) -> str:
    """The beginning of a partial file's name, cut so that all of it has at most 255 bytes."""
    return os.fsdecode(os.fsencode(path.name)[: 255 - 9 - len(PARTIAL)])


def _create(path: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """A new partial file or folder for `path`, and a descriptor that holds its lock."""
    while True:
        partial = path.with_name(f"{_stem(path)}.{secrets.token_hex(4)}{PARTIAL}")
        _begin(partial)
        try:
            descriptor = make(partial)
        except OSError as error:
            _end(partial)
            if error.errno == errno.EEXIST:
                continue
            raise
        is_ours = _lock(descriptor)
        # Before it was locked, another run may have removed it as stale.
        if is_ours is None or (is_ours and partial.exists()):
            return partial, descriptor
        _end(partial)
        os.close(descriptor)


def try_to_create(path: Path) -> None:
    """Raises OSError if no file can be written next to `path`; leaves nothing behind."""
    partial, descriptor = _create(path, _new_file)
    _remove(partial)
    _end(partial)
    os.close(descriptor)


def _new_file(partial: Path) -> int:
    return os.open(partial, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o666)


def _new_folder(partial: Path) -> int:
    partial.mkdir()
    try:
        return os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError as error:  # another run removed it as stale
        raise FileExistsError(errno.EEXIST, "was removed", partial) from error


def _lock(descriptor: int) -> bool | None:
    """True if this process now has the lock, false if another has it, None without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove(path: Path) -> None:
    """Removes a file or a folder, if it is still there and may be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


@contextmanager
def _folders_for(path: Path) -> Iterator[None]:
    """Makes the missing folders above `path`; removes them again if that or the block fails."""
    with writing(path):  # a name may be too long
        missing = [folder for folder in path.parents if not folder.exists()]
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in missing:
            with suppress(OSError):  # not made, or no longer empty
                folder.rmdir()
        raise


def _sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading ------------------------------------------------------------------------------------


def require_file(path: Path, what: str) -> None:
    """Raises HotsplitError unless `path` is a file, and for a pointer that stands in its place in a
    repository until it is fetched; `what` names it, e.g. "profile"."""
    if not path.is_file():
        found = "is not a regular file" if path.exists() else "no such file"
        found = "is a folder" if path.is_dir() else found
        raise HotsplitError(f"{path}: {found}; wanted a {what}")
    with suppress(OSError), path.open("rb") as file:  # the reader says why it cannot be opened
        start = file.read(POINTER_BYTES)
        for kind, (pattern, command) in POINTERS.items():
            if len(start) < POINTER_BYTES and (pointer := pattern.match(start)):
                raise HotsplitError(
                    f"{path}: is a {kind} pointer to a file of {int(pointer[1]):,} bytes, wanted a"
                    f" {what}; get the file itself with {command} there, or download it"
                )


def known_as(path: Path) -> str | None:
    """The kind of a file by its first bytes, for an error; None if unknown."""
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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
