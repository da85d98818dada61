"""The options that constrain a model's output: a JSON schema, grammar or regex."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotsplit.commands.options.shared import FILE, joined
from hotsplit.errors import HotsplitError, about
from hotsplit.files.json_file import read_text

if TYPE_CHECKING:
    from hotsplit.runtime.generate.constraints import Constraint
    from hotsplit.runtime.text.codec import TextCodec

MAX_CHARACTERS = 4 << 20  # of a schema or grammar in a file
LARK_SUFFIX = ".lark"
NAMES = ("json_schema", "json_schema_file", "grammar", "grammar_file", "regex")

# The command takes their values as keywords named as in NAMES.
constraint_options = joined(
    click.option("-j", "--json-schema", metavar="TEXT", help="JSON schema for the output."),
    click.option("-jf", "--json-schema-file", type=FILE, help="The same, from a file."),
    click.option("--grammar", metavar="TEXT", help="Grammar (GBNF or Lark) for the output."),
    click.option(
        "--grammar-file", type=FILE, help="The same, from a file; one named .lark is always Lark."
    ),
    click.option("--regex", metavar="TEXT", help="Regex that the whole output must match."),
)


@dataclass(frozen=True, kw_only=True)
class ConstraintOptions:
    json_schema: str | None = None
    json_schema_file: Path | None = None
    grammar: str | None = None
    grammar_file: Path | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        """Raises click's usage error if more than one is given."""
        given = [f"--{name.replace('_', '-')}" for name in NAMES if getattr(self, name) is not None]
        if len(given) > 1:
            raise click.UsageError(f"{' and '.join(given)} exclude each other; give one")


def constraint_of(options: ConstraintOptions, codec: "TextCodec") -> "Constraint | None":
    """The constraint that the options ask for; None if they ask for none.

    Raises HotsplitError for a file that cannot be read and for syntax errors."""
    from hotsplit.runtime.generate import constraints

    if options.regex is not None:
        return constraints.regex_constraint(options.regex, codec)
    schema, grammar = options.json_schema, options.grammar
    path = options.json_schema_file or options.grammar_file
    if options.json_schema_file is not None:
        schema = _read(options.json_schema_file, "JSON schema")
    if options.grammar_file is not None:
        grammar = _read(options.grammar_file, "grammar")
    with nullcontext() if path is None else about(path):
        if schema is not None:
            return constraints.json_schema_constraint(schema, codec)
        if grammar is None:
            return None
        is_lark = path is not None and path.suffix == LARK_SUFFIX or _looks_like_lark(grammar)
        make = constraints.lark_constraint if is_lark else constraints.gbnf_constraint
        return make(grammar, codec)


def _looks_like_lark(text: str) -> bool:
    """A GBNF text has `::=`, a Lark text has a rule `start` or a line %llguidance instead."""
    return "::=" not in text and any(
        line.lstrip().startswith(("start", "?start", "%llguidance")) for line in text.splitlines()
    )


def _read(path: Path, what: str) -> str:
    text = read_text(path, what)
    if len(text) > MAX_CHARACTERS:
        raise HotsplitError(f"{path}: has over {MAX_CHARACTERS} characters; wanted a {what}")
    if not text.strip():
        raise HotsplitError(f"{path}: is empty; wanted a {what}")
    return text
