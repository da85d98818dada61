"""A worker process: runs code or data of strangers apart from the program, which outlives it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hotsplit.errors import HotsplitError
from hotsplit.runtime.text import worker_inside

# A worker limits its own time; this limit is for one that is stopped, or hangs in the kernel.
WALL_S = worker_inside.WALL_S + 1.0
# Modules of hotsplit are found without running its __init__, or reading the site's .pth files.
# Signals to stop are the owner's to handle, also where a service manager sends them to all of its
# processes: a worker ends when its connection does.
_START = """\
import json, signal, sys, types
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
for name, folders in json.loads(sys.argv[2]).items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = folders
sys.path[:0] = sys.argv[3:]
from importlib import import_module
import_module(sys.argv[1]).main()
"""
_ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME")


class Worker:
    """A process that runs `main` of a module and answers messages on its stdin, a socket.

    It can import hotsplit, `packages` and the standard library. It has a session of its own, so
    that Ctrl-C does not reach it. `ask` must not be called by two threads at a time."""

    def __init__(self, module: str, packages: Sequence[str]) -> None:
        """Raises HotsplitError if the system refuses a process or open files."""
        try:
            self._start(module, packages)
        except OSError as error:
            raise HotsplitError(
                f"a helper process cannot be started ({error.strerror}); raise the limits on"
                " processes and open files (ulimit -u, ulimit -n)"
            ) from error

    def _start(self, module: str, packages: Sequence[str]) -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(WALL_S)
        folders = {name: _folders_of(name) for name in ("hotsplit", "hotsplit.runtime")}
        above = dict.fromkeys(str(Path(_folders_of(name)[0]).parent) for name in packages)
        command = [sys.executable, "-I", "-S", "-c", _START, module, json.dumps(folders), *above]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={key: os.environ[key] for key in _ENVIRONMENT if key in os.environ},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: bytes) -> bytes | None:
        """The answer; None if the process has ended, or has taken longer than WALL_S."""
        return exchange(self.connection, message)

    def end(self) -> int:
        """Closes the connection, which makes the process exit; kills it if it still runs a second
        later. Returns its exit code, negative for a signal."""
        self.connection.close()
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def exchange(connection: socket.socket, message: bytes) -> bytes | None:
    """The other side's answer; None if it has ended, or has taken longer than WALL_S."""
    try:
        worker_inside.send(connection, message)
        return worker_inside.receive(connection)
    except OSError:
        return None


def _folders_of(package: str) -> list[str]:
    found = find_spec(package)
    assert found is not None and found.submodule_search_locations, package
    return list(found.submodule_search_locations)
