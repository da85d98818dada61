"""Sets the thread counts of the C++ kernels and of torch.

Both may use all cores: the kernels' threads sleep soon after a job (cpu/thread_pool.cpp)."""

import logging
import os
from functools import cache
from pathlib import Path

import torch

from hotsplit.options.engine_config import check_threads
from hotsplit.runtime.kernels.cpu import library

log = logging.getLogger(__name__)


def use_threads(count: int | None) -> int:
    """Uses `count` threads (None: one per physical core) for each job; returns their number.

    Raises HotsplitError for an impossible count."""
    check_threads(count)
    if count is None:
        count = physical_cores()
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count > here:
        _note_too_many(count, here)
    torch.set_num_threads(count)
    if library.is_available():
        library.set_threads(count)
    return count


@cache
def _note_too_many(count: int, here: int) -> None:
    """Warns once for each count: `run` sets the threads for its stages and again for the text."""
    log.warning(
        f"note: {count} threads on {here} processors wait for each other; --threads {here} or fewer"
        " is faster"
    )


def physical_cores(topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Number of physical cores that this process may run on, or of processors if the system does
    not report cores."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if allowed is None:
        return os.cpu_count() or 1
    siblings = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in allowed)
    cores = {path.read_text() if path.exists() else str(path) for path in siblings}
    return max(1, len(cores))
