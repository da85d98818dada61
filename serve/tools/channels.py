"""Splits an answer in the messages of gpt-oss (OpenAI's harmony format): a header with a channel and
perhaps a recipient, <|message|>, a text, and a mark that ends it.

The channel analysis is reasoning; a message to a function is a call; everything else is for the
user."""

import re
from collections.abc import Generator, Iterator

from hotsplit.runtime.generate.stops import overlap
from hotsplit.serve.tools.parsers import harmony, recipient_of
from hotsplit.serve.tools.splitter import CallRules, HeldText, Kind, Part

MESSAGE = "<|message|>"
BEGINS = ("<|start|>", "<|channel|>")
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MAX_HEADER = 512  # characters
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_TO = (" to=", "to=")  # a recipient may come first: the prompt ends in <|start|>assistant


class ChannelSplitter:
    """`rules`: None if calls are not parsed, and remain text. `splits_reasoning`: if false, the
    reasoning is text, with its marks."""

    def __init__(self, rules: CallRules | None, *, splits_reasoning: bool) -> None:
        self._reads_calls, self._splits_reasoning = rules is not None, splits_reasoning
        self._held = HeldText(rules or CallRules())
        self._kind: Kind | None = None  # of the message; None between messages
        self._markup: Kind = "markup"
        self._has_begun = False

    def push(self, text: str) -> list[Part]:
        self._held.text += text
        return list(self._parts(is_over=False))

    def flush(self) -> list[Part]:
        return list(self._parts(is_over=True))

    def _parts(self, *, is_over: bool) -> Iterator[Part]:
        is_stuck = False
        while self._held.text and not is_stuck:
            if self._held.is_reading:
                part = self._held.read(is_over=is_over)
                is_stuck = part is None
                if part is not None:
                    self._kind = "content" if part.kind == "content" else None
                    yield part
            elif self._kind is None:
                is_stuck = not (yield from self._between(is_over))
            else:
                is_stuck = not (yield from self._inside(is_over))

    def _between(self, is_over: bool) -> Generator[Part, None, bool]:
        """Reads a header; what is none is text. Returns whether it got on."""
        held = self._held
        begins = BEGINS if self._has_begun else (*BEGINS, *_TO)
        at = held.text.find(MESSAGE)
        if not held.text.startswith(begins):
            if not is_over and any(mark.startswith(held.text) for mark in begins):
                return False
            self._kind, self._markup = "content", "markup"
        elif at < 0 and not is_over and len(held.text) < _MAX_HEADER:
            return False
        elif at < 0:
            self._kind = "content"
            yield held.take("content", len(held.text))
        elif recipient_of(held.text[:at]) is not None and self._reads_calls:
            held.begin(held.text[:at], harmony)
        else:
            self._kind, self._markup = self._kinds(held.text[:at])
            yield held.take(self._markup, at + len(MESSAGE))
        self._has_begun = True
        return True

    def _kinds(self, header: str) -> tuple[Kind, Kind]:
        """(kind of a message, kind of its marks)."""
        if recipient_of(header) is not None:
            return "content", "content"
        channel = _CHANNEL.search(header)
        if channel is None or channel.group(1) != "analysis":
            return "content", "markup"
        return ("reasoning", "markup") if self._splits_reasoning else ("content", "content")

    def _inside(self, is_over: bool) -> Generator[Part, None, bool]:
        """Reads a message up to its end. Returns whether it got there."""
        assert self._kind is not None
        held, marks = self._held, (*ENDS, *BEGINS)
        places = [(at, mark) for mark in marks if (at := held.text.find(mark)) >= 0]
        at, mark = min(places, default=(len(held.text), ""))
        if not mark and not is_over:
            at -= max(overlap(held.text, mark) for mark in marks)
        if at:
            yield held.take(self._kind, at)
        if not mark:
            return False
        self._kind = None
        if mark in ENDS:
            yield held.take(self._markup, len(mark))
        return True
