"""uvicorn's connections, with limits on their number and on the time that a client may take to send
a request's headers and to receive the rest of a complete answer.

A socket that is closed with unread data resets the connection, and the client may lose the answer
(RFC 9112, section 9.6). A connection whose client is still sending is therefore closed for writing
first, and what arrives is dropped for a while."""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hotsplit.serve.guard import MAX_HEAD_BYTES

LINGER_S, LINGER_BYTES = 10.0, 64 << 20
TOO_LONG = f"the headers have more than {MAX_HEAD_BYTES} bytes".encode()


class LingeringTransport:
    """A transport whose `close` lets a client that is still sending read its answer first."""

    def __init__(self, transport: asyncio.Transport, is_sending: Callable[[], bool]) -> None:
        self._transport, self._is_sending = transport, is_sending
        self._timer: asyncio.TimerHandle | None = None
        self._left = LINGER_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def is_lingering(self) -> bool:
        return self._timer is not None

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._is_sending():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # the client has just reset the connection
            self._transport.close()
            return
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)
        self._transport.resume_reading()

    def drop(self, count: int) -> None:
        """Counts bytes that were dropped, and closes the connection after LINGER_BYTES."""
        self._left -= count
        if self._left <= 0:
            self._transport.close()

    def closed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Connection(H11Protocol):
    """One connection, of at most `most`. A client has `head_s` seconds to send a request's headers,
    and as long to receive the rest of an answer once it is complete."""

    head_s: ClassVar[float] = 30.0
    most: ClassVar[int] = 1024

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._lingering = LingeringTransport(transport, self._is_client_sending)
        super().connection_made(cast(asyncio.Transport, self._lingering))
        self._head_timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.most:
            transport.abort()
            return
        self._wait_for_head()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.app_state = {**self.app_state, "abort": self._abort}  # becomes scope["state"]

    def _abort(self) -> None:
        """Closes the connection of a client that has gone or does not read its answer. Marks it as
        disconnected first: uvicorn would otherwise log an application error."""
        self.cycle.disconnected = True
        if not self.transport.is_closing():
            self.transport.abort()

    def _is_client_sending(self) -> bool:
        """True while a request's body is incomplete, and after a request that h11 refuses."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def send_400_response(self, msg: str) -> None:
        """Answers a request that h11 refuses: 400, or 431 if its headers are too long."""
        unread, _ = self.conn.trailing_data
        if len(unread) <= MAX_HEAD_BYTES or self.conn.our_state is not h11.IDLE:
            super().send_400_response(msg)
            return
        headers = [
            ("content-type", "text/plain; charset=utf-8"),
            ("connection", "close"),
            ("content-length", str(len(TOO_LONG))),
        ]
        answer = h11.Response(
            status_code=431, headers=headers, reason=b"Request Header Fields Too Large"
        )
        for event in (answer, h11.Data(data=TOO_LONG), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._lingering.is_lingering:
            self._stop_waiting()
            self._lingering.drop(len(data))
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._head_timer is None and not self.transport.is_closing():
            self._wait_for_head()  # the next request begins

    def on_response_complete(self) -> None:
        self._stop_waiting()
        self.loop.call_later(self.head_s, self._cut_unsent, self.cycle)
        super().on_response_complete()

    def _cut_unsent(self, cycle: object) -> None:
        """Drops an answer that the client does not read; it would stay buffered forever."""
        if self.cycle is cycle and self.transport.get_write_buffer_size():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._lingering.closed()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def connection_class(head_s: float, most: int) -> type[Connection]:
    return type("LimitedConnection", (Connection,), {"head_s": head_s, "most": most})
