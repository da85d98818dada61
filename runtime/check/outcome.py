"""Runs a part of a check in a thread of its own, with a time limit, and says why it fails."""

import re
import threading
from collections.abc import Callable

import torch

MOST_LETTERS = 160  # of an error message; the rest is cut off
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_PLACE = re.compile(r"at \d+:\d+:$")  # the beginning of Triton's errors


class NotChecked(Exception):
    """There was no memory for a check, so it has no result."""


def outcome(run: Callable[[], None], limit_s: float, *, is_waited_for: bool = False) -> str:
    """The reason why a function fails, "" if it does not. It runs in a thread of its own, which is
    abandoned at the limit: a call that waits for a device cannot be ended. An interrupt abandons it,
    too, unless `is_waited_for`."""
    found: list[str | NotChecked] = []

    def call() -> None:
        try:
            with torch.inference_mode():
                run()
        except Exception as error:  # noqa: BLE001  # any exception means that the part fails
            is_memory = any(words in str(error).lower() for words in _NO_MEMORY)
            found.append(NotChecked() if is_memory else line_of(error))
        else:
            found.append("")

    thread = threading.Thread(target=call, daemon=True)
    try:
        thread.start()
        thread.join(limit_s)
    except KeyboardInterrupt:
        if is_waited_for and thread.is_alive():
            thread.join(limit_s)
        raise
    if not found:
        return too_long(limit_s)
    if isinstance(found[0], NotChecked):
        raise found[0]
    return found[0]


def too_long(limit_s: float) -> str:
    return f"takes longer than {limit_s:g} s"


def line_of(error: Exception) -> str:
    """An error's type, unless that says nothing, and first line; the last line if the first is a
    place in source code."""
    lines = [line for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = " ".join(lines[-1 if _PLACE.match(lines[0]) else 0].split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)[:MOST_LETTERS]
    name = type(error).__name__
    return (
        text
        if name in ("Wrong", "ImportError", "HotsplitError", "DeviceLost")
        else f"{name}: {text}"
    )
