"""Options of predictors.

Does not import torch, so that wrong options are refused at once."""

from dataclasses import dataclass

from hotsplit.errors import HotsplitError


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target for a predictor on the text that it is chosen on (see profile.predictors.selection); each
    value is more than 0 and less than 1."""

    contribution: float = 0.992
    lost_norm: float = 0.04
    precision: float = 0.75

    def __post_init__(self) -> None:
        for name in ("contribution", "lost_norm", "precision"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise HotsplitError(f"target {name} is {value}, wanted more than 0, less than 1")


@dataclass(frozen=True, kw_only=True)
class PredictorOptions:
    """Form and type are chosen by measurement. Without a rank several are tried; with one, only
    low-rank predictors are."""

    rank: int | None = None
    target: Target = Target()

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise HotsplitError(f"predictor rank is {self.rank}, wanted 1 or more")
