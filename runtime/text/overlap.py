"""Marks in a text that arrives in pieces: how much of the end may belong to one."""


def overlap(text: str, mark: str) -> int:
    """Length of the longest proper prefix of `mark` that `text` ends with."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
