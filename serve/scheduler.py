"""The thread that runs the engine: texts join and leave between its steps.

A step computes the last token of every generating text and fills its remaining rows with pieces of
prompts, so a long prompt does not stall other answers. If the engine `has_equal_rows`, a row's
result is bit-identical whatever else is in the step, so every request gets the text that it would
get alone. A text that shares a long prefix with a prompt being computed waits for that prefix and
reuses it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from hotsplit.runtime.drafting import Drafting
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.generate.drafters import Beside
from hotsplit.runtime.step.sequences import Part
from hotsplit.serve.prefix_cache import PrefixCache, common
from hotsplit.serve.texts import (
    DeadlinePassed,
    EmbeddingJob,
    Ended,
    Event,
    Failed,
    Listen,
    Said,
    Stopping,
    Text,
    TextJob,
)

log = logging.getLogger("hotsplit.serve")

Batch = list[tuple[Text, Event]]
# Most rows of a step, unless more than STEP_ROWS - LEAST_ROWS texts generate; a native step reads
# each weight once for all of them.
STEP_ROWS = 128
LEAST_ROWS = 16  # of a step, left for prompts however many texts generate
READ_S = 0.25  # that more than LEAST_ROWS prompt rows may add to a step in which texts generate
# Wait for masks after a step, as a share of it; texts whose masks take longer sit out more steps.
MASK_SHARE, MASK_S = 0.25, 0.01  # MASK_S if there is no step
WORTH_WAITING = 64  # a text waits for another if at least this many more tokens become reusable


class QueueFull(Exception):
    """The queue of waiting texts is full."""


class Scheduler:
    """Runs the engine, with up to `parallel` texts in progress, and calls `post` once per step with
    all of the step's events, if any. Texts draft in steps that read no prompt, whose rows would
    cost as much as theirs. Requests are refused while `queue` texts or more wait.
    `submit`, `cancel` and `stop` may be called from any thread; `run` belongs to the thread that
    owns the engine."""

    def __init__(
        self,
        engine: Engine,
        prefix_cache: PrefixCache,
        post: Callable[[Batch], None],
        *,
        parallel: int,
        queue: int,
        drafting: Drafting | None = None,
    ) -> None:
        """`drafting` makes the drafts of texts, if any."""
        self.engine, self.prefix_cache, self._post = engine, prefix_cache, post
        self.parallel, self.queue, self._drafting = parallel, queue, drafting
        self._waiting: deque[Text] = deque()
        self._running: list[Text] = []
        self._undrawn: list[Text] = []  # of those running: texts with logits, but perhaps no mask
        self._change = threading.Condition()
        self._is_stopped = False
        self._row_s = 0.0  # seconds per row of recent steps with many rows; 0 before the first
        self.on_step: Callable[[float, int], None] = lambda seconds, rows: None  # for metrics
        self._batch: Batch = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def submit(self, jobs: Sequence[TextJob | EmbeddingJob], listen: Listen) -> list[Text]:
        """Queues the texts of a request; they take turns, however many they are, if there is room
        for the first. Raises QueueFull, or Stopping after `stop`."""
        texts = [Text(job, number, listen) for number, job in enumerate(jobs)]
        with self._change:
            if self._is_stopped:
                raise Stopping
            if len(self._running) + len(self._waiting) >= self.parallel + self.queue:
                raise QueueFull
            self._waiting.extend(texts)
            self._change.notify()
        return texts

    def cancel(self, texts: Sequence[Text]) -> None:
        """Cancels texts: those still unfinished at the next step end without an event."""
        for text in texts:
            text.is_cancelled = True
        with self._change:
            self._change.notify()

    def stop(self) -> None:
        """Ends `run` after the current step; unfinished texts fail with Stopping."""
        with self._change:
            self._is_stopped = True
            self._change.notify()

    def run(self) -> None:
        while True:
            with self._change:
                while self.is_idle and not self._is_stopped:
                    self._change.wait()
                if self._is_stopped:
                    break
            self.step()
        with self._change:
            waiting = list(self._waiting)
            self._waiting.clear()
        for text in (*self._running, *waiting):
            self._end(text, Failed(Stopping()), is_kept=False)
        self._flush()

    def step(self) -> None:
        """Runs one step of the engine."""
        # Drops cancelled texts and those past their deadline.
        now = time.monotonic()
        with self._change:
            texts = [*self._running, *self._waiting]
        for text in texts:
            if text.is_cancelled:
                self._end(text, None, is_kept=text.job.reuses)
            elif now > text.job.deadline:
                self._end(
                    text, Failed(DeadlinePassed(text.job.deadline_by)), is_kept=text.job.reuses
                )
        with self._change:
            while self._waiting and len(self._running) < self.parallel:
                self._running.append(self._waiting.popleft())
        # The parts of a step: one row of every generating text, then pieces of prompts.
        writing = [text for text in self._running if text.is_writing and text not in self._undrawn]
        shares = self._shares(self._rows_to_read(len(writing)))
        beside = None if shares else Beside.of(len(writing) - 1)
        parts = list[tuple[Text, Part]]()
        for text in writing:
            if found := self._part(text, 1, beside):
                parts.append(found)
                if beside is not None and text.generation is not None:
                    beside = text.generation.with_draft(beside)
        for text, share in shares:
            if found := self._part(text, share, None):
                parts.append(found)
        began = time.perf_counter()
        if parts:
            self._compute(parts)
        wait_s = MASK_SHARE * (time.perf_counter() - began) if parts else MASK_S
        self._draw_all(time.perf_counter() + wait_s)
        self._embed()
        self._flush()

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            self._post(batch)

    def _end(self, text: Text, event: Event | None, *, is_kept: bool) -> None:
        with self._change:
            if text in self._running:
                self._running.remove(text)
            elif text in self._waiting:
                self._waiting.remove(text)
        sequence, text.sequence = text.sequence, None
        generation = text.generation
        text.release()
        if generation is not None and generation.drafts is not None:
            assert self._drafting is not None
            self._drafting.end(generation.drafts)
        if sequence is not None and is_kept:
            self.prefix_cache.keep(sequence)
        elif sequence is not None:
            self.prefix_cache.drop(sequence)
        if event is not None:
            self._batch.append((text, event))

    @contextmanager
    def _failing(self, text: Text) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log.debug("a text failed", exc_info=error)
            self._end(text, Failed(error), is_kept=False)

    def _rows_to_read(self, num_writing: int) -> int:
        rows = STEP_ROWS - num_writing
        if num_writing and self._row_s:
            rows = min(rows, int(READ_S / self._row_s))
        return max(rows, LEAST_ROWS)

    def _embed(self) -> None:
        """Computes a piece of the oldest text to embed: observed passes go layer by layer."""
        text = next((text for text in self._running if text.pool is not None), None)
        if text is None:
            return
        num_writing = sum(other.is_writing for other in self._running)
        with self._failing(text):
            if text.sequence is None:
                text.sequence = self.prefix_cache.take(text.job.ids, reuses=False)
            if text.embed(self.engine, self._rows_to_read(num_writing)):
                assert text.pool is not None
                self._end(text, Ended(text.report(), text.pool.vector_D), is_kept=False)

    def _part(self, text: Text, most: int, beside: Beside | None) -> tuple[Text, Part] | None:
        with self._failing(text):
            return text, text.part(most, beside)
        return None

    def _shares(self, rows: int) -> list[tuple[Text, int]]:
        """Divides the rows among prompts: half to the oldest, so that it always progresses, the
        rest to the other prompts, shortest first, so that short ones do not wait for long ones."""
        new = [text for text in self._running if not text.is_writing and text.pool is None]
        reading = [text for text in new if self._has_begun(text)]
        if not reading:
            return []
        oldest, *others = reading
        others.sort(key=lambda text: text.num_unread)
        shares = {oldest: min(oldest.num_unread, rows if not others else -(-rows // 2))}
        left = rows - shares[oldest]
        for text in others:
            shares[text] = min(text.num_unread, left)
            left -= shares[text]
        shares[oldest] += min(left, oldest.num_unread - shares[oldest])
        return [(text, share) for text, share in shares.items() if share]

    def _has_begun(self, text: Text) -> bool:
        """True if the text has a sequence; opens one unless another text computes its prefix."""
        if text.sequence is not None:
            return True
        job = text.job
        if job.reuses and self._is_being_read(job.ids):
            return False
        with self._failing(text):
            text.sequence = self.prefix_cache.take(job.ids, reuses=job.reuses)
            drafts = None if self._drafting is None else self._drafting.begin()
            text.begin(text.sequence, self.engine.traffic, drafts)
            return True
        return False

    def _is_being_read(self, ids: Sequence[int]) -> bool:
        """True if waiting will make many more tokens of the prompt reusable than are now; the text
        that computes them is then asked to keep its state there."""
        coming, best = 0, None
        for other in self._running:
            if other.sequence is not None and not other.is_writing and other.job.reuses:
                shared = common(other.job.ids, ids[:-1])
                if other.sequence.length < shared and shared > coming:
                    coming, best = shared, other.sequence
        if best is None or coming < self.prefix_cache.known(ids) + WORTH_WAITING:
            return False
        best.mark(coming)
        return True

    def _compute(self, parts: list[tuple[Text, Part]]) -> None:
        began = time.perf_counter()
        try:
            found = self.engine.run([part for _, part in parts])
        except Exception as error:
            log.warning("a step failed (%s); its texts are computed one by one", error)
            for text, part in parts:  # only texts that also fail alone are ended
                began = time.perf_counter()
                with self._failing(text):
                    (logits_RV,) = self.engine.run([part])
                    self._take(text, part, logits_RV, time.perf_counter() - began)
            return
        seconds = time.perf_counter() - began
        rows = sum(len(part.tokens) for _, part in parts)
        self.on_step(seconds, rows)
        if rows >= LEAST_ROWS + self.parallel:
            row_s = seconds / rows
            self._row_s = row_s if not self._row_s else 0.7 * self._row_s + 0.3 * row_s
        texts = [text for text, _ in parts]
        drafts = texts[0].generation.drafts if texts[0].generation is not None else None
        if drafts is not None and all(text.is_writing for text in texts):
            drafts.learn_shared(len(texts), rows, seconds)
        for (text, part), logits_RV in zip(parts, found, strict=True):
            self._take(text, part, logits_RV, seconds)

    def _take(self, text: Text, part: Part, logits_RV: Tensor, seconds: float) -> None:
        if part.wanted == "none":
            return
        assert text.generation is not None
        if text.is_scored:
            self._batch.append((text, Said(text.score(part, logits_RV))))
            if not text.is_scored and text.job.only_scores:
                text.generation.run.stopped_by = "max tokens"
                self._end(text, Ended(text.report()), is_kept=False)
                return
            if text.is_scored or text.num_unread:
                return
            logits_RV = logits_RV[-1:]
        text.generation.take(logits_RV, seconds)
        self._undrawn.append(text)

    def _draw_all(self, deadline_s: float) -> None:
        """Draws a token of every text whose mask is known by the deadline, of time.perf_counter."""
        texts, self._undrawn = self._undrawn, []
        for text in texts:
            if text.generation is None:  # it has been cancelled
                continue
            while text.generation.can_draw(max(0.0, deadline_s - time.perf_counter())):
                self._draw(text)
                if text.generation is None or not text.generation.goes_on():
                    break
            else:
                self._undrawn.append(text)

    def _draw(self, text: Text) -> None:
        with self._failing(text):
            if tokens := text.draw():
                self._batch.append((text, Said(tokens)))
        if text.is_over:
            self._end(text, Ended(text.report()), is_kept=text.job.reuses)
