"""Runs a llama-bench, of llama.cpp or of a fork, which loads a model anew for each call."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path


def seconds_of(
    command: Sequence[str | Path],
    model: Path,
    threads: int,
    *,
    prompts: Sequence[int] = (),
    generated: int = 0,
    repetitions: int,
    before: Callable[[], None] | None = None,
) -> dict[int, list[float]]:
    """The seconds of each repetition of a prompt by its number of tokens; under 0 those of
    `generated` tokens one by one. Raises CalledProcessError, with what was said on stderr, if the
    program fails. `before` is called in its process before it."""
    options = ["-m", model, "-t", threads, "-p", ",".join(map(str, prompts)) or 0, "-n", generated]
    done = subprocess.run(
        [*command, *map(str, options), "-r", str(repetitions), "-o", "json"],
        check=True,
        text=True,
        capture_output=True,
        preexec_fn=before,
    )
    return {
        test["n_prompt"]: [1e-9 * ns for ns in test["samples_ns"]]
        for test in json.loads(done.stdout[done.stdout.index("[") :])
    }
