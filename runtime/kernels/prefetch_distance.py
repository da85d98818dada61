"""Measures how far ahead this processor should prefetch weights that a product streams.

The kernels know the best distance for some processors (ahead_here in cpu/dispatch.cpp): on a Zen 5
prefetching gains a third, on a Zen 4 it costs two thirds. On others with tiles, the first engine
measures it and keeps it in the cache folder. It also holds for sums of grouped rows, which are not
timed. Only the speed depends on it, never a result."""

import logging
import time
from collections.abc import Sequence
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from hotsplit import __version__
from hotsplit.errors import HotsplitError
from hotsplit.model.weight_types import TYPES
from hotsplit.runtime.device import huge_pages
from hotsplit.runtime.kernels.cpu import library
from hotsplit.system.cache_place import PREFETCH_FILE
from hotsplit.system.kept_values import keep_value, kept_values, processor

log = logging.getLogger(__name__)
DISTANCES = (0, 1024, 2304, 4608, 9216)
LEAST_GAIN = 0.05  # a distance other than 0 must be faster by this share, twice
ROUNDS = 4
MOST_SECONDS = 1.0  # after which an unfinished measurement is given up
WIDTH, MATRIX_BYTES = 2048, 32 << 20
KINDS = {  # bytes of a row of WIDTH values
    each.kind_in("tiled"): WIDTH // each.block_values * each.block_bytes
    for each in TYPES
    if each.has_integer_sums
}
TOGETHER = 16  # rows of a tile

_lock = Lock()


def set_for_this_processor() -> None:
    """Sets the distance, once per process: the known, the kept, or a measured one."""
    with _lock:
        _set_once()


@cache
def _set_once() -> None:
    if not library.prefers_tiles() or library.knows_prefetch_distance():
        return
    software = f"{__version__}, {library.level()}, {library.num_threads()} threads"
    key = f"{processor()}, {software}"
    found = _kept(key)
    if found is None:
        try:
            found = measured()
        except (HotsplitError, OSError, MemoryError, RuntimeError) as error:  # memory is short
            log.debug(f"the distance of prefetches is not measured: {error}")
            return
        log.debug(f"weights are prefetched {found:,} bytes ahead, as measured on this processor")
        keep_value(PREFETCH_FILE, key, found)
    library.set_prefetch_distance(found)


def measured() -> int:
    """The fastest of DISTANCES for products of matrices in memory with one vector; 0 unless another
    is faster by LEAST_GAIN in two comparisons, and 0 if MOST_SECONDS do not suffice."""
    before, deadline = library.prefetch_distance(), time.perf_counter() + MOST_SECONDS
    try:
        seconds = _best_seconds(DISTANCES, deadline)
        fastest = min(seconds, key=lambda distance: seconds[distance])
        if _is_faster(fastest, seconds):
            return fastest if _is_faster(fastest, _best_seconds((0, fastest), deadline)) else 0
        return 0
    except TimeoutError:
        return 0
    finally:
        library.set_prefetch_distance(before)


def _is_faster(distance: int, seconds: dict[int, float]) -> bool:
    return seconds[distance] < (1 - LEAST_GAIN) * seconds[0]


def _best_seconds(distances: Sequence[int], deadline: float) -> dict[int, float]:
    """The sum over KINDS of each distance's shortest time, in alternating rounds. Raises
    TimeoutError after the deadline, a value of time.perf_counter."""
    best_s = dict.fromkeys(distances, 0.0)
    x_D = torch.ones(WIDTH)
    for kind, row_bytes in KINDS.items():
        data = _matrix(row_bytes)
        samples: dict[int, list[float]] = {distance: [] for distance in distances}
        for number in range(ROUNDS + 1):
            for distance in distances:
                library.set_prefetch_distance(distance)
                library.evict(data)
                began = time.perf_counter()
                library.dot_rows(data, kind, x_D)
                ended = time.perf_counter()
                if ended > deadline:
                    raise TimeoutError
                if number:  # the first round warms up
                    samples[distance].append(ended - began)
        for distance in distances:
            best_s[distance] += min(samples[distance])
    return best_s


def _matrix(row_bytes: int) -> Tensor:
    """Rows in tiles, all of whose bytes are 1."""
    num_rows = MATRIX_BYTES // row_bytes // TOGETHER * TOGETHER
    return huge_pages.zeros((num_rows, row_bytes), torch.uint8).fill_(1)


def _kept(key: str) -> int | None:
    """The distance kept for this processor; None if there is none, or no usable file."""
    found = kept_values(PREFETCH_FILE).get(key)
    return found if type(found) is int and found in DISTANCES else None
