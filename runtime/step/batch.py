"""The rows of a step, each of which is one token of a sequence, and memory for their logits.

Letters: R rows that want logits, V vocabulary."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hotsplit.runtime.cache.kv_cache import KVCache
from hotsplit.runtime.cache.state_slots import Saves, StateSlots, Stretch
from hotsplit.runtime.kernels.gpu.launch import ROWS

Wanted = Literal["none", "last", "all"]  # tokens whose logits are wanted
_WANTED = {"none": slice(0, 0), "last": slice(-1, None), "all": slice(None)}
WANTED_NAMES = tuple(_WANTED)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One token of a step. Rows of a sequence are consecutive, without gaps in position. A row with
    a `source` is not computed: it copies the keys and values of the row with that index.

    With recurrent states: the first row of a sequence begins with the state in slot `reads`, -1 for
    zeros, after the kept rows `again`, and stores that state in slot `begins`; the state after a
    row is stored in its slot `writes`, and its inputs are kept in row `keeps`; -1: nowhere.
    `saves`: whether the state before the row is saved, see cache.state_slots, and the window, see
    cache.block_table."""

    token: int
    position: int
    sequence: int = 0
    has_logits: bool = False
    source: int | None = None
    saves: Saves | None = None
    reads: int = -1
    writes: int = -1
    again: range = range(0)
    begins: int = -1
    keeps: int = -1


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


def is_decoded(run: Sequence[Row]) -> bool:
    """True if all rows have logits, as in decoding (drafts included), and none is a copy. A run too
    long for a step is a text whose logits are all wanted, for instance by `eval`: a pass reads each
    weight once for all of it."""
    return len(run) <= ROWS[-1] and all(row.has_logits and row.source is None for row in run)


@contextmanager
def prepared(
    cache: KVCache, states: StateSlots | None, rows: Sequence[Row], *, keeps_rows: bool = False
) -> Iterator[Sequence[Row]]:
    """Yields the rows of a pass with the slots of their states; their positions in the cache are
    reserved. If the block does not raise, what the pass has stored is that of its sequences from
    then on, and windows are saved where rows ask for it. `keeps_rows`: the inputs of checked rows
    can be kept."""
    for run in runs_of(rows):
        cache.reserve(run[0].sequence, run[0].position, run[-1].position + 1)
    with with_slots(states, rows, keeps_rows=keeps_rows) as slotted:
        yield slotted
    for row in rows if cache.has_rings else ():
        if row.saves == "lasting":
            cache.save(row.sequence, row.position)


@contextmanager
def with_slots(
    states: StateSlots | None, rows: Sequence[Row], *, keeps_rows: bool = False
) -> Iterator[Sequence[Row]]:
    """Yields the rows of a pass with the slots of their states; if the block does not raise, the
    states that the pass has stored are those of its sequences from then on. Without recurrent
    states, yields the rows themselves."""
    if states is None:
        yield rows
        return
    runs = runs_of(rows)
    stretches = [_stretch_of(run, keeps_rows=keeps_rows) for run in runs]
    with states.passing(stretches) as slots:
        yield [
            replace(row, **own.of_row(number))
            for run, own in zip(runs, slots, strict=True)
            for number, row in enumerate(run)
        ]


def _stretch_of(run: Sequence[Row], *, keeps_rows: bool) -> Stretch:
    assert all(row.source is None for row in run), "a row with a state cannot be a copy"
    return Stretch(
        sequence=run[0].sequence,
        start=run[0].position,
        stop=run[-1].position + 1,
        saves={row.position: row.saves for row in run if row.saves is not None},
        is_check=keeps_rows and all(row.has_logits for row in run),
    )


_MOST_KEPT = 4  # buffers, so that a caller can hold the logits of the latest steps
_MOST_ROWS = 32  # of a kept buffer; more are usually the rows of a whole text, and rare
_UNUSED = 3  # references to an unused buffer: the list, a variable and an argument


@dataclass
class LogitsMemory:
    """Memory for logits, reused once no tensor refers to it: fresh memory would cost a step a page
    fault for every 4 KiB."""

    vocab_size: int
    _kept: list[np.ndarray] = field(default_factory=list, repr=False)

    def limit(self, vocab_size: int) -> None:
        """Later logits are those of that many ids."""
        self.vocab_size = vocab_size
        self._kept.clear()

    def take(self, num_rows: int) -> Tensor:
        """Uninitialised f32 [R, V], not handed out again while a tensor refers to it."""
        for memory in self._kept:
            if len(memory) >= num_rows and sys.getrefcount(memory) == _UNUSED:
                return torch.from_numpy(memory[:num_rows])
        made = np.empty((num_rows, self.vocab_size), np.float32)
        if num_rows <= _MOST_ROWS:
            self._kept[:] = [made, *self._kept[: _MOST_KEPT - 1]]
        return torch.from_numpy(made)
