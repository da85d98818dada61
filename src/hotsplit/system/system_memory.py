"""Main memory of this machine, and how much of it this process may use."""

import os
import resource
from pathlib import Path

from hotsplit.errors import HotsplitError
from hotsplit.system.control_groups import groups_of
from hotsplit.system.sizes import format_bytes

# Files of a group's limit and use, and the key of its cache in memory.stat, by version.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
# A group without a limit has "max" (version 2) or a number near 2^63 (version 1).
_NO_LIMIT = 1 << 60


def free_memory_bytes() -> int:
    """Bytes that this process can still allocate, reclaimable page cache included, within the
    limits of its control groups (containers, services) and of its address space."""
    most = address_space_bytes()
    left = [] if most is None else [max(0, most - _mapped_bytes())]
    return min([memory_bytes()[1], *_left_by_groups(), *left])


def own_memory_bytes() -> int:
    """Bytes of main memory that this process has written, without pages of files; 0 if the system
    does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(dict(line.split(":", 1) for line in lines)["RssAnon"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def memory_limit_bytes() -> int:
    """Bytes that this process may use at most, whatever else is running."""
    limits = [_limit(group, _FILES[version][0]) for group, version in groups_of("memory")]
    limits.append(address_space_bytes())
    return min([memory_bytes()[0], *(limit for limit in limits if limit is not None)])


def address_space_bytes() -> int | None:
    """The limit on the address space (ulimit -v), which mapped files count towards, or None."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if most == resource.RLIM_INFINITY else most


def advice_on_memory() -> str:
    """What to do where an allocation or a mapping failed."""
    most = address_space_bytes()
    if most is None:
        return "use smaller sizes, or more memory"
    return f"raise the limit on address space (ulimit -v), now {format_bytes(most)}"


def check_address_space(num_bytes: int, what: str) -> None:
    """Raises HotsplitError if the limit on address space leaves less than `num_bytes`. Libraries
    abort where they find out themselves."""
    most = address_space_bytes()
    if most is not None and most - _mapped_bytes() < num_bytes:
        raise HotsplitError(
            f"no address space for {format_bytes(num_bytes)} {what}; {advice_on_memory()}"
        )


def _mapped_bytes() -> int:
    """The address space in use; 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of main memory of the machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return total, int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return total, os.sysconf("SC_AVPHYS_PAGES") * page


def _left_by_groups() -> list[int]:
    """The bytes left in each control group with a limit that this process is in, at any depth: the
    limit minus the group's use, not counting inactive page cache."""
    found = [_left(group, *_FILES[version]) for group, version in groups_of("memory")]
    return [left for left in found if left is not None]


def _limit(group: Path, limit_name: str) -> int | None:
    """The limit of a group in bytes; None: it has none."""
    try:
        limit = (group / limit_name).read_text().strip()
    except OSError:
        return None
    return int(limit) if limit.isdecimal() and int(limit) < _NO_LIMIT else None


def _left(group: Path, limit_name: str, used_name: str, cached_name: str) -> int | None:
    """The bytes left in a group; None: it has no limit, or its use is unknown."""
    limit = _limit(group, limit_name)
    if limit is None:
        return None
    try:
        used = int((group / used_name).read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        cached = int(dict(line.split(" ", 1) for line in lines).get(cached_name, "0"))
    except (OSError, ValueError):
        return None
    return max(0, limit - max(0, used - cached))
