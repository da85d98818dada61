"""Findings on torch, Triton, the driver and GPUs, and on trials of these."""

from collections.abc import Mapping, Sequence
from typing import Any

from hotsplit.doctor.children import ProbeResult
from hotsplit.doctor.finding import Finding, note, ok, wrong
from hotsplit.doctor.machine_findings import REBUILD, is_wsl
from hotsplit.system.sizes import format_bytes

LEAST_CAPABILITY = 7.5  # the lowest for which torch's wheels for CUDA 12.8 and later have code
BF16_CAPABILITY = 8.0
INSTALL_TORCH = "pip install torch"
MOST_LETTERS = 300


def torch(found: ProbeResult) -> list[Finding]:
    if found.done is None:
        advice = "reinstall torch for this processor and Python"
        return [wrong("torch", f"importing and using it {_ended(found)}", advice)]
    done = found.done
    if "error" in done:
        if done["is_missing"]:
            return [wrong("torch", "is not installed: no model can be run", INSTALL_TORCH)]
        text = f"cannot be imported: {done['error'][:MOST_LETTERS]}"
        return [wrong("torch", text, "install torch again")]
    if not done["is_right"]:
        text = f"{done['version']} multiplies matrices wrongly"
        return [wrong("torch", text, "install torch again")]
    cuda = f"for CUDA {done['cuda']}" if done["cuda"] else "for the CPU"
    findings = [ok("torch", f"{done['version']}, {cuda}")]
    if done["runtime_error"]:
        why = f"the C++ library cannot be used: {done['runtime_error'][:MOST_LETTERS]}"
        findings.append(wrong("runtime", why, REBUILD))
    return findings


def driver(found: ProbeResult, torch_found: ProbeResult) -> list[Finding]:
    """The driver, and whether torch can use its GPUs."""
    if found.done is None:
        return [wrong("driver", f"querying it {_ended(found)}", "reinstall NVIDIA's driver")]
    done, gpus = found.done, gpus_of(torch_found)
    seen = done["gpus"] or gpus
    if not done["cuda"] and not seen:
        advice = "in a container, pass the GPU in (--gpus all)"
        if is_wsl():
            advice = "install NVIDIA's driver in Windows, not in WSL"
        text = "no NVIDIA driver: everything runs on the CPU"
        return [note("driver", text, f"with a GPU: {advice}")]
    text = f"{done['driver'] or 'unknown version'}, CUDA up to {done['cuda'] or 'unknown'}"
    if gpus or torch_found.done is None or "error" in torch_found.done:
        return [ok("driver", text)]
    built, error = torch_found.done["cuda"], torch_found.done.get("gpu_error")
    why = f": {error[:MOST_LETTERS]}" if error else "" if built else ": it is built for the CPU"
    if not built:
        advice = "install torch for CUDA (its wheel without +cpu)"
    elif done["cuda"] and _number(done["cuda"]) < _number(built):
        advice = (
            f"update the driver, which is older than torch's CUDA {built}, or take an older torch"
        )
    else:
        advice = "check whether CUDA_VISIBLE_DEVICES hides it, and whether nvidia-smi lists it"
    return [wrong("driver", f"{text}, but torch sees no GPU{why}", advice)]


def triton(found: ProbeResult, *, has_gpu: bool) -> list[Finding]:
    """Triton, its compiler and its cache; without a GPU, a problem is only a note."""
    problem = wrong if has_gpu else note
    later = "" if has_gpu else " (only a GPU needs it)"
    if found.done is None:
        return [problem("triton", f"importing it {_ended(found)}{later}", "reinstall triton")]
    done = found.done
    if "error" in done:
        error = f"fails: {done['error'][:MOST_LETTERS]}"
        text = "is not installed" if done["is_missing"] else error
        return [problem("triton", f"{text}: models run on the CPU{later}", "pip install triton")]
    size = f"{done['num_files']:,} files of {format_bytes(done['num_bytes'])} in its cache"
    lines = [ok("triton", f"{done['version']}, {size}")]
    if not done["can_write"]:
        text = f"its cache cannot be written, so every load compiles{later}"
        lines.append(problem("triton", text, "set TRITON_CACHE_DIR to another folder"))
    missing = [] if done["compiler"] else ["a C compiler"]
    missing += [] if done["has_headers"] else ["Python's headers"]
    if missing:
        text = f"{' and '.join(missing)} not found; Triton needs them to build its launchers{later}"
        lines.append(problem("compiler", text, "apt install gcc python3-dev, or the like"))
    return lines


def gpus(torch_found: ProbeResult, driver_found: ProbeResult) -> list[Finding]:
    """Each GPU with its free memory, as reported by torch or else by the driver."""
    seen = gpus_of(torch_found)
    if not seen and driver_found.done is not None:
        seen = driver_found.done["gpus"]
    return [finding for gpu in seen for finding in _gpu(gpu)]


def _gpu(gpu: Mapping[str, Any]) -> list[Finding]:
    about, capability = f"GPU {gpu['index']}", _number(gpu["capability"])
    text = (
        f"{gpu['name']}, compute capability {gpu['capability']}, {format_bytes(gpu['free'])} free"
        f" of {format_bytes(gpu['total'])}"
    )
    if capability < LEAST_CAPABILITY:
        text += (
            f": below {LEAST_CAPABILITY}, the lowest that torch's wheels for CUDA 12.8 and"
            " later support"
        )
        return [wrong(about, text, "use --device cpu")]
    if capability < BF16_CAPABILITY:
        text += ": it has no bf16, so a bf16 model may run slower on it"
        return [note(about, text, "convert with --outtype f16 or a quantised type")]
    return [ok(about, text)]


def trials(results: Sequence[ProbeResult]) -> list[Finding]:
    """Whether a small model on each GPU gives the CPU's logits."""
    found = []
    for index, result in enumerate(results):
        about, why = f"trial of GPU {index}", f"a small model {_ended(result)}"
        if result.done is not None:
            if result.done["why"] is None:
                found.append(ok(about, "a small model gives the CPU's logits"))
                continue
            why = result.done["why"]
        advice = "models run on the CPU; update NVIDIA's driver, torch and triton"
        found.append(wrong(about, why, advice))
    return found


def gpus_of(found: ProbeResult) -> list[Mapping[str, Any]]:
    """The GPUs that torch sees."""
    return list(found.done.get("gpus", ())) if found.done is not None else []


def _ended(found: ProbeResult) -> str:
    return found.why if found.how.startswith(("crashed", "took")) else f"fails: {found.why}"


def _number(text: str) -> float:
    """A version "major.minor" as a number; 0 if it is not one."""
    try:
        return float(text)
    except (ValueError, TypeError):
        return 0.0
