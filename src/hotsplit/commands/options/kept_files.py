"""Lines that name files which `hotsplit run` has cached for a model, and commands with them."""

import shlex
from pathlib import Path

from hotsplit.errors import HotsplitError


def with_copy(error: HotsplitError, command: str, model: Path) -> HotsplitError:
    """The error about a model that a command cannot load, with a hint at the copy that `run` has
    made of it; unchanged if it is about something else or there is none."""
    if not str(error).startswith(f"{model}: "):
        return error
    from hotsplit.artifacts.model_file import ModelFile

    try:
        ModelFile.load(model)
    except HotsplitError:
        from hotsplit.run.cached_files import cached_files_for

        copy = cached_files_for(model).model
        if copy is not None and copy != model.resolve():
            return HotsplitError(
                f"{error}; run has a converted copy: {command} {shlex.quote(str(copy))}"
            )
    return error


def bench_line(model: Path) -> str | None:
    """A note on how to measure the model as `run` would run it; None if that is the same."""
    from hotsplit.run.cached_files import cached_files_for

    kept = cached_files_for(model)
    is_full = kept.model is not None and kept.model.parent.name.startswith("full-")
    copy = kept.model if is_full and kept.model != model.resolve() else None
    if copy is None and kept.split is None:
        return None
    words = [str(copy or model), *(["--split", str(kept.split)] if kept.split else [])]
    return f"note: run uses its cached files: hotsplit bench {shlex.join(words)}"
