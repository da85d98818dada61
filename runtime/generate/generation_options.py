"""Options of a generation. Imports no torch, so that a command refuses wrong options at once."""

from dataclasses import dataclass

from hotsplit.errors import HotsplitError

ENDLESS = -1  # max_tokens: until the text or the context ends


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """When a text ends, and what is returned with its tokens. `stops`: strings that end it and are
    not part of it. `ignores_end`: end tokens are ordinary tokens. `num_logprobs`: number of most
    probable tokens whose log probabilities are returned besides the drawn token's; None: none at
    all. `shift_keep`: when the context is full, the text continues with its first `shift_keep`
    tokens and the last half of the rest; None: it ends."""

    max_tokens: int = 128
    stops: tuple[str, ...] = ()
    ignores_end: bool = False
    num_logprobs: int | None = None
    shift_keep: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1 and self.max_tokens != ENDLESS:
            raise HotsplitError(
                f"max_tokens (-n) is {self.max_tokens}, wanted 1 or more, or {ENDLESS} for no limit"
            )
        if any(not stop for stop in self.stops):
            raise HotsplitError("an empty stop string would end every text; leave it out")
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= 1000:
            raise HotsplitError(f"logprobs of {self.num_logprobs} tokens, wanted 0 to 1000")
        if self.shift_keep is not None and self.shift_keep < 0:
            raise HotsplitError(f"{self.shift_keep} tokens to keep, wanted 0 or more")
