"""Each sampler against its formula, and the search for the largest of many numbers."""

import random

import numpy as np
import pytest
from sampler_formulas import (
    Tokens,
    candidates_of,
    check,
    dry_ref,
    dynamic_ref,
    min_p_ref,
    mirostat_1_ref,
    mirostat_2_ref,
    penalties_ref,
    random_tokens,
    softmax,
    temperature_ref,
    top_k_ref,
    top_n_sigma_ref,
    top_p_ref,
    typical_ref,
    xtc_ref,
)

from hotsplit.runtime.generate import adaptive_samplers, samplers
from hotsplit.runtime.generate import dry as dry_module
from hotsplit.runtime.generate.candidates import Candidates, largest
from hotsplit.runtime.generate.dry import dry, tokens_since_breaker


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
            history,
            u(),
            1 + u(),
            draw.randrange(4),
            draw.choice([-1, 8, 64]),
            {history[0]} if history and u() < 0.5 else set(),
        ),
        "mirostat_1": (8 * u(), 1000),
        "mirostat_2": (8 * u(),),
    }[name]


def ours_dry(c: Candidates, history, multiplier, base, allowed, last_n, breakers) -> Candidates:
    return dry(
        c,
        history,
        multiplier=multiplier,
        base=base,
        allowed_length=allowed,
        last_n=last_n,
        breakers=dict.fromkeys(breakers, ((),)),
    )


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
    "mirostat_1": (adaptive_samplers.mirostat_1, mirostat_1_ref),
    "mirostat_2": (adaptive_samplers.mirostat_2, mirostat_2_ref),
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
