"""Passes the events of a request's texts to the handler that awaits them on asyncio's event loop.

The scheduler's thread posts all events of a step in one call. If a client disconnects, or stops
reading its answer for too long, its texts are cancelled."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotsplit.runtime.generate.constraints import ConstraintError
from hotsplit.serve.api_error import ApiError, busy, unavailable, wrong
from hotsplit.serve.scheduler import QueueFull, Scheduler
from hotsplit.serve.texts import (
    DeadlinePassed,
    EmbeddingJob,
    Ended,
    Event,
    Failed,
    Said,
    Stopping,
    Text,
    TextJob,
)

log = logging.getLogger("hotsplit.serve")
Result = TypeVar("Result")
# nginx's code for a client that closed the connection; never sent, only logged and counted
STATUS_GONE = 499
MAX_DROPPED_BYTES, DROP_S = 16 << 20, 1.0
DONE = b"data: [DONE]\n\n"


class Gone(Exception):
    """The client has closed the connection, or does not read its answer."""


class Exchange:
    """The texts of one request. Created and used on the event loop. Only a streaming handler
    (`is_stream`) is woken for new tokens; waking it costs 0.1 ms of the loop's time."""

    def __init__(
        self,
        scheduler: Scheduler,
        jobs: Sequence[TextJob | EmbeddingJob],
        retry_s: int,
        *,
        is_stream: bool,
    ) -> None:
        self._scheduler, self._is_stream = scheduler, is_stream
        self._events: list[tuple[int, Event]] = []
        self._news = asyncio.Event()
        self._num_open = len(jobs)
        self.texts: list[Text] = []
        try:
            self.texts = scheduler.submit(jobs, self._listen)
        except QueueFull:
            raise busy(
                f"{scheduler.num_waiting} texts are waiting in a queue for {scheduler.queue}",
                retry_s,
            ) from None
        except Stopping:
            raise unavailable("the server is stopping") from None

    async def batches(self) -> AsyncIterator[list[tuple[int, Said | Ended]]]:
        """Yields the events since the last batch, until all texts have ended.

        Raises ApiError if a text fails; the others are then cancelled."""
        while self._num_open:
            await self._news.wait()
            self._news.clear()
            found, self._events = self._events, []
            batch: list[tuple[int, Said | Ended]] = []
            for number, event in found:
                if isinstance(event, Failed):
                    self.cancel()
                    raise error_of(event.error)
                self._num_open -= isinstance(event, Ended)
                batch.append((number, event))
            yield batch

    def cancel(self) -> None:
        """Cancels unfinished texts and drops the references to all of them: texts and exchange
        refer to each other, and would otherwise wait for the cycle collector."""
        texts, self.texts = self.texts, []
        if self._num_open:
            self._scheduler.cancel(texts)

    def _listen(self, number: int, event: Event) -> None:
        self._events.append((number, event))
        if self._is_stream or not isinstance(event, Said):
            self._news.set()


def error_of(error: Exception) -> ApiError:
    """The error sent to a client for a text that failed."""
    if isinstance(error, DeadlinePassed):
        is_field = error.by == "timeout"
        limit = "the request's timeout" if is_field else "the server's --timeout"
        return ApiError(
            504,
            f"the answer took longer than {limit} allows",
            "timeout",
            param="timeout" if is_field else None,
        )
    if isinstance(error, Stopping):
        return unavailable("the server is stopping")
    message = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, ConstraintError):
        return wrong(None, message, "constraint_failed")
    log.error("a text failed", exc_info=error)
    return ApiError(500, message, "internal_error")


async def while_there(receive: Receive, work: Coroutine[object, object, Result]) -> Result:
    """Awaits `work`; cancels it and raises Gone if the client disconnects first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Gone
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
        del each, task, watch  # breaks a cycle: task, its error, its traceback, this frame


async def drop_body(receive: Receive) -> None:
    """Reads the rest of a refused request, within bounds of size and time: a client would not see
    the answer if the connection closed while it was still sending."""
    left = MAX_DROPPED_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(DROP_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def dumps(value: object) -> bytes:
    """JSON in UTF-8; lone surrogates, which a client may have sent, become question marks."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def dumps_with(head: Mapping[str, object], name: str, items: Iterable[bytes]) -> bytes:
    """`head` as JSON, with a further field: a list of items that are JSON already. For long lists,
    since one call of the encoder holds the GIL until it returns."""
    return dumps({**head, name: []})[:-2] + b",".join(items) + b"]}"


def sse(value: object, event: str | None = None) -> bytes:
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + dumps(value) + b"\n\n"


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return dumps(content)


def error_response(error: ApiError, path: str) -> JsonResponse:
    """`path`: that of the request, which has the form of its API."""
    return JsonResponse(error.body(path), status_code=error.status, headers=error.headers)


class EventStream(Response):
    """A stream, of server-sent events or lines. `pieces` yields bytes, possibly b"". Status 200 is
    sent with the first piece; a failure before it is answered with its own status, and a later one
    with what `failed` makes of it. `end` comes last."""

    def __init__(
        self,
        exchange: Exchange,
        pieces: AsyncIterator[bytes],
        take_s: float,
        *,
        failed: Callable[[ApiError], bytes],
        end: bytes,
        media_type: str,
    ) -> None:
        self._exchange, self._pieces, self._take_s = exchange, pieces, take_s
        self._failed, self._end = failed, end
        self._start = {**_START, "headers": [(b"content-type", media_type.encode()), *_HEADERS]}
        self.status_code, self.background = 200, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            failed = await while_there(receive, self._write(send))
        except TimeoutError:
            raise Gone from None
        finally:
            self._exchange.cancel()
        if failed is not None:
            await error_response(failed, scope["path"])(scope, receive, send)

    async def _write(self, send: Send) -> ApiError | None:
        """Writes the stream. Returns an error raised before the first piece; later ones are sent in
        the stream."""
        has_begun = False
        try:
            async for piece in self._pieces:
                if not has_begun:
                    has_begun = True
                    await send(self._start)
                if piece:
                    await self._send(send, piece)
            end = self._end
        except ApiError as error:
            if not has_begun:
                return error
            end = self._failed(error) + self._end
        await self._send(send, end)
        await send({"type": "http.response.body", "body": b""})
        return None

    async def _send(self, send: Send, piece: bytes) -> None:
        message = {"type": "http.response.body", "body": piece, "more_body": True}
        async with asyncio.timeout(self._take_s):
            await send(message)


_START = {"type": "http.response.start", "status": 200}
_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
