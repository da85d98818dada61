"""Translates a user's constraint for llguidance, and llguidance's messages for the user.

Runs in a grammar's process, since both take time that grows with the constraint."""

import json
import re
from collections.abc import Sequence
from typing import Literal

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import one_line
from hotsplit.runtime.generate import gbnf, gbnf_parser
from hotsplit.runtime.generate.json_schema import (
    Schema,
    mark_unions,
    parse_schema,
    place_of,
    prepare_schema,
    schemas_of,
)

Kind = Literal["JSON schema", "regex", "Lark grammar", "GBNF grammar", "grammar of tool calls"]

# As in llama.cpp, at most a space, or a newline and indentation, separates the parts of a document.
# An uncertain model could otherwise emit whitespace forever.
_WHITESPACE = r" |\n[ \t]{0,20}"
# Without \uXXXX, which could disguise one key as another.
_ESCAPES = 'nrbtf\\"'


def translated(kind: Kind, text: str) -> tuple[Literal["lark", "regex"], str]:
    """A grammar in llguidance's Lark, or a regex. Raises HotsplitError for a text that is wrong, or
    would not be enforced in full."""
    if kind == "JSON schema":
        return "lark", _json_rule("start", text)
    if kind == "grammar of tool calls":
        parts = json.loads(text)
        rules = [_json_rule(name, json.dumps(part)) for name, part in parts["schemas"].items()]
        return "lark", "".join([parts["grammar"], *rules])
    if kind == "GBNF grammar":
        grammar = gbnf_parser.parse(text)
        regex = gbnf.as_regex(grammar)
        return ("lark", gbnf.as_lark(grammar)) if regex is None else ("regex", regex)
    if kind == "Lark grammar" and "%json" in text:  # its keywords would not be checked
        raise HotsplitError("Lark grammar: %json is not supported; give --json-schema instead")
    return ("regex" if kind == "regex" else "lark"), text


def _json_rule(name: str, text: str) -> str:
    schema = parse_schema(text)
    prepare_schema(schema)
    mark_unions(schemas_of(schema))
    options = {
        "lenient": True,  # so that formats without a meaning to llguidance are only warned of
        "whitespace_pattern": _WHITESPACE,
        "json_allowed_escapes": _ESCAPES,
    }
    return f"{name}: %json {json.dumps(schema | {'x-guidance': options})}\n"


def unenforced(kind: Kind, text: str, warnings: Sequence[str]) -> str | None:
    """What llguidance warns that it would not enforce, in one line; None if it enforces all. A
    format that it does not know is an annotation."""
    for warning in warnings:
        if not warning.startswith("Unknown format"):
            return message_of(kind, text, warning)
    return None


def message_of(kind: Kind, text: str, message: str) -> str:
    """llguidance's message on a constraint, in one line."""
    if message.startswith("oneOf"):
        for schema in _schemas_in(kind, text):
            prepare_schema(schema)
            if (place := mark_unions(schemas_of(schema))) is not None:
                return (
                    f"JSON schema, {one_line(place)}: 'oneOf': a document may match several of its"
                    " alternatives; use anyOf, or require a property whose const tells them apart"
                )
    if keyword := re.search(r'Unimplemented keys: \["([^"]+)"', message):
        places = [place_of(schema, keyword[1]) for schema in _schemas_in(kind, text)]
        place = next(filter(None, places), "#")
        return (
            f"JSON schema, {one_line(place)}: '{keyword[1]}': this keyword is not supported;"
            " leave it out"
        )
    # The line numbers in messages on a Lark grammar are those of the user's text.
    words = _one_line if kind == "Lark grammar" else _without_place
    return f"{kind}: {words(message)}"


def _schemas_in(kind: Kind, text: str) -> list[Schema]:
    if kind == "JSON schema":
        return [parse_schema(text)]
    return list(json.loads(text)["schemas"].values())


def _one_line(message: str) -> str:
    """llguidance's message without its source excerpt (lines of `3 | ...` and carets)."""
    if "panic" in message or "<backtrace>" in message:
        return "llguidance cannot handle it; make it smaller or simpler"
    if "limits." in message or "too many" in message or "too large" in message:
        return "its automaton is too large; make it smaller or simpler"
    if "recursion limit exceeded" in message:
        return "a value in it is nested too deep; make it flatter"
    lines = [line.strip() for line in message.splitlines()]
    kept = [line for line in lines if line.strip("^") and not line.split(" ")[0].isdigit()]
    text = " ".join(kept).replace('failed to parse "%json"', "it is not JSON")
    return text.partition("failed to compile JSON schema: ")[2][:300] or text[:300]


def _without_place(message: str) -> str:
    """llguidance's message on a text that was translated: what is wrong, and if it says so, where.
    Leaves out line numbers, which are those of the translation."""
    lines = message.splitlines()
    marks = [i for i, line in enumerate(lines) if "^" in line and not line.strip(" ^")]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if not marks or not reasons:
        return re.sub(r"^at \d+\(\d+\): (invalid regex .* \(in regex\): )?", "", _one_line(message))
    part = lines[marks[0] - 1][lines[marks[0]].index("^") :][:60]
    return f"{reasons[0]}, {'from here: ' + part if part else 'at the end'}"
