"""A text that is continued: from the prompt's tokens to the last one, one draw after the other.

What this module does not know: models, how a token is drawn, where drafts come from."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sparkinfer.errors import SparkinferError
from sparkinfer.runtime.generate.stops import StopFilter
from sparkinfer.runtime.model.feed_forward import Traffic
from sparkinfer.runtime.step.batch import Wanted
from sparkinfer.runtime.step.sequences import Sequence as TextSequence
from sparkinfer.runtime.text.codec import TextCodec

ENDLESS = -1  # as max_tokens: until the text or the context ends


@dataclass(frozen=True)
class Token:
    """`text` may be empty: a character's first bytes, or what may be the beginning of a stop string.
    `id` is None where a text ends and what was held back still had to be said. `logprobs` are the
    most probable tokens with the natural logarithms of their probabilities before any sampler."""

    id: int | None
    text: str
    logprob: float | None = None
    logprobs: tuple[tuple[int, float], ...] = ()


@dataclass
class Run:
    """What a generation took; times in seconds, `ffn_bytes` read by the decode steps.

    `cached_tokens` of the prompt were there already. `drafted` tokens were guessed and computed
    beside others, of which `accepted` were right; `decode_steps` are then fewer than tokens."""

    prefill_tokens: int = 0
    cached_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    ffn_bytes: int = 0
    stopped_by: str = "not started"  # then "end of text", "stop string", "max tokens" or "context"

    @property
    def prefill_per_s(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_per_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """When a text ends. `stops`: strings that end it and are not part of it. `ignores_end`: the
    model's end tokens are tokens like others. `num_logprobs`: of how many tokens beside the drawn
    one; None of none, not even that. `shift_keep`: at the end of the context the text goes on with
    that many tokens of its beginning and the last half of the rest; None: it ends there."""

    max_tokens: int = 128
    stops: tuple[str, ...] = ()
    ignores_end: bool = False
    num_logprobs: int | None = None
    shift_keep: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1 and self.max_tokens != ENDLESS:
            raise SparkinferError(
                f"max_tokens is {self.max_tokens}, wanted 1 or more, or {ENDLESS} for no limit"
            )
        if any(not stop for stop in self.stops):
            raise SparkinferError("an empty stop string would end every text; leave it out")
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= 1000:
            raise SparkinferError(f"logprobs of {self.num_logprobs} tokens, wanted 0 to 1000")
        if self.shift_keep is not None and self.shift_keep < 0:
            raise SparkinferError(f"{self.shift_keep} tokens to keep, wanted 0 or more")


class Draws(Protocol):
    """A chain of samplers: runtime.generate.chain."""

    def sample(self, logits_V: Tensor, history: Sequence[int], mask_V: Tensor | None) -> int: ...

    def logprobs(self, logits_V: Tensor, count: int) -> list[tuple[int, float]]: ...


class Mask(Protocol):
    """What a text may go on with: runtime.generate.constraints."""

    def mask_V(self) -> Tensor: ...

    def accept(self, token_id: int) -> None: ...


class Drafts(Protocol):
    """Guesses what follows: runtime.generate.speculation."""

    def draft(self, ids: Sequence[int], room: int) -> Sequence[int]:
        """At most `room` tokens that may follow `ids`; none where a guess does not pay."""

    def learn(self, rows: int, accepted: int, seconds: float) -> None:
        """Hears what a step of so many rows took and how many drafted tokens were right."""


class Generation:
    """One text. `sequence` may have tokens: those that `ids` begins with too are not computed
    again. Afterwards it has all tokens that were given out, but perhaps not the last."""

    def __init__(
        self,
        sequence: TextSequence,
        ids: Sequence[int],
        codec: TextCodec,
        draws: Draws,
        options: GenerationOptions,
        traffic: Traffic,
        mask: Mask | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        self.sequence, self.options = sequence, options
        self.ids = list(ids)  # the prompt, and what was drawn since
        self.run = Run(prefill_tokens=len(self.ids))
        self._draws, self._mask, self._drafts, self._traffic = draws, mask, drafts, traffic
        self._end_ids = frozenset[int]() if options.ignores_end else codec.end_ids
        self._stream = codec.stream(self.ids)
        self._filter = StopFilter(options.stops)
        self._left = options.max_tokens
        # The latest step: its logits, what was drafted behind its first token, and how much of that
        # has turned out right; the row after it is the one that the next token is drawn from.
        self._logits_RV: Tensor | None = None
        self._draft: Sequence[int] = ()
        self._right = 0
        self._step_s = 0.0

    def tokens(self) -> Iterator[Token]:
        """Yields them as they are made. Raises SparkinferError for what the model, the constraint or
        the context does not allow."""
        try:
            self._prefill()
            read, token_id = self._traffic.total, None
            while self.run.stopped_by == "not started":
                began = time.perf_counter()
                if token_id is not None:
                    self._advance(token_id)
                    self.run.decode_tokens += 1
                token_id = self._draw()
                self.run.decode_s += time.perf_counter() - began
                self.run.ffn_bytes = self._traffic.total - read
                yield from self._emit(token_id)
        finally:  # also where nobody asks for the next one
            self._settle()

    def _prefill(self) -> None:
        began = time.perf_counter()
        text = self.sequence
        known = 0
        while known < min(text.length, len(self.ids) - 1) and text.ids[known] == self.ids[known]:
            known += 1
        text.rollback(known)
        self.run.cached_tokens = known
        self._logits_RV = text.extend(self.ids[known:])
        self.run.prefill_s = time.perf_counter() - began

    def _draw(self) -> int:
        assert self._logits_RV is not None
        logits_V = self._logits_RV[self._right]
        mask_V = None if self._mask is None else self._mask.mask_V()
        token_id = self._draws.sample(logits_V, self.ids, mask_V)
        if self._mask is not None and token_id not in self._end_ids:
            self._mask.accept(token_id)
        return token_id

    def _advance(self, token_id: int) -> None:
        """Computes what follows a token, unless it was drafted and is there already."""
        if self._right < len(self._draft) and self._draft[self._right] == token_id:
            self._right += 1
            self.run.accepted += 1
            return
        self._settle()
        if not self.sequence.room:
            self._shift()
        room = min(self.sequence.room - 1, self._left - 1 if self._left > 0 else self.sequence.room)
        self._draft = self._drafts.draft(self.ids, room) if self._drafts and room > 0 else ()
        began = time.perf_counter()
        wanted: Wanted = "all" if self._draft else "last"
        self._logits_RV = self.sequence.extend([token_id, *self._draft], wanted)
        self._step_s = time.perf_counter() - began
        self.run.decode_steps += 1
        self.run.drafted += len(self._draft)

    def _settle(self) -> None:
        """Forgets what was drafted and did not come."""
        wrong = len(self._draft) - self._right
        if wrong and self.sequence.is_open:
            self.sequence.rollback(self.sequence.length - wrong)
        if self._drafts and self._step_s:
            self._drafts.learn(1 + len(self._draft), self._right, self._step_s)
        self._draft, self._right, self._step_s = (), 0, 0.0

    def _shift(self) -> None:
        """Goes on with the beginning of the text and the last half of the rest, computed again at
        the positions that they have then."""
        keep = min(self.options.shift_keep or 0, self.sequence.length)
        ids = self.sequence.ids[keep:]
        self.sequence.rollback(keep)
        self.sequence.extend(ids[len(ids) - len(ids) // 2 :], "none")

    def _emit(self, token_id: int) -> Iterator[Token]:
        if token_id in self._end_ids:
            self.run.stopped_by = "end of text"
        else:
            self._left -= 1
            text, is_stopped = self._filter.push(self._stream.text(token_id))
            if is_stopped:
                self.run.stopped_by = "stop string"
            elif self._left == 0:
                self.run.stopped_by = "max tokens"
            elif not self._has_room and self.options.shift_keep is None:
                self.run.stopped_by = "context"
            yield self._token(token_id, text)
            self.ids.append(token_id)
        held = self._filter.flush() if self.run.stopped_by != "not started" else ""
        if held:
            yield Token(None, held)

    @property
    def _has_room(self) -> bool:
        """For a token that was not drafted."""
        wrong = len(self._draft) - self._right
        return self.sequence.room + wrong > 0

    def _token(self, token_id: int, text: str) -> Token:
        count = self.options.num_logprobs
        if count is None:
            return Token(token_id, text)
        assert self._logits_RV is not None
        logits_V = self._logits_RV[self._right]
        own = float(logits_V[token_id].double() - logits_V.double().logsumexp(0))
        most = tuple(self._draws.logprobs(logits_V, count)) if count else ()
        return Token(token_id, text, own, most)
