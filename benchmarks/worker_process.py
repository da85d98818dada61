"""Runs programs that answer each request, a line of JSON, with one line of JSON."""

import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

ANSWER_SECONDS = 150.0  # after which a program is assumed to hang


class ProcessError(Exception):
    """A program reported an error, ended or hung."""


class Process:
    """Started by `of`; its first line is `about`, read on first use."""

    def __init__(self, process: "subprocess.Popen[bytes]", name: str, log: Path) -> None:
        self._process, self.name, self._log = process, name, log
        self._about: dict[str, Any] | None = None
        self._read = b""

    @classmethod
    def of(
        cls, command: Sequence[str | Path], name: str, log: Path, path: Path | None = None
    ) -> Self:
        """Starts a program. `path` is prepended to PYTHONPATH; stderr goes to `log`."""
        environment = dict(os.environ)
        if path is not None:
            known = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join([str(path), *([known] if known else [])])
        with log.open("w") as errors:
            process = subprocess.Popen(
                [str(part) for part in command],
                bufsize=0,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        return cls(process, name, log)

    @property
    def about(self) -> dict[str, Any]:
        if self._about is None:
            self._about = self._answer()
        return self._about

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Sends a request and returns the answer. Raises ProcessError, with the reason."""
        assert self.about is not None and self._process.stdin is not None
        if self._process.stdin.closed:
            raise ProcessError(f"{self.name}: has already ended")
        try:
            self._process.stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
        except BrokenPipeError:
            raise ProcessError(self._last_words()) from None
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self) -> dict[str, Any]:
        answer = json.loads(self._line())
        if "error" in answer:
            raise ProcessError(f"{self.name}: {answer['error']}")
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\n" not in self._read:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                self._process.kill()
                raise ProcessError(
                    f"{self.name}: no answer in {ANSWER_SECONDS:.0f} s (see {self._log})"
                )
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise ProcessError(self._last_words())
            self._read += piece
        line, self._read = self._read.split(b"\n", 1)
        return line

    def _last_words(self) -> str:
        """How it ended, with the last line of its stderr."""
        self._process.wait()
        said = [line for line in self._log.read_text().splitlines() if line.strip()]
        last = said[-1][:200] if said else "nothing was said"
        return f"{self.name}: ended with {self._process.returncode}: {last} (see {self._log})"
