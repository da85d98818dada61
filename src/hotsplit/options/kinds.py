"""Checks that options are of the kinds and within the bounds that their annotations declare.

Python passes on any value, and a wrong one shows up late or never: 1.5 tokens, three stop strings
for "abc". Rules that depend on other options or on a model are checked where the option is declared
or used. pydantic is no help here: its strict mode takes neither numpy's numbers nor arrays, and its
errors of unions name no kind."""

import inspect
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Interval, Le

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import plain, shown
from hotsplit.system.sizes import whole_number

Given = ParamSpec("Given")
Returned = TypeVar("Returned")
Finite = Annotated[float, Interval()]
Share = Annotated[float, Interval(ge=0, le=1)]

# One of a kind, and several.
_WORDS: dict[object, tuple[str, str]] = {
    bool: ("True or False", "True or False"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    Path: ("a Path", "Paths"),
}


def check_fields(options: Any) -> None:
    """Raises HotsplitError for the first field of a dataclass that is of another kind than
    declared, or out of bounds; a list is as good as a tuple."""
    for name, kind in _hints(options.__class__).items():
        check_kind(name, getattr(options, name), kind)


def kinds_checked(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Lets a public function raise HotsplitError for an argument of another kind than declared;
    keywords that are passed on (**options) are not checked."""
    signature = inspect.signature(function)
    passed_on = {
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }

    @wraps(function)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        try:
            arguments = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # the call raises it with the function's name
            arguments = {}
        hints = _hints(function)
        for name, value in arguments.items():
            if name in hints and name not in passed_on:
                check_kind(name, value, hints[name])
        return function(*args, **kwargs)

    return checked


def check_kind(name: str, value: object, kind: object) -> None:
    """Raises HotsplitError, with the option's name, unless the value is of this annotated kind."""
    if not _is_of(value, kind):
        raise HotsplitError(f"{name} is {shown(value)}, wanted {_words(kind)}")


@cache
def _hints(declared: Any) -> dict[str, Any]:
    """Read at the first use, when all names of the annotations are known."""
    return get_type_hints(declared, include_extras=True)


def parse_settings(declared: type, text: str, default: str) -> dict[str, Any]:
    """The fields of a dataclass of numbers and strings in NAME=VALUE,...; {} for `default`. Raises
    HotsplitError for any other text."""
    if text == default:
        return {}
    kinds, found = _hints(declared), dict[str, Any]()
    for part in str(text).split(","):
        name, _, value = part.partition("=")
        if name not in kinds or name in found or not value:
            raise HotsplitError(
                f"{shown(part)} in {shown(text)}; wanted {default} or NAME=VALUE,... with"
                f" {', '.join(kinds)}"
            )
        found[name] = _read(name, value, kinds[name])
    return found


def _read(name: str, text: str, kind: Any) -> object:
    basic = _basic(kind)
    try:
        if int in basic or bool in basic:
            number = whole_number(text)
            return number if int in basic else bool(number)
        if float in basic and text.isascii():  # Python also takes the digits of other scripts
            return float(text)
    except ValueError:
        pass
    else:
        if float not in basic:
            return text
    raise HotsplitError(f"{name} is {shown(text)}, wanted {_words(kind)}")


def _basic(kind: Any) -> set[type]:
    """The classes of which values of a kind are."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is None:
        return {kind}
    if origin is Literal:
        return {type(part) for part in parts}
    return set().union(*map(_basic, parts[:1] if origin is Annotated else parts))


def _is_of(value: object, kind: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        if not _is_of(value, parts[0]):
            return False
        low, high = _bounds(kind)
        number: Any = plain(value)
        # Not math.isfinite, which raises for a whole number that no float can hold.
        return abs(number) <= sys.float_info.max and low <= number <= high
    if origin in (Union, types.UnionType):
        return any(_is_of(value, part) for part in parts)
    if origin is Literal:
        return any(type(plain(value)) is type(part) and value == part for part in parts)
    if origin is tuple:
        return _is_tuple(value, parts)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin is not None and issubclass(origin, Iterable):
        if isinstance(value, list | tuple):
            return _is_tuple(value, (parts[0], ...))
        # Arrays are checked where they are used; reading an iterator would end it.
        needed = "__getitem__" if issubclass(origin, Sequence) else "__iter__"
        return hasattr(type(value), needed) and not isinstance(value, str | bytes | Mapping)
    if origin is not None:
        return isinstance(value, origin)
    if kind in (int, float):  # numpy's numbers too
        number = int if kind is int else int | float
        return isinstance(plain(value), number) and not isinstance(plain(value), bool)
    return isinstance(value, kind)


def _bounds(kind: Any) -> tuple[float, float]:
    """The least and the greatest number of an annotated kind; None without a bound."""
    low, high = -math.inf, math.inf
    for bound in kind.__metadata__:
        for each in bound if isinstance(bound, Interval) else (bound,):
            low = each.ge if isinstance(each, Ge) else low  # type: ignore[assignment]
            high = each.le if isinstance(each, Le) else high  # type: ignore[assignment]
    return low, high


def _is_tuple(value: object, parts: tuple[Any, ...]) -> bool:
    if not isinstance(value, tuple | list):
        return False
    if parts[-1] is ...:
        return all(_is_of(each, parts[0]) for each in value)
    return len(value) == len(parts) and all(map(_is_of, value, parts))


def _words(kind: Any, *, several: bool = False) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        low, high = (f"{b:g}" if parts[0] is float else str(b) for b in _bounds(kind))
        least = "" if low == "-inf" else f" from {low}"
        most = "" if high == "inf" else f" to {high}" if least else f" up to {high}"
        return f"{_words(parts[0], several=several)}{least}{most}"
    if origin in (Union, types.UnionType):
        named = [part for part in parts if part is not types.NoneType]
        return _one_of([_words(part, several=several) for part in named])
    if origin is Literal:
        return _one_of([repr(part) for part in parts])
    if kind in _WORDS:
        return _WORDS[kind][several]
    if origin is None:
        return f"{'objects' if several else 'an object'} of class {kind.__name__}"
    if issubclass(origin, Mapping):
        return "dicts" if several else "a dict"
    if not issubclass(origin, Iterable):
        return "functions" if several else "a function"
    if origin is tuple and parts[-1] is not ...:
        return f"{'tuples' if several else 'a tuple'} of {' and '.join(map(_words, parts))}"
    return f"{'lists' if several else 'a list'} of {_words(parts[0], several=True)}"


def _one_of(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
