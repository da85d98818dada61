"""The draft controller of speculative decoding: decides how many tokens to draft for each step.

A step of r rows takes c(r) seconds and yields its accepted guesses and one more token. If a(i) is
the probability that the i-th guess is right given that those before it are, a draft of n tokens
yields

    E(n) = 1 + a(1) + a(1) a(2) + ... + a(1) ... a(n)   tokens in   c(n + 1)   seconds,

and the n that maximises E(n) - rate * c(n + 1) maximises the long-run rate, where `rate` is the
rate of recent steps, or that of single-row steps if it is higher (Dinkelbach 1967, for ratios).
Here n = 0 is a step without a draft, and c(n + 1) contains the time for guessing if that is not
free. The time of a step is the median of the latest steps of as many rows, interpolated where there
is none. a is counted separately for each confidence (`trust`) of the drafter; where guesses are
free, unused guesses count too. Losses against single-row steps, and time spent on guessing except
for reading a new text, are paid from an account that receives draft_costs' _SHARE of the time, so a
text for which drafts do not pay takes longer by about that share and the account's opening balance.
The account also pays for occasional trials, and for a draft model's first ones, without which the
cost of further rows is only assumed: they are made if the draft would pay were those rows free.

Costs, and therefore choices, depend on the machine. The text does not, because each row of a step
is bit-identical to a single step; where it is not, `check_rows` refuses."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Protocol, runtime_checkable

from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import SpeculationOptions
from hotsplit.options.kinds import kinds_checked
from hotsplit.runtime.generate.draft_costs import Acceptance, Account, RowCosts
from hotsplit.runtime.step.decoder import Decoder
from hotsplit.runtime.step.hybrid_step import HybridStep
from hotsplit.runtime.step.native_step import NativeStep
from hotsplit.runtime.step.sequences import Sequence as TextSequence

_LATELY = 20.0  # steps that the rate of recent steps is about
_TRIAL_EVERY, _TRIAL = 64, 3  # tokens between trials, and the length of a trial's draft
_FIRST_TRIALS = 4  # of a draft model, made at once
_VARY_EVERY = 16  # one draft in this many gets a nearby length whose cost is unknown, if any
_SINGLE_EVERY = 128  # after this many drafts in a row, one step has none, to measure a single row
_MARGIN = 0.05  # expected gain in tokens below which a draft is not worth it
_COSTLY_TRUST = 3  # trust in the guesses of a drafter that is not free
_OFF_AFTER = 8  # successive decisions against a draft, then counted as one switch-off


def has_equal_rows(decoder: Decoder) -> bool:
    """True if every row of any pass is bit-identical to a single step: all passes are native."""
    return isinstance(decoder.native, NativeStep)


def has_equal_steps(decoder: Decoder) -> bool:
    """True if every row of a decode step is bit-identical to a single step; prefill may differ."""
    native = decoder.native
    return has_equal_rows(decoder) or (isinstance(native, HybridStep) and native.has_equal_rows)


def check_rows(decoder: Decoder) -> None:
    """Raises HotsplitError unless every row of a decode step is bit-identical to a single
    step."""
    if has_equal_steps(decoder):
        return
    raise HotsplitError(
        "speculation could change the text here, because a row of a step may differ from a single"
        " token's step (K-quants on a GPU are rounded differently in steps of several rows); leave"
        " --speculate out"
    )


@dataclass(frozen=True)
class Guess:
    """Tokens that may follow. `trust`: the drafter's confidence in them, 0 to NUM_TRUSTS - 1."""

    tokens: Sequence[int]
    trust: int = 2


@runtime_checkable
class Drafter(Protocol):
    name: str
    is_free: bool  # the time of a guess is negligible, whatever its length
    token_s: float  # otherwise an estimate of the seconds per token

    def prepare(self, ids: Sequence[int]) -> None:
        """Reads the text, which usually has grown since the last call."""

    def propose(self, ids: Sequence[int], most: int) -> Guess:
        """At most `most` tokens that may follow `ids`, the text last prepared."""


@runtime_checkable
class Follower(Drafter, Protocol):
    """A drafter that reads what the model computes of a text."""

    def follow(self, text: TextSequence) -> None:
        """Drafts for this text from now on."""


@dataclass
class _Pending:
    """A guess for the tokens from `start` on, of which the first `checked` were right so far."""

    start: int
    guess: Guess
    checked: int = 0


@dataclass
class Totals:
    """Totals so far; times in seconds. `baseline_s` estimates the time without drafts: single-row
    steps at their own time, each token of other steps at the median of single-row steps."""

    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    step_s: float = 0.0
    check_s: float = 0.0  # of the steps with drafts
    draft_s: float = 0.0
    baseline_s: float = 0.0
    num_off: int = 0
    num_on: int = 0

    @property
    def gain(self) -> float:
        """Estimated speedup; 1 if nothing was measured."""
        took = self.step_s + self.draft_s
        return self.baseline_s / took if took and self.baseline_s else 1.0


class Speculation:
    """The drafts of one Generation, or of several in succession: see the module's docstring."""

    @kinds_checked
    def __init__(self, drafter: Drafter, options: SpeculationOptions) -> None:
        self.options, self._drafter = options, drafter
        self.totals, self.costs = Totals(), RowCosts()
        self._acceptance = Acceptance(options.most)
        # The opening balance of a draft model, which was loaded on purpose, covers a trial.
        least = options.least if drafter.is_free else max(options.least, min(_TRIAL, options.most))
        self._account = Account(least)
        self._ids: Sequence[int] = ()  # the text of the last call
        self._length = 0  # its length in that call
        self._pending: list[_Pending] = []
        # Decaying sums of recent tokens and their seconds, for the rate. They begin as those of
        # single steps, since the rate of a lucky first draft alone would forbid the next one.
        self._lately: tuple[float, float] | None = None
        self._draft_s = 0.0  # for the coming step
        self._is_read, self._read_s = False, 0.0  # has the drafter read the text; seconds of that
        self._since_trial = self._since_single = self._since_varied = 0
        self._num_declined = self._num_unsure = 0
        self._is_on = True
        # For a drafter that is not free: seconds per guessed and per read token, number of tokens
        # read, and seconds of reading before the next guess.
        self._token_s = self._read_token_s = drafter.token_s
        self._num_read, self._gap_s = 0, 0.0

    def follow(self, text: TextSequence) -> None:
        """Drafts for this text from now on, if the drafter reads more than tokens."""
        if isinstance(self._drafter, Follower):
            self._drafter.follow(text)

    def draft(self, ids: Sequence[int], room: int) -> Sequence[int]:
        """At most `room` tokens that may follow `ids`; none if a draft does not pay."""
        began, self._read_s = time.perf_counter(), 0.0
        self._check(ids)
        tokens = self._draft(ids, min(room, self.options.most))
        self._draft_s = time.perf_counter() - began
        self._account.spend(self._draft_s - self._read_s)
        self.totals.draft_s += self._draft_s
        return tokens

    def learn(self, rows: int, accepted: int, seconds: float) -> None:
        """Records a step of `rows` rows: its seconds, and the number of accepted draft tokens."""
        self.costs.learn(rows, seconds)
        totals, tokens = self.totals, 1 + accepted
        totals.steps += 1
        totals.tokens += tokens
        totals.step_s += seconds
        single_s = self.costs.single_s
        if rows > 1:
            totals.drafts += 1
            totals.drafted += rows - 1
            totals.accepted += accepted
            totals.check_s += seconds
            # The drafter has computed its own guesses, but the last one.
            self._num_read += min(accepted, rows - 2)
        self._since_single = self._since_single + 1 if rows > 1 else 0
        self._since_trial += tokens
        assert single_s is not None, "the first step has one row: see _draft"
        totals.baseline_s += tokens * single_s if rows > 1 else seconds
        gain_s = tokens * single_s - seconds if rows > 1 else 0.0
        self._account.settle(single_s, tokens, gain_s)
        num, seconds = self._lately or (_LATELY, _LATELY * single_s)
        lately_s = self.costs.seconds(rows) + self._draft_s - self._read_s
        self._lately = num + (tokens - num / _LATELY), seconds + (lately_s - seconds / _LATELY)

    def line(self) -> str | None:
        """What was decided and why, in a line for the user; None if there were no drafts, unless a
        model was loaded to make them."""
        totals, single_s = self.totals, self.costs.single_s
        begin = f"speculation ({self._drafter.name}):"
        if totals.drafts and single_s is not None:
            took = (totals.check_s + totals.draft_s) / totals.drafts / single_s
            return (
                f"{begin} {totals.drafts} checks of {1 + totals.drafted / totals.drafts:.1f} rows,"
                f" {totals.accepted / totals.drafted:.0%} of {totals.drafted} drafted tokens"
                f" accepted: {1 + totals.accepted / totals.drafts:.1f} tokens in the time of"
                f" {took:.1f} steps, an estimated {totals.gain:.2f}x the speed of the text;"
                f" {'on' if self._is_on else 'off'} at the end, switched off {totals.num_off}x"
            )
        if self._drafter.is_free:
            return None
        what, other = "model", "the text is too long for it"
        if isinstance(self._drafter, Follower):
            what, other = "block", "it has not seen the beginning of the text"
        begin += f" the draft {what} is loaded, but drafted nothing:"
        if single_s is None:
            return f"{begin} no step was made"
        if self._num_unsure:
            return (
                f"{begin} no first guess had a probability of {self.options.min_probability:g}, or"
                f" {other}"
            )
        return (
            f"{begin} a guess takes {1e3 * self._token_s:.3g} ms and a step of the model"
            f" {1e3 * single_s:.3g} ms, so that no draft was expected to pay"
        )

    def _check(self, ids: Sequence[int]) -> None:
        """Compares earlier guesses with the tokens that followed."""
        if ids is not self._ids or len(ids) < self._length:
            self._pending.clear()
            self._is_read = False
        self._ids, self._length = ids, len(ids)
        self._pending = [pending for pending in self._pending if self._follow(pending, ids)]

    def _follow(self, pending: _Pending, ids: Sequence[int]) -> bool:
        """Compares a guess with the text; true if it is right so far and not yet complete."""
        tokens, trust = pending.guess.tokens, pending.guess.trust
        while pending.checked < len(tokens) and pending.start + pending.checked < len(ids):
            is_right = tokens[pending.checked] == ids[pending.start + pending.checked]
            self._acceptance.learn(trust, pending.checked, is_right)
            if not is_right:
                return False
            pending.checked += 1
        return pending.checked < len(tokens)

    def _draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        if self.costs.single_s is None or self._since_single >= _SINGLE_EVERY or most < 1:
            return ()
        if self._drafter.is_free:
            return self._free_guess(ids, most)
        gap = len(ids) - self._num_read if self._is_read else 0  # reading a new text is not charged
        self._gap_s = gap * self._read_token_s
        length = self._length_for(_COSTLY_TRUST, most)
        return self._costly_guess(ids, length) if length else ()

    def _free_guess(self, ids: Sequence[int], most: int) -> Sequence[int]:
        """The tokens worth computing; the text is later compared with the whole guess."""
        if not self._account.can_pay(0.0):
            return ()
        self._prepare(ids)
        guess = self._drafter.propose(ids, most)
        tokens = guess.tokens[:most]
        if not tokens:
            return ()
        self._pending.append(_Pending(len(ids), Guess(tokens, guess.trust)))
        return tokens[: self._length_for(guess.trust, len(tokens))]

    def _costly_guess(self, ids: Sequence[int], length: int) -> Sequence[int]:
        self._prepare(ids)
        began = time.perf_counter()
        tokens = self._drafter.propose(ids, length).tokens[:length]
        token_s = (time.perf_counter() - began) / max(1, len(tokens))
        self._token_s += 0.1 * (token_s - self._token_s)
        if not tokens:
            self._num_unsure += 1
            self._acceptance.learn(_COSTLY_TRUST, 0, False)  # no guess counts as a wrong one
        if len(tokens) < max(1, self.options.least):
            return ()
        self._pending.append(_Pending(len(ids), Guess(tokens, _COSTLY_TRUST)))
        return tokens

    def _prepare(self, ids: Sequence[int]) -> None:
        """Lets the drafter read the text. For a new text this is not charged, like a prefill."""
        began = time.perf_counter()
        self._drafter.prepare(ids)
        took = time.perf_counter() - began
        if not self._is_read:
            self._is_read, self._read_s = True, took
        elif len(ids) > self._num_read:
            token_s = took / (len(ids) - self._num_read)
            self._read_token_s += 0.1 * (token_s - self._read_token_s)
        self._num_read = len(ids)

    def _length_for(self, trust: int, most: int) -> int:
        """The number of tokens to draft for the next step, at most `most`."""
        length = self.best_length(trust, most)
        length = self._varied(length, most) if length else self._trial_length(trust, most)
        self._switch(length > 0)
        return length

    def best_length(self, trust: int, most: int) -> int:
        """The length of the best draft that the account can afford; 0 is none."""
        expected = self._acceptance.expected(trust, most)
        cost_s = self._draft_costs(most)
        single_s = cost_s[0]
        assert self._lately is not None, "a single step was measured"
        tokens, seconds = self._lately
        rate = max(1 / single_s, tokens / seconds)
        best, best_value = 0, 1.0 + _MARGIN - rate * single_s
        for length in range(max(1, self.options.least), most + 1):
            value = expected[length] - rate * cost_s[length]
            if value > best_value and self._can_pay(length, cost_s):
                best, best_value = length, value
        return best

    def _draft_costs(self, most: int) -> list[float]:
        """Seconds of drafting 0, 1, ... `most` tokens and of the step that checks them."""
        single_s, *checks = self.costs.curve(most + 1)[1:]
        guesses = (self._gap_s + length * self._token_s for length in range(1, most + 1))
        return [single_s, *map(add, guesses, checks)]

    def _can_pay(self, length: int, cost_s: Sequence[float]) -> bool:
        """True if the account can afford a draft that is entirely wrong. Until a step of several
        rows is measured, each further row is assumed to cost at least a single step."""
        loss_s = cost_s[length] - cost_s[0]
        unknown_s = 0.0 if self.costs.is_known else length * cost_s[0]
        return self._account.can_pay(max(loss_s, unknown_s))

    def _varied(self, length: int, most: int) -> int:
        """The given length, or occasionally a nearby one whose cost is unknown."""
        self._since_varied += 1
        if self._since_varied < _VARY_EVERY:
            return length
        self._since_varied = 0
        lengths = range(max(1, self.options.least, length // 2), min(most, length + 2) + 1)
        unknown = [n for n in lengths if not self.costs.is_measured(n + 1)]
        return min(unknown, key=lambda n: abs(n - length), default=length)

    def _trial_length(self, trust: int, most: int) -> int:
        """The length of a trial, a draft that is not expected to pay, if one is due and affordable,
        because conditions may have changed, or a draft model has hardly been tried; else 0.
        Restarts the interval to the next trial."""
        length = max(min(_TRIAL, most), self.options.least)
        if length > most:
            return 0
        cost_s, expected = self._draft_costs(length), self._acceptance.expected(trust, length)
        is_due = self._since_trial >= _TRIAL_EVERY
        if self._drafter.is_free:
            is_due = is_due and expected[1] > 1.5
        else:
            with_free_rows_s = cost_s[0] + self._gap_s + length * self._token_s
            can_pay = expected[length] * cost_s[0] > with_free_rows_s
            is_first = self.totals.drafts < _FIRST_TRIALS and can_pay
            is_due = is_first or (is_due and self._is_read)
        if is_due and self._can_pay(length, cost_s):
            self._since_trial = 0
            return length
        return 0

    def _switch(self, is_worth_it: bool) -> None:
        self._num_declined = 0 if is_worth_it else self._num_declined + 1
        if is_worth_it and not self._is_on:
            self._is_on, self.totals.num_on = True, self.totals.num_on + 1
        elif self._num_declined >= _OFF_AFTER and self._is_on:
            self._is_on, self.totals.num_off = False, self.totals.num_off + 1
