"""Emulates a full disk with a preloaded library (full_disk.c): writes to files fail once the bytes
granted by `leave` are written."""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE = "FULL_DISK_LIBRARY"


def preload() -> None:
    """Restarts this program with the library, unless it is loaded or there is no C compiler."""
    compiler = shutil.which("cc")
    if is_loaded() or compiler is None:
        return
    library = Path(tempfile.mkdtemp(prefix="full-disk-"), "full_disk.so")
    source = Path(__file__).with_name("full_disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    more = {"LD_PRELOAD": str(library), VARIABLE: str(library)}
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | more)


def is_loaded() -> bool:
    return VARIABLE in os.environ


def leave(count: int) -> None:
    """Lets this process write `count` more bytes to files; -1 is no limit."""
    library = ctypes.CDLL(os.environ[VARIABLE])
    ctypes.c_long.in_dll(library, "disk_left").value = count


def remove() -> None:
    """Deletes the library's folder; to be called once, at the end."""
    if is_loaded():
        shutil.rmtree(Path(os.environ[VARIABLE]).parent, ignore_errors=True)
