"""Child process that checks whether Triton can be imported, whether it has a compiler and Python's
headers, and whether its kernel cache can be written and how large it is."""

import os
import shutil
import sysconfig
from pathlib import Path

from hotsplit.doctor.children import leave_no_core, tell_at, tell_done


def main() -> None:
    leave_no_core()
    compiler = os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    found = {
        "compiler": None if compiler is None else Path(compiler.split()[0]).name,
        "has_headers": headers.is_file(),
    }
    tell_at("import triton")
    try:
        import triton
        from triton import knobs

        folder = Path(knobs.cache.dir)
    except (ImportError, OSError, AttributeError) as error:
        tell_done({**found, "error": f"{type(error).__name__}: {error}",
                   "is_missing": getattr(error, "name", None) == "triton"})  # fmt: skip
        return
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    can_write = os.access(next(p for p in (folder, *folder.parents) if p.exists()), os.W_OK)
    tell_done({**found, "version": triton.__version__, "num_files": len(sizes),
               "num_bytes": sum(sizes), "can_write": can_write})  # fmt: skip


if __name__ == "__main__":
    main()
