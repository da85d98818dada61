"""State shared by all endpoints of a server: its model once it is loaded, and its scheduler."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from typing import Literal, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from starlette.requests import ClientDisconnect, Request

from hotsplit.serve.api_error import OLLAMA, ApiError, busy, too_large, unavailable
from hotsplit.serve.exchange import Exchange, Gone, drop_body, error_of
from hotsplit.serve.request_body import parsed
from hotsplit.serve.request_log import RequestLine
from hotsplit.serve.scheduler import QueueFull, Scheduler
from hotsplit.serve.serve_config import ServeConfig
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.text_requests import Grammar, TextRequest
from hotsplit.serve.texts import Arrival, DeadlinePassed, EmbeddingJob, Report, TextJob

log = logging.getLogger("hotsplit.serve")
NUM_PREPARING = 8  # threads that tokenise, and wait for the process of templates
MAX_RETRY_S = 60
NUM_AT_ONCE = 2  # their processes have a low priority, but the engine's threads share the cores
NAMESPACE = "hotsplit"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
Result = TypeVar("Result")


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
        if kind != "application/json" and not _is_ollama_tool(request, kind):
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


def _is_ollama_tool(request: Request, kind: str) -> bool:
    """Ollama reads bodies of any type, and some of its clients give none, or curl's. That is safe
    from what is no browser, which could send such a body from any page, but says where from."""
    is_browser = "origin" in request.headers or "sec-fetch-site" in request.headers
    is_curls = kind in ("", "application/x-www-form-urlencoded")
    return is_curls and not is_browser and request.url.path.startswith(OLLAMA)


class Lane:
    """The lane of requests with a grammar: compiling one may take two seconds of processor time,
    which requests without one do not wait for. Runs up to NUM_AT_ONCE tasks at a time, in threads;
    of those that wait, the smallest first. Created and used on the event loop."""

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


class Metrics:
    """Prometheus metrics of a server, in a registry of their own."""

    def __init__(self) -> None:
        # Those that have a label; labels for all paths that clients send could fill the memory.
        self.paths = frozenset[str]()
        disable_created_metrics()  # they would add a series with each metric's creation time
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests that ended.", "path", "status")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached = self._counter("cached_tokens", "Tokens of prompts that were in the cache.")
        self._generated = self._counter(
            "generated_tokens", "Tokens of answers, end tokens included."
        )
        self._drafted = self._counter("drafted_tokens", "Tokens that were guessed and checked.")
        self._accepted = self._counter("accepted_tokens", "Guesses that were right.")
        self._texts = self._counter("texts", "Texts that ended, by reason.", "reason")
        self._rows = self._counter("step_rows", "Tokens computed in the engine's steps.")
        self._first = self._histogram("time_to_first_token", "From arrival to first token.")
        self._token = self._histogram("time_per_token", "A text's mean per token after the first.")
        self._step = self._histogram("step", "Duration of a step of the engine.")

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, labels, namespace=NAMESPACE, registry=self.registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(
            name,
            what,
            namespace=NAMESPACE,
            unit="seconds",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def gauge(self, name: str, what: str, value: Callable[[], float]) -> None:
        """Adds a gauge whose value is computed whenever it is read."""
        found = Gauge(name, what, namespace=NAMESPACE, registry=self.registry)
        found.set_function(value)

    def request(self, line: RequestLine) -> None:
        path = line.path if line.path in self.paths else "other"
        self._requests.labels(path, str(line.status)).inc()

    def step(self, seconds: float, rows: int) -> None:
        self._step.observe(seconds)
        self._rows.inc(rows)

    def text(self, report: Report) -> None:
        self._prompt.inc(report.prompt_tokens)
        self._cached.inc(report.cached_tokens)
        self._generated.inc(report.generated_tokens)
        self._drafted.inc(report.drafted_tokens)
        self._accepted.inc(report.accepted_tokens)
        self._texts.labels(report.stopped_by).inc()
        self._first.observe(report.queued_s + report.prompt_s)
        if report.generated_tokens > 1:
            self._token.observe(report.generated_s / (report.generated_tokens - 1))

    def page(self) -> bytes:
        return generate_latest(self.registry)
