"""State shared by all endpoints of a server: its model once it is loaded, and its scheduler."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from starlette.requests import ClientDisconnect, Request

from hotsplit.serve.api_error import ApiError, busy, too_large, unavailable
from hotsplit.serve.exchange import Exchange, Gone, drop_body, error_of
from hotsplit.serve.lane import Lane
from hotsplit.serve.metrics import Metrics
from hotsplit.serve.request_body import parsed
from hotsplit.serve.request_log import RequestLine
from hotsplit.serve.scheduler import QueueFull, Scheduler
from hotsplit.serve.serve_config import ServeConfig
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.text_requests import Grammar, TextRequest
from hotsplit.serve.texts import Arrival, DeadlinePassed, EmbeddingJob, Report, TextJob

log = logging.getLogger("hotsplit.serve")
Result = TypeVar("Result")
NUM_PREPARING = 8  # threads that tokenise, and wait for the process of templates
MAX_RETRY_S = 60


class Service:
    """The shared state. Attributes are set on the event loop; other threads only read them."""

    def __init__(self, config: ServeConfig, fingerprint: str = "hotsplit") -> None:
        self.config, self.fingerprint = config, fingerprint
        self.state: Literal["loading", "ready", "stopping"] = "loading"
        self.metrics = Metrics()
        self.num_active = 0  # requests in progress
        self._has_said_loading = False
        self._served: ServedModel | None = None
        self._scheduler: Scheduler | None = None
        self._preparing = ThreadPoolExecutor(NUM_PREPARING, thread_name_prefix="prepare")
        self._grammars = Lane(config.queue)
        self._text_s = 1.0  # moving average of seconds per text

    def begin(self, served: ServedModel, scheduler: Scheduler) -> None:
        """Called when the model is loaded."""
        self._served, self._scheduler = served, scheduler
        scheduler.on_step = self.metrics.step
        gauge, cache = self.metrics.gauge, scheduler.prefix_cache
        gauge("running", "Texts in progress.", lambda: scheduler.num_running)
        gauge("waiting", "Texts in the queue.", lambda: scheduler.num_waiting)
        gauge("compiling", "Grammars that wait to be compiled.", lambda: self._grammars.num_waiting)
        gauge("kept_texts", "Finished texts in the cache.", lambda: cache.num_kept)
        gauge("kept_tokens", "Tokens of kept texts.", lambda: cache.num_kept_tokens)
        if self.state == "loading":
            self.state = "ready"

    @property
    def served(self) -> ServedModel:
        """Raises ApiError until the model is loaded."""
        if self._served is None:
            raise unavailable("the model is being loaded")
        return self._served

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise unavailable("the model is being loaded")
        return self._scheduler

    @property
    def is_stopping(self) -> bool:
        return self.state == "stopping"

    def observe(self, line: RequestLine) -> None:
        self.metrics.request(line)
        is_early = line.status == 503 and self.state == "loading"
        if not is_early:
            log.info("request", extra={"line": line})
        elif not self._has_said_loading:  # once: clients ask again and again
            self._has_said_loading = True
            log.info("requests get 503 until the model is loaded, which the log does not repeat")

    async def fields(self, request: Request) -> dict[str, object]:
        """The fields of a POST. Raises ApiError for a wrong content type, and for a body that is
        too long, arrives too slowly or is not a JSON object; Gone if the client disconnects."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            await drop_body(request.receive)
            shown = f"the body's type is {kind[:60]!r}" if kind else "the body has no type"
            raise ApiError(
                415,
                f"{shown}; with curl, add -H 'Content-Type: application/json'",
                "wrong_content_type",
            )
        pieces, length, most = [], 0, self.config.max_body_bytes
        try:
            async with asyncio.timeout(self.config.read_s):
                async for piece in request.stream():
                    pieces.append(piece)
                    length += len(piece)
                    if length > most:
                        break
        except TimeoutError:
            raise ApiError(
                408,
                f"the body took longer than {self.config.read_s:g} s",
                "request_timeout",
                headers={"Connection": "close"},
            ) from None
        except ClientDisconnect:
            raise Gone from None
        if length > most:  # after the deadline's block: the rest may arrive later
            await drop_body(request.receive)
            raise too_large(most)
        return await self.prepared(lambda: parsed(b"".join(pieces)))

    async def prepared(self, make: Callable[[], Result]) -> Result:
        """Runs `make`, which would block the loop, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, make)

    def arrival(self) -> Arrival:
        """That of a request which is read from now on."""
        return Arrival(at_s=time.monotonic(), timeout_s=self.config.timeout_s)

    async def with_masks(self, asked: TextRequest, grammar: Grammar) -> TextRequest:
        """The request with the masks of its grammar. Raises ApiError if the grammar is wrong, if
        too many others wait to be compiled, or at the request's deadline."""
        late_s = asked.jobs[0].deadline - time.monotonic()
        try:
            async with asyncio.timeout(late_s):
                return await self._grammars.run(lambda: asked.with_masks(grammar), grammar.size)
        except TimeoutError:
            raise error_of(DeadlinePassed(asked.jobs[0].deadline_by)) from None
        except QueueFull:
            waiting = self._grammars.num_waiting
            raise busy(
                f"{waiting} grammars are waiting to be compiled, in a queue for"
                f" {self.config.queue}",
                min(waiting, MAX_RETRY_S),
            ) from None

    def exchange(self, jobs: Sequence[TextJob | EmbeddingJob], *, is_stream: bool) -> Exchange:
        """Submits the jobs. Raises ApiError if the queue is full, or while loading or stopping."""
        waiting = self.scheduler.num_waiting + 1
        retry_s = round(self._text_s * waiting / self.config.parallel)
        retry_s = max(1, min(MAX_RETRY_S, retry_s))
        return Exchange(self.scheduler, jobs, retry_s, is_stream=is_stream)

    def report(self, request: Request, reports: Sequence[Report]) -> None:
        """Adds a request's texts, all of which have ended, to its log line and to the metrics."""
        line: RequestLine = request.scope["state"]["line"]
        for report in reports:
            self.metrics.text(report)
            line.prompt_tokens += report.prompt_tokens
            line.cached_tokens += report.cached_tokens
            line.generated_tokens += report.generated_tokens
            line.drafted_tokens += report.drafted_tokens
            line.accepted_tokens += report.accepted_tokens
            line.queued_s = max(line.queued_s, report.queued_s)
            self._text_s += 0.1 * (report.prompt_s + report.generated_s - self._text_s)

    def close(self) -> None:
        self._preparing.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()
