"""What the package says while it works, as lines on stderr.

Library code reports through loggers below "sparkinfer": what somebody should act upon as a warning,
what explains a choice as information. A message is a whole line for people, with the file it is
about. The command line shows both, without levels or times; in other programs, Python shows
warnings, and the rest if the program asks for it."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NAME = "sparkinfer"


def to_stderr(line: str) -> None:
    """Prints to what stderr is at the moment, which a progress bar redirects to above itself."""
    if sys.stderr is not None:
        print(line, file=sys.stderr)


class _Lines(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))


@contextmanager
def lines_on_stderr(say: Callable[[str], None] = to_stderr) -> Iterator[None]:
    """Prints information and warnings of the package as plain lines, by `say`."""
    logger = logging.getLogger(NAME)
    kept = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [_Lines(say)], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = kept[0], kept[2]
        logger.setLevel(kept[1])
