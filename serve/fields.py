"""Reads and checks the fields of a request one by one; unread fields are said in the log, or refused.

A null field counts as absent, because OpenAI's clients send nulls."""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hotsplit.serve.api_error import ApiError, wrong

log = logging.getLogger("hotsplit.serve")

MAX_SHOWN = 60  # characters of a wrong value in an error
LARGEST = sys.float_info.max
MAX_DEPTH = 64  # of lists and objects in a request
# Marks of a body, see `num_marks`; so many values take up to 0.1 s to parse, with the GIL held.
MAX_MARKS = 3 << 16
_IS_MARK = np.isin(np.arange(256), np.frombuffer(b",:[{.", np.uint8))
_SLICE = 1 << 20  # bytes
MAX_SAID = 64  # names of unknown fields that the log says, each once
_SAID: set[str] = set()


class Fields:
    """Fields of an object. `name` is its path within the request, for errors: "stream_options".
    `is_strict`: unknown fields are refused."""

    def __init__(
        self, values: Mapping[str, object], name: str = "", *, is_strict: bool = False
    ) -> None:
        self._left = {key: value for key, value in values.items() if value is not None}
        self._name, self.is_strict = name, is_strict

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> object:
        """The raw value; None if absent."""
        return self._left.pop(name, None)

    def _checked(self, name: str, is_valid: Callable[[object], bool], wanted: str) -> Any:
        """The value; None if absent. Refuses one that is not valid."""
        value = self.take(name)
        if value is not None and not is_valid(value):
            raise self.refuse(name, value, wanted)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._checked(name, lambda value: isinstance(value, bool), "true or false")
        return default if value is None else value

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():  # JavaScript has no integer type
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(name, value, f"a whole number, {low} to {high}")
        return value

    def number(self, name: str) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(name, value, "a number")
        if not abs(value) <= LARGEST:  # math.isfinite raises for an int above it
            raise self.refuse(name, value, f"a number up to {LARGEST:g}")
        return value

    def text(self, name: str, longest: int) -> str | None:
        def is_valid(value: object) -> bool:
            return isinstance(value, str) and len(value) <= longest

        return self._checked(name, is_valid, f"text of up to {longest} characters")

    def choice(self, name: str, known: tuple[str, ...]) -> str | None:
        return self._checked(name, known.__contains__, f"one of {', '.join(known)}")

    def items(self, name: str, longest: int) -> list[object]:
        def is_valid(value: object) -> bool:
            return isinstance(value, list) and len(value) <= longest

        return self._checked(name, is_valid, f"a list of up to {longest}") or []

    def inner(self, name: str) -> "Fields | None":
        value = self._checked(name, lambda value: isinstance(value, dict), "an object")
        return None if value is None else Fields(value, self.place(name), is_strict=self.is_strict)

    def ignore(self, *names: str) -> None:
        """Accepts fields that do not change an answer."""
        for name in names:
            self._left.pop(name, None)

    def only(self, name: str, *values: object, why: str) -> None:
        """Refuses a field unless it is absent or has one of these values; `why` is the reason."""
        value = self.take(name)
        if value is not None and value not in values:
            shown = f"{self.place(name)}: {_shown(value)} is not supported: {why}"
            raise wrong(self.place(name), shown, "unsupported_value")

    def rest(self) -> dict[str, object]:
        """Removes and returns all remaining fields."""
        left, self._left = self._left, {}
        return left

    def finish(self) -> None:
        """Refuses unread fields if the server is strict; otherwise the log says each of them once, since
        a misspelt one changes an answer."""
        for key in self._left:
            name = self.place(key)[:MAX_SHOWN]
            if self.is_strict:
                raise wrong(name, f"Unknown parameter: {name!r}.", "unknown_parameter")
            if name not in _SAID and len(_SAID) < MAX_SAID:
                _SAID.add(name)
                log.warning("ignored %r, which is no parameter here; --strict refuses it", name)

    def place(self, name: str) -> str:
        return f"{self._name}.{name}" if self._name else name

    def refuse(self, name: str, value: object, wanted: str) -> ApiError:
        place = self.place(name)
        return wrong(place, f"{place} is {_shown(value)}, wanted {wanted}")


def fields_of(body: bytes, *, is_strict: bool = False) -> Fields:
    """The fields of a request. Raises ApiError unless the body is a JSON object that is at most
    MAX_DEPTH deep."""
    if num_marks(body) > MAX_MARKS:
        line = (
            f"The body has more values than are read here (over {MAX_MARKS} commas, colons, points"
            " and opening brackets outside of strings); send several requests."
        )
        raise wrong(None, line, "invalid_json")
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        reason = str(error)[:100] or type(error).__name__
        raise wrong(None, f"The body is not JSON: {reason}.", "invalid_json") from error
    if not isinstance(found, dict):
        raise wrong(None, f"The body is {_shown(found)}, wanted a JSON object.", "invalid_json")
    _check_depth(found)
    if b"\\u" in body:
        _check_unicode(found)
    return Fields(found, is_strict=is_strict)


def num_marks(body: bytes) -> int:
    """Marks outside of strings that come with every value but the first: commas, colons and opening
    brackets. Points are counted too, because fractions take long to parse. Up to the first error,
    the strings are those that JSON has."""
    plain = body.replace(rb"\\", b"__").replace(rb"\"", b"__") if b"\\" in body else body
    bytes_B = np.frombuffer(plain, np.uint8)
    count, is_inside = 0, np.uint8(0)
    for start in range(0, len(bytes_B), _SLICE):
        part_B = bytes_B[start : start + _SLICE]
        inside_B = (np.cumsum(part_B == ord('"'), dtype=np.uint8) + is_inside) & 1
        count += int(np.count_nonzero(_IS_MARK[part_B] & (inside_B == 0)))
        is_inside = inside_B[-1]
    return count


def _check_depth(found: object) -> None:
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        level = [
            value
            for item in level
            for value in (item.values() if isinstance(item, dict) else item)
            if isinstance(value, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _check_unicode(found: dict[str, object]) -> None:
    """Refuses lone surrogates: JSON's escapes can express them, tokenizers and UTF-8 cannot."""
    for name, value in found.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            place = name.encode(errors="replace").decode()
            line = f"{place}: {error.object[error.start]!r} is half of a character, wanted Unicode text"
            raise wrong(place, line) from error


def _too_deep() -> ApiError:
    line = f"The body has lists and objects more than {MAX_DEPTH} deep."
    return wrong(None, line, "invalid_json")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
