"""Measures how far ahead this processor should prefetch weights that a product streams.

The kernels know the best distance for some processors (ahead_here in cpu/dispatch.cpp): on a Zen 5
prefetching gains a third, on a Zen 4 it costs two thirds. On others, the first engine measures it
and keeps it in the cache folder. Only the speed depends on it, never a result."""

import json
import logging
import time
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sparkinfer.cache_place import PREFETCH_FILE, cache_folder
from sparkinfer.errors import SparkinferError
from sparkinfer.files import partial_file
from sparkinfer.runtime.device import huge_pages
from sparkinfer.runtime.kernels.cpu import library

log = logging.getLogger(__name__)
DISTANCES = (0, 1024, 2304, 4608, 9216)
LEAST_GAIN = 0.05  # a distance other than 0 must be faster by this share
ROUNDS = 4
WIDTH, MATRIX_BYTES = 2048, 32 << 20
KINDS = {"q8_0_tiled": 2176, "q4_0_tiled": 1152}  # bytes of a row of WIDTH values
TOGETHER = 16  # rows of a tile


@cache
def set_for_this_processor() -> None:
    """Sets the distance, once per process: the known, the kept, or a measured one."""
    if not library.is_available() or library.knows_prefetch_distance():
        return
    processor = f"{_processor()}, {library.level()}, {library.num_threads()} threads"
    found = _kept(processor)
    if found is None:
        found = measured()
        log.debug(f"weights are prefetched {found:,} bytes ahead, as measured on this processor")
        _keep(processor, found)
    library.set_prefetch_distance(found)


def measured() -> int:
    """The fastest of DISTANCES for products of matrices in memory with one vector; 0 unless another
    is faster by LEAST_GAIN."""
    before = library.prefetch_distance()
    matrices = {kind: _matrix(row_bytes) for kind, row_bytes in KINDS.items()}
    x_D = torch.ones(WIDTH)
    best_s = dict.fromkeys(DISTANCES, 0.0)
    try:
        for kind, data in matrices.items():
            samples: dict[int, list[float]] = {distance: [] for distance in DISTANCES}
            for number in range(ROUNDS + 1):
                for distance in DISTANCES:
                    library.set_prefetch_distance(distance)
                    library.evict(data)
                    began = time.perf_counter()
                    library.dot_rows(data, kind, x_D)
                    if number:  # the first round warms up
                        samples[distance].append(time.perf_counter() - began)
            for distance in DISTANCES:
                best_s[distance] += min(samples[distance])
    finally:
        library.set_prefetch_distance(before)
    fastest = min(DISTANCES, key=lambda distance: best_s[distance])
    return fastest if best_s[fastest] < (1 - LEAST_GAIN) * best_s[0] else 0


def _matrix(row_bytes: int) -> Tensor:
    """Rows in tiles, all of whose bytes are 1."""
    num_rows = MATRIX_BYTES // row_bytes // TOGETHER * TOGETHER
    return huge_pages.zeros((num_rows, row_bytes), torch.uint8).fill_(1)


def _processor() -> str:
    """Vendor, family, model and name, as Linux reports them."""
    wanted = ("vendor_id", "cpu family", "model", "model name")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return "unknown"
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    found = {name.strip(): value.strip() for name, value in values.items()}
    return " ".join(found.get(name, "") for name in wanted)


def _kept(processor: str) -> int | None:
    """The distance kept for this processor; None if there is none, or no usable file."""
    found = _content().get(processor)
    return found if found in DISTANCES and not isinstance(found, bool) else None


def _content() -> dict[str, int]:
    """The kept distances by processor; empty if there is no usable file."""
    try:
        content = json.loads((cache_folder() / PREFETCH_FILE).read_text())
    except (OSError, ValueError, SparkinferError):
        return {}
    return content if isinstance(content, dict) else {}


def _keep(processor: str, distance: int) -> None:
    """Keeps the distance if the cache folder can be written; if not, the next process measures it
    again."""
    try:
        path = cache_folder() / PREFETCH_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_file(path) as partial:
            partial.write_text(json.dumps(_content() | {processor: distance}, indent=1) + "\n")
    except (OSError, SparkinferError) as error:
        log.debug(f"{error}: each process measures the distance of prefetches again")
