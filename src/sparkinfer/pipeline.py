"""Runs work on several threads and yields the results in order, a bounded number in memory."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def num_threads() -> int:
    """One per core this process may use, up to 4: beyond that the disk is the limit."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux; a container may use fewer than it sees
    return min(4, len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)


def in_order(tasks: Iterable[Callable[[], Result]], threads: int) -> Generator[Result, None, None]:
    """The results of `tasks` in order, computed by `threads` threads.

    At most twice `threads` tasks are started and not yet taken. The exception of a task is raised
    in its turn and ends the generator. However it ends (also by close(), if the caller takes no
    more), no further task is started and the threads have ended."""
    pending: deque[Future[Result]] = deque()
    executor = ThreadPoolExecutor(threads, thread_name_prefix="sparkinfer")
    try:
        for task in tasks:
            if len(pending) == 2 * threads:
                yield pending.popleft().result()
            pending.append(executor.submit(task))
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
