"""How much main memory this machine has."""

import os
from pathlib import Path


def free_memory_bytes() -> int:
    """What processes can still take, the system's cache of files included."""
    return memory_bytes()[1]


def memory_bytes() -> tuple[int, int]:
    """(all, available) bytes of main memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return total, int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return total, os.sysconf("SC_AVPHYS_PAGES") * page
