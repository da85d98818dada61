"""uvicorn's connections, with limits on their number and on the time that a client may take to send
a request's headers and to receive the rest of an answer."""

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """One connection, of at most `most`. A client has `head_s` seconds to send a request's headers,
    and as long to receive the rest of an answer once it is complete."""

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
        """Aborts an unfinished answer that the client does not read. Marks it as disconnected:
        uvicorn would otherwise log an application error."""
        self.cycle.disconnected = True
        if not self.transport.is_closing():
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
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
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def connection_class(head_s: float, most: int) -> type[Connection]:
    return type("LimitedConnection", (Connection,), {"head_s": head_s, "most": most})
