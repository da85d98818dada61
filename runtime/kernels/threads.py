"""Sets the thread counts of the C++ kernels and of torch.

Both may use all cores: the kernels' threads sleep soon after a job (cpu/thread_pool.cpp)."""

import logging
from functools import cache

import torch

from hotsplit.options.engine_config import check_threads
from hotsplit.runtime.kernels.cpu import library
from hotsplit.system.processors import processors

log = logging.getLogger(__name__)

_named: int | None = None  # the count that the user gave


def use_threads(count: int | None) -> int:
    """Uses `count` threads (None: the default of system.processors) for each job; returns their
    number.

    Raises HotsplitError for an impossible count."""
    global _named
    check_threads(count)
    _named = count
    if count is None:
        count = processors().threads
    if count > (here := processors().usable):
        _note_too_many(count, here)
    torch.set_num_threads(count)
    library.set_threads(count)
    return count


def use_default_threads(*, beside_gpu: bool) -> None:
    """Lets the kernels use the default for work beside a GPU, or for work without one. Changes
    nothing if the user gave a number, by `use_threads` or in another way."""
    count = threads_of_steps(beside_gpu=beside_gpu)
    if count != library.num_threads():
        library.set_threads(count)


def threads_of_steps(*, beside_gpu: bool) -> int:
    """The threads of decode steps, whichever of the defaults is in use now: the number that the
    user gave, or the default for work beside a GPU or without one."""
    here, count = processors(), threads_in_use()
    is_default = _named is None and count in (here.threads, here.threads_beside_gpu)
    if not is_default:
        return count
    return here.threads_beside_gpu if beside_gpu else here.threads


def threads_in_use() -> int:
    """The threads that share a job now."""
    return library.num_threads()


@cache
def _note_too_many(count: int, here: int) -> None:
    """Warns once for each count: `run` sets the threads for its stages and again for the text."""
    log.warning(
        f"note: {count} threads on {here} processors wait for each other; --threads {here} or fewer"
        " is faster"
    )
