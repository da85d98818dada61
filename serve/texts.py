"""One text of a request: its job, state and events."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from hotsplit.model.spec import Pooling
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.generate.answer_mask import Mask
from hotsplit.runtime.generate.drafters import Beside
from hotsplit.runtime.generate.generation import Generation, GenerationOptions, Token
from hotsplit.runtime.generate.sampler_chain import SamplerChain
from hotsplit.runtime.generate.speculation import Speculation
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step.batch import Wanted
from hotsplit.runtime.step.sequences import Part
from hotsplit.runtime.step.sequences import Sequence as TextSequence
from hotsplit.runtime.text.codec import TextCodec

DeadlineBy = Literal["--timeout", "timeout"]  # the server's option, or a request's field
SCORED_ROWS = (
    32  # of a prompt whose logits are all wanted, in a step: 20 MB for a vocabulary of 150,000
)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """When a request has arrived, by time.monotonic, and the server's --timeout."""

    at_s: float
    timeout_s: float

    def deadline(self, asked_s: float | None = None) -> tuple[float, DeadlineBy]:
        """The request's deadline, and what set it; `asked_s` is its field `timeout`."""
        if asked_s is not None and asked_s < self.timeout_s:
            return self.at_s + asked_s, "timeout"
        return self.at_s + self.timeout_s, "--timeout"


@dataclass(frozen=True, kw_only=True)
class TextJob:
    """A text to be continued. After `deadline`, by time.monotonic, it fails; `deadline_by` is what
    set it. `reuses`: whether it may reuse the keys and values of other texts, and leave its own for
    others. `scores`: the prompt's tokens are said, too, with their log probabilities;
    `only_scores`: nothing else is."""

    ids: Sequence[int]
    codec: TextCodec
    draws: SamplerChain
    options: GenerationOptions
    mask: Mask | None = None
    deadline: float = inf
    deadline_by: DeadlineBy = "--timeout"
    reuses: bool = True
    scores: bool = False
    only_scores: bool = False


@dataclass(frozen=True, kw_only=True)
class EmbeddingJob:
    """A text whose hidden states become a vector; `deadline` as in a TextJob. These passes round
    differently, so that keys and values are not shared."""

    ids: Sequence[int]
    pooling: Pooling
    deadline: float = inf
    deadline_by: DeadlineBy = "--timeout"
    reuses: ClassVar = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """Statistics of a finished text; times are wall-clock seconds, shared steps included."""

    stopped_by: str
    stop: str = ""  # the stop string that ended it
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int  # the end token included
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of the drafted ones
    queued_s: float
    prompt_s: float
    generated_s: float

    @property
    def is_complete(self) -> bool:
        """False if a limit cut the text off."""
        return self.stopped_by in ("end of text", "stop string")


class Stopping(Exception):
    """The server stops, so that a text is refused or ends early."""


class DeadlinePassed(Exception):
    """The text's deadline has passed; `by` is what set it."""

    def __init__(self, by: DeadlineBy) -> None:
        super().__init__(by)
        self.by = by


@dataclass(frozen=True)
class Said:
    tokens: Sequence[Token]


@dataclass(frozen=True)
class Ended:
    report: Report
    vector_D: np.ndarray | None = None  # of an EmbeddingJob: f64, pooled


@dataclass(frozen=True)
class Failed:
    error: Exception


Event = Said | Ended | Failed
Listen = Callable[[int, Event], None]  # the index of the text within its request, its event


class Pool:
    """The pooled hidden states of the tokens so far, in float64."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling, self._count = pooling, 0
        self._pooled_D: np.ndarray | float = 0.0

    def add(self, hidden_TD: Tensor) -> None:
        """Adds the next tokens of the text."""
        states_TD = hidden_TD.double().numpy()
        if self._pooling == "mean":
            self._pooled_D = self._pooled_D + states_TD.sum(axis=0)
        elif self._pooling == "last" or self._count == 0:
            self._pooled_D = states_TD[-1 if self._pooling == "last" else 0]
        self._count += len(states_TD)

    @property
    def vector_D(self) -> np.ndarray:
        assert isinstance(self._pooled_D, np.ndarray)
        return self._pooled_D / (self._count if self._pooling == "mean" else 1)


class Text:
    """A job in progress: it waits, computes its prompt, generates and ends. `listen` is only stored
    here: the scheduler posts events in batches."""

    def __init__(self, job: TextJob | EmbeddingJob, number: int, listen: Listen) -> None:
        self.job, self.number, self.listen = job, number, listen
        self.pool = Pool(job.pooling) if isinstance(job, EmbeddingJob) else None
        self.is_cancelled = False  # set by any thread; read before the next step
        self.sequence: TextSequence | None = None
        self.generation: Generation | None = None
        self.is_writing = False
        self.num_cached = 0
        self.num_drawn = 0  # tokens, the end token included, as llama-server counts them
        self._num_scored = 0  # tokens of the prompt that have been said
        self._prompt = job.codec.stream() if isinstance(job, TextJob) and job.scores else None
        self._submitted_s = time.monotonic()
        self._began_s = self._first_s = self._submitted_s
        self.last_s = self._submitted_s  # when the latest token was drawn

    @property
    def is_over(self) -> bool:
        return self.generation is not None and self.generation.is_over

    @property
    def num_unread(self) -> int:
        """Tokens of the prompt still to be computed."""
        known = 0 if self.sequence is None else self.sequence.length
        return 0 if self.is_writing else len(self.job.ids) - known

    def begin(
        self, sequence: TextSequence, traffic: Traffic, drafts: Speculation | None = None
    ) -> None:
        """Continues from the sequence's tokens, which are a prefix of the prompt."""
        job = self.job
        assert isinstance(job, TextJob)
        self.sequence, self.num_cached = sequence, sequence.length
        self._began_s = time.monotonic()
        self.generation = Generation(
            sequence, job.ids, job.codec, job.draws, job.options, traffic, job.mask, drafts
        )

    def part(self, most: int, beside: Beside | None = None) -> Part:
        """The next rows to compute: at most `most` tokens of its prompt, or its last token, perhaps
        with a draft. `beside`: see Generation.part."""
        assert self.sequence is not None and self.generation is not None
        wanted: Wanted = "all" if self.is_scored else "none"
        most = min(most, SCORED_ROWS) if self.is_scored else most
        if self.num_unread <= most:
            part = self.generation.part(beside)
            assert part is not None, "drafts that are right are drawn in their own step"
            return replace(part, wanted="all") if self.is_scored else part
        start = self.sequence.length
        return Part(
            sequence=self.sequence, tokens=self.job.ids[start : start + most], wanted=wanted
        )

    @property
    def is_scored(self) -> bool:
        """True while tokens of the prompt are to be said."""
        return self._prompt is not None and self._num_scored < len(self.job.ids)

    def score(self, part: Part, logits_RV: Tensor) -> list[Token]:
        """The prompt's tokens that follow from the logits of `part`, which has been computed; the
        first token of all comes with the first part, and nothing predicts it."""
        job, stream = self.job, self._prompt
        assert isinstance(job, TextJob) and stream is not None and self.sequence is not None
        ids, count, tokens = job.ids, job.options.num_logprobs, list[Token]()
        assert count is not None
        if self._num_scored == 0:
            tokens.append(Token(ids[0], stream.text(ids[0]), nan))
            self._num_scored = 1
        first = self.sequence.length - len(part.tokens)
        for row, logits_V in enumerate(logits_RV):
            number = first + row + 1
            if number != self._num_scored or number == len(ids):  # repeated, or the answer's
                continue
            found = job.draws.logprobs(logits_V, count, ids[number])
            own = next(logprob for i, logprob in found if i == ids[number])
            text = stream.text(ids[number]) + (stream.flush() if number == len(ids) - 1 else "")
            tokens.append(Token(ids[number], text, own, tuple(found[:count])))
            self._num_scored += 1
        return tokens

    def draw(self) -> Sequence[Token]:
        """Draws the next token; `generation` has its logits."""
        assert self.generation is not None
        self.last_s = time.monotonic()
        if not self.is_writing:
            self.is_writing, self._first_s = True, self.last_s
        self.num_drawn += 1
        return self.generation.draw()

    def release(self) -> None:
        """Frees the resources of an ended text, and drops drafts that were not accepted. Its last
        logits are a view of a whole step's, which would otherwise live as long as any reference to
        the text."""
        if self.generation is not None:
            self.generation.close()
        self.generation = None

    def embed(self, engine: Engine, most: int) -> bool:
        """Computes at most `most` further tokens of a text to embed; true if none is left."""
        assert self.sequence is not None and self.pool is not None
        start = self.sequence.length
        if start == 0:
            self._began_s = time.monotonic()
        self.pool.add(engine.hidden_states(self.sequence, self.job.ids[start : start + most]))
        self._first_s = self.last_s = time.monotonic()
        return self.sequence.length == len(self.job.ids)

    def report(self) -> Report:
        assert self.generation is not None or self.pool is not None
        read_s = time.monotonic() if self.pool is None and not self.is_writing else self._first_s
        return Report(
            stopped_by=self.generation.run.stopped_by if self.generation else "embedding",
            stop=self.generation.run.stop if self.generation else "",
            prompt_tokens=len(self.job.ids),
            cached_tokens=self.num_cached,
            generated_tokens=self.num_drawn,
            drafted_tokens=self.generation.run.drafted if self.generation else 0,
            accepted_tokens=self.generation.run.accepted if self.generation else 0,
            queued_s=self._began_s - self._submitted_s,
            prompt_s=read_s - self._began_s,
            generated_s=self.last_s - self._first_s,
        )
