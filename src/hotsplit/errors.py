"""Errors that are shown as one line, without a traceback."""

from signal import SIGINT


class HotsplitError(Exception):
    """Wrong input, or a request that this machine cannot meet. The message says what is wrong,
    where, what was wanted and what to do next."""


class Interrupted(KeyboardInterrupt):
    """Raised when a signal interrupts a command; holds the message and the exit code."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
        self.is_ctrl_c = signal_number == SIGINT
