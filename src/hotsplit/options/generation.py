"""Options of generation: when a text ends, how tokens are drawn, and drafts.

Imports neither torch nor numpy, because the command line reads its defaults here. The samplers are
in samplers.py, dry.py and adaptive_samplers.py; their settings have llama.cpp's names and defaults."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import plain, shown
from hotsplit.options.kinds import check_fields

ENDLESS = -1  # max_tokens: until the text or the context ends
SpecType = Literal["none", "ngram", "ngram-mod", "draft"]
LONGEST = 127  # of a draft: with the token before it, the most rows of a step
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
# Signed and unsigned 64-bit numbers.
_SEEDS = range(-(1 << 63), 1 << 64)
_INFINITY = math.inf


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
    num_logprobs: int | None = None
    shift_keep: int | None = None
    marks: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
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
        check_fields(self)
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


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """llama.cpp's common_params_sampling. Every sampler has a setting that turns it off."""

    temperature: float = 0.80  # at or below 0: greedy
    dynatemp_range: float = 0.0  # 0: off
    dynatemp_exponent: float = 1.0
    top_k: int = 40  # 0 or below: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    typ_p: float = 1.0  # 1: off
    top_n_sigma: float = -1.0  # 0 or below: off
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.10  # over 0.5: off
    repeat_last_n: int = 64  # 0: off, -1: the whole text
    repeat_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64  # 0: off, -1: the whole text
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    # A probability; below 0: off. Needs adaptive_p among the samplers, which always runs last.
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.90
    mirostat: int = 0  # 1 and 2 replace all samplers but logit bias and temperature
    mirostat_lr: float = 0.10  # eta
    mirostat_ent: float = 5.0  # tau, in bits
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias); -inf bans, +inf forces
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS  # in this order; the others are off
    min_keep: int = 0  # the fewest candidates that top_p, min_p, typ_p and xtc leave
    seed: int | None = None  # None: a random one each time

    def __post_init__(self) -> None:
        check_fields(self)
        for name, (low, high) in _RANGES.items():
            _check_number(name, getattr(self, name), low, high)
        if self.repeat_penalty == 0:
            raise HotsplitError("repeat_penalty is 0, wanted more than 0; 1 turns it off")
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if value < lowest:
                raise HotsplitError(
                    f"{name} is {shown(value)}, wanted a whole number from {lowest}"
                )
        if self.mirostat not in (0, 1, 2):
            raise HotsplitError(f"mirostat is {shown(self.mirostat)}, wanted 0 (off), 1 or 2")
        if self.seed is not None and not _SEEDS.start <= self.seed < _SEEDS.stop:
            raise HotsplitError(f"seed is {shown(self.seed)}, wanted a 64-bit integer, say 0")
        _check_samplers(self.samplers)
        for breaker in self.dry_sequence_breakers:
            if not breaker:
                raise HotsplitError(
                    f"dry_sequence_breakers has {shown(breaker)}, wanted text; () for no breakers"
                )
        for token_id, bias in self.logit_bias:
            _check_bias(token_id, bias)


# Bounds of the numbers, inclusive. Beyond 1e6 a penalty outweighs any logit.
_RANGES = {
    "temperature": (-_INFINITY, _INFINITY),
    "dynatemp_range": (0.0, _INFINITY),
    "dynatemp_exponent": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typ_p": (0.0, 1.0),
    "top_n_sigma": (-_INFINITY, _INFINITY),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "repeat_penalty": (0.0, 1e6),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "dry_multiplier": (0.0, 1e6),
    "dry_base": (1.0, 1e6),
    "adaptive_target": (-_INFINITY, 1.0),
    "adaptive_decay": (0.0, 0.99),
    "mirostat_lr": (0.0, 1e6),
    "mirostat_ent": (0.0, 1e6),
}
_LOWEST = {
    "top_k": -(1 << 63),
    "repeat_last_n": -1,
    "dry_allowed_length": 0,
    "dry_penalty_last_n": -1,
    "min_keep": 0,
}


def samplers_of_names(text: str) -> tuple[str, ...]:
    """Parses an order such as "top_k;temperature". Accepts top-k, topk, temp, typ and nucleus too,
    and any case.

    Raises HotsplitError for an unknown name."""
    plain = {name.replace("_", ""): name for name in LETTERS} | _ALIASES
    names = [name.strip() for name in text.split(";")] if text.strip() else []
    for name in names:
        if name.lower().replace("_", "").replace("-", "") not in plain:
            raise _unknown(name)
    return tuple(plain[name.lower().replace("_", "").replace("-", "")] for name in names)


def samplers_of_letters(text: str) -> tuple[str, ...]:
    """Parses an order in llama.cpp's letters, such as "kt". Raises HotsplitError for an unknown
    letter."""
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


def _check_number(name: str, value: float, low: float, high: float) -> None:
    number = plain(value)  # a bound may be too large for numpy's short floats
    assert isinstance(number, int | float)
    # Not math.isfinite, which raises for a whole number that no float can hold.
    if abs(number) <= sys.float_info.max and low <= number <= high:
        return
    bounds = "" if low == -_INFINITY else f" from {low:g}"
    bounds += "" if high == _INFINITY else f" up to {high:g}" if not bounds else f" to {high:g}"
    raise HotsplitError(f"{name} is {shown(value)}, wanted a number{bounds}")


def _check_samplers(names: Sequence[str]) -> None:
    for name in names:
        if name not in LETTERS:
            raise _unknown(name)
        if names.count(name) > 1:
            raise HotsplitError(f"samplers has {shown(name)} twice; name it once")


def _unknown(name: str) -> HotsplitError:
    return HotsplitError(f"no sampler is called {shown(name)}; known: {', '.join(LETTERS)}")


def _check_bias(token_id: int, bias: float) -> None:
    if token_id < 0:
        raise HotsplitError(f"logit_bias has token {shown(token_id)}, wanted a token id from 0")
    is_too_large = isinstance(bias, int) and abs(bias) > sys.float_info.max
    if is_too_large or math.isnan(bias):
        raise HotsplitError(f"logit_bias of token {token_id} is {shown(bias)}, wanted a number")
