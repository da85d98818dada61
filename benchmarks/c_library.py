"""Compiles a C source of this folder with any compiler, for this processor, and opens it."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def compiled(source: Path, *flags: str) -> ctypes.CDLL:
    """Raises OSError if there is no compiler, or if it refuses the source."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang", "c++")
    compiler = next((name for name in names if name and shutil.which(name)), None)
    if compiler is None:
        raise OSError("no C compiler here")
    library = Path(tempfile.mkdtemp(prefix=f"{source.stem}-")) / f"{source.stem}.so"
    command = [
        compiler,
        "-x",
        "c",
        "-O3",
        "-march=native",
        *flags,
        "-shared",
        "-fPIC",
        "-pthread",
        str(source),
        "-o",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{source.name} does not compile: {done.stderr.strip()[-200:]}")
    return ctypes.CDLL(str(library))
