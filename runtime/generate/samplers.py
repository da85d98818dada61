"""Samplers that remove candidates or change their logits: logit bias, penalties, top-k, top-p,
temperature, etc.

Each is a pure function. The formulas are those of llama.cpp's src/llama-sampler.cpp, in float64
where it uses float32, except for the logit bias. A sampler with `min_keep` leaves at least that
many candidates, if it has them. dry.py penalises repeated sequences; sampler_chain.py runs the
samplers in order, keeps the states of those that adapt to the tokens drawn, and draws.

Mirostat keeps the surprise of tokens near a target by the number of candidates: Basu et al. 2020
(arXiv:2007.14966), as in llama_sampler_init_mirostat and _mirostat_v2. Its state is one number: mu,
the largest allowed surprise in bits, which begins at twice the target.

Adaptive-p prefers tokens whose probability is near a target, and adjusts the target to the tokens
drawn: llama.cpp pull request 17927, llama_sampler_init_adaptive_p. Its state is an exponentially
decaying mean of the drawn tokens' probabilities before this sampler."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotsplit.runtime.generate.candidates import Candidates, largest_until, possible

# No float32 divided by this or more overflows a float64. Below it, different float32 logits,
# which are at least 1e-45 apart, differ by so many temperatures that only the largest can be drawn.
_TINY_TEMPERATURE = 1e-200
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def logit_bias(candidates: Candidates, bias: Sequence[tuple[int, float]]) -> Candidates:
    """logit_i += sum of the biases of i, in float32; -inf bans a token, +inf forces it.

    A ban wins over +inf. Unlike all other samplers it accepts infinite logits.
    llama_sampler_init_logit_bias, and OpenAI's logit_bias."""
    if not bias:
        return possible(candidates.ids_A, candidates.logits_A)
    positions, there = candidates.positions_of(np.array([token_id for token_id, _ in bias]))
    values = np.array([value for _, value in bias], np.float64)[there]
    logits_A = candidates.logits_A.copy()
    is_finite, wins = np.isfinite(values), positions[values == np.inf]
    biased, inverse = np.unique(positions[is_finite], return_inverse=True)
    sums = np.bincount(inverse, values[is_finite], len(biased)).clip(-_FLOAT32_MAX, _FLOAT32_MAX)
    with np.errstate(over="ignore"):
        logits_A[biased] += sums.astype(logits_A.dtype)
    logits_A[wins[logits_A[wins] > -np.inf]] = np.inf
    logits_A[positions[values == -np.inf]] = -np.inf
    return possible(candidates.ids_A, logits_A)


def last_tokens(history: Sequence[int], last_n: int) -> np.ndarray:
    """The last n token ids, or all if n is -1."""
    kept = history if last_n < 0 else history[max(0, len(history) - last_n) :]
    return np.asarray(kept, np.int64)


def penalties(
    candidates: Candidates,
    history: Sequence[int],
    *,
    last_n: int,
    repeat: float,
    frequency: float,
    presence: float,
) -> Candidates:
    """Penalises a token that occurs c > 0 times among the last n: multiplies its logit by `repeat`
    if it is not positive, else divides it, then subtracts c * frequency + presence.

    Keskar et al. 2019 (arXiv:1909.05858) always divide, which would favour negative logits; the
    other two penalties are OpenAI's. llama_sampler_init_penalties."""
    ids, counts = np.unique(last_tokens(history, last_n), return_counts=True)
    positions, there = candidates.positions_of(ids)
    logits = candidates.logits_A[positions].astype(np.float64)
    logits = np.where(logits <= 0, logits * repeat, logits / repeat)
    return candidates.with_logits_at(positions, logits - counts[there] * frequency - presence)


def top_k(candidates: Candidates, k: int) -> Candidates:
    """The k largest logits; all if k <= 0. Fan et al. 2018 (arXiv:1805.04833)."""
    return candidates.largest(k) if k > 0 else candidates


def top_p(candidates: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """The smallest set of most probable tokens whose probabilities sum to at least p.

    Nucleus sampling, Holtzman et al. 2019 (arXiv:1904.09751)."""
    if p >= 1:
        return candidates
    probability_A = candidates.probability_A

    def count_of(index: np.ndarray | slice) -> int | None:
        return _count_reaching(probability_A[index], p, "left", min_keep)

    if candidates.is_sorted:
        return candidates.only(slice(count_of(slice(None))))
    return candidates.only(largest_until(candidates.logits_A, count_of), is_sorted=True)


def min_p(candidates: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Tokens with p_i >= p * max p, that is logit_i >= max logit + ln p.

    Nguyen et al. 2024 (arXiv:2407.01082); llama.cpp pull request 3841."""
    if p <= 0:
        return candidates
    logits_A = candidates.logits_A
    # In float64: to compare float32 logits with a Python float, numpy would round it first.
    least = np.float64(logits_A[0] if candidates.is_sorted else logits_A.max()) + math.log(p)
    if candidates.is_sorted:
        return candidates.only(slice(max(np.count_nonzero(logits_A >= least), min_keep)))
    kept = np.flatnonzero(logits_A >= least)
    return candidates.only(kept) if len(kept) >= min_keep else candidates.largest(min_keep)


def typical_p(candidates: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """The smallest set of tokens whose surprise is nearest to the entropy and whose probabilities
    sum to more than p: ordered by abs(-ln p_i - H), H = -sum p_i ln p_i.

    Locally typical sampling, Meister et al. 2022 (arXiv:2202.00666)."""
    if p >= 1:
        return candidates
    probability_A = candidates.probability_A
    with np.errstate(divide="ignore"):
        surprise_A = -np.log(probability_A)
    # 0 ln 0 is 0 (for probabilities that underflow); llama.cpp gets NaN.
    entropy = float(probability_A @ np.where(probability_A > 0, surprise_A, 0.0))

    def count_of(index: np.ndarray) -> int | None:
        return _count_reaching(probability_A[index], p, "right", min_keep)

    kept = largest_until(-np.abs(surprise_A - entropy), count_of)
    return candidates.only(np.sort(kept))


def _count_reaching(probability: np.ndarray, p: float, side: str, min_keep: int) -> int | None:
    """The number of first values whose sum reaches p (side left) or exceeds it (right), at least
    `min_keep`; None if all together do not."""
    sums = np.cumsum(probability)
    count = max(int(np.searchsorted(sums, p, side=side)) + 1, min_keep)  # type: ignore[call-overload]
    return count if count <= len(sums) else None


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Tokens with logit_i >= max - n * standard deviation of the logits; all if n <= 0.

    Tang et al. 2024 (arXiv:2411.07641). llama.cpp keeps the other tokens with logits of -inf, and a
    later dynamic temperature counts them as candidates; here they are removed."""
    if n <= 0 or len(candidates) < 2:
        return candidates
    logits_A = candidates.logits_A.astype(np.float64)
    return candidates.only(np.flatnonzero(logits_A >= logits_A.max() - n * logits_A.std()))


def xtc(candidates: Candidates, threshold: float, min_keep: int = 0) -> Candidates:
    """Removes the tokens with p_i >= threshold except the least probable of them.

    The chain decides at random whether to apply it. "Exclude top choices" by p-e-w
    (text-generation-webui, pull request 6335); llama_sampler_init_xtc."""
    likely = np.flatnonzero(candidates.probability_A >= threshold)
    num_out = len(likely) - 1
    if threshold > 0.5 or num_out < 1 or len(candidates) - num_out < min_keep:
        return candidates
    # Of equally probable tokens, the one with the highest id stays, which comes last when sorted.
    by_logit = np.argsort(-candidates.logits_A[likely], kind="stable")
    is_kept = np.ones(len(candidates), bool)
    is_kept[likely[by_logit[:-1]]] = False
    return candidates.only(np.flatnonzero(is_kept))


def temperature(candidates: Candidates, t: float) -> Candidates:
    """logit_i / t; for t <= 0 only the largest logit stays (the lowest id among equals)."""
    if t <= 0:
        return candidates.largest(1)
    if t == 1:
        return candidates
    logits_A = candidates.logits_A.astype(np.float64)
    if t < _TINY_TEMPERATURE:
        winners = np.flatnonzero(logits_A == logits_A.max())
        return Candidates(candidates.ids_A[winners], np.zeros(len(winners)), candidates.is_sorted)
    return Candidates(candidates.ids_A, logits_A / t, candidates.is_sorted)


def dynamic_temperature(
    candidates: Candidates, t: float, spread: float, exponent: float
) -> Candidates:
    """A temperature between low = max(0, t - spread) and high = t + spread, low where the model is
    certain:

    low + (high - low) * (H / ln A) ** exponent, H the entropy of the A candidates. Zhu et al. 2023
    (arXiv:2309.02772) and kalomaze; llama_sampler_init_temp_ext."""
    if spread <= 0:
        return temperature(candidates, t)
    if len(candidates) < 2:
        return candidates
    probability_A = candidates.probability_A
    positive = probability_A[probability_A > 0]
    entropy = max(0.0, -float(positive @ np.log(positive)))
    share = min(1.0, entropy / math.log(len(candidates)))
    low, high = max(0.0, t - spread), min(t + spread, sys.float_info.max)
    return temperature(candidates, low + (high - low) * share**exponent)


# ---- samplers that adapt ------------------------------------------------------------------------

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
