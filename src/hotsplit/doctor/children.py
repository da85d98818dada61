"""Runs the probes, which may crash, in child processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LIMIT_S = 30.0
QUIET_S = 4.0  # after this time a line says what is being waited for
READ_S = 0.5  # time to read the output of a child that has ended


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The outcome of a child. `done` is what it found. If it did not finish, `done` is None, `how`
    says how it ended, and `at` what it was trying."""

    done: Mapping[str, Any] | None
    at: str = ""
    how: str = ""

    @property
    def why(self) -> str:
        return f"{self.how} (at {self.at})" if self.at else self.how


class Child:
    """A started probe; several can run at the same time."""

    def __init__(self, name: str, *arguments: str, limit_s: float | None = None) -> None:
        self._limit_s = LIMIT_S if limit_s is None else limit_s
        self._ends = time.monotonic() + self._limit_s
        self._failed = ""
        self._name = name
        try:
            # -P: modules in the working folder must not hide Python's own.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hotsplit.doctor.probes", name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONFAULTHANDLER": "", "PYTHONIOENCODING": "utf-8"},
            )
        except OSError as error:
            self._failed = f"no process can be started ({error.strerror})"

    def result(self, say: Callable[[str], None] | None = None) -> ProbeResult:
        """Waits for the child, at most until its time limit; `say` gets a line if it takes long."""
        if self._failed:
            return ProbeResult(done=None, how=self._failed)
        left_s = self._ends - time.monotonic()
        if say is not None and left_s > QUIET_S:
            self._output(QUIET_S)
            left_s = self._ends - time.monotonic()
            if self._process.poll() is None:
                say(f"waiting for the test of {self._name}, at most {left_s:.0f} s more")
        out, err = self._output(left_s)
        is_late = self._process.poll() is None
        if is_late:
            self._process.kill()
            out, err = self._output(0.0)
        done, at = _read(out)
        if is_late:
            return ProbeResult(done=None, at=at, how=f"took longer than {self._limit_s:g} s")
        if done is not None:
            return ProbeResult(done=done)
        return ProbeResult(done=None, at=at, how=_how(self._process.returncode, err))

    def end(self) -> None:
        """Kills the child if it is still running."""
        if not self._failed:
            self._process.kill()

    def _output(self, limit_s: float) -> tuple[bytes, bytes]:
        """The child's output (stdout, stderr) up to its end or the limit. READ_S is always granted:
        the child may have ended before its limit, while another one was waited for. The timeout
        also ends the wait for a child that has ended but left a process that holds the pipes
        open."""
        try:
            return self._process.communicate(timeout=max(READ_S, limit_s))
        except subprocess.TimeoutExpired as error:
            return error.output or b"", error.stderr or b""


def _read(out: bytes) -> tuple[Mapping[str, Any] | None, str]:
    """(what the child found, the last thing it tried)."""
    done, at = None, ""
    for line in out.decode(errors="replace").splitlines():
        try:
            values = json.loads(line)
            at, found = values.get("at", at), values.get("done", done)
        except (ValueError, AttributeError, RecursionError):  # printed by a library
            continue
        done = found if isinstance(found, Mapping) else done
    return done, at


def _how(code: int, err: bytes) -> str:
    if code < 0:
        try:
            return f"crashed by {signal.Signals(-code).name}"
        except ValueError:
            return f"crashed by signal {-code}"
    lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    return " ".join(lines[-1].split())[:200] if lines else f"ended with code {code}"
