"""Findings on torch, Triton, the driver and GPUs, and the stored results of their checks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hotsplit.artifacts.device_checks import (
    Checks,
    DeviceKey,
    Verdict,
    installed_version,
    name_of_part,
)
from hotsplit.doctor.children import Result
from hotsplit.doctor.finding import Finding, note, ok, wrong
from hotsplit.doctor.machine import REBUILD, is_wsl
from hotsplit.system.sizes import format_bytes

LEAST_CAPABILITY = 7.5  # the lowest for which torch's wheels for CUDA 12.8 and later have code
BF16_CAPABILITY = 8.0
INSTALL_TORCH = "pip install torch"
MOST_LETTERS = 300
# Display names of a key's fields.
_WORDS = {"package": "hotsplit", "triton": "Triton", "memory_bytes": "amount of memory"}


def torch(found: Result) -> list[Finding]:
    if found.done is None:
        return [wrong("torch", f"importing and using it {_ended(found)}", "reinstall torch for this"
                      " processor and Python")]  # fmt: skip
    done = found.done
    if "error" in done:
        if done["is_missing"]:
            return [wrong("torch", "is not installed: no model can be run", INSTALL_TORCH)]
        text = f"cannot be imported: {done['error'][:MOST_LETTERS]}"
        return [wrong("torch", text, "install torch again")]
    if not done["is_right"]:
        return [
            wrong("torch", f"{done['version']} multiplies matrices wrongly", "install torch again")
        ]
    cuda = f"for CUDA {done['cuda']}" if done["cuda"] else "for the CPU"
    findings = [ok("torch", f"{done['version']}, {cuda}")]
    if done["runtime_error"]:
        why = f"the C++ library cannot be used: {done['runtime_error'][:MOST_LETTERS]}"
        findings.append(wrong("runtime", why, REBUILD))
    return findings


def driver(found: Result, torch_found: Result) -> list[Finding]:
    """The driver, and whether torch can use its GPUs."""
    if found.done is None:
        return [wrong("driver", f"querying it {_ended(found)}", "reinstall NVIDIA's driver")]
    done, gpus = found.done, gpus_of(torch_found)
    seen = done["gpus"] or gpus
    if not done["cuda"] and not seen:
        advice = "in a container, pass the GPU in (--gpus all)" if not is_wsl() else (
            "install NVIDIA's driver in Windows, not in WSL"
        )  # fmt: skip
        return [note("driver", "no NVIDIA driver: everything runs on the CPU",
                     f"with a GPU: {advice}")]  # fmt: skip
    text = f"{done['driver'] or 'unknown version'}, CUDA up to {done['cuda'] or 'unknown'}"
    if gpus or torch_found.done is None or "error" in torch_found.done:
        return [ok("driver", text)]
    built, error = torch_found.done["cuda"], torch_found.done.get("gpu_error")
    why = f": {error[:MOST_LETTERS]}" if error else "" if built else ": it is built for the CPU"
    if not built:
        advice = "install torch for CUDA (its wheel without +cpu)"
    elif done["cuda"] and _number(done["cuda"]) < _number(built):
        advice = (
            f"the driver is older than torch's CUDA {built}: update it, or install an older torch"
        )
    else:
        advice = "check whether CUDA_VISIBLE_DEVICES hides it, and whether nvidia-smi lists it"
    return [wrong("driver", f"{text}, but torch sees no GPU{why}", advice)]


def triton(found: Result, *, has_gpu: bool) -> list[Finding]:
    """Triton, its compiler and its cache; without a GPU, a problem is only a note."""
    problem = wrong if has_gpu else note
    later = "" if has_gpu else " (only a GPU needs it)"
    if found.done is None:
        return [problem("triton", f"importing it {_ended(found)}{later}", "reinstall triton")]
    done = found.done
    if "error" in done:
        text = (
            "is not installed" if done["is_missing"] else f"fails: {done['error'][:MOST_LETTERS]}"
        )
        return [problem("triton", f"{text}: torch replaces its kernels, more slowly{later}",
                        "pip install triton")]  # fmt: skip
    size = f"{done['num_files']:,} files of {format_bytes(done['num_bytes'])} in its cache"
    lines = [ok("triton", f"{done['version']}, {size}")]
    if not done["can_write"]:
        lines.append(problem("triton", f"its cache cannot be written, so every load compiles{later}",
                             "set TRITON_CACHE_DIR to another folder"))  # fmt: skip
    missing = [] if done["compiler"] else ["a C compiler"]
    missing += [] if done["has_headers"] else ["Python's headers"]
    if missing:
        lines.append(problem("compiler", f"{' and '.join(missing)} not found; Triton needs"
                             f" them to build its launchers{later}", "apt install gcc python3-dev, or the"
                             " like"))  # fmt: skip
    return lines


def gpus(torch_found: Result, driver_found: Result) -> list[Finding]:
    """Each GPU with its free memory, as reported by torch or else by the driver."""
    seen = gpus_of(torch_found)
    if not seen and driver_found.done is not None:
        seen = driver_found.done["gpus"]
    return [finding for gpu in seen for finding in _gpu(gpu)]


def _gpu(gpu: Mapping[str, Any]) -> list[Finding]:
    about, capability = f"GPU {gpu['index']}", _number(gpu["capability"])
    text = (
        f"{gpu['name']}, compute capability {gpu['capability']}, {format_bytes(gpu['free'])} free of"
        f" {format_bytes(gpu['total'])}"
    )
    if capability < LEAST_CAPABILITY:
        return [wrong(about, f"{text}: below {LEAST_CAPABILITY}, the lowest that torch's wheels for"
                      " CUDA 12.8 and later support", "use --device cpu")]  # fmt: skip
    if capability < BF16_CAPABILITY:
        return [note(about, f"{text}: it has no bf16, so a bf16 model may run slower on it",
                     "convert with --outtype f16 or a quantised type")]  # fmt: skip
    return [ok(about, text)]


def is_checked(gpu: Mapping[str, Any], stored: Sequence[Checks]) -> bool:
    """True if a load would find results for this GPU (without a key: for its number)."""
    now = gpu.get("key")
    if now is not None:
        return any(asdict(each.key) == now for each in stored)
    return any(each.key.index == gpu["index"] for each in stored)


def checks(
    stored: Sequence[Checks],
    seen: Sequence[Mapping[str, Any]] = (),
    *,
    has_gpu: bool,
    unfinished: Result | None,
) -> list[Finding]:
    """Findings from the stored results of GPU checks: for each GPU those that a load would use, or
    the latest. `seen` are the GPUs as torch reports them."""
    crash = []
    if unfinished is not None and unfinished.done is None:
        crash = [wrong("check of the GPU", _ended(unfinished), "load a model: parts that crashed the"
                       " process are not used")]  # fmt: skip
    now = {gpu["index"]: gpu["key"] for gpu in seen if gpu.get("key") is not None}
    by_use = sorted(reversed(stored), key=lambda each: not _changes(each.key, now))  # noqa: C414  # of equals the last comes first
    used = {(each.key.index, each.key.device): each for each in by_use}
    found = [finding for each in used.values() for finding in _check(each, now)]
    if not found and not crash and has_gpu:
        return [note("check of the GPU", "has not been run", "load a model with the GPU")]
    return crash + found


def _changes(key: DeviceKey, now: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """The fields in which the system differs from the one that was checked. If torch does not see
    the GPU, only the versions of torch, Triton and hotsplit are compared."""
    if key.index in now:
        found, of = asdict(key), now[key.index]
        return [name for name in found if found[name] != of.get(name)]
    packages = {"torch": "torch", "triton": "triton", "package": "hotsplit"}
    return [
        field for field, name in packages.items() if getattr(key, field) != installed_version(name)
    ]


def _check(stored: Checks, now: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    key = stored.key
    about = f"check of {key.device}, number {key.index}"
    with_ = f"driver {key.driver}, torch {key.torch}, Triton {key.triton or 'none'}"
    changes = _changes(key, now)
    failed = [verdict for verdict in stored.verdicts.values() if not verdict.is_fine]
    reasons = list(dict.fromkeys(verdict.why for verdict in failed))
    lines = [
        (note if changes else wrong)(
            about, f"{_parts(failed, why)}: {why}",
            "its fallback is used; if the system has changed, hotsplit doctor --again checks again",
        )
        for why in reasons
    ]  # fmt: skip
    if stored.started is not None:
        lines.append(note(about, f"{stored.started}: is being checked, or its check crashed"))
    if changes:
        words = ", ".join(_WORDS.get(name, name) for name in changes)
        return [
            note(about, f"was made with another {words} ({with_}); the next load checks again"),
            *lines,
        ]
    count = len(stored.verdicts) - len(failed)
    work = "part works" if count == 1 else "parts work"
    return [ok(about, f"{count} {work} with {with_}"), *lines]


def _parts(failed: Sequence[Verdict], why: str) -> str:
    """The parts that failed for one reason; if all of them are kernels, only the kernels' names."""
    parts = [verdict.part for verdict in failed if verdict.why == why]
    if len(parts) > 1 and all(part.startswith("kernel ") for part in parts):
        return f"kernels {', '.join(sorted({part.split(' ')[1] for part in parts}))}"
    return ", ".join(map(name_of_part, parts))


def gpus_of(found: Result) -> list[Mapping[str, Any]]:
    """The GPUs that torch sees."""
    return list(found.done.get("gpus", ())) if found.done is not None else []


def _ended(found: Result) -> str:
    return found.why if found.how.startswith(("crashed", "took")) else f"fails: {found.why}"


def _number(text: str) -> float:
    """A version "major.minor" as a number; 0 if it is not one."""
    try:
        return float(text)
    except (ValueError, TypeError):
        return 0.0
