"""Generates a text token by token, from its prompt to its end."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import ENDLESS, GenerationOptions
from hotsplit.runtime.generate.answer_mask import Mask
from hotsplit.runtime.generate.drafters import ALONE, Beside
from hotsplit.runtime.generate.sampler_chain import SamplerChain
from hotsplit.runtime.generate.speculation import Speculation
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step.sequences import Part
from hotsplit.runtime.step.sequences import Sequence as TextSequence
from hotsplit.runtime.text.codec import TextCodec, overlap

NOT_STOPPED = "not started"
# Tokens at the end of a prompt without which a recurrent state is kept. The next turn of a
# conversation has others there (a template begins an answer otherwise than it repeats it), and the
# same prompt once more computes at least the last one again.
TURN_TAIL = 8
LEAST_SHIFTED = 4  # tokens; a shorter context cannot be shifted


@dataclass(frozen=True)
class Token:
    """A generated token. `text` is empty while it is held back: the first bytes of a character, or
    a possible start of a stop string. `id` is None for text that was still held back at the end,
    and, without text, between the pieces of a conversation's long prompt. `logprobs` are the most
    probable tokens and their natural log probabilities before samplers. `is_reasoning`: the text
    belongs to the reasoning of a conversation's answer."""

    id: int | None
    text: str
    logprob: float | None = None
    logprobs: tuple[tuple[int, float], ...] = ()
    is_reasoning: bool = False


@dataclass
class Run:
    """Statistics of a generation; times in seconds. `ffn_bytes` were read since the prompt, by all
    texts of the engine.

    `cached_tokens` of the prompt were in the cache already. `drafted` tokens were guessed and
    checked, and `accepted` of them were right, so there may be fewer decode steps than tokens."""

    prefill_tokens: int = 0
    cached_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    shifts: int = 0  # number of context shifts
    ffn_bytes: int = 0
    stopped_by: str = NOT_STOPPED  # or "end of text", "stop string", "max tokens" or "context"
    stop: str = ""  # the stop string that ended the text

    @property
    def prefill_per_s(self) -> float:
        """The rate of the computed tokens; `cached_tokens` do not count."""
        computed = self.prefill_tokens - self.cached_tokens
        return computed / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_per_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


class StopFilter:
    """Passes on text up to the first stop string, regardless of token boundaries; holds
    back a possible start of one. Hidden text, that of special tokens, is a part of stop strings
    only."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.stop = ""  # the one that was found
        self._held = ""
        self._is_shown: list[bool] = []  # for each character held

    def push(self, text: str, hidden: str = "") -> tuple[str, bool]:
        """(text that cannot belong to a stop string, whether one was found); `hidden` follows
        `text`."""
        self._held += text + hidden
        self._is_shown += [True] * len(text) + [False] * len(hidden)
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.stop = min(found)
            text = self._take(at)
            self._held, self._is_shown = "", []
            return text, True
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        return self._take(len(self._held) - keep), False

    def flush(self) -> str:
        """Returns the held-back text, at the end of the text."""
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        """Removes the first `count` characters, and returns those that are shown."""
        text = "".join(compress(self._held[:count], self._is_shown))
        self._held, self._is_shown = self._held[count:], self._is_shown[count:]
        return text


class Generation:
    """The generation of one text. `sequence` may hold tokens already; their common prefix with
    `ids` is not computed again, or with recurrent states what is `reusable` of it. In the end,
    unless the context was shifted, it holds all yielded tokens, except perhaps the last.

    Until it `is_over`, the caller computes `part()` and passes the logits to `take()`, unless the
    part is None, and calls `draw()`. `tokens()` does so for one text, `together()` for several in
    shared steps."""

    def __init__(
        self,
        sequence: TextSequence,
        ids: Sequence[int],
        codec: TextCodec,
        chain: SamplerChain,
        options: GenerationOptions,
        traffic: Traffic,
        mask: Mask | None = None,
        drafts: Speculation | None = None,
    ) -> None:
        self.sequence, self.options = sequence, options
        self.ids = list(ids)  # the prompt, and the tokens drawn since
        self.run = Run(prefill_tokens=len(self.ids))
        self._chain, self._mask, self.drafts, self._traffic = chain, mask, drafts, traffic
        self._end_ids = frozenset[int]() if options.ignores_end else codec.end_ids
        marks = dict(options.marks)
        self._stream = codec.stream(self.ids, marks)
        self._hidden_texts = {i: t for i, t in codec.special_texts.items() if i not in marks}
        self._filter = StopFilter(options.stops)
        self._left = options.max_tokens
        self._read_before = 0  # bytes of feed-forward weights read before decoding began
        # The latest step: its logits, the draft after its first token, and the number of draft
        # tokens accepted so far, which is also the row that the next token is drawn from.
        self._logits_RV: Tensor | None = None
        self._draft: Sequence[int] = ()
        self._right = 0
        self._step_s, self._may_draft = 0.0, True
        self._kept = 0  # length of the sequence before that step
        sequence.mark(len(self.ids) - TURN_TAIL)
        if drafts:
            drafts.follow(sequence)
        self._length = 0  # length it must have before the next step

    @property
    def is_over(self) -> bool:
        return self.run.stopped_by != NOT_STOPPED

    def tokens(self) -> Generator[Token, None, None]:
        """Yields tokens as they are generated. Raises HotsplitError if no token can be drawn, the
        context cannot hold the prompt or is too short to be shifted, or the sequence is used for
        something else meanwhile."""
        try:
            while not self.is_over:
                part = self.part()
                if part is not None:
                    began = time.perf_counter()
                    logits_RV = self.sequence.extend(part.tokens, part.wanted)
                    self.take(logits_RV, time.perf_counter() - began)
                yield from self.draw()
        finally:  # also if the caller stops early
            self.close()

    def part(self, beside: Beside | None = ALONE) -> Part | None:
        """The rows to compute before the next draw: the prompt, or the last token and perhaps a
        draft after it; None if the last token was an accepted draft, whose logits are known.
        `beside`: what else is in the step; None: no draft is wanted."""
        if self._logits_RV is None:
            return Part(sequence=self.sequence, tokens=self._new_of_prompt())
        if self.goes_on():
            return None
        token_id = self.ids[-1]
        self.close()
        if self.sequence.length != self._length:
            raise HotsplitError("the sequence was used for something else during generation")
        if not self.sequence.room:
            self._shift()
        room = self.sequence.room - 1
        room = min(room, self._left - 1) if self.options.max_tokens != ENDLESS else room
        self._may_draft = beside is not None
        if self.drafts and beside is not None and room > 0:
            began = time.perf_counter()
            self._draft = self.drafts.draft(self.ids, room, beside)
            self.run.decode_s += time.perf_counter() - began
        self._kept = self.sequence.length
        self._length = self._kept + 1
        tokens = [token_id, *self._draft]
        return Part(sequence=self.sequence, tokens=tokens, wanted="all" if self._draft else "last")

    def with_draft(self, beside: Beside) -> Beside:
        """What is beside other texts of the step, with the draft of this text's part."""
        if not self._draft or self.drafts is None:
            return beside
        return beside.with_draft(len(self._draft), self.drafts.expected - 1)

    def goes_on(self) -> bool:
        """True if the last token was an accepted draft: `draw` then takes the logits after it."""
        draft, right = self._draft, self._right
        is_right = not self.is_over and right < len(draft) and draft[right] == self.ids[-1]
        self._right += is_right
        self.run.accepted += is_right
        return is_right

    def take(self, logits_RV: Tensor, seconds: float) -> None:
        """Stores the logits of `part()`; `seconds` is the time that they took."""
        if self._logits_RV is None:
            self.run.prefill_s = seconds
            self._read_before = self._traffic.total
        else:
            self.run.decode_s += seconds
            self.run.decode_steps += 1
            self.run.drafted += len(self._draft)
            self._step_s = seconds
        self._logits_RV = logits_RV

    def can_draw(self, within_s: float) -> bool:
        """Waits up to `within_s` for the mask; true if `draw` would not wait."""
        return self._mask is None or self._mask.is_ready(within_s)

    def draw(self) -> list[Token]:
        """Draws the next token and returns the tokens to emit. At the end of the text, text that
        was held back follows as a token without an id; an end token is not emitted."""
        assert self._logits_RV is not None
        began = time.perf_counter()
        logits_V = self._logits_RV[self._right]
        mask_V = None if self._mask is None else self._mask.mask_V(len(logits_V))
        token_id = self._chain.sample(logits_V, self.ids, mask_V)
        if self._mask is not None and token_id not in self._end_ids:
            self._mask.accept(token_id)
        is_first = self._left == self.options.max_tokens
        tokens = self._emit(token_id)
        self.run.decode_tokens += not is_first
        self.run.decode_s += time.perf_counter() - began
        self.run.ffn_bytes = self._traffic.total - self._read_before
        return tokens

    def close(self) -> None:
        """Rolls back draft tokens that were not accepted, and tells `drafts` of the step."""
        if self._draft and self.sequence.is_open:  # a failed step has added nothing
            self._length = min(self._kept + 1 + self._right, self.sequence.length)
            self.sequence.rollback(self._length)
        if self.drafts and self._step_s and self._may_draft:
            self.drafts.learn(1 + len(self._draft), self._right, self._step_s)
        self._draft, self._right, self._step_s = (), 0, 0.0

    def _new_of_prompt(self) -> list[int]:
        """The prompt's tokens after its common prefix with the sequence, at least one."""
        known = self.sequence.reusable(num_common(self.sequence.ids, self.ids[:-1]))
        self.sequence.rollback(known)
        self._length = len(self.ids)
        self.run.cached_tokens = known
        return self.ids[known:]

    def _shift(self) -> None:
        """Keeps the beginning of the text, and recomputes the last half of the rest right after
        it."""
        if self.sequence.length < LEAST_SHIFTED:
            raise HotsplitError(
                f"a context of {self.sequence.length} is too short to drop half of it; load with a"
                " longer one"
            )
        keep = min(self.options.shift_keep or 0, self.sequence.length - 2)
        ids = self.sequence.ids[keep:]
        self.sequence.rollback(keep)
        self.sequence.extend(ids[len(ids) - len(ids) // 2 :], "none")
        self._length = self.sequence.length
        self.run.shifts += 1

    def _emit(self, token_id: int) -> list[Token]:
        tokens = []
        if token_id in self._end_ids:
            self.run.stopped_by = "end of text"
            held = self._filtered(self._stream.flush())
        else:
            self._left -= 1
            text, hidden = self._stream.text(token_id), self._hidden_texts.get(token_id, "")
            if self._left == 0:
                self.run.stopped_by = "max tokens"
            elif self.options.shift_keep is None:
                wrong = len(self._draft) - self._right  # draft tokens, which are dropped
                if self.sequence.room + wrong <= 0:
                    self.run.stopped_by = "context"
            if self.is_over:
                text += self._stream.flush()
            tokens.append(self._token(token_id, self._filtered(text, hidden)))
            self.ids.append(token_id)
            held = ""
        held += self._filter.flush() if self.is_over else ""
        return [*tokens, Token(None, held)] if held else tokens

    def _filtered(self, text: str, hidden: str = "") -> str:
        """The part of the text that cannot belong to a stop string; a stop string ends the text.
        `hidden`: the text of a special token after it."""
        text, is_stopped = self._filter.push(text, hidden)
        if is_stopped:
            self.run.stopped_by, self.run.stop = "stop string", self._filter.stop
        return text

    def _token(self, token_id: int, text: str) -> Token:
        count = self.options.num_logprobs
        if count is None:
            return Token(token_id, text)
        assert self._logits_RV is not None
        logits_V = self._logits_RV[self._right]
        found = self._chain.logprobs(logits_V, count, token_id)
        own = next(logprob for i, logprob in found if i == token_id)
        return Token(token_id, text, own, tuple((i, logprob) for i, logprob in found[:count]))


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:  # fast; a list never equals a tuple
        return shorter
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def together(
    generations: Sequence[Generation], run: Callable[[Sequence[Part]], Sequence[Tensor]]
) -> Iterator[tuple[int, Token]]:
    """Yields (index of the text, token) for several texts, which `run` computes in shared steps."""
    is_writing = False
    try:
        while living := [n for n, g in enumerate(generations) if not g.is_over]:
            parts, beside = list[Part](), Beside.of(len(living) - 1)
            for n in living:
                part = generations[n].part(beside)
                assert part is not None, "drafts that are right are drawn in their own step"
                parts.append(part)
                beside = generations[n].with_draft(beside)
            began = time.perf_counter()
            found = run(parts)
            seconds = time.perf_counter() - began
            drafts = generations[living[0]].drafts
            if drafts is not None and is_writing:
                rows = sum(len(part.tokens) for part in parts)
                drafts.learn_shared(len(parts), rows, seconds)
            is_writing = True
            for n, logits_RV in zip(living, found, strict=True):
                generation = generations[n]
                generation.take(logits_RV, seconds)
                is_right = True
                while is_right:
                    for token in generation.draw():
                        yield n, token
                    is_right = generation.goes_on()
    finally:
        for generation in generations:
            generation.close()
