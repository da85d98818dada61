"""Result files, with the machine and the versions that made them."""

import json
import os
import platform
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from hotsplit.files.atomic import partial_file
from hotsplit.system.processors import processors

RESULTS = Path(__file__).parent / "results"


def result_of(benchmark: str, **facts: object) -> dict[str, object]:
    """The start of a result: what is measured, when, where, under what load."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    here = {"time": now, "machine": machine(), "load_before": os.getloadavg()}
    return {"benchmark": benchmark, **here, **facts}


def write_result(result: Mapping[str, object], name: str, output: Path | None = None) -> Path:
    """Writes a result to `output`, by default results/NAME-PROCESSOR.json; returns the path."""
    path = path_of(name, output)
    with partial_file(path) as partial:
        partial.write_text(json.dumps(result, indent=2) + "\n")
    return path


def path_of(name: str, output: Path | None) -> Path:
    return output or RESULTS / f"{name}-{slug(processor())}.json"


def add_to_result(result: Mapping[str, object], name: str, output: Path | None = None) -> Path:
    """`write_result`, with what an earlier result at this place has and this one lacks."""
    path = path_of(name, output)
    earlier = json.loads(path.read_text()) if path.exists() else {}
    return write_result(_over(earlier, result), name, output)


def _over(earlier: Mapping[str, object], result: Mapping[str, object]) -> dict[str, object]:
    both = {**earlier, **result}
    for key in earlier.keys() & result.keys():
        before, now = earlier[key], result[key]
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            both[key] = _over(before, now)
    return both


def machine() -> dict[str, object]:
    packages = ("numpy", "torch", "safetensors", "gguf", "transformers")
    return {
        "processor": processor(),
        "cores": processors().usable,
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
