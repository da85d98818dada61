"""The rows of a step: each is one token of one of its sequences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Wanted = Literal["none", "last", "all"]  # tokens whose logits are wanted
_WANTED = {"none": slice(0, 0), "last": slice(-1, None), "all": slice(None)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One token of a step. Rows of a sequence are consecutive, without gaps in position. A row with
    a `source` is not computed: it copies the keys and values of the row with that index, as the
    branches of a draft tree copy their stem."""

    token: int
    position: int
    sequence: int = 0
    has_logits: bool = False
    source: int | None = None


def rows_of(
    tokens: Sequence[int], start: int, wanted: Wanted = "last", sequence: int = 0
) -> list[Row]:
    """Rows for tokens of a sequence at positions from `start`."""
    has_logits = [False] * len(tokens)
    has_logits[_WANTED[wanted]] = [True] * len(has_logits[_WANTED[wanted]])
    return [
        Row(token=token, position=start + t, sequence=sequence, has_logits=has)
        for t, (token, has) in enumerate(zip(tokens, has_logits, strict=True))
    ]


def runs_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Groups consecutive rows of the same sequence, keeping their order."""
    runs: list[list[Row]] = []
    for row in rows:
        if runs and runs[-1][-1].sequence == row.sequence:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs
