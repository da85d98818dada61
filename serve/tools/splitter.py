"""Splits an answer into text and tool calls while it arrives. Every character is in exactly one
part."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hotsplit.runtime.generate.stops import overlap
from hotsplit.serve.tools.calls import Call, ToolCall, is_short_id, new_id
from hotsplit.serve.tools.parsers import Parser, Tools
from hotsplit.serve.tools.reader import Malformed, Reader, Steps, Unfinished

MAX_CALLS = 128

Kind = Literal["content", "reasoning", "calls", "markup"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of the model's text. Markup has no place in an answer: tags, and the space around
    calls."""

    kind: Kind
    text: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CallRules:
    """What a request allows. `tools`: names and schemas. Calls beyond `most` are dropped.
    `has_short_ids`: the template accepts only ids of nine letters and digits."""

    tools: Tools = field(default_factory=dict)
    most: int = MAX_CALLS
    has_short_ids: bool = False


class Splitter(Protocol):
    """Takes an answer in pieces; both methods return the parts that have become certain."""

    def push(self, text: str) -> list[Part]: ...

    def flush(self) -> list[Part]:
        """At the end of the answer: returns the rest."""


class HeldText:
    """Text that is not yet known to be one part or another, and an attempt to read calls at its
    beginning. What begins like a call and is none becomes text."""

    def __init__(self, rules: CallRules) -> None:
        self.text = ""
        self._rules, self._ids = rules, set[str]()
        self._reader = Reader()
        self._steps: Steps[list[Call]] | None = None
        self._mark = ""

    @property
    def is_reading(self) -> bool:
        return self._steps is not None

    def take(self, kind: Kind, count: int) -> Part:
        part = Part(kind=kind, text=self.text[:count])
        self.text = self.text[count:]
        return part

    def begin(self, mark: str, parse: Parser) -> None:
        """Begins to read calls at the text's beginning, which is the mark."""
        self._mark, self._reader = mark, Reader()
        self._steps = parse(self._reader, self._rules.tools)

    def read(self, *, is_over: bool) -> Part | None:
        """Reads on; the part with the calls, or with what proved to be text, or None if that is
        not known yet."""
        assert self._steps is not None
        self._reader.text, self._reader.is_over = self.text, is_over
        try:
            next(self._steps)
            return None
        except StopIteration as end:
            part = self.take("calls", self._reader.at)
            part = Part(kind="calls", text=part.text, calls=tuple(self._numbered(end.value)))
        except Unfinished:
            part = self.take("content", len(self.text))
        except Malformed:
            part = self.take("content", len(self._mark))
        self._steps = None
        return part

    def _numbered(self, calls: Sequence[Call]) -> Iterator[ToolCall]:
        for call in calls[: self._rules.most - len(self._ids)]:
            own = call.id
            if own is None or own in self._ids or self._rules.has_short_ids > is_short_id(own):
                own = new_id()
            yield ToolCall(index=len(self._ids), id=own, name=call.name, arguments=call.arguments)
            self._ids.add(own)


class CallSplitter:
    """Separates calls from text. `begins`: the marks that begin calls, with their parsers; `first`:
    further ones, valid only where nothing but calls has come before. `separators`: characters
    between calls, besides white space."""

    def __init__(
        self,
        begins: Mapping[str, Parser],
        rules: CallRules,
        *,
        first: Mapping[str, Parser] | None = None,
        separators: str = "",
    ) -> None:
        self._begins, self._first = begins, {**begins, **(first or {})}
        self._held = HeldText(rules)
        self._between = re.compile(rf"[\s{re.escape(separators)}]*")
        self._has_calls = False
        self._has_text = False
        self._is_blank = True  # nothing but space since the beginning, or since a call

    def push(self, text: str) -> list[Part]:
        self._held.text += text
        return list(self._parts(is_over=False))

    def flush(self) -> list[Part]:
        return list(self._parts(is_over=True))

    def _parts(self, *, is_over: bool) -> Iterator[Part]:
        while self._held.text:
            if not self._held.is_reading:
                yield from self._before_call(is_over=is_over)
                if not self._held.is_reading:
                    return
            part = self._held.read(is_over=is_over)
            if part is None:
                return
            self._is_blank = part.kind == "calls"
            self._has_calls |= self._is_blank
            self._has_text |= not self._is_blank
            yield part

    def _before_call(self, *, is_over: bool) -> Iterator[Part]:
        """Takes the text that is certainly before a call; begins to read the call."""
        held = self._held
        if self._is_blank:
            space = self._between if self._has_calls else _SPACE
            match = space.match(held.text)
            assert match is not None
            count, begins = match.end(), self._begins if self._has_text else self._first
            rest = held.text[count:]
            if (mark := next((mark for mark in begins if rest.startswith(mark)), None)) is not None:
                if count:
                    yield held.take("markup", count)
                held.begin(mark, begins[mark])
                return
            if not is_over and any(mark.startswith(rest) for mark in begins):
                return
            if not rest and self._has_calls:
                yield held.take("markup", count)
                return
            self._is_blank, self._has_text = False, True
        places = [(at, mark) for mark in self._begins if (at := held.text.find(mark)) >= 0]
        at, mark = min(places, default=(len(held.text), ""))
        if not mark and not is_over:
            at -= max(overlap(held.text, mark) for mark in self._begins)
        if at:
            yield held.take("content", at)
        if mark:
            held.begin(mark, self._begins[mark])


_SPACE = re.compile(r"\s*")
