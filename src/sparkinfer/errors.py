"""The one error that means "your input": shown as one line, without a traceback."""


class SparkinferError(Exception):
    """Wrong input: a message with what, where, what was wanted, and the next step."""
