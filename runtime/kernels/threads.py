"""How many threads the runtime takes: ours and torch's alike.

Ours sleep while torch computes and torch's while ours do, so both may have all cores."""

import os
from pathlib import Path

import torch

from sparkinfer.errors import SparkinferError
from sparkinfer.runtime.kernels.cpu import library

MOST_THREADS = 1024


def use_threads(count: int | None) -> int:
    """Lets `count` threads (None: one a physical core) share each job; returns how many.

    Raises SparkinferError for a count that cannot be."""
    if count is None:
        count = physical_cores()
    if not 1 <= count <= MOST_THREADS:
        raise SparkinferError(f"--threads is {count}, wanted 1 to {MOST_THREADS}")
    torch.set_num_threads(count)
    if library.is_available():
        library.set_threads(count)
    return count


def physical_cores(topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Cores that this process may run on, two hardware threads of one core counting once; where
    the system does not tell, the processors it may run on."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if allowed is None:
        return os.cpu_count() or 1
    siblings = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in allowed)
    cores = {path.read_text() if path.exists() else str(path) for path in siblings}
    return max(1, len(cores))
