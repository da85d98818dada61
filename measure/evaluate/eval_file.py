"""Builds and reads `hotsplit eval --json`: a comparison of one mode with the dense model."""

from dataclasses import asdict
from pathlib import Path

from hotsplit.errors import HotsplitError, about
from hotsplit.files.declared import read_declared
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import shown
from hotsplit.measure.evaluate.quality import EvalReport

FORMAT, VERSION = "hotsplit.eval", 1
_WHAT = "comparison (hotsplit eval --json)"


def eval_content(report: EvalReport) -> dict[str, object]:
    """The object to print. Raises HotsplitError if `load_eval` would refuse it: for figures that
    are not finite or too large, such as the perplexity of a broken mode."""
    content = asdict(report)
    try:
        read_declared(EvalReport, content)
    except HotsplitError as error:
        raise HotsplitError(
            f"mode {report.mode}: {error}, so the comparison cannot be stored; without --json, all"
            " its figures are shown"
        ) from error
    return {"format": FORMAT, "version": VERSION, **content}


def load_eval(path: Path) -> EvalReport:
    """The comparison. Raises HotsplitError unless it is complete, finite and of this version."""
    values = read_object(path, _WHAT)
    kind, version = values.pop("format", None), values.pop("version", None)
    if (kind, version) != (FORMAT, VERSION):
        raise HotsplitError(
            f"{path}: format {shown(kind)}, version {shown(version)};"
            f" wanted a {_WHAT} of version {VERSION}"
        )
    with about(path, "; run hotsplit eval --json again"):
        return read_declared(EvalReport, values)
