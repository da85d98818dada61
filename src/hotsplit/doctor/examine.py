"""Examines this machine. Everything that may crash or take long runs in child processes: first the
probes of kernels, torch, Triton and the driver, in parallel, then the check of GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotsplit.artifacts.device_checks import Say, forget_checks, stored_checks
from hotsplit.doctor import gpu, machine
from hotsplit.doctor.children import Child, Result
from hotsplit.doctor.finding import Finding

CHECK_S = 300.0  # compiling a small model's kernels, with room for a slow machine


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All findings; `is_fine` if none of them is "wrong"."""

    is_fine: bool
    findings: tuple[Finding, ...]


def examine(*, again: bool = False, say: Say = lambda line: None) -> Examination:
    """All findings. With `again`, the stored results of GPU checks are removed first; a GPU is then
    checked again, which takes a minute. `say` gets a line for every longer wait."""
    if again:
        forget_checks()
    kernels, torch, triton, driver = _results(("kernels", "torch", "triton", "driver"), say)
    seen = gpu.gpus_of(torch)
    unfinished = _check(seen, say)
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
        *gpu.checks(stored_checks(), seen, has_gpu=has_gpu, unfinished=unfinished),
    )
    is_fine = all(finding.state != "wrong" for finding in findings)
    return Examination(is_fine=is_fine, findings=findings)


def _results(names: Sequence[str], say: Say = lambda line: None) -> list[Result]:
    """The results of these probes, run in parallel; an interrupt kills them."""
    children: list[Child] = []
    try:
        children += [Child(name) for name in names]
        return [child.result(say) for child in children]
    finally:
        for child in children:
            child.end()


def _check(seen: Sequence[Mapping[str, Any]], say: Say = lambda line: None) -> Result | None:
    """Checks GPUs without a stored result for this configuration; None if there are none."""
    stored = stored_checks()
    missing = [f"cuda:{each['index']}" for each in seen if not gpu.is_checked(each, stored)]
    if not missing:
        return None
    say(f"checking {', '.join(missing)} with a small model: a minute, at most {CHECK_S:g} s")
    child = Child("gpu", *missing, limit_s=CHECK_S)
    try:
        return child.result()
    finally:
        child.end()
