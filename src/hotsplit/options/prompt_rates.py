"""The times by which a prompt's cold experts are computed by the CPU or streamed to a GPU. A plan
has them, so that a prompt's bits do not depend on a clock."""

import math
from dataclasses import dataclass

from hotsplit.errors import HotsplitError


@dataclass(frozen=True, kw_only=True)
class PromptRates:
    """Seconds per byte of an expert: of the CPU, whatever its tokens, and for each token in
    addition; and of the link to the GPU, from pinned memory and from other memory."""

    cpu_s: float
    token_s: float
    link_s: float
    staged_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise HotsplitError(f"{name} of prompts is {value:g} s a byte, wanted 0 to 1")
