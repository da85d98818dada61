"""Runs commands, and Python programs, as separate processes that are forked from one which has
already imported their modules.

A fresh process spends two seconds of a core on imports; a fork spends a hundredth of that.
Otherwise a command behaves as with `python -m hotsplit`, and a program as with `python -c`: it
has its own pid, signals, exit code, files and environment. A program imports hotsplit itself,
unless it asks for another server: `python` has imported only other packages, `cli` only hotsplit's
command line, without torch. Tests of the start itself use a fresh process.

Run as a program, this file is the server: it takes one connection per process, with its arguments
and its three standard files, and answers with its pid and later its exit status."""

import atexit
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from paths import SEARCH_PATH

PACKAGES = ["torch", "numpy", "safetensors", "tokenizers", "transformers"]
COMMANDS = """
hotsplit.cli hotsplit.commands.all_commands hotsplit.runtime.engine
hotsplit.profile.collect hotsplit.measure.evaluate.quality hotsplit.convert.convert
hotsplit.solver.solve
""".split()  # noqa: SIM905  # words
READERS = [*COMMANDS, "fuzz_inputs", "llguidance", "matplotlib.figure", "pyarrow.parquet"]
# What each server has imported.
SERVERS = {
    "command": [*PACKAGES, *COMMANDS],
    "python": PACKAGES,
    "fuzz": [*PACKAGES, *READERS],
    "cli": ["hotsplit.cli", "hotsplit.commands.all_commands"],
}
START = "import sys, forked; forked.start(sys.argv[1], sys.argv[2:])"
READY = b"ready\n"
LONGEST = 1 << 20  # bytes of a request
MOST_STDIN = 1 << 16  # bytes that a pipe holds without a reader
# Variables that take effect only at the start of a process.
AT_START = ("OMP_", "MKL_", "PYTHON", "LD_", "CUDA_", "TRITON_")

finished: list[subprocess.CompletedProcess] = []  # those of the running test: see conftest.py


# ---- tests ------------------------------------------------------------------------------------


# The servers, with their standard inputs, which stay open until this process ends.
_servers: list[tuple[object, int]] = []
_one_at_a_time = threading.RLock()


def _server(kind: str) -> Path:
    """The socket of a server that ends with this process."""
    with _one_at_a_time:
        return _started(kind)


@cache
def _started(kind: str) -> Path:
    """Servers that have imported what `python` has, and more, are forked from it."""
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    words = [str(folder / "socket"), *SERVERS[kind]]
    (stdin, held), (read, stdout) = os.pipe(), os.pipe()
    if kind != "python" and {*PACKAGES} <= {*SERVERS[kind]}:
        process: object = Forked(words, (stdin, stdout, 2), code=START, server="python")
    else:
        process = subprocess.Popen([sys.executable, __file__, *words], stdin=stdin, stdout=stdout)
    os.close(stdin)
    os.close(stdout)
    _servers.append((process, held))
    with os.fdopen(read, "rb") as answers:
        assert answers.readline() == READY
    return folder / "socket"


class Forked:
    """A running command with these arguments, or program if `code` is given. `files` are its stdin,
    stdout and stderr; `server` is one of SERVERS."""

    def __init__(
        self,
        words: list[str],
        files: tuple[int, int, int],
        *,
        code: str | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        server: str | None = None,
    ) -> None:
        environment = dict(os.environ if env is None else env)
        changed = {
            k for k in {*environment, *os.environ} if environment.get(k) != os.environ.get(k)
        }
        assert not [name for name in changed if name.startswith(AT_START)], changed
        request = {"words": words, "code": code, "cwd": str(cwd or Path.cwd()), "env": environment}
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(_server(server or ("python" if code else "command"))))
        content = json.dumps(request).encode()
        assert len(content) < LONGEST
        socket.send_fds(self._connection, [len(content).to_bytes(4, "little")], files)
        self._connection.sendall(content)
        self._answers = self._connection.makefile("rb")
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            self.returncode = os.waitstatus_to_exitcode(int(self._answers.readline()))
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


def run_command(*words: object, **options: Any) -> subprocess.CompletedProcess:
    """Runs `python -m hotsplit WORDS` to its end; the options are those of `_run`."""
    return _run(None, words, **options)


def run_python(code: str, *words: object, **options: Any) -> subprocess.CompletedProcess:
    """Runs `python -c CODE WORDS` to its end; the options are those of `_run`."""
    return _run(code, words, **options)


def _run(
    code: str | None,
    words: tuple[object, ...],
    *,
    stdin: bytes | int = b"",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    text: bool = True,
    timeout: float = 120.0,
    server: str | None = None,
) -> subprocess.CompletedProcess:
    """`stdin` is bytes for a pipe, or a file's descriptor. With `text`, output that is not UTF-8 is
    replaced; without it, the output is bytes."""
    arguments = [os.fspath(word) if isinstance(word, Path) else str(word) for word in words]
    read, write = os.pipe()
    if isinstance(stdin, bytes):
        assert len(stdin) <= MOST_STDIN
        os.write(write, stdin)
    os.close(write)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        files = read if isinstance(stdin, bytes) else stdin, out.fileno(), error.fileno()
        try:
            process = Forked(arguments, files, code=code, cwd=cwd, env=env, server=server)
        finally:
            os.close(read)
        try:
            status = process.wait(timeout)
        except TimeoutError:
            process.send_signal(signal.SIGKILL)
            raise
        given: list[Any] = []
        for file in (out, error):
            file.seek(0)
            given.append(file.read().decode(errors="replace") if text else file.read())
    named = ["hotsplit"] if code is None else ["python", "-c", code]
    done = subprocess.CompletedProcess([*named, *arguments], status, *given)
    finished.append(done)
    return done


# ---- the server ---------------------------------------------------------------------------------


def _serve(listener: socket.socket) -> None:
    """Serves until stdin ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    while select.select([listener, 0], [], [])[0] == [listener]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _attend(connection)
        connection.close()


def _attend(connection: socket.socket) -> NoReturn:
    """Starts a command or program, and reports its status when it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(connection, 4, 3)
    content = connection.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
    request = json.loads(content)
    child = os.fork()
    if child:
        for file in files:
            os.close(file)
        connection.sendall(f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        connection.sendall(f"{status}\n".encode())
        os._exit(0)
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["code"] is None:
        sys.argv = ["hotsplit", *request["words"]]
        _end_with(_main)
    sys.argv = ["-c", *request["words"]]
    sys.path.insert(0, "")
    _end_with(lambda: _execute(request["code"]))


def _main() -> int:
    from hotsplit.cli import main

    return main()


def _execute(code: str) -> int:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, "<string>", "exec"), vars(module))
    return 0


def _end_with(run: Callable[[], int]) -> NoReturn:
    """Runs this and ends the process as an interpreter would."""
    try:
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except Exception:  # noqa: BLE001  # reported, as by an interpreter
        traceback.print_exc()
        code = 1
    # An interpreter that ends normally destroys all objects, which would copy the server's pages.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def sync_nothing() -> None:
    """This process no longer waits for the disk, which takes milliseconds a file: no test switches
    the machine off."""
    os.fsync = lambda fd: None


def start(path: str, modules: list[str]) -> None:
    """Imports the modules, says so, and serves."""
    sync_nothing()
    for name in modules:
        __import__(name)
    gc.freeze()  # a collection in a fork would copy the pages of all objects
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    sys.stdout.write(READY.decode())
    sys.stdout.flush()
    _serve(listener)


if __name__ == "__main__":
    sys.path += SEARCH_PATH.split(os.pathsep)
    start(sys.argv[1], sys.argv[2:])
