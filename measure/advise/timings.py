"""The rounds in which models were timed, and the gains in speed that follow from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

NORMAL_95 = 1.96
Trial = tuple[str, str, float]  # type, rule, share


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A relative gain in tokens/s, 0.1 for 10 % more: the median of the rounds and its 95 %
    interval. If the gain is estimated, all three are equal."""

    median: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """True if the whole interval is above 0."""
        return self.low > 0

    @property
    def line(self) -> str:
        if self.low == self.high:
            return f"{self.median:+.0%}"
        return f"{self.median:+.0%} (95%: {self.low:+.0%} to {self.high:+.0%})"


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Seconds per token of the models of one group, in the order of `trials`; a row is a round."""

    trials: tuple[Trial, ...]  # the reference is the first
    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Timings:
    """All rounds, and the figures derived from them."""

    groups: tuple[Rounds, ...] = ()

    @property
    def reference(self) -> Trial:
        return self.groups[0].trials[0]

    def num_rounds(self, trial: Trial) -> int:
        return sum(len(group.seconds) for group in self.groups if trial in group.trials)

    def seconds(self, trial: Trial) -> float:
        """Seconds per token: the reference's median, divided by one plus the gain over it."""
        own = [row[0] for group in self.groups for row in group.seconds]
        return median(own) / (1 + self.gain(trial, self.reference).median)

    def gain(self, trial: Trial, over: Trial) -> Gain:
        """How much faster `trial` is, relative to `over`; both must have been timed."""
        if trial == over:
            return Gain(median=0.0, low=0.0, high=0.0)
        ratios = [
            row[group.trials.index(over)] / row[group.trials.index(trial)]
            for group in self.groups
            if trial in group.trials and over in group.trials
            for row in group.seconds
        ]
        if ratios:
            return _gain(ratios)
        assert self.reference not in (trial, over), (trial, over)
        one, other = (self.gain(each, self.reference) for each in (trial, over))
        return Gain(
            median=(1 + one.median) / (1 + other.median) - 1,
            low=(1 + one.low) / (1 + other.high) - 1,
            high=(1 + one.high) / (1 + other.low) - 1,
        )


def _gain(ratios: Sequence[float]) -> Gain:
    """The interval is between two of the sorted ratios, by the normal approximation of the number
    of ratios below the median; with seven or fewer, between the first and the last."""
    ordered, count = sorted(ratios), len(ratios)
    first = max(0, int((count - NORMAL_95 * math.sqrt(count)) / 2))
    return Gain(
        median=median(ordered) - 1, low=ordered[first] - 1, high=ordered[count - 1 - first] - 1
    )
