"""Examines this machine. Everything that may crash or take long runs in child processes: first the
probes of kernels, torch, Triton and the driver, in parallel, then the trial of GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotsplit.doctor import gpu_findings as gpu
from hotsplit.doctor import machine_findings as machine
from hotsplit.doctor.children import Child, ProbeResult
from hotsplit.doctor.finding import Finding

TRIAL_S = 300.0  # compiling a small model's kernels, with room for a slow machine
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All findings; `is_fine` if none of them is "wrong"."""

    is_fine: bool
    findings: tuple[Finding, ...]


def examine(say: Say = lambda line: None) -> Examination:
    """All findings. `say` gets a line for every longer wait."""
    kernels, torch, triton, driver = _results(("kernels", "torch", "triton", "driver"), say)
    seen = gpu.gpus_of(torch)
    trials = [_trial(each["index"], say) for each in seen]
    has_gpu = bool(seen) or bool(driver.done and driver.done["gpus"])
    findings = (
        *machine.system(),
        *machine.processor(kernels),
        *machine.memory(),
        *machine.cache(),
        *gpu.torch(torch),
        *gpu.triton(triton, has_gpu=has_gpu),
        *gpu.driver(driver, torch),
        *gpu.gpus(torch, driver),
        *machine.trials(),
        *gpu.trials(trials),
    )
    is_fine = all(finding.state != "wrong" for finding in findings)
    return Examination(is_fine=is_fine, findings=findings)


def _results(names: Sequence[str], say: Say = lambda line: None) -> list[ProbeResult]:
    children: list[Child] = []
    try:
        children += [Child(name) for name in names]
        return [child.result(say) for child in children]
    finally:
        for child in children:
            child.end()


def _trial(index: int, say: Say = lambda line: None) -> ProbeResult:
    device = f"cuda:{index}"
    say(f"trying {device} with a small model: up to a minute, at most {TRIAL_S:g} s")
    child = Child("gpu", device, limit_s=TRIAL_S)
    try:
        return child.result()
    finally:
        child.end()
