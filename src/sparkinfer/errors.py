"""Errors that are shown as one line, without a traceback."""


class SparkinferError(Exception):
    """Wrong input: a message with what, where, what was wanted, and the next step."""


class Interrupted(KeyboardInterrupt):
    """A run was told to stop by a signal, and has saved where it stands: a message and exit code."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
