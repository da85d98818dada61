"""The machine and the versions used for a result."""

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path


def machine() -> dict[str, object]:
    packages = ("numpy", "torch", "safetensors", "gguf", "transformers")
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1 << 20),
        "system": platform.system() + " " + platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def processor() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1].strip() if found else "unknown"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\(R\)|\(TM\)", "", name).lower()).strip("-")
