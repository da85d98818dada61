"""Lines that point to files that `sparkinfer run` has cached for a model, with the command that
uses them."""

import shlex
from pathlib import Path

from sparkinfer.errors import SparkinferError


def with_copy(error: SparkinferError, command: str, model: Path) -> SparkinferError:
    """The error about a model that a command cannot load, with a hint at the copy that `run` has
    made of it; unchanged if it is about something else, if the model can be loaded, or if there is
    no copy."""
    if not str(error).startswith(f"{model}: "):
        return error
    from sparkinfer.model_file import ModelFile

    try:
        ModelFile.load(model)
    except SparkinferError:
        from sparkinfer.run.kept import kept_for

        copy = kept_for(model).model
        if copy is not None and copy != model.resolve():
            return SparkinferError(f"{error}; run has a converted copy: {command} {_quoted(copy)}")
    return error


def report_line(model: Path, output: Path, given: set[str]) -> str | None:
    """A line with the command for a page with those files cached by `run` that were not given; None
    if there are none. Inputs that were given are not in the command."""
    from sparkinfer.run.kept import kept_for

    kept = kept_for(model)
    found = {"profile": kept.profile, "split": kept.split, "machine": kept.machine}
    more = [f"--{name} {_quoted(path)}" for name, path in found.items()
            if path is not None and name not in given]  # fmt: skip
    if not more:
        return None
    command = f"sparkinfer report {_quoted(model)} -o {_quoted(output)} --force {' '.join(more)}"
    return f"run has more files for this model: {command}"


def bench_line(model: Path) -> str | None:
    """A note with the command that measures the model as `run` would run it; None if no cached file
    makes a difference."""
    from sparkinfer.run.kept import kept_for

    kept = kept_for(model)
    is_full = kept.model is not None and kept.model.parent.name.startswith("full-")
    copy = kept.model if is_full and kept.model != model.resolve() else None
    if copy is None and kept.split is None:
        return None
    plan = f" --split {_quoted(kept.split)}" if kept.split else ""
    return f"note: run uses its cached files: sparkinfer bench {_quoted(copy or model)}{plan}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
