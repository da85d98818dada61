"""The lane of requests with a grammar: compiling one may take two seconds of processor time, which
requests without one do not wait for."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from hotsplit.serve.scheduler import QueueFull

Result = TypeVar("Result")
NUM_AT_ONCE = 2  # their processes have a low priority, but the engine's threads share the cores


class Lane:
    """Runs up to NUM_AT_ONCE tasks at a time, in threads; of those that wait, the smallest first.
    Created and used on the event loop."""

    def __init__(self, queue: int) -> None:
        """`queue`: tasks that may wait."""
        self._queue, self._num_free = queue, NUM_AT_ONCE
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # by size, then order
        self._order = count()
        self._threads = ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="grammar")

    @property
    def num_waiting(self) -> int:
        return sum(not turn.done() for _, _, turn in self._waiting)

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """Runs `work` in its turn. Raises QueueFull. If this is cancelled, work that has begun goes
        on and keeps its place until it ends."""
        await self._turn(size)
        loop = asyncio.get_running_loop()

        def leave(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits
                loop.call_soon_threadsafe(self._leave)

        task = self._threads.submit(work)
        task.add_done_callback(leave)
        try:
            return await asyncio.wrap_future(task)
        finally:
            del task  # an error refers to this frame: in a cycle, it would keep a grammar's process

    async def _turn(self, size: int) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        if self.num_waiting >= self._queue:
            raise QueueFull
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (size, next(self._order), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn has just come
                self._leave()
            raise

    def _leave(self) -> None:
        while self._waiting:
            *_, turn = heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
