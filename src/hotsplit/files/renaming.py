"""Gives a finished file or folder its name, atomically if the system supports it."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

from hotsplit.errors import HotsplitError

OLD = ".old"
ATTEMPTS = 100  # to rename a folder while other runs do the same
_AT_CWD, _NO_REPLACE, _EXCHANGE = -100, 1, 2  # of renameat2(2)


def put_folder(partial: Path, path: Path) -> None:
    """Renames `partial` to `path`; an old folder ends up at `partial`, or is removed."""
    old = partial.with_suffix(OLD)
    for _ in range(ATTEMPTS):
        try:
            if path.exists() and _exchange(partial, path):
                return None
            if path.exists():  # not atomic: for a moment nothing has the name
                path.replace(old)
            partial.replace(path)
            return shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            if old.exists() and not path.exists():
                old.replace(path)
            # These errors mean that another run has put its folder there meanwhile, or removed one.
            if error.errno not in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
                raise
    raise HotsplitError(f"{path}: other runs keep replacing it; give another name")


def _exchange(one: Path, other: Path) -> bool:
    return _renamed(one, other, _EXCHANGE)


def put_new(partial: Path, path: Path) -> None:
    """Renames `partial` to `path`; raises FileExistsError if something has that name. Of two runs
    that do this at the same time, one fails. Without renameat2, a file is linked to its name
    instead, or, on a file system without links, replaces an empty file that was made under that
    name; a run that is killed in between leaves the empty one. A folder is then renamed after a
    check, and may replace an empty folder that appeared in between."""
    if _renamed(partial, path, _NO_REPLACE):
        return None
    if partial.is_dir():
        return _put_new_folder(partial, path)
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        # An empty file, which fails if something has the name, is renamed over.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        try:
            partial.replace(path)
        except BaseException:
            if partial.exists():  # a signal may also come after the renaming
                path.unlink()
            raise
    else:
        partial.unlink()


def _put_new_folder(partial: Path, path: Path) -> None:
    try:
        if os.path.lexists(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        partial.rename(path)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None


def _renamed(one: Path, other: Path, how: int) -> bool:
    """True if renameat2 did it. Raises FileNotFoundError and FileExistsError; else False."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), how) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOENT, errno.EEXIST):
        raise OSError(number, os.strerror(number), str(other))
    return False
