"""The measurement of drives: what is read, how many reads at a time, and drives that are not
measured. `system/drives` against trees of files as the kernel writes them."""

import errno
import os
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from models import make_machine

from hotsplit.artifacts.machine_file import Drive, DriveReads, Figure, Machine
from hotsplit.errors import HotsplitError
from hotsplit.measure.calibrate import calibrate as calibrating
from hotsplit.measure.calibrate import drive as measuring
from hotsplit.measure.calibrate.drive import measure_drive, report
from hotsplit.system.drives import DriveOfPath, drive_of

KIB, MIB = 1 << 10, 1 << 20
GB_PER_S = 0.5  # of the pretended drive, for each read


@pytest.fixture
def slow(monkeypatch, tmp_path):
    """A file whose drive takes so long for each read; (path, offsets, most reads at a time by
    size)."""
    path, offsets, running, most = tmp_path / "file", [], Counter(), Counter()
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, measuring.LEAST_BYTES)
    lock = threading.Lock()

    def preadv(descriptor, buffers, offset):
        (buffer,) = buffers
        with lock:
            offsets.append((len(buffer), offset))
            running[len(buffer)] += 1
            most[len(buffer)] = max(most[len(buffer)], running[len(buffer)])
        time.sleep(len(buffer) / GB_PER_S * 1e-9)
        with lock:
            running[len(buffer)] -= 1
        return len(buffer)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(measuring, "SLOT_S", 0.02)
    monkeypatch.setattr(measuring, "LIMIT_S", 0.0)
    return path, offsets, most


def on_drive(monkeypatch, kind):
    where = DriveOfPath(name="disk", identity="0123", kind=kind)
    monkeypatch.setattr(measuring, "drive_of", lambda path: where)


def test_a_file_with_holes_is_not_measured(slow, monkeypatch):
    path, read, opened = slow[0].with_name("holes"), [], measuring._opened
    with path.open("wb") as file:
        file.truncate(measuring.LEAST_BYTES)
    on_drive(monkeypatch, "solid state")
    monkeypatch.setattr(measuring, "WRITTEN_BYTES", measuring.LEAST_BYTES)
    monkeypatch.setattr(measuring, "_opened", lambda each: read.append(each) or opened(each))
    assert measure_drive(path, pytest.fail) is not None
    assert read[0] != path and {each.name for each in path.parent.iterdir()} == {"file", "holes"}


def test_each_read_is_aligned_and_as_many_run_at_a_time_as_are_said(slow, monkeypatch):
    path, offsets, most = slow
    on_drive(monkeypatch, "solid state")
    found = measure_drive(path, pytest.fail)
    assert {(r.size_bytes, r.depth) for r in found.reads} == {
        (size, depth) for size in measuring.SIZES for depth in measuring.DEPTHS
    }
    assert all(offset % size == 0 and offset < path.stat().st_size for size, offset in offsets)
    assert {most[size] for size in measuring.SIZES} == {max(measuring.DEPTHS)}
    for reads in found.reads:  # sleeping reads add up, but for what starting and ending takes
        if reads.size_bytes >= MIB:
            assert 0.3 < reads.gb_per_s.best / (GB_PER_S * reads.depth) < 1.05


def test_neighbouring_places_are_read_in_order_and_random_ones_are_not(slow, monkeypatch):
    path, offsets, _ = slow
    on_drive(monkeypatch, "solid state")
    monkeypatch.setattr(measuring, "SIZES", (KIB * 256,))
    monkeypatch.setattr(measuring, "DEPTHS", (1,))
    measure_drive(path, pytest.fail)
    steps = [b - a for (_, a), (_, b) in zip(offsets, offsets[1:], strict=False)]
    in_order = sum(step in (256 * KIB, 256 * KIB - measuring.LEAST_BYTES) for step in steps)
    assert 0.3 < in_order / len(steps) < 0.7


@pytest.mark.parametrize(("page_s", "kind"), [(8e-3, "rotating"), (1e-4, "solid state")])
def test_a_disk_rotates_only_if_it_also_seeks(slow, monkeypatch, page_s, kind):
    path, _, most = slow
    read = os.preadv

    def preadv(descriptor, buffers, offset):
        if len(buffers[0]) == measuring.PAGE:
            time.sleep(page_s)
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    on_drive(monkeypatch, "rotating")
    found = measure_drive(path, pytest.fail)
    assert found.kind == kind
    assert most[MIB] == max(measuring.SLOW_DEPTHS if kind == "rotating" else measuring.DEPTHS)
    assert any("rotating" in line for line in report(found)) == (kind == "rotating")


def test_a_network_drive_is_said(slow, monkeypatch):
    on_drive(monkeypatch, "network")
    found = measure_drive(slow[0], pytest.fail)
    assert "behind a network" in report(found)[-1]


def test_the_real_drive_is_read_and_its_file_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "WRITTEN_BYTES", measuring.LEAST_BYTES)
    monkeypatch.setattr(measuring, "LIMIT_S", 0.0)
    lines = []
    found = measure_drive(tmp_path, lines.append)
    assert not list(tmp_path.iterdir())
    if found is None:
        pytest.skip(lines[0])
    assert found.identity == drive_of(tmp_path).identity
    assert all(0.001 < reads.gb_per_s.best < 1000 for reads in found.reads)
    machine = replace(make_machine(), drives=(found,))
    machine.save(tmp_path / "m.json")
    assert Machine.load(tmp_path / "m.json") == machine
    assert machine.drive(found.identity) is found is machine.drive(None)
    assert machine.drive("another") is None


def test_what_has_no_drive_or_no_direct_reads_gives_one_line(tmp_path, monkeypatch):
    lines = []
    if Path("/dev/shm").exists():
        assert measure_drive(Path("/dev/shm"), lines.append) is None
        assert "is in memory (tmpfs)" in lines.pop()

    def refused(path, flags):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(measuring.os, "open", refused)
    on_drive(monkeypatch, "solid state")
    path = tmp_path / "file"
    path.write_bytes(bytes(measuring.LEAST_BYTES))
    assert measure_drive(path, lines.append) is None
    assert lines == [f"{path}: the drive was not measured by direct reads (Invalid argument)"]
    path.write_bytes(b"short")
    with pytest.raises(HotsplitError, match="5 B are too few"):
        measure_drive(path, pytest.fail)
    with pytest.raises(HotsplitError, match="does not exist"):
        measure_drive(tmp_path / "none", pytest.fail)


def test_a_drive_is_measured_once_for_all_paths_on_it(tmp_path, monkeypatch):
    drive = reads_of({(MIB, 1): 1.0})
    seen = []
    monkeypatch.setattr(
        calibrating, "measure_drive", lambda path, *rest: seen.append(path) or drive
    )
    where = DriveOfPath(name="disk", identity=drive.identity, kind="solid state")
    monkeypatch.setattr(calibrating, "drive_of", lambda path: where)
    assert calibrating.measure_drives([tmp_path, tmp_path / "..", tmp_path]) == (drive,)
    assert seen == [tmp_path]


def reads_of(rates) -> Drive:
    """A drive of these GB/s by (bytes, depth)."""
    return Drive(
        name="disk",
        identity="0123",
        kind="solid state",
        source="measured",
        reads=tuple(
            DriveReads(
                size_bytes=size,
                depth=depth,
                is_random=True,
                gb_per_s=Figure(best=rate),
                cpu_s_per_gb=0.0,
            )
            for (size, depth), rate in rates.items()
        ),
    )


def test_the_best_reads_are_of_the_nearest_size_and_no_deeper_than_pays():
    drive = reads_of({(MIB, 1): 1.0, (MIB, 4): 1.98, (MIB, 8): 2.0, (4 * MIB, 1): 3.0})
    assert drive.best_reads(900_000).depth == 4
    assert drive.best_reads(1.9 * MIB).gb_per_s.best == 1.98
    assert drive.best_reads(2.1 * MIB).gb_per_s.best == 3.0


def fake_kernel(tmp_path, *, serial="S1", is_rotating=True):
    """A tree of a disk `sda` with a partition, which has the device number of tmp_path."""
    number = tmp_path.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    disk = tmp_path / "sys/devices/sda"
    (disk / "sda1").mkdir(parents=True)
    (disk / "queue").mkdir()
    (disk / "device").mkdir()
    (disk / "queue/rotational").write_text(f"{int(is_rotating)}\n")
    (disk / "device/serial").write_text(f"{serial}\n")
    (disk / "sda1/partition").write_text("1\n")
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    (tmp_path / "sys/dev/block" / device).symlink_to(disk / "sda1")
    return tmp_path / "sys", device


def test_the_drive_of_a_partition_is_its_disk(tmp_path):
    sys, device = fake_kernel(tmp_path)
    mounts = tmp_path / "mounts"
    mounts.write_text(f"27 1 {device} / / rw - ext4 /dev/sda1 rw\n")
    found = drive_of(tmp_path, sys, mounts)
    assert (found.name, found.kind, len(found.identity)) == ("sda", "rotating", 16)
    assert "S1" not in found.identity
    (sys / "devices/sda/device/serial").write_text("S2\n")
    (sys / "devices/sda/queue/rotational").write_text("0\n")
    other = drive_of(tmp_path, sys, mounts)
    assert other.kind == "solid state" and other.identity != found.identity


@pytest.mark.parametrize(
    ("file_system", "kind"), [("nfs4", "network"), ("tmpfs", "memory"), ("zfs", "unknown")]
)
def test_file_systems_without_a_block_device(tmp_path, file_system, kind):
    number = tmp_path.stat().st_dev
    mounts = tmp_path / "mounts"
    device = f"{os.major(number)}:{os.minor(number)}"
    mounts.write_text(f"27 1 {device} / / rw - {file_system} server:/models rw\n")
    found = drive_of(tmp_path, tmp_path / "no-sys", mounts)
    assert (found.name, found.kind) == (file_system, kind)
