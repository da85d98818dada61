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
# What models call a call's arguments, whatever their template says, in small letters.
_ARGUMENTS = frozenset({"arguments", "parameters", "args", "params", "input", "kwargs"})
_NAMES = ("name", "tool_name", "function")
_OTHERS = frozenset({*_NAMES, "id", "type", "index", "tool_call_id"})


@dataclass(frozen=True, kw_only=True)
class WrittenCall:
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


def call_of(name: object, arguments: object, call_id: object = None) -> WrittenCall:
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
    return WrittenCall(
        name=name,
        arguments=json_text(arguments),
        id=call_id if isinstance(call_id, str) and 0 < len(call_id) <= _MAX_ID else None,
    )


def calls_of(found: object, tools: Mapping[str, Mapping[str, object]]) -> list[WrittenCall]:
    """The calls in a value of JSON: an object with a name and arguments, also inside `function`, or
    a list of such objects. `tools`: names with schemas. Raises Malformed."""
    items = found if isinstance(found, list) else [found]
    if not items:
        raise Malformed
    return [_call_of_object(item, tools) for item in items]


def _call_of_object(item: object, tools: Mapping[str, Mapping[str, object]]) -> WrittenCall:
    if not isinstance(item, dict):
        raise Malformed
    inner = item.get("function")
    function: Mapping[str, object] = inner if isinstance(inner, dict) else item
    name = next((function[key] for key in _NAMES if isinstance(function.get(key), str)), None)
    schema = tools.get(name, {}) if isinstance(name, str) else {}
    return call_of(name, _arguments(function, schema), item.get("id"))


def _arguments(function: Mapping[str, object], schema: Mapping[str, object]) -> object:
    """The arguments of a call under any of their names, and those beside the function's name that
    are its parameters. Raises Malformed where a call would lose some: if there are several
    arguments, or keys that are neither arguments nor parameters of the function."""
    given = {
        key: value
        for key, value in function.items()
        if key.lower() in _ARGUMENTS and _may_be_arguments(value)
    }
    full = [value for value in given.values() if value not in (None, {}) and value != ""]
    if len(full) > 1:
        raise Malformed
    beside = {k: v for k, v in function.items() if k not in given and k not in _OTHERS}
    known = schema.get("properties")
    properties = known.keys() if isinstance(known, dict) else set[str]()
    if full:
        inside, more = full[0], {k: v for k, v in beside.items() if k in properties}
        if not more:
            return inside
        if not isinstance(inside, dict) or inside.keys() & more.keys():
            raise Malformed
        return {**inside, **more}
    if beside and beside.keys() <= properties:
        return beside
    if beside and not given:
        raise Malformed
    return None


def _may_be_arguments(value: object) -> bool:
    """Whether it is an object, JSON of one in a string, or nothing."""
    if isinstance(value, str):
        return not value.strip() or value.lstrip().startswith("{")
    return value is None or isinstance(value, dict)


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
