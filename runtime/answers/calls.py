"""Tool calls: their values from JSON, their ids, and their form in an answer."""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotsplit.runtime.answers.scanner import Malformed, sound_json

Tool = Mapping[str, Any]  # a tool of a chat: {"type": "function", "function": {...}}

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_MAX_ID = 64  # characters
# Names of the arguments in a call. A model may use the other one of what its template says.
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call in a model's text. `arguments`: JSON of an object. `id`: the model's own, if it writes
    ids."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call in an answer; `index` counts them."""

    index: int
    id: str
    name: str
    arguments: str  # JSON of an object

    def body(self, *, has_index: bool = False) -> dict[str, object]:
        """OpenAI's object; with its index, as a part of a stream."""
        function = {"name": self.name, "arguments": self.arguments}
        found: dict[str, object] = {"id": self.id, "type": "function", "function": function}
        return {"index": self.index, **found} if has_index else found


def name_of(tool: Tool) -> str:
    return str(tool["function"]["name"])


def schema_of(tool: Tool) -> dict[str, object]:
    schema = tool["function"].get("parameters")
    return schema if isinstance(schema, dict) else {}


def json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_of(name: object, arguments: object, call_id: object = None) -> Call:
    """A call from values of JSON. Arguments may be JSON in a string, too; null and the empty string
    stand for no arguments. Raises Malformed."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = sound_json(arguments)
        except ValueError as error:
            raise Malformed from error
    if arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise Malformed
    return Call(
        name=name,
        arguments=json_text(arguments),
        id=call_id if isinstance(call_id, str) and 0 < len(call_id) <= _MAX_ID else None,
    )


def calls_of(found: object) -> list[Call]:
    """The calls in a value of JSON: an object with a name and arguments, also inside `function`, or
    a list of such objects. Raises Malformed."""
    items = found if isinstance(found, list) else [found]
    if not items:
        raise Malformed
    return [_call_of_object(item) for item in items]


def _call_of_object(item: object) -> Call:
    if not isinstance(item, dict):
        raise Malformed
    inner = item.get("function")
    function: Mapping[str, object] = inner if isinstance(inner, dict) else item
    given = (function.get(key) for key in _ARGUMENTS)
    arguments = next((value for value in given if value is not None), None)
    return call_of(function.get("name"), arguments, item.get("id"))


def new_id() -> str:
    """An id of nine letters and digits, which every known template accepts; some of Mistral's
    accept no other."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def is_short_id(call_id: str) -> bool:
    return _SHORT_ID.fullmatch(call_id) is not None


def short_id(call_id: str) -> str:
    """The id if it has nine letters and digits, otherwise such an id derived from it."""
    if is_short_id(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest(), "big")
    letters = []
    for _ in range(9):
        number, digit = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[digit])
    return "".join(letters)
