"""The order that values impose on the operations of a step program."""

from collections.abc import Sequence

from hotsplit.runtime.step.program import Op


def edges(ops: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[tuple[int, int]]:
    """Pairs (earlier, later) of indices of `ops`, given as (reads, writes), that must keep their
    order: read after write, write after read, write after write."""
    found: set[tuple[int, int]] = set()
    written: dict[str, int] = {}
    read: dict[str, list[int]] = {}
    for number, (reads, writes) in enumerate(ops):
        for value in reads:
            found |= {(written[value], number)} if value in written else set()
        for value in writes:
            found |= {(before, number) for before in read.pop(value, ())}
            found |= {(written[value], number)} if value in written else set()
            written[value] = number
        for value in reads:
            read.setdefault(value, []).append(number)
    return sorted((a, b) for a, b in found if a != b)


def is_added(value: str, later: Sequence[Op]) -> bool:
    """True if a value is next read as a summand."""
    reader = next((op for op in later if value in op.reads), None)
    return reader is not None and reader.kind == "add"


def is_read(value: str, later: Sequence[Op]) -> bool:
    """True if the value is read before it is written again."""
    for op in later:
        if value in op.reads:
            return True
        if value in op.writes:
            return False
    return False
