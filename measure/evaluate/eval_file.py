"""Builds and reads the output of `hotsplit eval --json`: a comparison of one mode with the
dense model."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import cast, get_args

from hotsplit.errors import HotsplitError
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import Fields, shown
from hotsplit.measure.evaluate.quality import EvalReport
from hotsplit.model.modes import Mode

FORMAT, VERSION = "hotsplit.eval", 1
MOST = 1e12  # the largest float that is accepted
_WHAT = "comparison (hotsplit eval --json)"
_NAMES = {"format", "version", *(field.name for field in fields(EvalReport))}


def eval_content(report: EvalReport) -> dict[str, object]:
    """The object to print. Raises HotsplitError if `load_eval` would refuse it: for figures that
    are not finite or above MOST, such as the perplexity of a broken mode."""
    content = {"format": FORMAT, "version": VERSION, **asdict(report)}
    try:
        _report(Fields(json.loads(json.dumps(content)), keys=_NAMES))
    except HotsplitError as error:
        raise HotsplitError(
            f"mode {report.mode}: {error}, so the comparison cannot be stored; without --json, all"
            " its figures are shown"
        ) from error
    return content


def load_eval(path: Path) -> EvalReport:
    """The comparison in a file. Raises HotsplitError unless it is complete, finite and of this
    version."""
    values = read_object(path, _WHAT)
    if (values.get("format"), values.get("version")) != (FORMAT, VERSION):
        raise HotsplitError(
            f"{path}: format {shown(values.get('format'))}, version {shown(values.get('version'))};"
            f" wanted a {_WHAT} of version {VERSION}"
        )
    try:
        return _report(Fields(values, keys=_NAMES))
    except HotsplitError as error:
        raise HotsplitError(f"{path}: {error}; run hotsplit eval --json again") from error


def _report(read: Fields) -> EvalReport:
    return EvalReport(
        model_id=read.line("model_id"),
        mode=cast(Mode, read.choice("mode", get_args(Mode))),
        num_tokens=read.count("num_tokens", least=1),
        perplexity=_number(read, "perplexity", 1),
        perplexity_own_half_width=_width(read, "perplexity_own_half_width"),
        dense_perplexity=_number(read, "dense_perplexity", 1),
        dense_perplexity_half_width=_width(read, "dense_perplexity_half_width"),
        perplexity_increase=_number(read, "perplexity_increase", -1),
        perplexity_half_width=_width(read, "perplexity_half_width"),
        kl_mean=_number(read, "kl_mean", -1),  # rounding may make it negative
        kl_half_width=_width(read, "kl_half_width"),
        kl_p99=_number(read, "kl_p99", -1),
        kl_p99_interval=_interval(read, "kl_p99_interval"),
        top1_agreement=_number(read, "top1_agreement", 0, 1),
        top1_half_width=_width(read, "top1_half_width"),
        bytes_per_token=read.count("bytes_per_token"),
        bytes_half_width=_width(read, "bytes_half_width"),
        dense_bytes_per_token=read.count("dense_bytes_per_token", least=1),
        named_share_L=_shares(read, "named_share_L"),
        named_half_width=_width(read, "named_half_width"),
        hidden_share_L=_shares(read, "hidden_share_L"),
        hidden_half_width=_width(read, "hidden_half_width"),
        notes=tuple(read.lines("notes")),
    )


def _number(read: Fields, key: str, least: float, most: float = MOST) -> float:
    number = read.number(key, least=least)
    if number > most:
        raise HotsplitError(f"{key} is {shown(number)}, wanted {least:g} to {most:g}")
    return number


def _width(read: Fields, key: str) -> float | None:
    if key in read.values and read.values[key] is None:
        return None
    return _number(read, key, 0)


def _interval(read: Fields, key: str) -> tuple[float, float] | None:
    if key in read.values and read.values[key] is None:
        return None
    ends = read.numbers(key)
    if len(ends) != 2 or ends != sorted(ends) or max(map(abs, ends)) > MOST:
        raise HotsplitError(f"{key} is {shown(ends)}, wanted two ascending numbers")
    return ends[0], ends[1]


def _shares(read: Fields, key: str) -> tuple[float, ...]:
    shares = read.numbers(key)
    if not all(0 <= share <= 1 for share in shares):
        raise HotsplitError(f"{key} is {shown(shares)}, wanted shares from 0 to 1")
    return tuple(shares)
