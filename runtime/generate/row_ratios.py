"""Measures what a step of several rows costs, so that drafts need not find out at a text's expense.

The first MEASURED programs with a model measure it, because one may find the processor busy, and
keep it in the cache folder; medians count. Steps of a text replace them as soon as there are some
(draft_costs.RowCosts)."""

import logging
import random
import statistics
import time
from collections.abc import Mapping

from hotsplit import __version__
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.runtime.generate.speculation import has_equal_rows
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.sequences import Part, Sequence, Sequences
from hotsplit.system.cache_place import ROWS_FILE
from hotsplit.system.kept_values import keep_value, kept_values, processor

log = logging.getLogger(__name__)
ROWS = (1, 4, 2, 8, 3, 6)  # measured in this order
ROUNDS = 2
MEASURED = 5  # times
MOST_SECONDS = 2.0  # after which no further step is begun
MOST_RATIO = 1e3  # more is no measurement


def ratios_here(sequences: Sequences, model: ModelFile, mode: str) -> Mapping[int, float] | None:
    """Times of steps of an engine by their number of rows, in those of one row. None on a GPU,
    whose steps are captured when they are first wanted, and if all sequences are in use."""
    if not has_equal_rows(sequences.live) or not sequences.has_room:
        return None
    num_bytes = sum(entry.num_bytes for entry in model.tensors.values())
    content = f"{model.model_id[:16]} of {num_bytes} bytes, {mode}"
    software = f"{__version__}, {library.level()}, {library.num_threads()} threads"
    key = f"{processor()}, {software}, {content}"
    found = _kept(key)
    if len(found) < MEASURED:
        with sequences.open() as text:
            latest = measured(sequences, text)
        if latest is not None:
            found.append(latest)
            keep_value(ROWS_FILE, key, found)
    ratios = {rows: [each[rows] for each in found if rows in each] for rows in ROWS}
    medians = {rows: statistics.median(ratios[rows]) for rows in sorted(ROWS) if ratios[rows]}
    words = ", ".join(f"{rows}: {ratio:.2f}" for rows, ratio in medians.items())
    log.debug(f"a step of several rows takes, in steps of one, {words}")
    return medians if len(medians) > 1 else None


def measured(sequences: Sequences, text: Sequence) -> dict[int, float] | None:
    """The ratios of the shortest times of ROUNDS, as many as MOST_SECONDS suffice for, at least
    that of one row; None if the clock stands still. `text`: an empty one, as it is afterwards."""
    generator, least = random.Random(0), dict[int, float]()
    size, deadline = sequences.live.vocab_size, time.perf_counter() + MOST_SECONDS
    for rows in (1, *ROWS * ROUNDS):  # the first one warms up
        if time.perf_counter() > deadline or rows > text.room:
            break
        tokens = [generator.randrange(size) for _ in range(rows)]
        began = time.perf_counter()
        sequences.run([Part(sequence=text, tokens=tokens, wanted="all")])
        took = time.perf_counter() - began
        least[rows] = min(took, least.get(rows, took))
        text.rollback(0)
    if not least.get(1):
        return None
    return {rows: least[rows] / least[1] for rows in sorted(least)}


def _kept(key: str) -> list[dict[int, float]]:
    """What was measured so far; empty if that is nothing, or no usable file."""
    found = kept_values(ROWS_FILE).get(key)
    if not isinstance(found, list) or not all(map(_are_ratios, found)):
        return []
    return [{int(rows): ratio for rows, ratio in each.items()} for each in found]


def _are_ratios(found: object) -> bool:
    return (
        isinstance(found, dict)
        and {"1"} <= found.keys() <= set(map(str, ROWS))
        and all(type(ratio) is float and 0 < ratio < MOST_RATIO for ratio in found.values())
    )
