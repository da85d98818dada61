"""Converts a summary to one JSON object."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hotsplit.inspection.inspect_file import Summary

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def to_json(summary: "Summary | DataclassInstance") -> str:
    """Strict JSON; non-finite numbers, such as the -inf of a threshold that selects all neurons,
    become "-inf", "inf" or "nan"."""
    return json.dumps(_plain(asdict(summary)), allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | frozenset):
        return [_plain(item) for item in (sorted(value) if isinstance(value, frozenset) else value)]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
