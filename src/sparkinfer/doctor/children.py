"""Child processes for tests that may crash.

A child is a module of this package. It prints JSON objects, one per line: {"at": "..."} before each
thing that it tries, and {"done": {...}} at the end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """`done` is what the child found, or None if it did not finish; then `how` says how it ended,
    and `at` what it was trying."""

    done: Mapping[str, Any] | None
    at: str = ""
    how: str = ""

    @property
    def why(self) -> str:
        return f"{self.how} (at {self.at})" if self.at else self.how


class Child:
    """A started child; several run at the same time."""

    def __init__(self, module: str, *arguments: str, limit_s: float | None = None) -> None:
        self._ends = time.monotonic() + (LIMIT_S if limit_s is None else limit_s)
        self._limit_s = LIMIT_S if limit_s is None else limit_s
        self._failed = ""
        try:
            # -P: modules in the working folder must not hide Python's own.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONFAULTHANDLER": "", "PYTHONIOENCODING": "utf-8"},
            )  # fmt: skip
        except OSError as error:
            self._failed = f"no process can be started ({error.strerror})"

    def result(self) -> Result:
        """Waits for the child, at most until its time limit."""
        if self._failed:
            return Result(done=None, how=self._failed)
        is_late = False
        try:
            out, err = self._process.communicate(timeout=max(0.0, self._ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            is_late = True
            self._process.kill()
            out, err = self._process.communicate()
        done, at = _read(out)
        if is_late:
            return Result(done=None, at=at, how=f"took longer than {self._limit_s:g} s")
        if done is not None:
            return Result(done=done)
        return Result(done=None, at=at, how=_how(self._process.returncode, err))


def _read(out: bytes) -> tuple[Mapping[str, Any] | None, str]:
    """(what the child found, the last thing it tried)."""
    done, at = None, ""
    for line in out.decode(errors="replace").splitlines():
        try:
            values = json.loads(line)
            at, done = values.get("at", at), values.get("done", done)
        except (ValueError, AttributeError):  # printed by a library
            continue
    return done, at


def _how(code: int, err: bytes) -> str:
    """How a process without a result ended."""
    if code < 0:
        try:
            return f"crashed by {signal.Signals(-code).name}"
        except ValueError:
            return f"crashed by signal {-code}"
    lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    return " ".join(lines[-1].split())[:200] if lines else f"ended with code {code}"


# ---- in a child -----------------------------------------------------------------------------------


def tell_at(what: str) -> None:
    print(json.dumps({"at": what}), flush=True)


def tell_done(found: Mapping[str, Any]) -> None:
    print(json.dumps({"done": found}), flush=True)


def leave_no_core() -> None:
    """A crash is expected, and its memory is not worth the disk."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):
        pass
