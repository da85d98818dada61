"""Findings on the system, the processor and its kernels, memory, and the cache folder."""

import platform
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hotsplit.artifacts.trial_file import MISSED, Trial
from hotsplit.doctor.children import ProbeResult
from hotsplit.doctor.finding import Finding, note, ok, wrong
from hotsplit.errors import HotsplitError
from hotsplit.runtime.kernels.cpu.shared_library import LEVEL_VARIABLE, LEVELS
from hotsplit.system.cache_place import VARIABLE, cache_folder
from hotsplit.system.processors import processor_name, processors
from hotsplit.system.sizes import format_bytes
from hotsplit.system.system_memory import free_memory_bytes, memory_bytes, memory_limit_bytes

LITTLE_BYTES = 2 << 30
_KERNEL = Path("/proc/sys/kernel/osrelease")
_IN_CONTAINER = (Path("/.dockerenv"), Path("/run/.containerenv"))
REBUILD = "install the package again, or run make build in the repository"


def system() -> list[Finding]:
    """Versions, and the kind of system."""
    try:
        own = version("hotsplit")
    except PackageNotFoundError:
        own = "not installed"
    python = f"Python {platform.python_version()}, hotsplit {own}"
    where = f"{platform.system()} on {platform.machine()}"
    if is_wsl():
        where += ", under WSL"
    elif any(path.exists() for path in _IN_CONTAINER):
        where += ", in a container"
    return [ok("versions", f"{python}, {where}")]


def is_wsl() -> bool:
    try:
        return "microsoft" in _KERNEL.read_text().lower()
    except OSError:
        return False


def processor(kernels: ProbeResult) -> list[Finding]:
    """The processor, the C++ library, and the levels that it can run."""
    here = processors()
    text = f"{processor_name()}, {here.usable} of {here.in_machine} threads allowed"
    text += "" if here.quota is None else f", by a CPU quota of {here.quota:g}"
    text += f", {len(here.nodes)} memory nodes" if len(here.nodes) > 1 else ""
    found = [ok("processor", f"{text}; {here.threads} are used")]
    if kernels.done is None:
        verb = "cannot be tried:" if "No module" in kernels.how else "fails:"
        text = f"the C++ library {verb} {kernels.why}"
        advice = f"set {LEVEL_VARIABLE} to a lower level, e.g. generic, or {REBUILD}"
        return [*found, wrong("kernels", text, advice)]
    if not kernels.done["is_built"]:
        text = "the C++ library is missing: no model can be run"
        return [*found, wrong("kernels", text, REBUILD)]
    return [*found, *_levels(kernels.done)]


def _levels(done: Mapping[str, Any]) -> list[Finding]:
    usable, forced = list(done["usable"]), done["forced"]
    text = f"{done['level']} is the best of {', '.join(usable)}"
    found = [ok("kernels", text)]
    if done["faulty"] is not None:
        text = f"the processor advertises {done['faulty']}, whose instructions fail here; {text}"
        found = [note("kernels", text, "nothing: that level is left out")]
    if forced is None:
        return found
    if forced not in LEVELS:
        why = f"is not a level; known: {', '.join(LEVELS)}"
    elif forced not in usable:
        why = f"cannot run on this processor, which has {', '.join(usable)}"
    else:
        advice = f"unset it for {done['level']}" if forced != done["level"] else ""
        return [*found, note("kernels", f"{LEVEL_VARIABLE}={forced} is set and used", advice)]
    advice = f"unset {LEVEL_VARIABLE}: until then every command that loads a model is refused"
    return [*found, wrong("kernels", f"{LEVEL_VARIABLE}={forced!r} {why}", advice)]


def memory() -> list[Finding]:
    total, _ = memory_bytes()
    free, most = free_memory_bytes(), memory_limit_bytes()
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    text += f"; this process may use {format_bytes(most)}" if most < total else ""
    if free >= LITTLE_BYTES:
        return [ok("memory", text)]
    advice = "end other programs, or raise the limit of the container or shell (ulimit -v)"
    return [note("memory", text, advice)]


def trials() -> list[Finding]:
    """Plans that `run` has tried, with their predictions."""
    findings = []
    with suppress(HotsplitError, OSError):
        for path in sorted(cache_folder().glob("trial-*/trial.json")):
            with suppress(HotsplitError, OSError):  # `run` makes a damaged one again
                trial = Trial.load(path)
                about, text = "trial of a plan", f"{trial.line}; {trial.parts_line}"
                is_missed = trial.ratio is None or trial.ratio > MISSED
                advice = "if another program was busy then: hotsplit cache clear machine trial"
                findings.append(note(about, text, advice) if is_missed else ok(about, text))
    return findings


def cache() -> list[Finding]:
    """Whether the cache folder can be written."""
    try:
        folder = cache_folder()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there) as file:  # for root, permissions prove nothing
            file.write(bytes(4096))
        free = shutil.disk_usage(there).free
        return [ok("cache", f"{folder} can be written, {format_bytes(free)} free")]
    except (HotsplitError, OSError, StopIteration):
        text = "the cache folder cannot be written, so run cannot prepare models"
        return [wrong("cache", text, f"set {VARIABLE} to another folder")]
