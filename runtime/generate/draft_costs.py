"""Statistics for the draft controller (speculation.py): seconds per step, the acceptance rate of
guesses, and the time that drafts may lose."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

NUM_TRUSTS = 5
NUM_FIRST = 3  # guesses of a draft model's first rounds, at most
_PRIOR_RIGHT = (0.2, 0.3, 0.45, 0.75, 0.85)  # prior acceptance rate of a guess, by trust
_PRIOR_WEIGHT = 4.0  # guesses that this prior counts for
_PRIOR_TOLD = 8.0  # guesses that a probability counts for which a draft model tells

_FORGET = 0.98  # decay of the weight of past guesses
_PRIOR_MEAN = 0.8  # the same of a draft model, until it tells its own probabilities
# Rounds of a draft model that the expected first ones count for, and the decay of the weight of
# past ones, and of those before a trial.
_PRIOR_ROUNDS, _FORGET_ROUND, _FORGET_LONG_AGO = 2.0, 0.95, 0.5
_PRIOR_SLOPE = 0.5  # cost of another row in single steps, before any was measured
_NUM_KEPT = 9  # measurements kept per number of rows; their median is used
_PLAIN_EVERY = 128  # after this many steps with drafts, at the latest, one without is measured
_SHARE = 0.005  # the part of the estimated time without drafts that the account receives
_MOST_SAVED = 20.0  # the largest balance of the account, in single steps


class RowCosts:
    """Seconds of a step by its number of rows: medians, linearly interpolated in between. Texts
    that share steps share them.

    A step is compared with those of the fewest rows at its time, since the first steps of a text,
    and all of a busy machine, are slower than others; what was known before counts as one."""

    def __init__(self, ratios: Mapping[int, float] | None = None) -> None:
        """`ratios`: what steps of some numbers of rows took before, in steps of one row; None:
        not known."""
        self._known = {} if ratios is None else ratios
        self._fewest = 0  # rows of a step so far; 0 without any
        self._latest = deque[float](maxlen=_NUM_KEPT)  # seconds of the steps of so many
        self._single_s = 0.0  # of a step of one row, measured or by the ratios
        # In steps of one row, what the latest steps of other numbers of rows took.
        self._kept = {
            rows: deque([ratio], _NUM_KEPT) for rows, ratio in self._known.items() if rows > 1
        }
        self._ratios = {rows: kept[0] for rows, kept in self._kept.items()}  # their medians
        self._measured = set[int]()
        self._curve: list[float] = []  # as far as it was wanted since the latest step
        # By number of texts: steps without drafts, and those with drafts since the last of these.
        self._num_plain, self._since_plain = Counter[int](), Counter[int]()

    def learn(self, rows: int, seconds: float, texts: int = 1) -> None:
        self._measured.add(rows)
        self._curve = []
        if not self._fewest or rows < self._fewest:
            self._begin(rows, seconds)
        elif rows == self._fewest:
            self._latest.append(seconds)
            self._single_s = _median(self._latest) / self._known.get(rows, 1.0)
        else:
            kept = self._kept.setdefault(rows, deque(maxlen=_NUM_KEPT))
            kept.append(seconds / self._single_s)
            self._ratios[rows] = _median(kept)
        self._num_plain[texts] += rows == texts
        self._since_plain[texts] = 0 if rows == texts else self._since_plain[texts] + 1

    def _begin(self, rows: int, seconds: float) -> None:
        """The first step of so few rows: other steps are in units of one row by it from now on."""
        before_s, self._single_s = self._single_s, seconds / self._known.get(rows, 1.0)
        if self._fewest:
            others = self._measured - {rows, self._fewest}
            self._kept[self._fewest] = deque([_median(self._latest) / before_s], _NUM_KEPT)
            for other in (self._fewest, *others):
                kept = [ratio * before_s / self._single_s for ratio in self._kept[other]]
                self._kept[other] = deque(kept, _NUM_KEPT)
                self._ratios[other] = _median(kept)
        self._fewest, self._latest = rows, deque([seconds], _NUM_KEPT)

    def is_plain_due(self, texts: int, *, is_soon: bool) -> bool:
        """True if the next step of so many texts should have no drafts, to measure one. `is_soon`:
        a few slow ones at the beginning, after which drafts seem to pay, are soon followed."""
        every = min(_PLAIN_EVERY, 2 * self._num_plain[texts]) if is_soon else _PLAIN_EVERY
        return self._since_plain[texts] >= every

    @property
    def single_s(self) -> float | None:
        return self._single_s if self._fewest == 1 else None

    def is_measured(self, rows: int) -> bool:
        return rows in self._measured

    def curve(self, most: int) -> list[float]:
        """Seconds of 0, 1, ... `most` rows; some must have been measured. Beyond the largest known
        count, extrapolates the line from a single row to that count, or with _PRIOR_SLOPE if only
        single rows are known. Fewer than the smallest measured count are taken to cost as much if
        no ratios are known."""
        if len(self._curve) <= most:
            self._curve = self._up_to(most)
        return self._curve[: most + 1]

    def _up_to(self, most: int) -> list[float]:
        single = self._single_s
        known = {rows: ratio * single for rows, ratio in self._ratios.items()}
        knots = sorted((known | {1: single, self._fewest: _median(self._latest)}).items())
        found = [0.0, single]
        for (left, left_s), (right, right_s) in pairwise(knots):
            slope = (right_s - left_s) / (right - left)
            found.extend(left_s + slope * n for n in range(1, right - left + 1))
        last, last_s = knots[-1]
        slope = (last_s - single) / (last - 1) if last > 1 else _PRIOR_SLOPE * single
        found.extend(last_s + max(0.0, slope) * n for n in range(1, most - last + 1))
        return found

    def seconds(self, rows: int) -> float:
        return self._single_s if rows == 1 else self.curve(rows)[rows]

    @property
    def is_known(self) -> bool:
        """True if, besides single rows, anything is known of steps of several rows."""
        return len(self._measured) > 1 or len(self._known) > 1


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


class Acceptance:
    """The recent acceptance rate of guesses, by their trust and their place in the draft.

    The rate of a place that is seldom reached is taken to be near that of the place before."""

    def __init__(self, most: int) -> None:
        self._right = [[0.0] * most for _ in range(NUM_TRUSTS)]
        self._seen = [[0.0] * most for _ in range(NUM_TRUSTS)]

    def learn(self, trust: int, place: int, is_right: bool) -> None:
        self._right[trust][place] = self._right[trust][place] * _FORGET + is_right
        self._seen[trust][place] = self._seen[trust][place] * _FORGET + 1

    def expected(self, trust: int, length: int) -> list[float]:
        """Expected tokens from a step with a draft of 0, 1, ... `length` tokens."""
        found, reached, probability = [1.0], 1.0, _PRIOR_RIGHT[trust]
        for place in range(length):
            seen = self._seen[trust][place] + _PRIOR_WEIGHT
            probability = (self._right[trust][place] + _PRIOR_WEIGHT * probability) / seen
            reached *= probability
            found.append(found[-1] + reached)
        return found


class Confidence:
    """The recent share of right guesses among those to which a draft model gave about the same
    probability, which it is taken to be near."""

    _NUM_PARTS = 8

    def __init__(self) -> None:
        self._right, self._seen = [0.0] * self._NUM_PARTS, [0.0] * self._NUM_PARTS
        self._told = 0.0  # the sum of the probabilities

    def learn(self, probability: float, is_right: bool) -> None:
        part = self._part(probability)
        self._right[part] = self._right[part] * _FORGET + is_right
        self._seen[part] = self._seen[part] * _FORGET + 1
        self._told = self._told * _FORGET + probability

    def of(self, probability: float) -> float:
        """The chance that a guess of this probability is right."""
        part = self._part(probability)
        ratio = (sum(self._right) + _PRIOR_TOLD) / (self._told + _PRIOR_TOLD)
        right = self._right[part] + _PRIOR_TOLD * min(1.0, ratio * probability)
        return right / (self._seen[part] + _PRIOR_TOLD)

    def pays(self, reached: float, costs: Sequence[float]) -> bool:
        """Whether 1, 2, ... more guesses bring more tokens than costs[0], costs[1], ...; `reached`:
        the chance that all guesses so far are right."""
        right = sum(self._right) + _PRIOR_TOLD * _PRIOR_MEAN
        mean, tokens = right / (sum(self._seen) + _PRIOR_TOLD), 0.0
        for cost in costs:
            reached *= mean
            tokens += reached
            if tokens > cost:
                return True
        return False

    def _part(self, probability: float) -> int:
        """Each has half the chance of an error of the one before."""
        return min(int(-math.log2(max(1 - probability, 1e-9))), self._NUM_PARTS - 1)


# Tokens from a step with 0, 1, ... guesses of a draft model that has told no probability yet.
EXPECTED_FIRST = tuple(accumulate(_PRIOR_MEAN**place for place in range(NUM_FIRST + 1)))


class Rounds:
    """The recent gain of rounds, steps for which a draft model read the text, whether or not it
    made a guess: tokens, in the time that one takes without drafts. Tokens of other texts in the
    step count."""

    def __init__(self) -> None:
        self._tokens = self._time = 0.0
        self.num = 0

    def learn(self, tokens: float, expected: float, time: float, *, is_trial: bool) -> None:
        """`expected`: tokens, whose number varies less than that of those that came; half of each
        is taken. `is_trial`: the rounds before were long ago."""
        self.num += 1
        forget = _FORGET_LONG_AGO if is_trial else _FORGET_ROUND
        self._tokens = self._tokens * forget + (tokens + expected) / 2
        self._time = self._time * forget + time

    def gain(self, tokens: float, time: float) -> float:
        """`tokens`, `time`: of the expected first rounds, which count as rounds that were."""
        tokens = self._tokens + _PRIOR_ROUNDS * tokens
        return tokens / (self._time + _PRIOR_ROUNDS * time)


@dataclass
class Account:
    """The balance of seconds that drafts may still lose."""

    start: float = 1.0  # the opening balance in single steps
    saved_s: float | None = None  # None until a single step is measured
    owed_s: float = field(default=0.0)  # spent before the first single step

    def settle(self, single_s: float, tokens: float, gain_s: float) -> None:
        if self.saved_s is None:
            self.saved_s = self.start * single_s - self.owed_s
        more = self.saved_s + _SHARE * tokens * single_s + gain_s
        self.saved_s = min(more, _MOST_SAVED * single_s)

    def spend(self, seconds: float) -> None:
        if self.saved_s is None:
            self.owed_s += seconds
        else:
            self.saved_s -= seconds

    def can_pay(self, seconds: float) -> bool:
        return self.saved_s is not None and self.saved_s >= seconds
