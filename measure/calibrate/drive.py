"""How fast a drive is read past the kernel's page cache, by direct reads of several sizes, so many
at a time, at neighbouring and at random places of one file; and what that takes of the processors.

The file is one that is there, such as a model's, or a temporary one of random bytes."""

import errno
import itertools
import mmap
import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from hotsplit.artifacts.machine_file import Drive, DriveReads, Figure
from hotsplit.errors import HotsplitError
from hotsplit.system.drives import DriveKind, drive_of
from hotsplit.system.sizes import format_bytes

KIB, MIB = 1 << 10, 1 << 20
SIZES = (256 * KIB, MIB, 4 * MIB)
DEPTHS = (1, 4, 8, 16)
SLOW_DEPTHS = (1, 4)  # of drives on which many reads at a time take seconds
ROUNDS, LEAST_ROUNDS = 4, 2
SLOT_S, LIMIT_S = 0.05, 4.0  # of one kind of reads in a round; of all of them
# Disks of virtual machines say that they rotate, whatever is behind them. Of reads of PAGE bytes at
# NUM_SEEKS random places, a quarter takes less than SEEK_S where no head moves, also beside other
# programs, which make the others wait.
PAGE, NUM_SEEKS, SEEK_S = 4 * KIB, 32, 2e-3
LEAST_BYTES, WRITTEN_BYTES = 64 * MIB, 256 * MIB
WRITTEN_AT_A_TIME = 16 * MIB
BLOCK_BYTES = 512  # of st_blocks

Say = Callable[[str], None]


def measure_drive(
    path: Path, say: Say, on_probe: Callable[[float], None] = lambda count: None
) -> Drive | None:
    """Measures the drive of a file, or of a folder in which a temporary file can be written. None,
    after a line that says why, if it cannot be read directly. Raises HotsplitError for a path that
    does not exist, and for a file that is too small."""
    if not path.exists():
        raise HotsplitError(f"{path}: does not exist; give a file or a folder on the drive")
    where = drive_of(path)
    if where.kind == "memory":
        say(f"{path} is in memory ({where.name}): no drive to measure; --drive names another path")
        return None
    try:
        with _file_on(path) as file, _opened(file) as descriptor:
            size, kind = os.fstat(descriptor).st_size, where.kind
            kind = "solid state" if kind == "rotating" and not _seeks(descriptor, size) else kind
            reads = _measured(descriptor, size, kind, on_probe)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSPC, errno.EACCES):
            raise
        say(f"{path}: the drive was not measured by direct reads ({error.strerror})")
        return None
    return Drive(
        name=where.name, identity=where.identity, kind=kind, source="measured", reads=reads
    )


def report(drive: Drive) -> list[str]:
    """The drive's speeds as a line, and one on what makes it a bad place for weights."""
    random_reads = drive.best_reads(MIB)
    sequential = max(
        (reads for reads in drive.reads if not reads.is_random),
        key=lambda reads: reads.gb_per_s.median,
    )
    alone = min(drive.reads, key=lambda reads: (reads.depth, reads.size_bytes, reads.is_random))
    lines = [
        f"drive {drive.name}: {sequential.gb_per_s.median:.2f} GB/s in sequence, random reads of"
        f" {format_bytes(random_reads.size_bytes)} {random_reads.gb_per_s.median:.2f} with"
        f" {random_reads.depth} at a time ({1e3 * random_reads.cpu_s_per_gb:.0f} ms of a core a"
        f" GB), of {format_bytes(alone.size_bytes)} {alone.gb_per_s.median:.2f} one by one"
    ]
    words = {
        "rotating": "is a rotating disk: experts that are not in memory are read one by one",
        "network": "is behind a network, whose speed others share",
    }
    if drive.kind in words:
        lines.append(f"note: the drive {drive.name} {words[drive.kind]}")
    return lines


@contextmanager
def _file_on(path: Path) -> Iterator[Path]:
    """The file itself, or a temporary one in the folder, or beside a file with holes, which are
    read from no drive."""
    if path.is_file():
        about = path.stat()
        if about.st_size < LEAST_BYTES:
            raise HotsplitError(
                f"{path}: {format_bytes(about.st_size)} are too few to measure a drive;"
                f" wanted a file of {format_bytes(LEAST_BYTES)} or more, or a folder"
            )
        if about.st_blocks * BLOCK_BYTES >= about.st_size:
            yield path
            return
    folder = path.parent if path.is_file() else path
    with TemporaryFile(dir=folder) as file:  # without a name, so that nothing can be left
        for _ in range(WRITTEN_BYTES // WRITTEN_AT_A_TIME):
            file.write(os.urandom(WRITTEN_AT_A_TIME))
        file.flush()
        os.fsync(file.fileno())
        yield Path(f"/proc/self/fd/{file.fileno()}")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    if not hasattr(os, "O_DIRECT"):
        raise OSError(errno.EOPNOTSUPP, "this system has none")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _seeks(descriptor: int, file_bytes: int) -> bool:
    """True if reads at random places take as long as a head's movement."""
    places, times = random.Random(1).sample(range(file_bytes // PAGE), NUM_SEEKS), []
    with mmap.mmap(-1, PAGE) as buffer:
        for place in places:
            began = time.perf_counter()
            os.preadv(descriptor, [buffer], place * PAGE)
            times.append(time.perf_counter() - began)
    return sorted(times)[NUM_SEEKS // 4] > SEEK_S


def _measured(
    descriptor: int, file_bytes: int, kind: DriveKind, on_probe: Callable[[float], None]
) -> tuple[DriveReads, ...]:
    depths = SLOW_DEPTHS if kind in ("rotating", "network") else DEPTHS
    kinds = list(itertools.product(SIZES, depths, (False, True)))
    found: dict[tuple[int, int, bool], list[tuple[float, float]]] = {each: [] for each in kinds}
    buffers = [mmap.mmap(-1, max(SIZES)) for _ in range(max(depths))]
    chance = random.Random(0)
    began = time.perf_counter()
    with ThreadPoolExecutor(max(depths)) as threads:
        for number in range(ROUNDS):
            if number >= LEAST_ROUNDS and time.perf_counter() - began > LIMIT_S:
                break
            for each in kinds:
                size, depth, is_random = each
                places = list(range(file_bytes // size))
                start = chance.randrange(len(places))
                places = places[start:] + places[:start]
                if is_random:
                    chance.shuffle(places)
                found[each].append(_read_some(descriptor, size, places, buffers[:depth], threads))
                on_probe(1)
    return tuple(
        DriveReads(
            size_bytes=size,
            depth=depth,
            is_random=is_random,
            gb_per_s=Figure.of_rounds([rate for rate, _ in rounds], is_rate=True),
            cpu_s_per_gb=min(seconds for _, seconds in rounds),
        )
        for (size, depth, is_random), rounds in found.items()
    )


def _read_some(
    descriptor: int,
    size: int,
    places: list[int],
    buffers: list[mmap.mmap],
    threads: ThreadPoolExecutor,
) -> tuple[float, float]:
    """GB/s of reads at these places, one a buffer at a time, for SLOT_S; and the processors'
    seconds a GB."""
    following = itertools.cycle(places)
    before, began = _cpu_seconds(), time.perf_counter()

    def reads(buffer: mmap.mmap) -> int:
        num_bytes = 0
        with memoryview(buffer)[:size] as view:
            while not num_bytes or time.perf_counter() - began < SLOT_S:
                count = os.preadv(descriptor, [view], next(following) * size)
                if count != size:
                    raise HotsplitError(
                        f"a read of {size:,} bytes of the drive returned {count:,}: the file was"
                        " cut short while the drive was measured; measure again"
                    )
                num_bytes += count
        return num_bytes

    total = sum(threads.map(reads, buffers)) * 1e-9
    seconds = time.perf_counter() - began
    return total / seconds, max(0.0, _cpu_seconds() - before) / total


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
