"""Parses tool calls in answers, for templates that use a known syntax of calls.

A template tells its model how to write a call, so the syntax is detected from the template's text.
If it is unknown, tools are refused: clients would receive the calls as plain text."""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hotsplit.runtime.generate.stops import overlap

MAX_CALLS = 128


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON; parsed and written again unless the model wrote a string

    def body(self, index: int | None = None) -> dict[str, object]:
        """OpenAI's object; with an index, as a part of a stream."""
        function = {"name": self.name, "arguments": self.arguments}
        found: dict[str, object] = {"id": self.id, "type": "function", "function": function}
        return found if index is None else {"index": index, **found}


@dataclass(frozen=True, kw_only=True)
class ToolForm:
    """A syntax of tool calls. Any of `begin` starts the calls, which last to the end of the answer;
    `where` says whether they may start anywhere or only at its beginning. `read` returns the calls
    in a text, or None if they are malformed. `marks` are delimiters that may be special tokens."""

    name: str
    begin: tuple[str, ...]
    marks: tuple[str, ...]
    where: Literal["anywhere", "first"]
    read: Callable[[str], list[tuple[str, object]] | None]


def form_of(template: str) -> ToolForm | None:
    """The syntax of a template's tool calls; None if it has no tools, or their syntax is
    unknown."""
    if "tools" not in template:
        return None
    return next((form for marks, form in _FORMS if all(mark in template for mark in marks)), None)


def _read_hermes(text: str) -> list[tuple[str, object]] | None:
    pieces = text.split("<tool_call>")[1:]
    return _calls([_json(piece.partition("</tool_call>")[0]) for piece in pieces], "arguments")


def _read_mistral(text: str) -> list[tuple[str, object]] | None:
    found = _json(text.removeprefix("[TOOL_CALLS]"))
    return _calls(found if isinstance(found, list) else [], "arguments")


def _read_llama(text: str) -> list[tuple[str, object]] | None:
    """Reads one call, or several separated by semicolons."""
    rest, found = text.strip().removeprefix("<|python_tag|>"), []
    while rest := rest.lstrip(" \n;"):
        try:
            call, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        found.append(call)
        rest = rest[end:]
    return _calls(found, "parameters")


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _calls(found: list[object], arguments: str) -> list[tuple[str, object]] | None:
    """(name, arguments) of each call; None if there is none, or one is malformed."""
    calls = []
    for call in found:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        calls.append((call["name"], call.get(arguments, {})))
    return calls or None


_FORMS: tuple[tuple[tuple[str, ...], ToolForm], ...] = (
    (("<tool_call>", '"arguments"'),
     ToolForm(name="hermes", begin=("<tool_call>",), marks=("<tool_call>", "</tool_call>"),
              where="anywhere", read=_read_hermes)),
    (("[TOOL_CALLS]",),
     ToolForm(name="mistral", begin=("[TOOL_CALLS]",), marks=("[TOOL_CALLS]",),
              where="anywhere", read=_read_mistral)),
    (("<|start_header_id|>", '"parameters"'),
     ToolForm(name="llama 3", begin=("{", "<|python_tag|>"), marks=("<|python_tag|>",),
              where="first", read=_read_llama)),
)  # fmt: skip


class ToolSplitter:
    """Passes on text up to the first call, and parses the calls once the text has ended."""

    def __init__(self, form: ToolForm, *, most: int = MAX_CALLS) -> None:
        self._form, self._most = form, most
        self._held, self._said = "", False
        self._is_call = False

    def push(self, text: str) -> str:
        """Adds text; returns the part that cannot belong to a call."""
        self._held += text
        if self._is_call:
            return ""
        if self._form.where == "first":
            return self._first()
        places = [at for mark in self._form.begin if (at := self._held.find(mark)) >= 0]
        if places:
            self._is_call = True
            return self._take(min(places))
        keep = max(overlap(self._held, mark) for mark in self._form.begin)
        return self._take(len(self._held) - keep)

    def _first(self) -> str:
        begun = self._held.lstrip()
        if not self._said and any(begun.startswith(mark) for mark in self._form.begin):
            self._is_call = True
            return ""
        if not self._said and any(mark.startswith(begun) for mark in self._form.begin):
            return ""
        self._said = True
        return self._take(len(self._held))

    def finish(self) -> tuple[str, Sequence[ToolCall]]:
        """(held-back text that is not a call, the first `most` calls). If a call is malformed, all
        are returned as text."""
        text = self._take(len(self._held))
        found = self._form.read(text) if self._is_call else None
        if found is None:
            return text, ()
        calls = []
        for name, arguments in found[: self._most]:
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append(
                ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=arguments)
            )
        return "", calls

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text
