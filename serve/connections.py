"""Connections of the server: uvicorn's, with limits on their number and on the time that a client
may take to send the head of a request and to receive the rest of an answer."""

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """One connection. `head_s` limits the seconds from the connection to the end of a request's
    headers, and from the end of an answer until all of it is sent."""

    head_s: ClassVar[float] = 30.0
    most: ClassVar[int] = 1024

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.most:
            transport.abort()
            return
        self._wait_for_head()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.app_state = {**self.app_state, "abort": self._abort}  # becomes scope["state"]

    def _abort(self) -> None:
        """Aborts an unfinished answer that its client does not take, marked as disconnected: uvicorn
        would otherwise log a fault of the application."""
        self.cycle.disconnected = True
        if not self.transport.is_closing():
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._head_timer is None and not self.transport.is_closing():
            self._wait_for_head()  # the beginning of the next request

    def on_response_complete(self) -> None:
        self._stop_waiting()
        self.loop.call_later(self.head_s, self._cut_unsent, self.cycle)
        super().on_response_complete()

    def _cut_unsent(self, cycle: object) -> None:
        """Drops an answer that nobody reads; it would otherwise be kept forever."""
        if self.cycle is cycle and self.transport.get_write_buffer_size():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def connection_class(head_s: float, most: int) -> type[Connection]:
    return type("LimitedConnection", (Connection,), {"head_s": head_s, "most": most})
