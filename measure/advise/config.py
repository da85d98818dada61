"""Options of `advise`. Imports no torch, so that wrong ones are refused at once."""

from dataclasses import dataclass
from pathlib import Path

from hotsplit.errors import HotsplitError

SHARES = (0.08, 0.12, 0.16, 0.20, 0.24, 0.32)  # shares of all weight bytes to save
MIN_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class AdviseConfig:
    model: Path
    corpora: tuple[Path, ...]
    max_tokens: int = 16_384
    max_loss: float = 0.01  # relative increase of the perplexity that the user accepts
    shares: tuple[float, ...] = SHARES
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < MIN_TOKENS:
            raise HotsplitError(
                f"tokens is {self.max_tokens}, wanted {MIN_TOKENS} or more: fewer cannot tell"
                " rules apart"
            )
        if not 0 <= self.max_loss < 10:
            raise HotsplitError(
                f"max loss is {self.max_loss}, wanted 0 or more and less than 10, e.g. 0.01"
            )
