"""Options of speculative decoding. Imports neither torch nor numpy, because the command line reads
its defaults here."""

from dataclasses import dataclass
from typing import Literal

from hotsplit.errors import HotsplitError

SpecType = Literal["none", "ngram", "ngram-mod", "draft"]
LONGEST = 127  # with the token before it, the most rows of a step
MOST_DRAFTED = 16  # a step of 17 rows takes 3 to 8 times as long as a single row on measured CPUs


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Options of drafts. `type`: the source of drafts. A draft has `least` to `most` tokens; a
    draft model stops before a token less probable than `min_probability`. `is_optional`: if drafts
    could change the text, they are switched off instead of refused."""

    type: SpecType = "none"
    is_optional: bool = False
    most: int = MOST_DRAFTED
    least: int = 0
    min_probability: float = 0.75

    def __post_init__(self) -> None:
        if not 1 <= self.most <= LONGEST:
            raise HotsplitError(f"drafts of at most {self.most} tokens, wanted 1 to {LONGEST}")
        if not 0 <= self.least <= self.most:
            raise HotsplitError(
                f"drafts of at least {self.least} tokens, wanted 0 to {self.most} (--draft-max)"
            )
        if not 0 <= self.min_probability <= 1:
            raise HotsplitError(
                f"a draft's least probability is {self.min_probability}, wanted 0 to 1"
            )
