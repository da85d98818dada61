"""The inner side of a worker process: frames on a socket, and limits by the operating system."""

import resource
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WALL_S = 10.0  # for one message, on an overloaded machine
_UNKNOWN_BYTES = 1 << 30  # of address space in use, where /proc is not mounted
_LENGTH = struct.Struct("<Q")


def send(connection: socket.socket, content: bytes | memoryview) -> None:
    """Sends a frame: its length, its content."""
    connection.sendall(_LENGTH.pack(len(content)))
    connection.sendall(content)


def receive(connection: socket.socket) -> bytes | None:
    """The next frame; None if the other side has closed the connection."""
    head = _exactly(connection, _LENGTH.size)
    return None if head is None else _exactly(connection, _LENGTH.unpack(head)[0])


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    content = bytearray(count)
    rest = memoryview(content)
    while rest:
        received = connection.recv_into(rest)
        if not received:
            return None
        rest = rest[received:]
    return bytes(content)


def confine(*, more_memory_bytes: int, open_files: int) -> None:
    """Limits this process to its address space and `more_memory_bytes`, and to the files below
    `open_files`; it can write no file and (unless it is root) start no process."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        used_bytes = pages * resource.getpagesize()
    except OSError:
        used_bytes = _UNKNOWN_BYTES
    limits = {
        resource.RLIMIT_AS: used_bytes + more_memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: open_files,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


@contextmanager
def limited(cpu_s: float, wall_s: float = WALL_S) -> Iterator[None]:
    """Within the block, the process is ended after `cpu_s` of CPU time, or `wall_s`."""
    for number in (signal.SIGPROF, signal.SIGALRM):  # the default action ends the process
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
