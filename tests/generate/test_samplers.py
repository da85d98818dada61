"""Each sampler against its formula, in plain Python over lists, and the search for the largest of
many numbers.

A distribution is [(id, logit), ...]; where the order matters, logits fall, and tied ids rise."""

import math
import random
from collections import Counter

import numpy as np
import pytest

from hotsplit.runtime.generate import dry as dry_module
from hotsplit.runtime.generate import samplers
from hotsplit.runtime.generate.candidates import Candidates, largest
from hotsplit.runtime.generate.dry import dry, tokens_since_breaker

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


def a_history(draw: random.Random, tokens: Tokens) -> list[int]:
    few = draw.sample([i for i, _ in tokens], min(len(tokens), 4)) + [1001]
    return draw.choices(few, k=draw.choice([0, 1, 5, 60]))


def settings(name: str, draw: random.Random, tokens: Tokens) -> tuple:
    u, keep = draw.random, draw.randrange(4)
    history = a_history(draw, tokens)
    return {
        "top_k": (draw.randrange(1, 60),),
        "top_p": (u(), keep),
        "min_p": (u() ** 2, keep),
        "typical": (u(), keep),
        "top_n_sigma": (3 * u(),),
        "xtc": (u() / 2, keep),
        "temperature": (draw.choice([0.0, 0.3, 1.0, 2.0]),),
        "dynamic": (0.1 + u(), u(), 2 * u()),
        "penalties": (history, draw.choice([-1, 0, 3, 64]), 0.5 + u(), u() - 0.3, u() - 0.3),
        "dry": (
            *(history, u(), 1 + u(), draw.randrange(4), draw.choice([-1, 8, 64])),
            {history[0]} if history and u() < 0.5 else set(),
        ),
        "mirostat_1": (8 * u(), 1000),
        "mirostat_2": (8 * u(),),
    }[name]


def ours_dry(c: Candidates, history, multiplier, base, allowed, last_n, breakers) -> Candidates:
    given = {"multiplier": multiplier, "base": base, "allowed_length": allowed, "last_n": last_n}
    return dry(c, history, **given, breakers=dict.fromkeys(breakers, ((),)))


def ours_penalties(c: Candidates, history, last_n, repeat, frequency, presence) -> Candidates:
    return samplers.penalties(
        c, history, last_n=last_n, repeat=repeat, frequency=frequency, presence=presence
    )


PAIRS = {
    "top_k": (samplers.top_k, top_k_ref),
    "top_p": (samplers.top_p, top_p_ref),
    "min_p": (samplers.min_p, min_p_ref),
    "typical": (samplers.typical_p, typical_ref),
    "top_n_sigma": (samplers.top_n_sigma, top_n_sigma_ref),
    "xtc": (samplers.xtc, xtc_ref),
    "temperature": (samplers.temperature, temperature_ref),
    "dynamic": (samplers.dynamic_temperature, dynamic_ref),
    "penalties": (ours_penalties, penalties_ref),
    "dry": (ours_dry, dry_ref),
    "mirostat_1": (samplers.mirostat_1, mirostat_1_ref),
    "mirostat_2": (samplers.mirostat_2, mirostat_2_ref),
}


@pytest.mark.parametrize("name", PAIRS)
def test_each_sampler_equals_its_formula(name):
    ours, reference = PAIRS[name]
    draw, num_narrowed = random.Random(name), 0
    for number in range(300):
        tokens = random_tokens(draw)
        given = settings(name, draw, tokens)
        if name in ("typical", "mirostat_1") and len({x for _, x in tokens}) < len(tokens):
            continue  # their formulas leave the order of equal logits open
        want = reference(tokens, *given)
        check(ours(candidates_of(tokens, is_sorted=number % 2 == 1), *given), want)
        num_narrowed += softmax(want) != softmax(tokens)
    assert num_narrowed > 50


@pytest.mark.parametrize("is_sorted", [False, True])
def test_thresholds_that_are_met_exactly(is_sorted):
    """Top-p stops when the sum reaches its threshold, typical-p when it exceeds it; min-p keeps
    tokens at its threshold."""
    four = candidates_of([(i, 0.0) for i in range(4)], is_sorted=is_sorted)
    assert samplers.top_p(four, 0.5).ids_A.tolist() == [0, 1]
    assert samplers.typical_p(four, 0.5).ids_A.tolist() == [0, 1, 2]
    assert len(samplers.min_p(four, 1.0)) == 4


def test_the_check_rejects_wrong_candidates():
    tokens = [(1, 0.5), (4, 2.0), (7, -1.0)]
    check(candidates_of(tokens), tokens)
    for wrong in (tokens[:2], [(1, 0.5), (4, 2.0), (8, -1.0)], [(1, 0.5), (4, 2.001), (7, -1.0)]):
        with pytest.raises(AssertionError):
            check(candidates_of(tokens), wrong)


@pytest.mark.parametrize("size", [1, 2, 1023, 2047, 2048, 2049, 5000, 40_000])
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "ascending", "one column", "one high"])
def test_the_largest_of_many(size, kind):
    draw = np.random.default_rng(size)
    values = draw.normal(size=size).astype(np.float32)
    if kind == "ties":
        values = np.round(values)
    elif kind == "equal":
        values[:] = 0.5
    elif kind == "ascending":
        values.sort()
    elif kind == "one column":
        values[::1024] += 100
    elif kind == "one high":
        values[size // 2] = 100
    for count in {1, 2, min(40, size), min(257, size), max(1, size - 1), size, size + 1}:
        want = np.argsort(-values.astype(np.float64), kind="stable")[:count]
        assert (largest(values, count) == want).all()


def test_long_tails_are_sorted_piece_by_piece():
    """With more candidates than the first slice has, the result is the same as from sorting all."""
    draw = np.random.default_rng(0)
    tokens = [(i, float(x)) for i, x in enumerate(draw.normal(size=9000))]
    for p in (0.2, 0.9, 0.999999):
        check(samplers.top_p(candidates_of(tokens), p), top_p_ref(tokens, p, 0))
        check(samplers.typical_p(candidates_of(tokens), p), typical_ref(tokens, p, 0))


@pytest.mark.filterwarnings("error")
def test_huge_biases_of_one_token_are_summed_before_they_are_clipped():
    tokens = candidates_of([(0, 1.0), (1, 2.0), (2, 3.0)])
    bias = [(0, 1e300), (0, -1e300), (1, 1e300), (1, 1e308), (1, 1.7e308), (2, -1e300)]
    found, limit = samplers.logit_bias(tokens, bias), np.finfo(np.float32).max
    assert found.ids_A.tolist() == [0, 1, 2]
    assert np.allclose(found.logits_A, [1.0, limit, -limit], rtol=1e-6)
    won = samplers.logit_bias(tokens, [(0, np.inf), (0, -1e300), (1, 1e300)])
    assert won.ids_A.tolist() == [0]
    assert samplers.logit_bias(tokens, [(1, -np.inf), (1, 1e300)]).ids_A.tolist() == [0, 2]


@pytest.mark.filterwarnings("error")
def test_a_huge_dynamic_temperature_gives_probabilities():
    sure, even = [(0, 0.0), (1, -9e4)], [(0, 0.0), (1, 0.0), (2, 0.0)]
    # Equal logits get the exponent 1: on some processors, rounded logarithms make their share of
    # the largest entropy a little less than 1, and its 1e300th power would be 0.
    for tokens, exponent, want in ((sure, 1e300, [1.0]), (even, 1.0, [1 / 3] * 3)):
        found = samplers.dynamic_temperature(candidates_of(tokens), 1e308, 1.7e308, exponent)
        assert np.allclose(found.probability_A, want)


class CountedTokens(list):
    """A list that counts the elements that its slices copy."""

    copied = 0

    def tolist(self):
        return self

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.copied += len(found) if isinstance(index, slice) else 0
        return found


def test_base_1_needs_no_lengths_beyond_the_allowed_one(monkeypatch):
    """Lengths do not change its penalty, and finding them is quadratic in a text that repeats."""
    caps, find = [], dry_module.repeats

    def watched(tokens_N, allowed_length, max_exponent, breakers):
        caps.append(max_exponent)
        return find(tokens_N, allowed_length, max_exponent, breakers)

    monkeypatch.setattr(dry_module, "repeats", watched)
    tokens = [(5, 1.0), (6, 2.0), (7, 3.0)]
    for allowed in (0, 1, 2, 3):
        given = [5, 6, 5, 6, 7, 5, 6, 5, 6], 0.5, 1.0, allowed, -1, set()
        check(ours_dry(candidates_of(tokens), *given), dry_ref(tokens, *given))
    assert caps == [0] * 4


def test_looking_for_a_breaker_does_not_copy_the_history():
    tokens = CountedTokens([5] * 2000)
    assert tokens_since_breaker(tokens, {5: ((7, 8), (9,))}) == 2000
    assert tokens.copied <= 2000 * 3
    assert tokens_since_breaker(CountedTokens([5, 7, 8, 5, 5]), {5: ((7, 8), (7,))}) == 2
