"""Samplers that adapt to the tokens drawn. Their states belong to the chain.

Mirostat keeps the surprise of tokens near a target by the number of candidates: Basu et al. 2020
(arXiv:2007.14966), as in llama_sampler_init_mirostat and _mirostat_v2. Its state is one number: mu,
the largest allowed surprise in bits, which begins at twice the target.

Adaptive-p prefers tokens whose probability is near a target, and adjusts the target to the tokens
drawn: llama.cpp pull request 17927, llama_sampler_init_adaptive_p. Its state is an exponentially
decaying mean of the drawn tokens' probabilities before this sampler."""

import math
from dataclasses import dataclass, replace

import numpy as np

from hotsplit.runtime.generate.candidates import Candidates

_NUM_ESTIMATED = 100  # llama.cpp's m: tokens from which mirostat_1 estimates the exponent
# llama.cpp's constants: quadratic near the target, linear far from it.
_PEAK_LOGIT, _SHARPNESS, _WIDTH = 5.0, 10.0, 0.3


def mirostat_1(candidates: Candidates, mu: float, vocab_size: int) -> Candidates:
    """The k most probable tokens, for k such that a Zipf distribution with the estimated exponent s
    would have surprise mu: k = (e * 2 ** mu / (1 - V ** -e)) ** (1 / s), e = s - 1."""
    first = candidates.largest(_NUM_ESTIMATED)
    if len(first) < 2:
        return candidates
    k = zipf_count(first.logits_A.astype(np.float64), mu, vocab_size)
    return candidates if k >= len(candidates) else candidates.largest(max(int(k), 1))


def zipf_count(sorted_logits_M: np.ndarray, mu: float, vocab_size: int) -> float:
    """k of mirostat_1's formula; s is the slope of a least squares fit of the drops in ln p between
    successive tokens to the rises in ln rank.

    Computed as exp(ln k), since 1 / s may be large; infinite or 0 if s is 0 (equal logits)."""
    rank = np.arange(1, len(sorted_logits_M))
    slope = np.log((rank + 1) / rank)
    drop = -np.diff(sorted_logits_M)
    s = float(slope @ drop / (slope @ slope))
    e = s - 1
    log_size = math.log(vocab_size)
    share = 1 / log_size if e == 0 else e / -math.expm1(-e * log_size)
    log_product = mu * math.log(2) + math.log(share)
    if s == 0:
        return math.inf if log_product > 0 else 0.0
    log_k = log_product / s
    return math.exp(log_k) if log_k < 700 else math.inf


def mirostat_2(candidates: Candidates, mu: float) -> Candidates:
    """The tokens whose surprise -log2 p_i is at most mu, and always the most probable."""
    kept = np.flatnonzero(candidates.probability_A >= 2.0 ** min(-mu, 1000.0))
    return candidates.only(kept) if len(kept) else candidates.largest(1)


@dataclass(frozen=True, kw_only=True)
class DrawnMean:
    """Sums of decay ** age * probability and of decay ** age over the drawn tokens."""

    weighted_sum: float
    weight: float
    decay: float

    @classmethod
    def start(cls, target: float, decay: float) -> "DrawnMean":
        """The state in which all earlier tokens had probability `target`."""
        return cls(weighted_sum=target / (1 - decay), weight=1 / (1 - decay), decay=decay)

    def after(self, probability: float) -> "DrawnMean":
        return replace(
            self,
            weighted_sum=probability + self.decay * self.weighted_sum,
            weight=1 + self.decay * self.weight,
        )


def adaptive_p(candidates: Candidates, target: float, drawn: DrawnMean) -> Candidates:
    """logit_i = 5 - 10 d ** 2 / (1 + d), d = abs(p_i - t) / 0.3, t = 2 target - mean, clipped
    to [0, 1].

    The result's `origin` is `candidates`, whose probabilities enter the mean."""
    aim = min(max(2 * target - drawn.weighted_sum / drawn.weight, 0.0), 1.0)
    distance_A = np.abs(candidates.probability_A - aim) / _WIDTH
    logits_A = _PEAK_LOGIT - _SHARPNESS * distance_A**2 / (1 + distance_A)
    by_id = np.argsort(candidates.ids_A) if candidates.is_sorted else slice(None)
    return Candidates(candidates.ids_A[by_id], logits_A[by_id], False, origin=candidates)
