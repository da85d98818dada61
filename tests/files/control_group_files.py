"""Control-group files in a folder, as a container sees them."""

from pathlib import Path

# `docker run --cpus=2`: version 2; version 1, whose path is the host's; and version 1 as systemd
# mounts it, with two controllers together.
TWO_PROCESSORS = {
    "version 2": ("0::/\n", {"cpu.max": "200000 100000"}),
    "version 1": (
        "5:cpu:/docker/3f\n0::/\n",
        {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"},
    ),
    "version 1, together": (
        "5:cpu,cpuacct:/docker/3f\n0::/\n",
        {"cpu,cpuacct/cpu.cfs_quota_us": "100000", "cpu,cpuacct/cpu.cfs_period_us": "50000"},
    ),
    "nested": (
        "0::/pod/box\n",
        {
            "cpu.max": "max 100000",
            "pod/cpu.max": "250000 100000",
            "pod/box/cpu.max": "400000 100000",
        },
    ),
}


def write_groups(root: Path, lines: str, files: dict[str, str]) -> None:
    """Writes /proc/self/cgroup and files of /sys/fs/cgroup below `root`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
