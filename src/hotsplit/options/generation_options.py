"""Options of generation: when a text ends, how tokens are drawn, and drafts.

Imports neither torch nor numpy, because the command line reads its defaults here. The samplers are
in samplers.py and dry.py; their settings have llama.cpp's names and defaults."""

import math
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown
from hotsplit.options.kinds import Finite, Share, check_fields

ENDLESS = -1  # max_tokens: until the text or the context ends
SpecType = Literal["none", "auto", "ngram", "ngram-mod", "draft", "mtp"]
LONGEST = 127  # of a draft: with the token before it, the most rows of a step
FIRST_IDS = 32_768  # of a larger vocabulary, from which guesses are taken
MOST_DRAFTED = 16  # a step of 17 rows takes 3 to 8 times as long as a single row on measured CPUs
# Names of samplers in llama.cpp's order, and its letters for them.
LETTERS = {
    "penalties": "e",
    "dry": "d",
    "top_n_sigma": "s",
    "top_k": "k",
    "typ_p": "y",
    "top_p": "p",
    "min_p": "m",
    "xtc": "x",
    "temperature": "t",
    "adaptive_p": "a",
}
DEFAULT_SAMPLERS = tuple(LETTERS)[:-1]
_NAMES = {letter: name for name, letter in LETTERS.items()}
_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
Penalty = Annotated[float, Interval(ge=-1e6, le=1e6)]  # beyond it, one outweighs any logit
UpToMillion = Annotated[float, Interval(ge=0, le=1e6)]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """When a text ends, and what is returned with its tokens. `stops`: strings that end it and are
    not part of it. `ignores_end`: end tokens are ordinary tokens. `num_logprobs`: number of most
    probable tokens whose log probabilities are returned besides the drawn token's; None: none at
    all. `shift_keep`: when the context is full, the text continues with its first `shift_keep`
    tokens and the last half of the rest; None: it ends. `marks`: special tokens, by id, that have a
    text here; the others have none."""

    max_tokens: int = 128
    stops: tuple[str, ...] = ()
    ignores_end: bool = False
    num_logprobs: Annotated[int, Interval(ge=0, le=1000)] | None = None
    shift_keep: Annotated[int, Ge(0)] | None = None
    marks: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_tokens < 1 and self.max_tokens != ENDLESS:
            raise HotsplitError(
                f"max_tokens (-n) is {self.max_tokens}, wanted 1 or more, or {ENDLESS} for no limit"
            )
        if not all(self.stops):
            raise HotsplitError("an empty stop string would end every text; leave it out")


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Options of drafts. `type`: the source of drafts; "auto" is the text itself and, if there is
    one, a draft model or else the model's draft block, whichever pays more. A draft has `least` to
    `most` tokens. `is_optional`: if drafts could change the text, they are switched off instead of
    refused."""

    type: SpecType = "none"
    is_optional: bool = False
    most: Annotated[int, Interval(ge=1, le=LONGEST)] = MOST_DRAFTED
    least: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.least > self.most:
            raise HotsplitError(
                f"drafts of at least {self.least} tokens, wanted 0 to {self.most} (--draft-max)"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """llama.cpp's common_params_sampling. Every sampler has a setting that turns it off."""

    temperature: Finite = 0.80  # at or below 0: greedy
    dynatemp_range: Annotated[float, Interval(ge=0)] = 0.0  # 0: off
    dynatemp_exponent: UpToMillion = 1.0
    top_k: int = 40  # 0 or below: off
    top_p: Share = 0.95  # 1: off
    min_p: Share = 0.05  # 0: off
    typ_p: Share = 1.0  # 1: off
    top_n_sigma: Finite = -1.0  # 0 or below: off
    xtc_probability: Share = 0.0  # 0: off
    xtc_threshold: Share = 0.10  # over 0.5: off
    repeat_last_n: Annotated[int, Ge(-1)] = 64  # 0: off, -1: the whole text
    repeat_penalty: UpToMillion = 1.0  # 1: off
    presence_penalty: Penalty = 0.0  # 0: off
    frequency_penalty: Penalty = 0.0  # 0: off
    dry_multiplier: UpToMillion = 0.0  # 0: off
    dry_base: Annotated[float, Interval(ge=1, le=1e6)] = 1.75
    dry_allowed_length: Annotated[int, Ge(0)] = 2
    dry_penalty_last_n: Annotated[int, Ge(-1)] = 64  # 0: off, -1: the whole text
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    # A probability; below 0: off. Needs adaptive_p among the samplers, which always runs last.
    adaptive_target: Annotated[float, Interval(le=1)] = -1.0
    adaptive_decay: Annotated[float, Interval(ge=0, le=0.99)] = 0.90
    mirostat: Literal[0, 1, 2] = 0  # 1 and 2 replace all samplers but logit bias and temperature
    mirostat_lr: UpToMillion = 0.10  # eta
    mirostat_ent: UpToMillion = 5.0  # tau, in bits
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias); -inf bans, +inf forces
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS  # in this order; the others are off
    # The fewest candidates that top_p, min_p, typ_p and xtc leave.
    min_keep: Annotated[int, Ge(0)] = 0
    seed: int | None = None  # signed or unsigned, of 64 bits; None: a random one each time

    def __post_init__(self) -> None:
        check_fields(self)
        if self.repeat_penalty == 0:
            raise HotsplitError("repeat_penalty is 0, wanted more than 0; 1 turns it off")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise HotsplitError(f"seed is {shown(self.seed)}, wanted a 64-bit integer, say 0")
        for name in self.samplers:
            if name not in LETTERS:
                raise _unknown(name)
            if self.samplers.count(name) > 1:
                raise HotsplitError(f"samplers has {shown(name)} twice; name it once")
        if not all(self.dry_sequence_breakers):
            raise HotsplitError("dry_sequence_breakers has '', wanted text; () for no breakers")
        for token_id, bias in self.logit_bias:
            _check_bias(token_id, bias)


def samplers_of_names(text: str) -> tuple[str, ...]:
    """Parses an order such as "top_k;temperature". Accepts top-k, topk, temp, typ and nucleus too,
    and any case. Raises HotsplitError for an unknown name."""
    plain = {name.replace("_", ""): name for name in LETTERS} | _ALIASES
    names = [name.strip() for name in text.split(";")] if text.strip() else []
    for name in names:
        if name.lower().replace("_", "").replace("-", "") not in plain:
            raise _unknown(name)
    return tuple(plain[name.lower().replace("_", "").replace("-", "")] for name in names)


def samplers_of_letters(text: str) -> tuple[str, ...]:
    """Samplers by llama.cpp's letters, such as "kt". Raises HotsplitError for an unknown one."""
    for letter in text:
        if letter not in _NAMES:
            known = ", ".join(f"{letter} {name}" for letter, name in _NAMES.items())
            raise HotsplitError(f"no sampler has the letter {shown(letter)}; known: {known}")
    return tuple(_NAMES[letter] for letter in text)


def bias_of(text: str) -> tuple[int, float]:
    """Parses llama.cpp's TOKEN(+/-)BIAS, such as 15043+1 or 15043-inf, into (token id, bias).
    Raises HotsplitError for any other text."""
    cut = next((i for i, c in enumerate(text) if c in "+-" and i), 0)
    try:
        token_id, bias = int(text[:cut]), float(text[cut:])
    except ValueError:
        raise HotsplitError(
            f"logit bias {shown(text)}; wanted TOKEN+BIAS or TOKEN-BIAS, say 15043+1 or 15043-inf"
        ) from None
    _check_bias(token_id, bias)
    return token_id, bias


def _unknown(name: str) -> HotsplitError:
    return HotsplitError(f"no sampler is called {shown(name)}; known: {', '.join(LETTERS)}")


def _check_bias(token_id: int, bias: float) -> None:
    if token_id < 0:
        raise HotsplitError(f"logit_bias has token {shown(token_id)}, wanted a token id from 0")
    is_too_large = isinstance(bias, int) and abs(bias) > sys.float_info.max
    if is_too_large or math.isnan(bias):
        raise HotsplitError(f"logit_bias of token {token_id} is {shown(bias)}, wanted a number")
