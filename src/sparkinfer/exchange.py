"""Replaces a folder with a new one, atomically if the system supports it."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

from sparkinfer.errors import SparkinferError

OLD = ".old"
ATTEMPTS = 100  # to rename a folder while other runs do the same
_AT_CWD, _EXCHANGE = -100, 2  # of renameat2(2)


def put_folder(partial: Path, path: Path) -> None:
    """Renames `partial` to `path`. A folder that had that name ends up at `partial`, or is
    removed."""
    old = partial.with_suffix(OLD)
    for _ in range(ATTEMPTS):
        try:
            if path.exists() and _exchange(partial, path):
                return
            if path.exists():  # not atomic: for a moment nothing has the name
                path.replace(old)
            partial.replace(path)
            return shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            if old.exists() and not path.exists():
                old.replace(path)
            # With these errors, another run has put its own folder there meanwhile, or removed it.
            if error.errno not in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
                raise
    raise SparkinferError(f"{path}: other runs keep replacing it; give another name")


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names atomically; False if the system cannot. Raises FileNotFoundError if one
    is missing."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    if ctypes.get_errno() == errno.ENOENT:
        raise FileNotFoundError(errno.ENOENT, "not there", str(other))
    return False
