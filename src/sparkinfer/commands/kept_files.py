"""Lines that point to what `sparkinfer run` has kept for a model, with the command that uses it."""

import shlex
from pathlib import Path

from sparkinfer.errors import SparkinferError


def with_copy(error: SparkinferError, command: str, model: Path) -> SparkinferError:
    """The error of a model that a command cannot load, with the command for the copy that `run` has
    made of it; the error itself if there is none."""
    if not str(error).startswith(f"{model}: "):
        return error
    from sparkinfer.model_file import ModelFile

    try:
        ModelFile.load(model)
    except SparkinferError:
        from sparkinfer.run.kept import kept_for

        copy = kept_for(model).model
        if copy is not None and copy != model.resolve():
            return SparkinferError(f"{error}; run has made one: {command} {_quoted(copy)}")
    return error


def report_line(model: Path, output: Path, given: set[str]) -> str | None:
    """The command of a page with the files that `run` has kept; None if it adds none."""
    from sparkinfer.run.kept import kept_for

    kept = kept_for(model)
    found = {"profile": kept.profile, "split": kept.split, "machine": kept.machine}
    more = [f"--{name} {_quoted(path)}" for name, path in found.items()
            if path is not None and name not in given]  # fmt: skip
    if not more:
        return None
    command = f"sparkinfer report {_quoted(model)} -o {_quoted(output)} --force {' '.join(more)}"
    return f"run has kept more for this model: {command}"


def bench_line(model: Path) -> str | None:
    """The command that measures the model as `run` would run it; None if it is this one."""
    from sparkinfer.run.kept import kept_for

    kept = kept_for(model)
    is_full = kept.model is not None and kept.model.parent.name.startswith("full-")
    copy = kept.model if is_full and kept.model != model.resolve() else None
    if copy is None and kept.split is None:
        return None
    plan = f" --split {_quoted(kept.split)}" if kept.split else ""
    return f"note: run uses what it has kept: sparkinfer bench {_quoted(copy or model)}{plan}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
