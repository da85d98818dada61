"""Which of a file's types with grids (weight_types.GRID_NAMES) are multiplied as files have them.

A table type takes up to 2.2 times the bytes and is unpacked faster. Products of both are the same
bits, so the first engine that reads a type measures both, on processors with kernels for tiles of
it (cpu/grid_formats.h), and keeps in the cache folder which is faster; where they are alike, the
file's, which takes less memory."""

import logging
import time
from functools import cache
from threading import Lock

import torch

from hotsplit import __version__
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.files.gguf_types import block_sizes
from hotsplit.files.table_blocks import grid_codes
from hotsplit.model.weight_types import BY_NAME, GRID_NAMES, TABLES
from hotsplit.runtime.device import huge_pages
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.tiled import TILE_ROWS
from hotsplit.system.cache_place import GRIDS_FILE
from hotsplit.system.kept_values import keep_value, kept_values, processor

log = logging.getLogger(__name__)
ROUNDS = 4
MOST_SECONDS = 0.5  # after which an unfinished measurement is given up
WIDTH, TABLE_BYTES = 2048, 16 << 20
LEAST_GAIN = 0.05  # by which the table type must be faster

_lock = Lock()


def are_faster(kind: str) -> bool:
    """Whether tiles of a type are multiplied as files have them; their grid is set then."""
    if kind not in GRID_NAMES or not library.reads_grids():
        return False
    software = f"{__version__}, {library.level()}, {library.num_threads()} threads"
    with _lock:
        return _is_faster(f"{kind}, {processor()}, {software}", kind)


def is_read_in_file(entry: TensorEntry, num_rows: int | None = None) -> bool:
    """Whether a matrix that is multiplied whole, or so many of its rows, is read in the file's type
    instead of its table type."""
    count = entry.shape[-2] if num_rows is None and len(entry.shape) > 1 else num_rows
    return (
        entry.packed_from is not None
        and count is not None
        and count % TILE_ROWS == 0
        and are_faster(entry.packed_from.kind)
    )


@cache
def _is_faster(key: str, kind: str) -> bool:
    library.set_grid(kind, grid_codes(kind))
    found = kept_values(GRIDS_FILE).get(key)
    if not isinstance(found, bool):
        try:
            found = measured(kind)
        except (HotsplitError, OSError, MemoryError, RuntimeError) as error:  # memory is short
            log.debug(f"products of {kind} are not measured: {error}")
            return True
        log.debug(f"{kind} is multiplied as {kind if found else TABLES[kind]}, as measured here")
        keep_value(GRIDS_FILE, key, found)
    return found


def measured(kind: str) -> bool:
    """Whether products of matrices in memory with one vector are not slower by LEAST_GAIN than
    those of the table type; also true if MOST_SECONDS do not suffice."""
    table = BY_NAME[TABLES[kind]]
    x_D, num_blocks = torch.ones(WIDTH), WIDTH // table.block_values
    num_rows = TABLE_BYTES // (num_blocks * table.block_bytes) // TILE_ROWS * TILE_ROWS
    matrices = {
        f"{name}_tiled": huge_pages.zeros((num_rows, num_blocks * size), torch.uint8).fill_(1)
        for name, size in ((kind, block_sizes(kind)[1]), (table.name, table.block_bytes))
    }
    deadline = time.perf_counter() + MOST_SECONDS
    samples: dict[str, list[float]] = {tiled: [] for tiled in matrices}
    for number in range(ROUNDS + 1):
        for tiled, data in matrices.items():
            library.evict(data)
            began = time.perf_counter()
            library.dot_rows(data, tiled, x_D)
            ended = time.perf_counter()
            if ended > deadline:
                return True
            if number:  # the first round warms up
                samples[tiled].append(ended - began)
    of_file, of_table = (min(each) for each in samples.values())
    return of_table > (1 - LEAST_GAIN) * of_file
