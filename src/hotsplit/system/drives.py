"""Which drive a path is on, by what the kernel says: its block device, whether it rotates, and
whether it is behind a network. Linux only; elsewhere nothing is known."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DriveKind = Literal["solid state", "rotating", "network", "memory", "unknown"]
NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "ceph",
    "glusterfs",
    "lustre",
    "fuse.sshfs",
}
IN_MEMORY = {"tmpfs", "ramfs"}
# Files of a block device in /sys that say which one it is, the first that has anything.
_NAMES = ("wwid", "device/wwid", "device/serial", "serial", "dm/uuid", "md/uuid")


@dataclass(frozen=True, kw_only=True)
class DriveOfPath:
    """`identity` is of the device, wherever it is mounted: a hash of its serial number, or its
    device number where it has none; of a network drive, a hash of the server's name for it."""

    name: str  # e.g. "nvme0n1", or the type of a file system without a block device
    identity: str
    kind: DriveKind


def drive_of(path: Path, sys: Path = Path("/sys"), mounts: Path | None = None) -> DriveOfPath:
    """The drive of a file or a folder that exists. Raises OSError if it does not."""
    number = path.stat().st_dev
    file_system, source = _mount(path, mounts or Path("/proc/self/mountinfo"))
    if file_system in IN_MEMORY:
        return DriveOfPath(name=file_system, identity=file_system, kind="memory")
    if file_system in NETWORK:
        return DriveOfPath(name=file_system, identity=_hashed(source), kind="network")
    if os.major(number) == 0 and source.startswith("/dev/"):  # e.g. btrfs
        number = Path(source).stat().st_rdev
    device = sys / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    if not device.exists():
        name = file_system or "unknown"
        return DriveOfPath(name=name, identity=_hashed(f"{name} {number}"), kind="unknown")
    folder = device.resolve()
    folder = folder.parent if (folder / "partition").exists() else folder
    kind: DriveKind = "rotating" if _read(folder / "queue/rotational") == "1" else "solid state"
    known = next((text for name in _NAMES if (text := _read(folder / name))), "")
    return DriveOfPath(
        name=folder.name,
        identity=_hashed(known or f"{_read(folder / 'dev')} {_read(folder / 'size')}"),
        kind=kind,
    )


def _mount(path: Path, mounts: Path) -> tuple[str, str]:
    """The type and the source of the file system that a path is on; ("", "") if not known."""
    number, found = path.stat().st_dev, ("", "")
    for line in _read(mounts).splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == f"{os.major(number)}:{os.minor(number)}":
            file_system, source = rest.split()[:2]
            found = file_system, source
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
