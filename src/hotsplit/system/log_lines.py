"""Prints the package's log messages as lines on stderr.

Library code reports through loggers below "hotsplit": a warning if the user should act,
information if it explains a choice. A message is a whole line for people, with the name of the file
that it is about. The command line shows both, without levels or times; in other programs Python
shows warnings, and the rest only if logging is configured to."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NAME = "hotsplit"


def to_stderr(line: str) -> None:
    """Prints to the current sys.stderr, which a progress bar redirects to above itself."""
    if sys.stderr is not None:
        print(line, file=sys.stderr)  # noqa: T201


class _Lines(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))


@contextmanager
def lines_on_stderr(say: Callable[[str], None] = to_stderr) -> Iterator[None]:
    """Within the block, passes the package's information and warnings to `say` as plain lines."""
    logger = logging.getLogger(NAME)
    kept = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [_Lines(say)], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = kept[0], kept[2]
        logger.setLevel(kept[1])
