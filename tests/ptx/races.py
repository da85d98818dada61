"""Finds data races: accesses of a launch that no barrier orders.

Two accesses of different threads are ordered if the threads belong to one block and a block barrier
lies between the accesses, or to one warp and a warp barrier does. They race if they are not
ordered, access the same bytes and one of them writes.

Writes of several threads by one instruction, which no thread reads before a barrier, do not race if
their values are equal, or are f32 numbers that differ by no more than rounding explains: Triton
lets all threads of a sum store it, after the compiler has fused the sum's first product into an
addition, which then rounds differently in each thread. One of the values stays; CUDA does not say
which."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

WARP = 32
# Rounding may explain a difference of CLOSE * (1 + the larger magnitude) between two f32 numbers.
CLOSE = 2.0**-10
_LEAST_NORMAL = 2.0**-126


@dataclass(frozen=True, kw_only=True, eq=False)
class Access:
    """What one instruction accessed: the bytes at `offset_N` of a space, by `thread_N`, in the
    epochs of their blocks and warps."""

    instruction: str
    size: int
    offset_N: np.ndarray
    thread_N: np.ndarray  # numbered over the whole grid
    block_epoch_N: np.ndarray
    warp_epoch_N: np.ndarray
    value_N: np.ndarray | None  # u8 [N, size] if it is a store


class Race(NamedTuple):
    offset: int
    first: str
    first_thread: int
    second: str
    second_thread: int


def find_race(accesses: list[Access], unit: int, num_threads: int) -> Race | None:
    """A pair of accesses that race, or None. Memory is compared in units of `unit` bytes; a block
    has `num_threads` threads."""
    places = [_units(access, unit) for access in accesses]
    written = [place for place, a in zip(places, accesses, strict=True) if a.value_N is not None]
    if not written:
        return None
    is_written = np.zeros(max(int(place.max()) for place in places) + 1, bool)
    for place in written:
        is_written[place] = True
    events = _events(accesses, places, unit, is_written)
    block = events["thread"] // num_threads
    warp = events["thread"] // WARP
    by_block = [events["place"], block, events["block_epoch"]]
    for keys, who in (
        ([events["place"]], block),
        (by_block, warp),
        ([*by_block, warp, events["warp_epoch"]], events["thread"]),
    ):
        if (found := _pair(keys, who, events)) is not None:
            first, second = (int(events["access"][at]) for at in found)
            threads = (int(events["thread"][at]) for at in found)
            return Race(
                int(events["place"][found[0]]) * unit,
                accesses[first].instruction,
                next(threads),
                accesses[second].instruction,
                next(threads),
            )
    return None


def _units(access: Access, unit: int) -> np.ndarray:
    """The numbers of the units that are accessed, [N, size / unit], at least one column."""
    return access.offset_N[:, None] // unit + np.arange(max(1, access.size // unit))


def _events(accesses, places, unit, is_written) -> dict[str, np.ndarray]:
    """One event for each access of a thread to a unit of memory that some access writes."""
    columns: dict[str, list[np.ndarray]] = {}
    for number, (access, place) in enumerate(zip(accesses, places, strict=True)):
        counted = is_written[place]
        if not counted.any():
            continue
        row, column = np.nonzero(counted)
        value, word = np.zeros(len(row), np.uint64), np.full(len(row), np.nan, np.float32)
        if access.value_N is not None:
            parts = np.ascontiguousarray(access.value_N).view(f"u{min(unit, access.size)}")
            value = parts[row, column].astype(np.uint64)
            if access.size >= 4:
                words = np.ascontiguousarray(access.value_N).view(np.float32)
                word = words[row, column * unit // 4]
        for name, array in (
            ("place", place[row, column]),
            ("thread", access.thread_N[row]),
            ("block_epoch", access.block_epoch_N[row]),
            ("warp_epoch", access.warp_epoch_N[row]),
            ("value", value),
            ("number", word),  # the f32 that the unit is part of; NaN if none is stored
            ("writes", np.full(len(row), access.value_N is not None)),
            ("access", np.full(len(row), number)),
        ):
            columns.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in columns.items()}


def _pair(keys, who, events) -> tuple[int, int] | None:
    """Two events that race, at least one of them a write, with equal keys but different `who`; None
    if there are none."""
    order = np.lexsort([who, *reversed(keys)])
    is_first = np.zeros(len(order), bool)
    is_first[0] = True
    for key in keys:
        ordered = key[order]
        is_first[1:] |= ordered[1:] != ordered[:-1]
    start = np.flatnonzero(is_first)

    def over(reduce: Callable, array: np.ndarray) -> np.ndarray:
        return reduce.reduceat(array[order], start)

    writes, value, access = events["writes"], events["value"], events["access"]
    several = over(np.minimum, who) != over(np.maximum, who)
    one_store = over(np.logical_and, writes) & (
        over(np.minimum, access) == over(np.maximum, access)
    )
    harmless = one_store & (over(np.minimum, value) == over(np.maximum, value))
    low, high = over(np.fmin, events["number"]), over(np.fmax, events["number"])
    is_close = high - low <= CLOSE * (1 + np.maximum(np.abs(low), np.abs(high)))
    least = over(np.minimum, np.abs(events["number"]))
    harmless |= one_store & is_close & (least >= _LEAST_NORMAL)
    races = several & over(np.logical_or, writes) & ~harmless
    if not races.any():
        return None
    group = int(races.argmax())
    end = start[group + 1] if group + 1 < len(start) else len(order)
    members = order[start[group] : end]
    one = members[writes[members]][0]
    other = members[who[members] != who[one]]
    if not writes[other].all():  # a reader is more informative than another writer
        other = other[~writes[other]]
    return int(one), int(other[0])
