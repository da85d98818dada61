"""Reads a growing text piece by piece: marks, words, JSON. Parsers of tool calls are generators
that use it.

A parser yields when it needs more text, returns its calls, and raises Malformed if the text is
something else. Each character is read once, so that the time is linear in the text's length."""

import json
import re
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]  # of a parser; it yields where it needs more text

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\s\[\]{}<>\"',;()=|]*")
_NUMBER_OR_NAME = re.compile(r"[-+.\w]*")
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_BEGINS_SCALAR = frozenset("-0123456789tfn")


class Malformed(Exception):
    """The text is not what a parser reads."""


class Unfinished(Malformed):
    """The answer ended inside something that has an end."""


def sound_json(text: str) -> object:
    """The value of JSON that can be passed on: written again, it is UTF-8 and has only finite
    numbers. Line ends inside strings are accepted. Raises ValueError for anything else."""
    try:
        found = json.loads(text, strict=False, parse_constant=_refuse_constant)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


class Scanner:
    """`text` grows until `is_over`; the part before `at` has been read. `is_cut`: a limit has ended
    the answer, so that what has no end is not whole."""

    def __init__(self) -> None:
        self.text, self.at, self.is_over, self.is_cut = "", 0, False, False

    def at_end(self) -> Steps[bool]:
        """True if nothing follows. Raises Unfinished if something might have."""
        while self.at == len(self.text):
            if self.is_over and self.is_cut:
                raise Unfinished
            if self.is_over:
                return True
            yield
        return False

    def space(self) -> Steps[None]:
        """Skips white space; waits for what follows it."""
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text) or self.is_over:
                return
            yield

    def follows(self, *marks: str) -> Steps[str | None]:
        """The first of the marks that comes next; None if none does. Reads nothing."""
        while True:
            for mark in marks:
                rest = self.text[self.at : self.at + len(mark)]
                if rest == mark:
                    return mark
                if mark.startswith(rest) and not self.is_over:
                    break
            else:
                return None
            yield

    def skip(self, *marks: str) -> Steps[bool]:
        """Reads one of the marks if it comes next; returns whether it did."""
        found = yield from self.follows(*marks)
        self.at += len(found or "")
        return found is not None

    def skip_after_space(self, *marks: str) -> Steps[bool]:
        """The same behind white space, which is read only with a mark."""
        start = self.at
        yield from self.space()
        is_there = yield from self.skip(*marks)
        if not is_there:
            self.at = start
        return is_there

    def take(self, *marks: str) -> Steps[None]:
        is_there = yield from self.skip(*marks)
        if not is_there:
            raise Malformed

    def close(self, *marks: str, least: int = 1) -> Steps[bool]:
        """Reads the mark that ends a call, behind white space and perhaps brackets too many;
        returns whether it did. What the end of the answer has cut off counts, if `least` characters
        are there."""
        start = self.at
        yield from self.space()
        is_there = yield from self.skip(*marks)
        if not is_there and self._is_cut_off(marks, least):
            self.at, is_there = len(self.text), True
        while not is_there and (yield from self.skip_after_space("}", "]")):
            is_there = yield from self.skip_after_space(*marks)
        if not is_there:
            self.at = start
        return is_there

    def _is_cut_off(self, marks: tuple[str, ...], least: int) -> bool:
        rest = self.text[self.at :] if self.is_over else ""
        return len(rest) >= least and any(mark.startswith(rest) for mark in marks)

    def until(self, *marks: str, or_end: bool = False) -> Steps[str]:
        """Reads up to the first of the marks, and returns that text without it. `or_end`: or up to
        the end of an answer that is whole."""
        start, longest = self.at, max(map(len, marks))
        while True:
            places = [at for mark in marks if (at := self.text.find(mark, self.at)) >= 0]
            if places:
                self.at = min(places)
                return self.text[start : self.at]
            if or_end and self.is_over and not self.is_cut:
                self.at = len(self.text)
                return self.text[start:]
            self.at = max(self.at, len(self.text) - longest + 1)
            yield from self._more()

    def word(self) -> Steps[str]:
        """Reads a name: characters other than space, quotes and brackets."""
        return (yield from self.matched(_WORD))

    def json(self) -> Steps[object]:
        """Reads an object or a list, wherever its end is, and returns its value."""
        start = self.at
        yield from self._pass_value()
        try:
            return sound_json(self.text[start : self.at])
        except ValueError as error:
            raise Malformed from error

    def json_string(self) -> Steps[object]:
        """Reads a string between quotes, and returns its value."""
        start = self.at
        yield from self._pass_string()
        try:
            return sound_json(self.text[start : self.at])
        except ValueError as error:
            raise Malformed from error

    def _more(self) -> Steps[None]:
        if self.is_over:
            raise Unfinished
        yield

    def _next(self) -> Steps[str]:
        """The next character that is not white space."""
        yield from self.space()
        if self.at == len(self.text):
            raise Unfinished
        return self.text[self.at]

    def matched(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads what a pattern matches that may match more of a longer text."""
        start = self.at
        while True:
            found = pattern.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text) or self.is_over:
                return self.text[start : self.at]
            yield

    def _pass_value(self) -> Steps[None]:
        """Reads an object or a list, checking its structure but not its strings and numbers."""
        if (yield from self._next()) not in "{[":
            raise Malformed
        ends: list[str] = []  # the closing brackets of the objects and lists around
        place, may_close = "value", False
        while True:
            character = yield from self._next()
            if may_close and character == ends[-1]:
                self.at += 1
                ends.pop()
                if not ends:
                    return
                place = "comma"
            elif place == "comma":
                if character != ",":
                    raise Malformed
                self.at += 1
                place, may_close = ("key" if ends[-1] == "}" else "value"), False
            elif place == "key":
                yield from self._pass_key(character)
                place, may_close = "value", False
            elif character in "{[":
                self.at += 1
                ends.append("}" if character == "{" else "]")
                place, may_close = ("key" if character == "{" else "value"), True
            else:
                yield from self._pass_scalar(character)
                place, may_close = "comma", True

    def _pass_scalar(self, character: str) -> Steps[None]:
        if character == '"':
            yield from self._pass_string()
        elif character in _BEGINS_SCALAR:
            yield from self.matched(_NUMBER_OR_NAME)
        else:
            raise Malformed

    def _pass_key(self, character: str) -> Steps[None]:
        if character != '"':
            raise Malformed
        yield from self._pass_string()
        if (yield from self._next()) != ":":
            raise Malformed
        self.at += 1

    def _pass_string(self) -> Steps[None]:
        self.at += 1
        while True:
            found = _IN_STRING.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.text.startswith('"', self.at):
                self.at += 1
                return
            yield from self._more()
