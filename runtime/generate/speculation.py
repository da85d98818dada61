"""The draft controller of speculative decoding: decides how many tokens to draft for each step.

A step of r rows takes c(r) seconds and yields its accepted guesses and one more token. If a(i) is
the probability that the i-th guess is right given that those before it are, a draft of n tokens
yields

    E(n) = 1 + a(1) + a(1) a(2) + ... + a(1) ... a(n)   tokens in   c(n + 1)   seconds,

and the n that maximises E(n) - rate * c(n + 1) maximises the long-run rate, where `rate` is the
rate of recent steps, or that of single-row steps if it is higher (Dinkelbach 1967, for ratios).
Here n = 0 is a step without a draft. The time of a step is the median of the latest steps of as
many rows, interpolated where there is none. Where texts share a step, n + 1 and E include the rows
and tokens of the others (`Beside`). a is counted separately for each confidence (`trust`) of the
drafter, and unused guesses count too.

A draft model's guesses are not free, but it tells their probabilities, one after another. So it
makes another guess while some number of them is expected to be worth their time and that of their
rows, and of the guesses as many are checked as maximise E(n) - rate * c(n + 1), with these
probabilities. Whether the model is asked at all depends on the rate of its recent rounds. A drafter
in negligible time may stand beside it: its draft is taken where it beats that rate.

Losses against single-row steps, and time spent on guessing, are paid from an account that receives
draft_costs' _SHARE of the time, so a text for which drafts do not pay takes longer by that share
and the account's opening balance: one step, and more for a draft model only as far as it should
gain by what rows are known to cost (row_ratios). The account also pays for occasional trials.

Before a draft model guesses, it reads the text so far, which of a long prompt takes as long as many
steps. That is not charged if what it is expected to gain in as many tokens as the text has already,
or in _LEAST_FUTURE, makes up for it.

To decide takes time as well, which counts for a model whose step takes a fraction of a millisecond.
It is measured, and after a decision against a draft the next steps are made without any, so many
that deciding takes the share _DECIDING of their time.

Costs, and therefore choices, depend on the machine. The text does not, because each row of a step
is bit-identical to a single step; where it is not, `check_rows` refuses."""

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import LONGEST, SpeculationOptions
from hotsplit.options.kinds import kinds_checked
from hotsplit.runtime.generate.draft_costs import (
    EXPECTED_FIRST,
    NUM_FIRST,
    Acceptance,
    Account,
    Confidence,
    Rounds,
    RowCosts,
)
from hotsplit.runtime.generate.drafters import ALONE, Beside, CostlyDrafter, Drafter, Follower
from hotsplit.runtime.step.decoder import Decoder
from hotsplit.runtime.step.hybrid_step import HybridStep
from hotsplit.runtime.step.native_step import NativeStep
from hotsplit.runtime.step.sequences import Sequence as TextSequence

_LATELY = 20.0  # steps that the rate of recent steps is about
_TRIAL_EVERY, _TRIAL = 64, 3  # tokens between trials, and the length of a trial's draft
_START = 1.0  # the account's opening balance, in single steps
# What is added for a draft model, in single steps for each step that its first round should gain.
_MORE_FOR_GAIN = 4.0
_FIRST_ROUNDS = 6  # of a draft model, with at most NUM_FIRST guesses
# Of a text so short, and otherwise of one as long as it is already, a draft model reads what comes
# before it if the gain on as many tokens more pays for that.
_LEAST_FUTURE = 32
_PRIOR_OWN_S = 60e-6  # what Python takes for a round of a draft model
# Where that is more than this share of a step, a draft model is not asked for the first steps of a
# text, which take up to three times as long as later ones, so that guesses seem cheap.
_WARM_SHARE, _WARM_STEPS = 0.02, 8
# The part of a step's time from which on following a text is given up if no draft pays.
_FOLLOWING = 0.005
# The weight of the latest of a draft model's times in their mean, and what is no delay.
_SMOOTH, _LEAST_DELAY_S = 0.2, 1e-5
_VARY_EVERY = 16  # one draft in this many gets a nearby length whose cost is unknown, if any
_MARGIN = 0.05  # expected gain in tokens below which a draft is not worth it
_ROUND_MARGIN = 1.02  # expected gain of a draft model's rounds below which it is not asked
# Of the time of steps, what deciding against drafts may take, after as many single steps' worth of
# it at the beginning of a text and after each draft.
_DECIDING, _FREE_DECIDING = 0.01, 0.5
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


@dataclass
class _Pending:
    """A draft for the tokens from `start` on, of which the first `checked` were right so far, and
    its trust, or its tokens' probabilities."""

    start: int
    tokens: Sequence[int]
    trust: int | Sequence[float]
    checked: int = 0


@dataclass
class Totals:
    """Totals so far; times in seconds. `baseline_s` estimates the time without drafts: steps
    without them at their own time, each token of others at the median of such steps."""

    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    drafts_of_text: int = 0  # of these, by the free drafter beside another
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


@dataclass(frozen=True)
class Learnt:
    """What the drafts of a text have learnt: the costs, and what may be lost, which all texts of
    the engine share; how often guesses are right, and what a draft model gains; the seconds of a
    draft model's guess, and of a token that it reads."""

    costs: RowCosts
    account: Account
    rates: tuple[Acceptance, Confidence, Rounds]
    drafter_s: tuple[float, float]


class Speculation:
    """The drafts of one Generation, or of several in succession: see the module's docstring."""

    expected = 1.0  # tokens of the text from the coming step

    @kinds_checked
    def __init__(
        self,
        drafter: Drafter | CostlyDrafter,
        options: SpeculationOptions,
        text_drafter: Drafter | None = None,
        ratios: Mapping[int, float] | None = None,
    ) -> None:
        """`text_drafter`: a free one beside a costly `drafter`; `ratios`: see RowCosts."""
        self.options, self._drafter = options, drafter
        self.costly = drafter if isinstance(drafter, CostlyDrafter) else None
        self._free = text_drafter if isinstance(drafter, CostlyDrafter) else drafter
        self.totals, self.costs = Totals(), RowCosts(ratios)
        self._acceptance, self._confidence = Acceptance(options.most), Confidence()
        self._guess_s = self._read_token_s = 0.0
        if self.costly is not None:
            self._guess_s = self.costly.token_s
            self._read_token_s = self.costly.read_token_s  # of each beyond a pass's first
        self._account, self._rounds = Account(_START + options.least), Rounds()
        self._ids: Sequence[int] = ()  # the text of the last call
        self._length = self._start = 0  # its length in that call, and in its first one
        self._pending: list[_Pending] = []
        # Decaying sums of the time that recent tokens would have taken without drafts, and that
        # they took. They begin as those of single steps, since a lucky first draft alone would
        # forbid the next one.
        self._lately: tuple[float, float] | None = None
        self._draft_s = 0.0  # for the coming step
        # The drafters that have read the text, and the seconds that this took for the coming step.
        self._has_read, self._read_s = set[str](), 0.0
        self._since_trial = self._since_varied = 0
        self._num_declined = self._num_unsure = self._num_guesses = 0
        self._is_on = True
        # Of a draft model: the text's tokens that it has read, None until that is known; whether it
        # is asked for the coming step, and the expected seconds of that.
        self._num_read: int | None = None
        self._is_asked, self._round_s = False, 0.0
        self._own_s = _PRIOR_OWN_S  # what a round takes besides its guesses and its step
        self._beside = ALONE  # of the coming step
        # Seconds of deciding against drafts that are not made up for yet; the coming steps without
        # a decision, and the number and seconds of those since the last one.
        self._decided_s: float | None = None
        self._num_resting, self._num_rested, self._rested_s = 0, 0, 0.0
        self._is_resting = False
        self._has_left = False  # the drafter has stopped to follow the text

    @property
    def learnt(self) -> Learnt:
        return Learnt(
            self.costs,
            self._account,
            copy.deepcopy((self._acceptance, self._confidence, self._rounds)),
            (self._guess_s, self._read_token_s),
        )

    def begin_with(self, learnt: Learnt) -> None:
        """Begins with what another text of the engine has learnt."""
        self.costs, self._account = learnt.costs, learnt.account
        self._acceptance, self._confidence, self._rounds = copy.deepcopy(learnt.rates)
        self._guess_s, self._read_token_s = learnt.drafter_s

    def follow(self, text: TextSequence) -> None:
        """Drafts for this text from now on."""
        self._num_resting, self._decided_s = 0, None
        if isinstance(self._drafter, Follower):
            self._drafter.follow(text)
            self._has_left = False

    def draft(self, ids: Sequence[int], room: int, beside: Beside = ALONE) -> Sequence[int]:
        """At most `room` tokens that may follow `ids`; none if a draft does not pay."""
        self._is_resting = self._num_resting > 0
        if self._is_resting:
            self._num_resting -= 1
            self._beside, self.expected = beside, 1.0
            return ()
        if self._num_rested:
            self._end_rest()
        began, self._read_s, self._is_asked = time.perf_counter(), 0.0, False
        self._beside, self.expected = beside, 1.0
        self._check(ids)
        tokens = self._draft(ids, min(room, self.options.most, LONGEST - beside.rows), room)
        self._draft_s = time.perf_counter() - began
        if self._is_asked or tokens:  # to decide against a draft is paid by rests
            self._account.spend(self._draft_s - self._read_s)
        self.totals.draft_s += self._draft_s
        return tokens

    def learn(self, rows: int, accepted: int, seconds: float) -> None:
        """Records a step with `rows` rows of this text: its seconds, and the number of accepted
        draft tokens. `learn_shared` records the costs of steps of several texts."""
        if self._is_resting:
            self._rest(seconds)
            return
        began, beside = time.perf_counter(), self._beside
        if not beside.texts:
            self.costs.learn(rows, seconds)
        totals, tokens, num_texts = self.totals, 1 + accepted, 1 + beside.texts
        if not self.costs.is_measured(num_texts):  # the step failed, and was made text by text
            return
        plain_s = self.costs.seconds(num_texts)  # of a step without drafts
        totals.steps += 1
        totals.tokens += tokens
        totals.step_s += seconds
        if rows > 1:
            totals.drafts += 1
            totals.drafted += rows - 1
            totals.accepted += accepted
            totals.check_s += seconds
            if self._is_asked:  # a draft model has computed its own guesses, but the last one
                assert self._num_read is not None
                self._num_read += min(accepted, rows - 2)
            totals.drafts_of_text += self.costly is not None and not self._is_asked
        check_s = self.costs.seconds(beside.rows + rows)
        num_tokens = beside.tokens + tokens  # of all texts
        if self._is_asked:
            took = (self._round_s + self._learnt_own_s() + check_s) / plain_s * num_texts
            expected = beside.tokens + self.expected
            self._rounds.learn(num_tokens, expected, took, is_trial=not self._is_on)
        self._since_trial += tokens
        totals.baseline_s += tokens * plain_s if rows > 1 else seconds
        if self.costly is not None and self._account.saved_s is None:
            _, first_tokens, first_s = self._first_round(self.options.most)
            self._account.start += _MORE_FOR_GAIN * max(0.0, first_tokens / first_s - 1)
        more_s = seconds - plain_s if num_texts == 1 else check_s - self._step_s(1)[1]
        gain_s = accepted * plain_s / num_texts - more_s if rows > 1 else 0.0
        self._account.settle(plain_s, tokens / num_texts, gain_s)
        plain, lately_s = self._lately or (_LATELY * plain_s, _LATELY * plain_s)
        took = check_s + self._draft_s - self._read_s
        plain += num_tokens * plain_s / num_texts - plain / _LATELY
        self._lately = plain, lately_s + (took - lately_s / _LATELY)
        if rows > 1 or self._decided_s is None:
            self._decided_s = -_FREE_DECIDING * plain_s
        elif not self._is_asked:
            self._decided_s += self._draft_s + time.perf_counter() - began
            self._num_resting = int(max(0.0, self._decided_s) / (_DECIDING * plain_s))
            self._decided_s = min(self._decided_s, 0.0)

    def _learnt_own_s(self) -> float:
        """Seconds of a round besides its guesses and its step, by the latest rounds."""
        own_s = self._draft_s - self._read_s - self._round_s
        self._own_s = _smoothed(self._own_s, max(0.0, own_s))
        return self._own_s

    def _rest(self, seconds: float) -> None:
        """Records a step without a decision."""
        self._num_rested += 1
        self._rested_s += seconds
        totals = self.totals
        totals.steps += 1
        totals.tokens += 1
        totals.step_s += seconds
        totals.baseline_s += seconds

    def _end_rest(self) -> None:
        """Records the steps since the last decision together."""
        num, num_texts = self._num_rested, 1 + self._beside.texts
        step_s = self._rested_s / num
        if num_texts == 1:
            self.costs.learn(1, step_s)
        if self.costs.is_measured(num_texts):
            plain_s = self.costs.seconds(num_texts)
            self._account.settle(plain_s, num / num_texts, 0.0)
            plain, lately_s = self._lately or (_LATELY * plain_s, _LATELY * plain_s)
            kept = (1 - 1 / _LATELY) ** num
            steps = (1 - kept) * _LATELY
            self._lately = kept * plain + steps * plain_s, kept * lately_s + steps * step_s
        self._since_trial += num
        self._num_rested, self._rested_s = 0, 0.0

    def learn_shared(self, texts: int, rows: int, seconds: float) -> None:
        """Records what a step of so many generating texts, and no others, took."""
        if texts > 1:
            self.costs.learn(rows, seconds, texts)

    def line(self) -> str:
        """What was decided and why, in a line for the user."""
        totals = self.totals
        begin = f"speculation ({self._drafter.name}):"
        if totals.drafts:
            took = (totals.check_s + totals.draft_s) / totals.drafts
            took /= totals.baseline_s / totals.tokens
            of_text = f" ({totals.drafts_of_text} from the text)" if totals.drafts_of_text else ""
            return (
                f"{begin} {totals.drafts} checks{of_text} of"
                f" {1 + totals.drafted / totals.drafts:.1f} rows,"
                f" {totals.accepted / totals.drafted:.0%} of {totals.drafted} drafted tokens"
                f" accepted: {1 + totals.accepted / totals.drafts:.1f} tokens in the time of"
                f" {took:.1f} steps, an estimated {totals.gain:.2f}x the speed of the text;"
                f" {'on' if self._is_on else 'off'} at the end, switched off {totals.num_off}x"
            )
        if self.costly is None:
            begin += " drafted nothing:"
            if not totals.steps:
                return f"{begin} no step was made"
            if not self._num_guesses:
                return f"{begin} the text repeated nothing"
            return f"{begin} no draft was expected to pay"
        what = "block" if isinstance(self._drafter, Follower) else "model"
        begin += f" the draft {what} is loaded, but drafted nothing:"
        if not totals.steps:
            return f"{begin} no step was made"
        if self._num_unsure:
            return f"{begin} {self.costly.fault or 'no first guess was probable enough'}"
        step_s, two_s = self.costs.curve(2)[1:]
        return (
            f"{begin} a guess takes {1e3 * self._guess_s:.3g} ms, a step of the model"
            f" {1e3 * step_s:.3g} ms and one of two rows {1e3 * two_s:.3g} ms, so that no draft was"
            " expected to pay"
        )

    def _check(self, ids: Sequence[int]) -> None:
        """Compares earlier guesses with the tokens that followed."""
        if ids is not self._ids or len(ids) < self._length:
            self._pending.clear()
            self._has_read.clear()
            self._start, self._num_read = len(ids), None
        self._ids, self._length = ids, len(ids)
        self._pending = [pending for pending in self._pending if self._follow(pending, ids)]

    def _follow(self, pending: _Pending, ids: Sequence[int]) -> bool:
        """Compares a draft with the text; true if it is right so far and not yet complete."""
        tokens, trust = pending.tokens, pending.trust
        while pending.checked < len(tokens) and pending.start + pending.checked < len(ids):
            place = pending.checked
            is_right = tokens[place] == ids[pending.start + place]
            if isinstance(trust, int):
                self._acceptance.learn(trust, place, is_right)
            else:
                self._confidence.learn(trust[place], is_right)
            if not is_right:
                return False
            pending.checked += 1
        return pending.checked < len(tokens)

    def _draft(self, ids: Sequence[int], most: int, room: int) -> Sequence[int]:
        num_texts = 1 + self._beside.texts
        is_due = self.costs.is_plain_due(num_texts, is_soon=self.costly is not None)
        if not self.costs.is_measured(num_texts) or is_due or most < 1:
            return ()
        draft: Sequence[int] = ()
        if self._free is not None:
            draft = self._draft_of_text(self._free, ids, most)
        if self._asked is not None:
            if not draft and self._asks(ids, most, room):
                draft = self._guesses(self._asked, ids, most)
            self._switch(len(draft) > 0)
            self._leave_if_costly(most)
        return draft

    @property
    def _asked(self) -> CostlyDrafter | None:
        """The costly drafter, unless it has left the text."""
        return None if self._has_left else self.costly

    def _leave_if_costly(self, most: int) -> None:
        """Stops following a text for which drafts do not pay, if that takes time itself."""
        drafter, costs_s = self._drafter, self._read_token_s
        if self._is_on or costs_s < _FOLLOWING * self._token_s:
            return
        pays = self._account.can_pay(0.0) and self._round_gain(most) > 0
        if isinstance(drafter, Follower) and not pays:
            drafter.leave()
            self._has_left = True

    def _draft_of_text(self, drafter: Drafter, ids: Sequence[int], most: int) -> Sequence[int]:
        if not self._account.can_pay(0.0):
            return ()
        self._prepare(drafter, ids)
        guess = drafter.propose(ids, most)
        tokens = guess.tokens[:most]
        if not tokens:
            return ()
        self._num_guesses += 1
        self._pending.append(_Pending(len(ids), tokens, guess.trust))
        length = self._length_for(guess.trust, len(tokens))
        self.expected = self._acceptance.expected(guess.trust, length)[-1]
        return tokens[:length]

    def _step_s(self, most: int) -> list[float]:
        """Seconds of the coming step with 0, 1, ... `most` rows of this text."""
        rows = self._beside.rows
        return self.costs.curve(rows + most)[rows:]

    @property
    def _token_s(self) -> float:
        """Seconds of a token without drafts."""
        num_texts = 1 + self._beside.texts
        return self.costs.seconds(num_texts) / num_texts

    def _first_round(self, most: int) -> tuple[int, float, float]:
        """The number of guesses of a draft model's round that gain most if they are as often right
        as is assumed at first; the tokens of all texts from it, and its time in seconds of one."""
        lengths = range(max(1, self.options.least), min(NUM_FIRST, most) + 1)
        lengths = lengths or range(self.options.least, self.options.least + 1)
        step_s, token_s, others = self._step_s(lengths[-1] + 1), self._token_s, self._beside.tokens
        rounds = [
            (
                length,
                EXPECTED_FIRST[min(length, NUM_FIRST)] + others,
                (self._own_s + length * self._guess_s + step_s[length + 1]) / token_s,
            )
            for length in lengths
        ]
        return max(rounds, key=lambda found: found[1] / found[2])

    def _round_gain(self, most: int) -> float:
        """The gain of rounds of a draft model; 0 if they do not pay."""
        _, tokens, took = self._first_round(most)
        gain = self._rounds.gain(tokens, took)
        return gain if gain > _ROUND_MARGIN else 0.0

    def _asks(self, ids: Sequence[int], most: int, room: int) -> bool:
        """Whether a draft model reads the text and guesses: because its rounds pay, or for a trial
        that is due. The account must afford a round whose guesses are all wrong, and for a trial
        the reading of a new text."""
        assert self.costly is not None
        if self.options.least > most or not self._account.can_pay(0.0):
            return False
        length, _, _ = self._first_round(most)
        step_s, guess_s, token_s = self._step_s(length + 1), self._guess_s, self._token_s
        if self.totals.steps < _WARM_STEPS and self._own_s > _WARM_SHARE * token_s:
            return False
        is_new = self._drafter.name not in self._has_read
        if self._num_read is None:
            self._num_read = len(ids) - self.costly.unread(ids)
        gap = len(ids) - self._num_read
        read_s = guess_s + max(0, gap - 1) * self._read_token_s
        new_s = read_s if is_new else 0.0
        wrong_s = guess_s * length + step_s[-1] - step_s[1]  # if all are wrong
        wrong_s += 0.0 if is_new else read_s - guess_s
        gain = self._round_gain(most)
        future_s = min(room, max(_LEAST_FUTURE, len(ids) - self._start)) * token_s
        if gain and new_s <= (1 - 1 / gain) * future_s:
            new_s = 0.0  # not charged, like a prefill
        elif self._since_trial < _TRIAL_EVERY:
            return False
        if not self._account.can_pay(wrong_s + new_s):
            return False
        self._account.spend(new_s)
        self._is_asked, self._round_s, self._since_trial = True, guess_s if is_new else read_s, 0
        return True

    def _guesses(self, drafter: CostlyDrafter, ids: Sequence[int], most: int) -> Sequence[int]:
        """The draft for a round: see the module's docstring."""
        self._prepare(drafter, ids)
        least = self.options.least
        if self._rounds.num < _FIRST_ROUNDS:
            most = min(most, max(NUM_FIRST, least))
        step_s, guess_s = self._step_s(most + 2), self._guess_s
        rate = max(1.0, self._rounds.gain(*self._first_round(most)[1:])) / self._token_s
        guesses, reached, expected = list[tuple[int, float]](), 1.0, [1.0]
        began = time.perf_counter()
        for num, guess in enumerate(drafter.guesses(ids), 1):
            guesses.append(guess)
            reached *= self._confidence.of(guess[1])
            expected.append(expected[-1] + reached)
            wrong_s = self._round_s + num * guess_s + step_s[num + 2] - step_s[1]
            more_s = [
                n * guess_s + step_s[num + 1 + n] - step_s[num + 1]
                for n in range(1, 1 + most - num)
            ]
            pays = self._confidence.pays(reached, [rate * seconds for seconds in more_s])
            if num >= least and not (pays and self._account.can_pay(wrong_s)):
                break
            if num == most:
                break
        lengths = range(least, len(expected)) or [0]
        num = max(lengths, key=lambda n: expected[n] - rate * step_s[n + 1])
        self.expected = expected[num]
        if len(guesses) > 1:  # the first comes out of the text's own pass
            took = (time.perf_counter() - began) / (len(guesses) - 1)
            self._guess_s = _smoothed(self._guess_s, took)
            self._round_s += (len(guesses) - 1) * guess_s
        if not num:
            self._num_unsure += 1
        # Those that are not worth their rows are compared with the text all the same.
        tokens = [token for token, _ in guesses]
        self._pending.append(_Pending(len(ids), tokens, [told for _, told in guesses]))
        return tokens[:num]

    def _prepare(self, drafter: Drafter | CostlyDrafter, ids: Sequence[int]) -> None:
        """Lets the drafter read the text. For a new text this is not charged, like a prefill."""
        began, num_new = time.perf_counter(), len(ids) - (self._num_read or 0)
        drafter.prepare(ids)
        took = time.perf_counter() - began
        if drafter.name not in self._has_read:
            self._has_read.add(drafter.name)
            self._read_s += took
        if drafter is self.costly and num_new > 1:
            token_s = max(0.0, took - self._guess_s) / (num_new - 1)
            self._read_token_s = _smoothed(self._read_token_s, token_s)
        if drafter is self.costly:
            self._num_read = len(ids)

    def _length_for(self, trust: int, most: int) -> int:
        """The number of tokens to draft for the next step, at most `most`."""
        length = self.best_length(trust, most)
        if length:
            length = self._varied(length, most)
        elif self._asked is None:
            length = self._trial_length(trust, most)
        if self._asked is None:
            self._switch(length > 0)
        return length

    def best_length(self, trust: int, most: int) -> int:
        """The length of the best draft that the account can afford; 0 is none."""
        expected = self._acceptance.expected(trust, most)
        cost_s = self._step_s(most + 1)[1:]
        plain, lately_s = self._lately or (1.0, 1.0)
        round_gain = 0.0 if self._asked is None else self._round_gain(most)
        rate = max(1.0, plain / lately_s, round_gain) / self._token_s
        best, best_value = 0, 1.0 - rate * cost_s[0]
        if round_gain:  # the draft must also be better than a draft model's
            best_value = max(best_value, -self._beside.tokens)
        best_value += _MARGIN
        for length in range(max(1, self.options.least), most + 1):
            value = expected[length] - rate * cost_s[length]
            if value > best_value and self._can_pay(length, cost_s):
                best, best_value = length, value
        return best

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
        because conditions may have changed; else 0. Restarts the interval to the next trial."""
        length = max(min(_TRIAL, most), self.options.least)
        if length > most or self._since_trial < _TRIAL_EVERY:
            return 0
        expected = self._acceptance.expected(trust, length)
        if expected[1] > 1.5 and self._can_pay(length, self._step_s(length + 1)[1:]):
            self._since_trial = 0
            return length
        return 0

    def _switch(self, is_worth_it: bool) -> None:
        self._num_declined = 0 if is_worth_it else self._num_declined + 1
        if is_worth_it and not self._is_on:
            self._is_on, self.totals.num_on = True, self.totals.num_on + 1
        elif self._num_declined >= _OFF_AFTER and self._is_on:
            self._is_on, self.totals.num_off = False, self.totals.num_off + 1


def _smoothed(mean_s: float, latest_s: float) -> float:
    """The mean with the latest time, of which far more than the mean is a delay of the machine."""
    return mean_s + _SMOOTH * (min(latest_s, 2 * mean_s + _LEAST_DELAY_S) - mean_s)
