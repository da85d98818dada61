"""Programs that are asked in lines of JSON and answer in lines of JSON, one each."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self


class ProcessError(Exception):
    """What a program said went wrong, or that it ended."""


class Process:
    """Started by `of`; its first line is `about`, read when it is first wanted."""

    def __init__(self, process: subprocess.Popen[str], name: str, log: Path) -> None:
        self._process, self.name, self._log = process, name, log
        self._about: dict[str, Any] | None = None

    @classmethod
    def of(
        cls, command: Sequence[str | Path], name: str, log: Path, path: Path | None = None
    ) -> Self:
        """`path` goes before the others that its Python finds modules in; stderr goes to `log`."""
        environment = dict(os.environ)
        if path is not None:
            known = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join([str(path), *([known] if known else [])])
        with log.open("w") as errors:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=environment,
            )  # fmt: skip
        return cls(process, name, log)

    @property
    def about(self) -> dict[str, Any]:
        if self._about is None:
            self._about = self._line()
        return self._about

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Raises ProcessError with its reason where it does not do it."""
        assert self.about is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ProcessError(self._last_words()) from None
        return self._line()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ProcessError(self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise ProcessError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        """The last line that it wrote to stderr."""
        self._process.wait()
        said = [line for line in self._log.read_text().splitlines() if line.strip()]
        last = said[-1][:200] if said else "nothing was said"
        return f"{self.name}: ended with {self._process.returncode}: {last} (see {self._log})"
