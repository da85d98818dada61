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
    """The processor's name, with its family if the name contains no number: "AMD EPYC" alone may be
    a Zen 4 (family 25) or a Zen 5 (family 26)."""
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"model name\s*:\s*(.+)", text)
    if found is None:
        return "unknown"
    name = found[1].strip()
    family = re.search(r"cpu family\s*:\s*(\d+)", text)
    return name if family is None or re.search(r"\d", name) else f"{name} (family {family[1]})"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\(R\)|\(TM\)", "", name).lower()).strip("-")
