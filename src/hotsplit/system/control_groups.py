"""The control groups (containers, services) that limit this process.

A limit of any group above a process's own holds for it too, so all of them are listed."""

from pathlib import Path
from typing import Literal

ROOT = Path("/")  # of the system's files; tests have one of their own


def groups_of(controller: Literal["cpu", "memory"]) -> list[tuple[Path, int]]:
    """The folders of the groups that this process is in, each with its version of control groups,
    1 or 2; files of a limit may be missing in any of them."""
    try:
        lines = (ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount = ROOT / "sys/fs/cgroup"
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            top, version = mount, 2
        elif controller in controllers.split(","):
            # Mounted under all controllers' names, e.g. cpu,cpuacct; systemd adds links of each.
            together = mount / controllers
            top, version = together if together.is_dir() else mount / controller, 1
        else:
            continue
        # In a container the path may be the host's, and the container's own group is at the top.
        group = top / path.lstrip("/")
        found += [(each, version) for each in (group, *group.parents) if each.is_relative_to(top)]
    return found
