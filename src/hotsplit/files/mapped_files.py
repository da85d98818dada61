"""Reports a mapped input that is truncated while it is read, and a library that aborts.

The system then sends SIGBUS, possibly while native code runs, where a Python handler cannot run, so
the handler is C++ (native/mapped_files.cpp). Continuing with other bytes in place of the lost ones
would give wrong results, so the command names the file and ends."""

import ctypes
import faulthandler
import mmap
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

# Reserves no memory for copies of pages that are never written: otherwise a file larger than main
# memory cannot be mapped. Python names it from 3.13 on; 0x4000 is Linux's value.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
EXIT_CODE = 74  # sysexits.h: EX_IOERR

_lib: ctypes.CDLL | None = None


def guard() -> bool:
    """Installs the handlers in this process; true if they are installed. Python's own handler
    (PYTHONFAULTHANDLER) takes precedence."""
    global _lib
    spec = find_spec("hotsplit._mapped")  # finds the file in every kind of install
    if spec is None or spec.origin is None or faulthandler.is_enabled():
        return False
    lib = ctypes.CDLL(spec.origin)
    lib.hs_guard_mapped_files.restype = ctypes.c_int32
    lib.hs_set_unfinished.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    lib.hs_set_unfinished.restype = None
    if lib.hs_guard_mapped_files() != 0:
        return False
    _lib = lib
    return True


def set_unfinished(paths: Iterable[Path]) -> None:
    """Sets the unfinished files that the handler removes (up to 16); it does not remove folders."""
    if _lib is not None:
        names = [os.fsencode(path.absolute()) + b"\0" for path in paths]
        _lib.hs_set_unfinished(b"".join(names), len(names))


def map_whole(stream: BinaryIO) -> mmap.mmap:
    """Maps a whole file copy-on-write, because torch warns of read-only arrays. Raises ValueError
    for an empty file, OSError if it cannot be mapped."""
    return map_part(stream, 0, 0)


def map_part(stream: BinaryIO, start: int, stop: int) -> mmap.mmap:
    """The same of some bytes from a multiple of mmap.ALLOCATIONGRANULARITY on."""
    flags, rights = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(stream.fileno(), stop - start, flags=flags, prot=rights, offset=start)
