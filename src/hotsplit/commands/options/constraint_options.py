"""The options that constrain a model's output: a JSON schema, grammar or regex."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.options.command_options import option_table
from hotsplit.errors import HotsplitError, about
from hotsplit.files.json_file import read_text

if TYPE_CHECKING:
    from hotsplit.runtime.generate.constraints import Constraint
    from hotsplit.runtime.text.codec import TextCodec

MAX_CHARACTERS = 4 << 20  # of a schema or grammar in a file
LARK_SUFFIX = ".lark"
FILE_MARK = "@"  # before the name of a file that has the text
_WORDS = {"json_schema": "JSON schema", "grammar": "grammar", "regex": "regex"}
# `take_constraint` takes their values.
constraint_options = option_table(
    """
-j --json-schema | text TEXT|@FILE | JSON schema for the output.
--grammar | text TEXT|@FILE | Grammar (GBNF or Lark) for the output; a file named .lark is always
    Lark.
--regex | text | Regex that the whole output must match.
"""
)


@dataclass(frozen=True, kw_only=True)
class ConstraintOption:
    """A constraint of the user's: its kind, its text, and the file that it is from."""

    kind: str
    text: str
    path: Path | None = None


def take_constraint(options: dict[str, Any]) -> ConstraintOption | None:
    """The constraint among a command's options, from which all are removed; None if there is none.
    Raises UsageError for more than one, HotsplitError for an unreadable file."""
    given = {name: text for name in _WORDS if (text := options.pop(name)) is not None}
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{names} exclude each other; give one")
    ((kind, text),) = given.items()
    if kind == "regex" or not text.startswith(FILE_MARK):
        return ConstraintOption(kind=kind, text=text)
    path, what = Path(text.removeprefix(FILE_MARK)), _WORDS[kind]
    text = read_text(path, what)
    if len(text) > MAX_CHARACTERS:
        raise HotsplitError(f"{path}: has over {MAX_CHARACTERS} characters; wanted a {what}")
    if not text.strip():
        raise HotsplitError(f"{path}: is empty; wanted a {what}")
    return ConstraintOption(kind=kind, text=text, path=path)


def constraint_of(option: ConstraintOption, codec: "TextCodec") -> "Constraint":
    """A new constraint for one text. Raises HotsplitError for syntax errors."""
    from hotsplit.runtime.generate import constraints

    is_lark = option.path is not None and option.path.suffix == LARK_SUFFIX
    make: Callable[[str, TextCodec], Constraint]
    if option.kind == "regex":
        make = constraints.regex_constraint
    elif option.kind == "json_schema":
        make = constraints.json_schema_constraint
    elif is_lark or _looks_like_lark(option.text):
        make = constraints.lark_constraint
    else:
        make = constraints.gbnf_constraint
    with nullcontext() if option.path is None else about(option.path):
        return make(option.text, codec)


def _looks_like_lark(text: str) -> bool:
    """A GBNF text has `::=`, a Lark text has a rule `start` or a line %llguidance instead."""
    return "::=" not in text and any(
        line.lstrip().startswith(("start", "?start", "%llguidance")) for line in text.splitlines()
    )
