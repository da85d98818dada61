"""Prometheus metrics of a server, in a separate registry."""

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from hotsplit.serve.request_log import RequestLine
from hotsplit.serve.texts import Report

NAMESPACE = "hotsplit"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
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
