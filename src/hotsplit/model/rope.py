"""Rotary embeddings and their scaling, for texts longer than those a model was trained on.

linear  all positions are divided by a factor (Chen et al. 2023, arXiv 2306.15595)
longrope  each frequency is divided by a number of the model's own, of which it has two sets, for
        short and for long contexts; cos and sin are multiplied by a magnitude (Ding et al. 2024,
        arXiv 2402.13753)
yarn    fast frequencies stay, slow ones are divided by the factor, and those between are
        interpolated; cos and sin are multiplied by a magnitude (Peng et al. 2023, arXiv
        2309.00071). As in transformers (modeling_rope_utils.py) and llama.cpp
        (ggml_rope_yarn_corr_dims), both borders are rounded outwards to whole pairs, except in
        gpt-oss, of which transformers does not round them.

Longrope's set for a text is that of the context for which the engine is made: the short one up to
the length of the training, the long one above. Keys are cached as they were rotated, so a text
needs one set from its first token to its last. transformers takes that of the text's length at each
pass, so that a text which grows past the limit has keys of both sets in its cache; llama.cpp takes
that of the context size, as here. Both agree with this rule on a text whose context is its
length."""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from hotsplit.errors import HotsplitError

RopeKind = Literal["none", "linear", "yarn", "longrope"]
AskedKind = Literal["none", "linear", "yarn"]
Pairing = Literal["adjacent", "halves"]
KINDS: tuple[AskedKind, ...] = get_args(AskedKind)  # that a user may ask for
# Tensors of divisors of the frequencies: for all texts, or longrope's for short and for long
# contexts.
FREQUENCIES = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
MOST = 1e4  # the largest factor: a context of 4,096 tokens becomes one of 41 million


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A scaling; `original_length` is the training length in tokens, for YaRN and longrope."""

    kind: RopeKind = "none"
    factor: float = 1.0
    original_length: int = 0
    beta_fast: float = 32.0  # pairs with more turns than this within the original length are kept
    beta_slow: float = 1.0  # pairs with fewer turns than this are divided by the factor
    attn_factor: float = 1.0  # factor on YaRN's magnitude; longrope's magnitude
    rounds_borders: bool = True  # of the interpolated pairs
    is_long: bool = False  # the divisors are longrope's for long contexts

    @property
    def magnitude(self) -> float:
        """Factor on cos and sin; attention scores are thus multiplied by its square."""
        if self.kind == "longrope":
            return self.attn_factor
        if self.kind != "yarn":
            return 1.0
        return self.attn_factor * (1.0 + 0.1 * math.log(max(1.0, self.factor)))

    def divisors(self, theta: float, width: int) -> np.ndarray:
        """f64 [W / 2] for a head of `width` W, or a scalar: the frequency of pair i,
        theta ** (-2 i / W), is divided by this."""
        if self.kind != "yarn":
            return np.array(self.factor if self.kind == "linear" else 1.0)
        low, high = (self._pair(turns, theta, width) for turns in (self.beta_fast, self.beta_slow))
        if self.rounds_borders:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(0, low), min(width - 1, high)
        ramp = (np.arange(width // 2, dtype=np.float64) - low) / max(0.001, high - low)
        share = np.clip(ramp, 0.0, 1.0)
        return 1.0 / (1.0 + share * (1.0 / self.factor - 1.0))

    def _pair(self, turns: float, theta: float, width: int) -> float:
        """The (fractional) index of the pair that turns this often within the original length."""
        length = self.original_length / (turns * 2 * math.pi)
        return width * math.log(length) / (2 * math.log(theta))

    @property
    def has_contexts(self) -> bool:
        """True if the divisors are other ones for long contexts."""
        return self.kind == "longrope"

    @property
    def words(self) -> str:
        if self.kind == "linear":
            return f"positions divided by {self.factor:g}"
        if self.kind == "yarn":
            return (
                f"YaRN, {self.factor:g} times the {self.original_length:,} tokens of its training"
            )
        if self.kind == "longrope":
            length = f"the {self.original_length:,} tokens of its training"
            if self.is_long:
                return f"longrope's long factors, for a context above {length}"
            return f"longrope's short factors, for a context up to {length} (above: its long ones)"
        return "as trained"

    def for_context(self, length: int) -> "RopeScaling":
        """The scaling for texts of up to `length` tokens."""
        return replace(self, is_long=self.has_contexts and length > self.original_length)


NO_SCALING = RopeScaling()


def asked_scaling(
    kind: str | None, factor: float | None, context_length: int | None, length: int
) -> RopeScaling:
    """The scaling that a user asks for, of a model trained on texts of `length` tokens. A `kind` of
    None means YaRN; a factor of None means what `context_length` needs. Raises HotsplitError for an
    unknown kind, a factor that is missing or out of range, and a factor with kind "none"."""
    check_scaling(kind, factor)
    kind = "yarn" if kind is None else kind
    if kind == "none":
        return NO_SCALING
    if factor is None:
        if context_length is None or context_length <= length:
            raise HotsplitError(
                f"--rope-scaling {kind} needs a factor, --rope-scale, or a context above the"
                f" {length:,} tokens that the model was trained on"
            )
        factor = context_length / length
        if factor > MOST:
            raise HotsplitError(
                f"context of {context_length:,} asked for, {factor:,.0f} times the {length:,}"
                f" tokens that the model was trained on; at most {MOST:,.0f} times"
            )
        check_scaling(kind, factor)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    return RopeScaling(kind="yarn", factor=factor, original_length=length)


def check_scaling(kind: str | None, factor: float | None) -> None:
    """Raises HotsplitError for an unknown kind, and a factor out of range or with "none"."""
    if kind not in (None, *KINDS):
        raise HotsplitError(f"rope scaling {kind!r} is unknown; known: {', '.join(KINDS)}")
    if factor is None:
        return
    if not 1.0 <= factor <= MOST:
        raise HotsplitError(f"rope scale {factor:g}, wanted 1 to {MOST:,.0f}")
    if kind == "none":
        raise HotsplitError(
            f"a rope scale of {factor:g} and --rope-scaling none; leave one of the two out"
        )


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary embeddings (Su et al. 2021, arXiv 2104.09864) of the whole head, or of its first
    `num_values` values. `pairing` says which values rotate together: adjacent ones, or those half
    of these apart. `has_factors`: the file has a divisor for each frequency."""

    theta: float
    pairing: Pairing
    scaling: RopeScaling = NO_SCALING
    has_factors: bool = False
    num_values: int | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors of divisors of the frequencies that a file has."""
        if self.scaling.has_contexts:
            return SHORT, LONG
        return (FREQUENCIES,) if self.has_factors else ()

    @property
    def factors(self) -> str | None:
        """The name of that which is in use."""
        return self.tensors[self.scaling.is_long] if self.tensors else None
