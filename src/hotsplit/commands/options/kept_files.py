"""Lines that name files which `hotsplit run` has cached for a model, and commands with them."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hotsplit.errors import HotsplitError

if TYPE_CHECKING:
    from hotsplit.report.config import ReportConfig


def with_copy(error: HotsplitError, command: str, model: Path) -> HotsplitError:
    """The error about a model that a command cannot load, with a hint at the copy that `run` has
    made of it; unchanged if it is about something else, if the model can be loaded, or if there is
    no copy."""
    if not str(error).startswith(f"{model}: "):
        return error
    from hotsplit.artifacts.model_file import ModelFile

    try:
        ModelFile.load(model)
    except HotsplitError:
        from hotsplit.run.cached_files import cached_files_for

        copy = cached_files_for(model).model
        if copy is not None and copy != model.resolve():
            return HotsplitError(f"{error}; run has a converted copy: {command} {_quoted(copy)}")
    return error


def report_line(config: "ReportConfig") -> str | None:
    """A line with the command for a page with the files that were given and those cached by `run`
    that go with them; None if there are none of the latter."""
    from hotsplit.report.artifacts import load_artifacts
    from hotsplit.run.cached_files import cached_files_for

    kept, whole = cached_files_for(config.model), config
    for name in ("profile", "split", "machine"):
        if getattr(kept, name) is None or getattr(config, name) is not None:
            continue
        more = replace(whole, **{name: getattr(kept, name)})
        try:
            load_artifacts(more)
        except HotsplitError:  # e.g. a plan that was made from another profile than the one given
            continue
        whole = more
    if whole == config:
        return None
    named = {
        "--profile": whole.profile,
        "--split": whole.split,
        "--machine": whole.machine,
        "--predictors": whole.predictors,
    }
    options = [(option, path) for option, path in named.items() if path is not None]
    options += [("--eval-json", path) for path in whole.evals]
    words = " ".join(f"{option} {_quoted(path)}" for option, path in options)
    command = f"hotsplit report {_quoted(whole.model)} -o {_quoted(whole.output)} --force {words}"
    return f"run has more files for this model: {command}"


def bench_line(model: Path) -> str | None:
    """A note on how to measure the model as `run` would run it; None if that is the same."""
    from hotsplit.run.cached_files import cached_files_for

    kept = cached_files_for(model)
    is_full = kept.model is not None and kept.model.parent.name.startswith("full-")
    copy = kept.model if is_full and kept.model != model.resolve() else None
    if copy is None and kept.split is None:
        return None
    plan = f" --split {_quoted(kept.split)}" if kept.split else ""
    return f"note: run uses its cached files: hotsplit bench {_quoted(copy or model)}{plan}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
