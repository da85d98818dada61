"""Runs tasks on several threads and yields their results in order, with few in memory at a time."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from hotsplit.system.processors import processors

Result = TypeVar("Result")


def num_threads() -> int:
    """One for each processor that this process may use, up to 4."""
    return min(4, processors().usable)


def in_order(tasks: Iterable[Callable[[], Result]], threads: int) -> Generator[Result, None, None]:
    """Yields the results of `tasks` in order, computed by `threads` threads. At any time, at most 2
    * `threads` tasks have been started whose results have not been taken. The exception of a task
    is raised in its turn and ends the generator. However the generator ends (also by close()), no
    further task is started, and the threads have ended."""
    pending: deque[Future[Result]] = deque()
    executor = ThreadPoolExecutor(threads, thread_name_prefix="hotsplit")
    try:
        for task in tasks:
            if len(pending) == 2 * threads:
                yield pending.popleft().result()
            pending.append(executor.submit(task))
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
