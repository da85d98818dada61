"""Samplers that remove candidates or change their logits: logit bias, penalties, top-k, top-p,
temperature, etc.

Each is a pure function. The formulas are those of llama.cpp's src/llama-sampler.cpp, in float64
where it uses float32, except for the logit bias. A sampler with `min_keep` leaves at least that
many candidates, if it has them. dry.py penalises repeated sequences, adaptive_samplers.py has
samplers with a state; chain.py runs the samplers in order and draws."""

import math
import sys
from collections.abc import Sequence

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
