"""Reads an answer while it arrives: content, reasoning, tool calls, and marks that belong to none
of them. Every character is in exactly one part."""

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hotsplit.runtime.answers.calls import ToolCall, WrittenCall, is_short_id, new_id
from hotsplit.runtime.answers.channels import BEGINS, ENDS, MARKS, TO, header_of
from hotsplit.runtime.answers.formats import AnswerFormat, Reasoning
from hotsplit.runtime.answers.parsers import Parser, Tools, message_to
from hotsplit.runtime.answers.scanner import Malformed, Scanner, Steps, Unfinished
from hotsplit.runtime.text.codec import overlap

MAX_CALLS = 128

Kind = Literal["content", "reasoning", "calls", "markup"]
End = Literal["open", "whole", "cut"]  # of the text so far: more may follow, all, cut by a limit


@dataclass(frozen=True, kw_only=True)
class AnswerPart:
    """A piece of the model's text. Markup has no place in an answer: marks, and the space around
    calls and reasoning."""

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


class HeldText:
    """Text that is not yet known to be one part or another, and an attempt to read calls at its
    beginning. What begins like a call and is none becomes text."""

    def __init__(self, rules: CallRules) -> None:
        self.text = ""
        self._rules, self._ids = rules, set[str]()
        self._scanner = Scanner()
        self._steps: Steps[list[WrittenCall]] | None = None
        self._mark = ""

    @property
    def is_reading(self) -> bool:
        return self._steps is not None

    def take(self, kind: Kind, count: int) -> AnswerPart:
        part = AnswerPart(kind=kind, text=self.text[:count])
        self.text = self.text[count:]
        return part

    def begin(self, mark: str, parse: Parser) -> None:
        """Begins to read calls at the text's beginning, which is the mark."""
        self._mark, self._scanner = mark, Scanner()
        self._steps = parse(self._scanner, self._rules.tools)

    def read(self, end: End) -> AnswerPart | None:
        """Reads on; the part with the calls, or with what proved to be text, or None if that is
        not known yet."""
        assert self._steps is not None
        self._scanner.text = self.text
        self._scanner.is_over, self._scanner.is_cut = end != "open", end == "cut"
        try:
            next(self._steps)
            return None
        except StopIteration as found:
            part = self.take("calls", self._scanner.at)
            part = AnswerPart(
                kind="calls", text=part.text, calls=tuple(self._numbered(found.value))
            )
        except Unfinished:
            part = self.take("content", len(self.text))
        except Malformed:
            part = self.take("content", len(self._mark))
        self._steps = None
        return part

    def _numbered(self, calls: Sequence[WrittenCall]) -> Iterator[ToolCall]:
        for call in calls[: self._rules.most - len(self._ids)]:
            own = call.id
            if own is None or own in self._ids or self._rules.has_short_ids > is_short_id(own):
                own = new_id()
            yield ToolCall(index=len(self._ids), id=own, name=call.name, arguments=call.arguments)
            self._ids.add(own)


class AnswerReader:
    """Takes an answer in pieces; `push` and `flush` return the parts that have become certain.

    `rules`: None if calls are not read, and remain text. `splits_reasoning`: if false, reasoning is
    content, with its marks. `opened`: the marks inside which the answer starts."""

    def __init__(
        self,
        known: AnswerFormat,
        *,
        rules: CallRules | None = None,
        splits_reasoning: bool = True,
        opened: Reasoning | None = None,
    ) -> None:
        self._format, self._rules, self._splits = known, rules, splits_reasoning
        self._held = HeldText(rules or CallRules())
        self._calls: dict[str, Parser] = {}
        self._first_calls: dict[str, Parser] = {}
        separators = ""
        if rules is not None:
            self._calls, self._first_calls = dict(known.calls.begins), dict(known.calls.first)
            separators = known.calls.separators
        self._between = re.compile(rf"[\s{re.escape(separators)}]*")
        self._thoughts = {marks.begin: marks for marks in known.reasoning}
        anywhere = [marks for marks in known.reasoning if marks.is_anywhere]
        # What ends reasoning that has not begun has no place in an answer either.
        self._ends = {marks.end for marks in known.reasoning}
        self._everywhere: tuple[str, ...] = (
            *self._calls,
            *known.hidden,
            *(mark for marks in anywhere for mark in (marks.begin, marks.end)),
        )
        if known.has_channels:
            self._everywhere = MARKS
        self._inside: Reasoning | None = opened  # the marks of the reasoning that goes on
        self._may_skip = [] if opened is None else [opened.label, "\n"]  # behind the opening mark
        self._is_blank = opened is None  # nothing but space since what is before
        self._before: Literal["nothing", "reasoning", "calls"] = "nothing"
        self._has_text = False
        self._mark_kind: Kind = "markup"  # of the mark that ends a message in a channel
        self._has_begun = False
        self._channel = ""  # of the message that goes on
        self.has_calls = False

    @property
    def inside(self) -> Reasoning | None:
        """The marks of the reasoning that goes on; None outside reasoning."""
        return self._inside

    @property
    def is_answering(self) -> bool:
        """True where the answer proper goes on: not in reasoning and, if the format has channels,
        in the final one. A grammar or a schema of the answer holds there."""
        if self._format.has_channels:
            return self._channel == "final"
        return self._inside is None

    @property
    def is_holding(self) -> bool:
        """True while there is text that may still become one part or another."""
        return bool(self._held.text)

    def push(self, text: str) -> list[AnswerPart]:
        self._held.text += text
        return list(self._parts("open"))

    def flush(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """The rest, at the end of the answer. `is_cut`: a limit has ended it, not the model."""
        return list(self._parts("cut" if is_cut else "whole"))

    def _parts(self, end: End) -> Iterator[AnswerPart]:
        gets_on = True
        while self._held.text and gets_on:
            if self._held.is_reading:
                gets_on = yield from self._call(end)
            elif self._inside is not None:
                gets_on = yield from self._reasoning(self._inside, end)
            elif self._is_blank:
                gets_on = yield from self._blank(end)
            else:
                gets_on = yield from self._content(end)

    def _call(self, end: End) -> Generator[AnswerPart, None, bool]:
        part = self._held.read(end)
        if part is None:
            return False
        self._is_blank = part.kind == "calls"
        if self._is_blank:
            self._before = "calls"
        else:
            self._has_text = True
        self.has_calls |= bool(part.calls)
        yield part
        return True

    def _reasoning(self, marks: Reasoning, end: End) -> Generator[AnswerPart, None, bool]:
        """Reads reasoning up to its end. Returns whether it got there."""
        held = self._held
        if self._may_skip:
            text = self._may_skip[0]
            if end == "open" and len(held.text) < len(text) and text.startswith(held.text):
                return False
            del self._may_skip[0]
            if text and held.text.startswith(text):
                yield self._thought("markup", len(text))
            return True
        ends: tuple[str, ...] = ENDS
        cuts: tuple[str, ...] = BEGINS
        if not self._format.has_channels:
            ends = (f"\n{marks.end}", marks.end)
            cuts = (marks.cut,) if marks.cut and self._rules is not None else ()
            cuts = (*cuts, marks.begin) if marks.is_anywhere else cuts
        at, mark = self._next_mark((*ends, *cuts), end)
        if at:
            yield self._thought("reasoning", at)
        if not mark:
            return False
        if mark == marks.begin:  # once more
            yield self._thought("markup", len(mark))
            self._may_skip = [marks.label, "\n"]
            return True
        if mark in ends:
            yield self._thought("markup", len(mark))
        self._inside, self._channel = None, ""
        self._begin_blank()
        return True

    def _begin_blank(self) -> None:
        """The space that follows is next to reasoning, and so no content."""
        self._is_blank = True
        self._before = "reasoning" if self._splits else "nothing"

    def _thought(self, kind: Kind, count: int) -> AnswerPart:
        return self._held.take(kind if self._splits else "content", count)

    def _blank(self, end: End) -> Generator[AnswerPart, None, bool]:
        """Reads the space at the beginning, or behind a call or reasoning, and the mark behind
        it."""
        held = self._held
        space = (self._between if self._before == "calls" else _SPACE).match(held.text)
        assert space is not None
        count, rest = space.end(), held.text[space.end() :]
        marks = self._marks_of_blank()
        if mark := next((mark for mark in marks if rest.startswith(mark)), ""):
            if count:
                yield held.take("markup", count)
            return (yield from self._begin(mark, end))
        may_begin = any(mark.startswith(rest) for mark in marks)
        if end == "open" and (may_begin or not rest):
            return False
        if end == "cut" and may_begin and self._before == "calls":  # half a mark
            yield held.take("markup", len(held.text))
            return True
        is_markup = self._before == "reasoning" or (self._before == "calls" and not rest)
        if count and is_markup:
            yield held.take("markup", count)
        if held.text:
            self._is_blank, self._has_text = False, True
        return True

    def _marks_of_blank(self) -> tuple[str, ...]:
        if self._format.has_channels:
            return self._everywhere if self._has_begun else (*self._everywhere, TO)
        if self._has_text:
            return self._everywhere
        wrapper = self._format.wrapper[:1] if self._before == "reasoning" else ()
        return (*self._everywhere, *self._first_calls, *self._thoughts, *self._ends, *wrapper)

    def _content(self, end: End) -> Generator[AnswerPart, None, bool]:
        """Reads text up to the next mark. Returns whether there is one."""
        at, mark = self._next_mark(self._everywhere, end)
        if at:
            yield self._held.take("content", at)
        return (yield from self._begin(mark, end)) if mark else False

    def _next_mark(self, marks: Sequence[str], end: End) -> tuple[int, str]:
        """(place of the first mark, the mark), or (characters that belong to none, "")."""
        text = self._held.text
        at, mark = min(
            ((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=(len(text), "")
        )
        if not mark and end == "open":
            at -= max((overlap(text, mark) for mark in marks), default=0)
        return at, mark

    def _begin(self, mark: str, end: End) -> Generator[AnswerPart, None, bool]:
        """Takes the mark at the beginning of the held text, or begins to read what it begins."""
        held = self._held
        if self._format.has_channels:
            return (yield from self._message(mark, end))
        if mark in self._thoughts:
            marks = self._thoughts[mark]
            yield self._thought("markup", len(mark))
            self._inside, self._may_skip = marks, [marks.label, "\n"]
        elif mark in self._ends:
            yield self._thought("markup", len(mark))
            self._begin_blank()
        elif mark in self._format.hidden:
            yield held.take("markup", len(mark))
        elif mark.lstrip() in self._format.wrapper:
            yield held.take("markup", len(mark))
            self._begin_blank()
            _, close = self._format.wrapper
            if mark != close:
                self._everywhere = (*self._everywhere, f"\n{close}", close)
        else:
            held.begin(mark, {**self._calls, **self._first_calls}[mark])
        return True

    def _message(self, mark: str, end: End) -> Generator[AnswerPart, None, bool]:
        """Reads the end of a message, or the header of one."""
        held = self._held
        if mark in ENDS:
            yield held.take(self._mark_kind, len(mark))
            self._mark_kind, self._channel = "markup", ""
            self._is_blank, self._before = True, "nothing"
            return True
        tools = self._rules.tools if self._rules is not None else {}
        header = header_of(held.text, tools, is_over=end != "open")
        if header is None:
            return False
        self._has_begun, self._is_blank, self._channel = True, False, header.channel
        if header.recipient is not None and self._rules is not None:
            held.begin(held.text[: header.length], message_to(header))
        elif header.recipient is not None:
            self._mark_kind = "content"
            yield held.take("content", header.length)
        elif header.kind == "reasoning":
            yield self._thought("markup", header.length)
            self._inside = self._format.reasoning[0]
        else:
            yield held.take("markup", header.length)
        return True


_SPACE = re.compile(r"\s*")
