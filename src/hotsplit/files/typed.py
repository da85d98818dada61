"""Quotes foreign values in errors.

This module imports neither torch nor numpy, because the command line starts without them."""

import sys
import unicodedata

MAX_COUNT = (1 << 63) - 1  # the largest int64; every count of ours fits
MAX_SHOWN = 60  # characters of a value that an error quotes
MAX_LINE = 200  # characters of another program's message
LONGEST_END = 700  # characters kept at either end of a printed line


def other_version(found: object, known: int, again: str) -> str:
    """What an error says of a file of version `found`. `again`: how to make it anew."""
    return f"version {shown(found)}, this program reads {known}; {again}"


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
