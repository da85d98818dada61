"""The samplers' formulas, in plain Python over lists, and a check of candidates against them.

A distribution is [(id, logit), ...]; where the order matters, logits fall, and tied ids rise."""

import math
import random
from collections import Counter

import numpy as np

from hotsplit.runtime.generate.candidates import Candidates

Tokens = list[tuple[int, float]]
TINY = 1e-12


def by_logit(tokens: Tokens) -> Tokens:
    return sorted(tokens, key=lambda token: (-token[1], token[0]))


def softmax(tokens: Tokens) -> dict[int, float]:
    highest = max(logit for _, logit in tokens)
    weights = {i: math.exp(logit - highest) for i, logit in tokens}
    total = math.fsum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


def top_k_ref(tokens: Tokens, k: int) -> Tokens:
    return by_logit(tokens)[:k]


def top_p_ref(tokens: Tokens, p: float, min_keep: int) -> Tokens:
    of, kept, total = softmax(tokens), [], 0.0
    for token in by_logit(tokens):
        kept.append(token)
        total += of[token[0]]
        if total >= p and len(kept) >= min_keep:
            break
    return kept


def min_p_ref(tokens: Tokens, p: float, min_keep: int) -> Tokens:
    of, ordered = softmax(tokens), by_logit(tokens)
    least = p * of[ordered[0][0]]
    return [t for n, t in enumerate(ordered) if of[t[0]] >= least or n < min_keep]


def typical_ref(tokens: Tokens, p: float, min_keep: int) -> Tokens:
    of = softmax(tokens)
    entropy = -math.fsum(q * math.log(q) for q in of.values() if q)
    ordered = sorted(tokens, key=lambda t: (abs(-math.log(of[t[0]]) - entropy), t[0]))
    kept, total = [], 0.0
    for token in ordered:
        kept.append(token)
        total += of[token[0]]
        if total > p and len(kept) >= min_keep:
            break
    return kept


def top_n_sigma_ref(tokens: Tokens, n: float) -> Tokens:
    logits = [logit for _, logit in tokens]
    mean = math.fsum(logits) / len(logits)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in logits) / len(logits))
    return [t for t in tokens if t[1] >= max(logits) - n * sigma]


def xtc_ref(tokens: Tokens, threshold: float, min_keep: int) -> Tokens:
    of, ordered = softmax(tokens), by_logit(tokens)
    num_likely = sum(of[i] >= threshold for i, _ in ordered)
    out = num_likely - 1
    return ordered[out:] if out > 0 and len(ordered) - out >= min_keep else ordered


def temperature_ref(tokens: Tokens, t: float) -> Tokens:
    return [(i, logit / t) for i, logit in tokens] if t > 0 else by_logit(tokens)[:1]


def dynamic_ref(tokens: Tokens, t: float, spread: float, exponent: float) -> Tokens:
    if len(tokens) == 1:
        return tokens
    entropy = -math.fsum(q * math.log(q) for q in softmax(tokens).values() if q)
    low, high = max(0.0, t - spread), t + spread
    return temperature_ref(
        tokens, low + (high - low) * (entropy / math.log(len(tokens))) ** exponent
    )


def penalties_ref(tokens: Tokens, history, last_n, repeat, frequency, presence) -> Tokens:
    counts = Counter(
        history[len(history) - min(last_n, len(history)) :] if last_n >= 0 else history
    )
    return [
        (i, (x * repeat if x <= 0 else x / repeat) - counts[i] * frequency - presence)
        if counts[i]
        else (i, x)
        for i, x in tokens
    ]


def dry_ref(tokens: Tokens, history, multiplier, base, allowed, last_n, breakers) -> Tokens:
    """Finds what each token would repeat by looking at all its earlier occurrences."""
    text = history[len(history) - min(last_n, len(history)) :] if last_n >= 0 else history
    found = []
    for i, logit in tokens:
        longest = -1
        for j in range(1, len(text)):  # i occurs at j: how much before it equals the end?
            if text[j] != i:
                continue
            n = 0
            while n < j and text[j - 1 - n] == text[-1 - n] and text[-1 - n] not in breakers:
                n += 1
            longest = max(longest, n)
        is_hit = longest >= allowed and len(text) > allowed and i not in breakers
        found.append(
            (i, logit - multiplier * base ** (longest - allowed)) if is_hit else (i, logit)
        )
    return found


def adaptive_ref(tokens: Tokens, target: float, decay: float, drawn: list[float]) -> Tokens:
    """`drawn`: the probabilities of the tokens drawn so far, whose decaying mean starts at the
    target."""
    weights = [decay**age for age in range(len(drawn))][::-1]
    before = decay ** len(drawn) / (1 - decay)
    mean = (sum(w * p for w, p in zip(weights, drawn, strict=True)) + before * target) / (
        sum(weights) + before
    )
    aim = min(max(2 * target - mean, 0), 1)
    far = {i: abs(p - aim) / 0.3 for i, p in softmax(tokens).items()}
    return [(i, 5 - 10 * far[i] ** 2 / (1 + far[i])) for i, _ in tokens]


def mirostat_1_ref(tokens: Tokens, mu: float, vocab_size: int) -> Tokens:
    of, ordered = softmax(tokens), by_logit(tokens)
    if len(tokens) == 1:
        return tokens
    pairs = list(zip(ordered[:100], ordered[1:100], strict=False))
    steps = [math.log((n + 2) / (n + 1)) for n in range(len(pairs))]
    falls = [math.log(of[a[0]] / of[b[0]]) for a, b in pairs]
    s = sum(t * b for t, b in zip(steps, falls, strict=True)) / sum(t * t for t in steps)
    e = s - 1
    k = (e * 2**mu / (1 - vocab_size**-e)) ** (1 / s)
    return ordered[: max(int(k), 1)]


def mirostat_2_ref(tokens: Tokens, mu: float) -> Tokens:
    of = softmax(tokens)
    return [t for t in tokens if -math.log2(of[t[0]]) <= mu] or by_logit(tokens)[:1]


def random_tokens(draw: random.Random) -> Tokens:
    size = draw.choice([1, 2, 3, 17, 90, 400])
    scale = draw.choice([0.2, 1.0, 4.0])
    ids = draw.sample(range(1000), size)
    has_ties = draw.random() < 0.3
    logits = [draw.gauss(0, scale) for _ in ids]
    return [
        (i, float(round(x)) if has_ties else x) for i, x in zip(sorted(ids), logits, strict=True)
    ]


def candidates_of(tokens: Tokens, *, is_sorted: bool = False) -> Candidates:
    ordered = by_logit(tokens) if is_sorted else sorted(tokens)
    ids, logits = zip(*ordered, strict=True)
    return Candidates(np.array(ids), np.array(logits, np.float64), is_sorted)


def check(got: Candidates, want: Tokens) -> None:
    ids, logits = got.ids_A.tolist(), got.logits_A.tolist()
    order = [(-x, i) for x, i in zip(logits, ids, strict=True)] if got.is_sorted else ids
    assert order == sorted(order), "not in the promised order"
    assert got.probability_A.dtype == np.float64 and abs(got.probability_A.sum() - 1) < 1e-12
    expected = softmax(want)
    here = dict(zip(got.ids_A.tolist(), got.probability_A.tolist(), strict=True))
    here = {i: p for i, p in here.items() if p > TINY}
    assert here.keys() == {i for i, p in expected.items() if p > TINY}
    assert max(abs(here[i] - expected[i]) for i in here) < 1e-9
