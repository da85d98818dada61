"""Errors that are shown as one line, without a traceback."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT


class HotsplitError(Exception):
    """Wrong input, or a request that this machine cannot meet. The message says what is wrong,
    where, what was wanted and what to do next."""


class DoesNotFitError(HotsplitError):
    """The memories do not hold the model; larger ones would."""


def refuse_together(source: Path | str, *checks: Callable[[], object]) -> None:
    """Runs all checks of a source. Raises HotsplitError with the messages of all that do."""
    found: list[str] = []
    for check in checks:
        try:
            check()
        except HotsplitError as error:
            found.append(str(error).removeprefix(f"{source}: "))
    if found:
        raise HotsplitError(f"{source}: {'; and '.join(found)}")


@contextmanager
def about(source: Path | str, advice: str = "") -> Iterator[None]:
    """Puts the source before, and the advice after, the message of the block's HotsplitError."""
    try:
        yield
    except HotsplitError as error:
        raise HotsplitError(f"{source}: {error}{advice}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into the error that `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise HotsplitError(f"{path}: cannot be written: {error.strerror}") from error


class Interrupted(KeyboardInterrupt):
    """Raised when a signal interrupts a command; holds the message and the exit code."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
        self.is_ctrl_c = signal_number == SIGINT
