"""Renders chat templates in a worker process. template_worker runs Jinja."""

import json
import os
import selectors
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from signal import SIGKILL, SIGPROF
from threading import Lock

from hotsplit.errors import HotsplitError

# The worker limits its CPU time; this limit is for an overloaded machine, or a worker that hangs.
WALL_S = 10.0
_START = (
    "import sys; sys.path[:0] = sys.argv[2:]; sys.path.append(sys.argv[1]);"
    " from template_worker import main; main()"
)
_PACKAGES = ("jinja2", "markupsafe")
_ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME")
_REASONS = {
    "syntax": "is not a valid Jinja template",
    "template": "rejects these messages",
    "other": "fails with these messages",
    "size": "writes too long a text",
}


class TemplateProcess:
    """A worker process, started at the first rendering (0.1 s; later renderings take 1 ms).
    Thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def render(self, name: str, template: str, variables: Mapping[str, object]) -> str:
        """The rendered text. Raises HotsplitError, naming `name`, for a template that does not
        parse, raises, writes too much, or exceeds the worker's CPU time or memory, and for
        variables that are not JSON."""
        try:
            request = json.dumps({"template": template, "variables": variables}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise HotsplitError(
                f"a message is not JSON ({str(error)[:200]}); wanted texts, numbers, lists, objects"
            ) from error
        with self._lock:
            answer = self._exchange(name, request)
        if "text" in answer:
            return answer["text"]
        raise HotsplitError(
            f"{name} {_REASONS[answer['kind']]}: {answer['error']}; see --chat-template for another"
        )

    def close(self) -> None:
        """Ends the process, once a rendering in another thread is done; the next rendering starts
        a new one."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _exchange(self, name: str, request: bytes) -> dict[str, str]:
        process = self._running()
        try:
            line = _ask(process, request)
        except BaseException:  # an unread answer must not be taken for the next one
            self._stop()
            raise
        if line:
            return json.loads(line)
        self._stop()
        raise HotsplitError(
            f"{name} {_reason(process.returncode)}; see --chat-template for another"
        )

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = _start()
            weakref.finalize(self, _end, self._process)
        return self._process


def _start() -> subprocess.Popen[bytes]:
    """Starts the worker with only the packages that it needs, in a session of its own, so that
    Ctrl-C does not reach it."""
    places = [str(Path(_file_of(package)).parent.parent) for package in _PACKAGES]
    here = str(Path(_file_of("hotsplit.runtime.text.template_worker")).parent)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START, here, *dict.fromkeys(places)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={key: os.environ[key] for key in _ENVIRONMENT if key in os.environ},
        start_new_session=True,
        bufsize=0,
    )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)  # a worker that does not read blocks nobody
    return process


def _file_of(module: str) -> str:
    found = find_spec(module)
    assert found is not None and found.origin is not None, module
    return found.origin


def _ask(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """The answer's line; empty if the process has ended or was killed at the time limit."""
    assert process.stdin is not None and process.stdout is not None
    deadline = time.monotonic() + WALL_S
    rest, pieces = memoryview(request), list[bytes]()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while not (pieces and pieces[-1].endswith(b"\n")):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                process.kill()
                return b""
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    rest = rest[_written(process.stdin.fileno(), rest) :]
                    if not rest:
                        selector.unregister(process.stdin)
                    continue
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    return b""
                pieces.append(piece)
    return b"".join(pieces)


def _written(file: int, content: memoryview) -> int:
    """The number of bytes that the pipe has taken; all if the worker has closed it, in which case
    there is no answer either."""
    try:
        return os.write(file, content)
    except BlockingIOError:  # the pipe has less room than an atomic write (PIPE_BUF)
        return 0
    except BrokenPipeError:
        return len(content)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Closes the process's input, which makes it exit; kills it if it still runs a second
    later."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _reason(code: int | None) -> str:
    if code in (-SIGPROF, -SIGKILL):
        return f"takes too long: it was stopped after half a second of CPU time or {WALL_S:g} s"
    return f"ended the process that renders it (exit code {code})"
