"""Schedules of a run: the silent share, the learning rate, and when limits are frozen.

Several shares are reached in sequence, each in a stage of the same number of steps: the share rises
along half a cosine from the previous one (as ProSparse, arXiv 2402.13516, raises its penalty), then
is held, and in the last part of the stage the limits are frozen. In every stage the learning rate
warms up and then falls linearly towards zero. docs/log/sparsity.md compares alternatives."""

import math
from dataclasses import dataclass

from hotsplit.errors import HotsplitError

RAMP = 0.15  # the first part of a stage's steps, in which the share rises
ACTIVATION_RAMP = 0.4  # the same, if the activation meanwhile changes to ReLU
FROZEN = 0.2  # the last part of a stage's steps, with frozen limits
FIRST_SHARE = 0.5  # start, relative to the first target


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`steps_of_share` steps for each of `shares`, which ascend."""

    shares: tuple[float, ...]
    steps_of_share: int
    learning_rate: float
    warmup_steps: int
    ramp: float = RAMP
    first_share: float | None = None  # start of the first share; None: see FIRST_SHARE

    def __post_init__(self) -> None:
        check_shares(self.shares)

    @property
    def num_steps(self) -> int:
        return len(self.shares) * self.steps_of_share

    def stage(self, step: int) -> int:
        """The index of the share being reached or held."""
        return min(step // self.steps_of_share, len(self.shares) - 1)

    def share(self, step: int) -> float:
        """The silent share wanted at this step."""
        stage, progress = self.stage(step), self._progress(step)
        first = FIRST_SHARE * self.shares[0] if self.first_share is None else self.first_share
        start = self.shares[stage - 1] if stage else first
        rise = 0.5 - 0.5 * math.cos(math.pi * min(1.0, progress / self.ramp))
        return start + (self.shares[stage] - start) * rise

    def blend(self, step: int) -> float:
        """The blend of a replaced activation with ReLU: 1 once the first share is reached."""
        return min(1.0, step / self.steps_of_share / self.ramp)

    def is_held(self, step: int) -> bool:
        """True once the share of this stage is reached."""
        return self._progress(step) >= self.ramp

    def is_frozen(self, step: int) -> bool:
        """True once limits are frozen."""
        return self._progress(step) >= 1 - FROZEN

    def ends_stage(self, step: int) -> bool:
        return (step + 1) % self.steps_of_share == 0

    def rate(self, step: int) -> float:
        """The learning rate of this step."""
        done = step - self.stage(step) * self.steps_of_share
        if done < self.warmup_steps:
            return self.learning_rate * (done + 1) / (self.warmup_steps + 1)
        left = self.steps_of_share - done
        return self.learning_rate * left / (self.steps_of_share - self.warmup_steps)

    def _progress(self, step: int) -> float:
        return step / self.steps_of_share - self.stage(step)


def check_shares(shares: tuple[float, ...]) -> None:
    """Raises HotsplitError unless the shares are between 0 and 1, exclusive, and ascend strictly,
    and if there are none."""
    wrong = [share for share in shares if not 0 < share < 1]
    if wrong or not shares:
        raise HotsplitError(
            f"share is {wrong[0] if wrong else 'missing'}: a layer must lose some neurons and keep"
            " some; wanted more than 0 and less than 1, e.g. 0.6"
        )
    if list(shares) != sorted(set(shares)):
        raise HotsplitError(
            f"shares are {', '.join(map(str, shares))}; wanted each once, the smallest first"
        )
