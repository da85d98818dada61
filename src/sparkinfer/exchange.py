"""A new folder in the place of one that there is, at once where the system can.

What this module does not know: what is in them (files)."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

from sparkinfer.errors import SparkinferError

OLD = ".old"
ATTEMPTS = 100  # to give a folder its name, where other runs do too
_AT_CWD, _EXCHANGE = -100, 2  # of renameat2(2)


def put_folder(partial: Path, path: Path) -> None:
    """Gives a folder its name. What had it before is at `partial` then, or gone."""
    old = partial.with_suffix(OLD)
    for _ in range(ATTEMPTS):
        try:
            if path.exists() and _exchange(partial, path):
                return
            if path.exists():  # for a moment nothing has the name
                path.replace(old)
            partial.replace(path)
            return shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            if old.exists() and not path.exists():
                old.replace(path)
            # Another run has put its own there, or taken it away, in between.
            if error.errno not in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
                raise
    raise SparkinferError(f"{path}: other runs write it again and again; give another name")


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names at once; False where the system cannot. Raises FileNotFoundError."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    if ctypes.get_errno() == errno.ENOENT:
        raise FileNotFoundError(errno.ENOENT, "not there", str(other))
    return False
