"""Type-checked reads of values in our own JSON objects and GGUF keys, and helpers that quote
foreign values in errors.

A value of the wrong type is refused with its name. The caller that catches the error adds the
file's name. This module imports neither torch nor numpy, because the command line, which starts
without them, quotes values too."""

import math
import sys
import unicodedata
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

from hotsplit.errors import HotsplitError

T = TypeVar("T")
MAX_COUNT = (1 << 63) - 1  # the largest int64; every count of ours fits
MAX_SHOWN = 60  # characters of a value that an error quotes
MAX_LINE = 200  # characters of another program's message
LONGEST_END = 700  # characters kept at either end of a printed line


def other_version(found: object, known: int, again: str) -> str:
    """What an error says of a file of version `found`, without the file's name. `again`: how to make
    the file anew."""
    return f"version {shown(found)}, this program reads {known}; {again}"


class Fields:
    """The values of an object by their keys; errors call it `name`."""

    def __init__(self, values: object, name: str = "", keys: set[str] | None = None) -> None:
        """Raises HotsplitError for a value that is not an object and, if `keys` is given, for an
        unknown or missing key."""
        if not isinstance(values, Mapping):
            name = one_line(name or "the content", MAX_SHOWN)
            raise HotsplitError(f"{name} is {shown(values)}, wanted an object")
        self.values, self.name = values, name
        wrong = sorted(str(key) for key in values.keys() ^ keys) if keys is not None else []
        if wrong:
            raise HotsplitError(f"key {shown(self._name(wrong[0]))} is unknown or missing")

    def text(self, key: str) -> str:
        value = self._get(key)
        return value if isinstance(value, str) else self._refuse(key, value, "a string")

    def text_or_none(self, key: str) -> str | None:
        return None if self._get(key) is None else self.text(key)

    def line(self, key: str) -> str:
        """A one-line string, such as an id or a name, which errors can quote as it is."""
        return self._line(key, self.text(key))

    def line_or_none(self, key: str) -> str | None:
        return None if self._get(key) is None else self.line(key)

    def lines(self, key: str) -> list[str]:
        """One-line strings."""
        return self._each(key, self._line)

    def choice(self, key: str, known: tuple[str, ...]) -> str:
        value = self._get(key)
        if isinstance(value, str) and value in known:
            return value
        return self._refuse(key, value, f"one of {', '.join(known)}")

    def flag(self, key: str) -> bool:
        value = self._get(key)
        return value if isinstance(value, bool) else self._refuse(key, value, "true or false")

    def count(self, key: str, least: int = 0, most: int = MAX_COUNT) -> int:
        return self._count(key, self._get(key), least, most)

    def counts(self, key: str, most: int = MAX_COUNT) -> list[int]:
        return self._each(key, lambda name, value: self._count(name, value, 0, most))

    def number(self, key: str, *, least: float = -math.inf, above: float = -math.inf) -> float:
        """A finite number, at least `least` and larger than `above`."""
        value = self._number(key, self._get(key))
        if not (math.isfinite(value) and value >= least and value > above):
            bound = f" above {above}" if above > -math.inf else ""
            bound = bound or (f", at least {least}" if least > -math.inf else "")
            self._refuse(key, value, f"a finite number{bound}")
        return value

    def numbers(self, key: str, *, may_be_infinite: bool = False) -> list[float]:
        def read(name: str, value: object) -> float:
            number = self._number(name, value)
            if math.isnan(number) or not (may_be_infinite or math.isfinite(number)):
                self._refuse(name, value, "a finite number")
            return number

        return self._each(key, read)

    def part(self, key: str, keys: set[str] | None = None) -> "Fields":
        """An object within this one."""
        return Fields(self._get(key), self._name(key), keys)

    def parts(self, key: str, keys: set[str]) -> list["Fields"]:
        return self._each(key, lambda name, value: Fields(value, self._name(name), keys))

    def items(self, key: str) -> list[object]:
        value = self._get(key)
        return value if isinstance(value, list) else self._refuse(key, value, "a list")

    def _each(self, key: str, read: Callable[[str, object], T]) -> list[T]:
        return [read(f"{key}[{i}]", plain(v)) for i, v in enumerate(self.items(key))]

    def _line(self, key: str, value: object) -> str:
        if isinstance(value, str) and value.isprintable():
            return value
        return self._refuse(key, value, "a one-line string")

    def _count(self, key: str, value: object, least: int, most: int) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        return self._refuse(key, value, f"a whole number from {least} to {most}")

    def _number(self, key: str, value: object) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (isinstance(value, int) and abs(value) > MAX_COUNT):
            return self._refuse(key, value, "a number")
        assert isinstance(value, int | float)
        return float(value)

    def _get(self, key: str) -> object:
        if key not in self.values:
            raise HotsplitError(f"key {shown(self._name(key))} is missing")
        return plain(self.values[key])

    def _name(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def _refuse(self, key: str, value: object, wanted: str) -> NoReturn:
        name = one_line(self._name(key), MAX_SHOWN)
        raise HotsplitError(f"{name} is {shown(value)}, wanted {wanted}")


def plain(value: object) -> object:
    """A Python value. Numbers in GGUF keys are numpy's, which the command line imports late."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def shown(value: object, most: int = MAX_SHOWN) -> str:
    """A value as errors quote it: on one line, and cut if it is long."""
    value = plain(value)
    if isinstance(value, int) and abs(value) > 10**60:
        return "a number of more than 60 digits"
    try:
        text = repr(value[: most + 1] if isinstance(value, str) else value)
        text = " ".join(text.split()) if "\n" in text else text  # an array's
    except RecursionError:  # json nests up to the limit, and repr needs more of the stack
        return f"a {type(value).__name__} in a {type(value).__name__}, and so on"
    return text if len(text) <= most + 2 else text[: most - 3] + "..."


def json_kind(value: object) -> str:
    """The kind of a JSON value, in JSON's words: "null", "a number" and so on."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kinds = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds[type(value)]


def one_line(message: object, most: int = MAX_LINE) -> str:
    """Another program's message on one line, cut if it is long."""
    text = " ".join(str(message).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def escaped(text: str) -> str:
    """The text with control characters, such as a newline or ESC in a file's name, as escapes.

    Invisible characters that reorder text are escaped too, spaces of other scripts are not."""
    if text.isprintable():
        return text
    return "".join(
        c
        if c.isprintable() or unicodedata.category(c) == "Zs"
        else c.encode("unicode_escape").decode()
        for c in text
    )


def printable(text: str) -> str:
    """The text with everything but printable characters and the plain space as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def printed_line(line: str) -> str:
    """An error as it is printed: on one line, and without the middle of a very long one."""
    line = escaped(line)
    left_out = len(line) - 2 * LONGEST_END
    if left_out <= 100:
        return line
    return f"{line[:LONGEST_END]} [... {left_out:,} characters ...] {line[-LONGEST_END:]}"
