"""The sampler chain: order, seeds, draws, greedy, masks, infinities, log-probabilities."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from test_samplers import (
    adaptive_ref,
    by_logit,
    check,
    min_p_ref,
    mirostat_1_ref,
    mirostat_2_ref,
    softmax,
    temperature_ref,
    top_k_ref,
    top_p_ref,
    typical_ref,
    xtc_ref,
)

from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import DEFAULT_SAMPLERS, SamplingOptions
from hotsplit.runtime.generate.sampler_chain import SamplerChain

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def chain_of(size: int, **values) -> SamplerChain:
    return SamplerChain(SamplingOptions(**(OFF | values)), size, {})


def tensor(*logits: float) -> torch.Tensor:
    return torch.tensor(logits, dtype=torch.float32)


def test_the_default_chain_is_its_samplers_in_order():
    draw = np.random.default_rng(1)
    for _ in range(100):
        logits_V = (3 * draw.normal(size=3000)).astype(np.float32)
        tokens = [(i, float(x)) for i, x in enumerate(logits_V)]
        want = min_p_ref(top_p_ref(top_k_ref(tokens, 40), 0.95, 0), 0.05, 0)
        got = SamplerChain(SamplingOptions(), 3000).distribution(torch.from_numpy(logits_V), [])
        check(got, temperature_ref(want, 0.8))


def test_samplers_run_in_the_order_of_the_options():
    logits_V = tensor(2.0, 1.5, 1.0, 0.0)
    first = chain_of(4, temperature=0.25, min_p=0.3, samplers=("temperature", "min_p"))
    last = chain_of(4, temperature=0.25, min_p=0.3, samplers=("min_p", "temperature"))
    assert len(first.distribution(logits_V, [])) == 1
    assert len(last.distribution(logits_V, [])) == 3
    only = chain_of(4, temperature=0.25, min_p=0.3, samplers=())
    check(only.distribution(logits_V, []), list(enumerate(logits_V.tolist())))


DRAWN = [{}, {"xtc_probability": 0.5}, {"mirostat": 1}, {"mirostat": 2}, {"top_p": 0.7}]
DRAWN += [{"repeat_penalty": 1.3}, {"dry_multiplier": 0.8, "dry_sequence_breakers": ()}]


@pytest.mark.parametrize("more", DRAWN, ids=str)
def test_draws_follow_the_seed(more):
    draw = np.random.default_rng(2)
    rows = torch.from_numpy(draw.normal(size=(60, 500)).astype(np.float32) * 2)

    def run(seed: int, asks: int = 0) -> list[int]:
        chain, history = chain_of(500, seed=seed, **more), [3, 4, 3, 4]
        for row_V in rows:
            for _ in range(asks):
                chain.distribution(row_V, history)
            history.append(chain.sample(row_V, history))
        return history

    assert run(7) == run(7) == run(7, asks=2)
    assert len({tuple(run(seed)) for seed in (7, 8, -7, -(1 << 63), 7 + (1 << 32))}) == 5


def chi_square(chain: SamplerChain, logits_V: torch.Tensor, probability: dict[int, float]) -> float:
    count = 20_000
    drawn = Counter(chain.sample(logits_V, []) for _ in range(count))
    assert drawn.keys() <= probability.keys()
    return sum((drawn[i] - count * p) ** 2 / (count * p) for i, p in probability.items())


# With 11 degrees of freedom, chi-square exceeds 31.3 once in a thousand runs; the seed is fixed.
LOGITS = tensor(*(math.sin(3 * i) for i in range(12)))
MOST = 31.3


def test_draws_are_as_frequent_as_probable():
    expected = softmax(temperature_ref(list(enumerate(LOGITS.tolist())), 0.7))
    assert chi_square(chain_of(12, temperature=0.7, seed=5), LOGITS, expected) < MOST
    # The measure detects another temperature.
    assert chi_square(chain_of(12, temperature=0.8, seed=5), LOGITS, expected) > 3 * MOST


def test_xtc_applies_with_its_probability():
    """The distribution is a mixture of those with and without XTC."""
    tokens = list(enumerate(LOGITS.tolist()))
    plain, cut = softmax(tokens), softmax(xtc_ref(tokens, 0.1, 0))
    assert len(cut) < len(plain)
    mixed = {i: 0.7 * plain[i] + 0.3 * cut.get(i, 0.0) for i in plain}
    chain = chain_of(12, xtc_probability=0.3, xtc_threshold=0.1, seed=5)
    assert chi_square(chain, LOGITS, mixed) < MOST
    assert chi_square(chain_of(12, seed=5), LOGITS, mixed) > 3 * MOST


def test_a_token_of_probability_0_is_not_drawn_by_an_extreme_random_number():
    chain = chain_of(3, seed=1)
    chain._random.random = lambda: 0.0
    assert chain.sample(tensor(-9999.0, 0.0, 0.0), []) == 1
    chain._random.random = lambda: math.nextafter(1.0, 0.0)
    assert chain.sample(tensor(0.0, 0.0, -9999.0), []) == 1


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_follows_the_surprise_of_drawn_tokens(version):
    draw, mu = np.random.default_rng(9), 2 * 3.0
    chain = chain_of(90, mirostat=version, mirostat_ent=3.0, mirostat_lr=0.3, seed=1)
    for _ in range(40):
        logits_V = torch.from_numpy((3 * draw.normal(size=90)).astype(np.float32))
        tokens = list(enumerate(logits_V.tolist()))
        kept = mirostat_1_ref(tokens, mu, 90) if version == 1 else mirostat_2_ref(tokens, mu)
        check(chain.distribution(logits_V, []), kept)
        mu -= 0.3 * (-math.log2(softmax(kept)[chain.sample(logits_V, [])]) - 3.0)


def test_adaptive_p_is_its_formula_token_by_token():
    draw, drawn = np.random.default_rng(8), []
    adaptive = {"adaptive_target": 0.3, "adaptive_decay": 0.8}
    chain = chain_of(90, top_k=40, seed=1, samplers=("adaptive_p", "top_k"), **adaptive)
    for _ in range(40):
        logits_V = torch.from_numpy((2 * draw.normal(size=90)).astype(np.float32))
        kept = top_k_ref(list(enumerate(logits_V.tolist())), 40)
        check(chain.distribution(logits_V, []), adaptive_ref(kept, 0.3, 0.8, drawn))
        drawn.append(softmax(kept)[chain.sample(logits_V, [])])


GREEDY = [{"top_k": 40, "top_p": 0.9, "min_p": 0.1}, {"typ_p": 0.6}, {"repeat_penalty": 1.5}]
GREEDY += [{"xtc_probability": 1.0}, {"logit_bias": ((2, 4.0),)}, {"mirostat": 2}]
GREEDY += [{"temperature": -3.0}, {"samplers": DEFAULT_SAMPLERS[::-1]}]


@pytest.mark.parametrize("more", GREEDY, ids=str)
def test_greedy_is_the_largest_after_the_earlier_samplers(more):
    draw = np.random.default_rng(4)
    greedy = chain_of(300, **{"temperature": 0.0} | more)
    # The same chain at a temperature near 0, where the place of `temperature` makes no difference.
    near = chain_of(300, **more | {"temperature": 1e-6})
    for _ in range(30):
        logits_V, history = torch.from_numpy(draw.normal(size=300).astype(np.float32)), [1, 2, 3]
        if "xtc_probability" in more or "typ_p" in more:
            tokens = list(enumerate(logits_V.double().tolist()))
            kept = typical_ref(tokens, 0.6, 0) if "typ_p" in more else xtc_ref(tokens, 0.1, 0)
            want = by_logit(kept)[0][0]
        else:
            found = near.distribution(logits_V, history)
            want = int(found.ids_A[found.probability_A.argmax()])
        assert greedy.sample(logits_V, history) == want
        found = greedy.distribution(logits_V, history)
        assert found.ids_A.tolist() == [want] and found.probability_A.tolist() == [1.0]


def test_of_equal_logits_greedy_takes_the_lowest_id():
    for more in ({}, {"logit_bias": ((0, -1.0),)}, {"repeat_penalty": 2.0}):
        chain = chain_of(4, temperature=0.0, **more)
        assert chain.sample(tensor(0.0, 3.0, 1.0, 3.0), [2]) == 1


# ---- infinities, masks and refusals -------------------------------------------------------

INF = math.inf
EVERYTHING = [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}]
EVERYTHING += [{"typ_p": 0.5}]
EVERYTHING += [{"top_n_sigma": 1.0}, {"xtc_probability": 1.0}, {"dynatemp_range": 0.5}]
EVERYTHING += [{"mirostat": 1}, {"mirostat": 2}, {"repeat_penalty": 1.2}, {"temperature": 1e-300}]
EVERYTHING += [{"samplers": ("adaptive_p",), "adaptive_target": 0.3}, {"logit_bias": ((0, 1.0),)}]


@pytest.mark.parametrize("more", EVERYTHING, ids=str)
def test_nan_infinities_and_one_survivor(more):
    chain = chain_of(4, seed=1, **more)
    for logits_V in (
        tensor(0, math.nan, 1, 2),
        tensor(INF, math.nan, 1, 2),
        tensor(*[math.nan] * 4),
    ):
        with pytest.raises(HotsplitError, match="^the model gave NaN logits; convert its checkp"):
            chain.sample(logits_V, [])
    with pytest.raises(HotsplitError, match="no token can be drawn: every logit is -inf"):
        chain.sample(tensor(-INF, -INF, -INF, -INF), [])
    with pytest.raises(HotsplitError, match="NaN"):
        chain.logprobs(tensor(0, math.nan, 1, 2), 1)
    assert {chain.sample(tensor(-INF, -INF, 0.5, -INF), [2]) for _ in range(9)} == {2}
    assert {chain.sample(tensor(3e38, -INF, INF, -3e38), [2]) for _ in range(9)} == {2}
    far = {chain.sample(tensor(3e38, 3.1e38, -3e38, -INF), [2]) for _ in range(9)}
    # Adaptive-p prefers tokens of probability 0 to one of probability 1: 0 is nearer to its target.
    assert far == {1} or ("adaptive_target" in more and 3 not in far)
    assert {chain.sample(tensor(-INF, INF, -INF, INF), [2]) for _ in range(40)} <= {1, 3}


@pytest.mark.parametrize("more", EVERYTHING, ids=str)
def test_masked_tokens_are_never_drawn(more):
    draw = np.random.default_rng(5)
    chain = chain_of(70, seed=1, **more | {"logit_bias": ((0, 1.0), (1, INF))})
    bare = chain_of(70, seed=1, **more)
    for number in range(40):
        allowed = draw.random(70) < 0.2
        allowed[[1, 40]] = False, True
        mask = torch.from_numpy(allowed)
        logits_V = torch.from_numpy(draw.normal(size=70).astype(np.float32))
        logits_V[1 if number % 2 else 2] = INF if number % 3 == 0 and not allowed[2] else 9.0
        for each in (chain, bare):
            assert allowed[each.sample(logits_V, [1, 40], mask)]
            assert allowed[each.distribution(logits_V, [1, 40], mask).ids_A].all()
        within = torch.where(mask, logits_V, -INF)
        same = bare.distribution(within, [1, 40])
        found = bare.distribution(logits_V, [1, 40], mask)
        assert found.ids_A.tolist() == same.ids_A.tolist()
        assert np.abs(found.probability_A - same.probability_A).max() < 1e-12
    with pytest.raises(HotsplitError, match="no token can be drawn"):
        bare.sample(logits_V, [], torch.zeros(70, dtype=torch.bool))


def test_logit_bias_bans_forces_and_adds():
    logits_V = tensor(1.0, 2.0, -INF, 0.0)
    one = chain_of(4, logit_bias=((0, 1.0), (0, 0.5), (1, -INF)))
    check(one.distribution(logits_V, []), [(0, 2.5), (3, 0.0)])
    assert chain_of(4, logit_bias=((3, INF),)).sample(logits_V, []) == 3
    both = chain_of(4, logit_bias=((3, INF), (3, -INF), (2, INF)))
    assert set(both.distribution(logits_V, []).ids_A.tolist()) == {0, 1}
    with pytest.raises(
        HotsplitError, match="logit_bias has token 4; the model's tokens are 0 to 3"
    ):
        chain_of(4, logit_bias=((4, 1.0),))


def test_logprobs_are_those_of_the_models_logits():
    draw = np.random.default_rng(6)
    logits_V = torch.from_numpy(draw.normal(size=5000).astype(np.float32))
    want_V = torch.log_softmax(logits_V.double(), 0)
    found = chain_of(5000, temperature=0.1, logit_bias=((3, 9.0),)).logprobs(logits_V, 20, chosen=7)
    order = torch.sort(want_V, descending=True, stable=True).indices[:20].tolist()
    assert [token_id for token_id, _ in found] == [*order, 7]
    assert all(abs(logprob - want_V[token_id]) < 1e-6 for token_id, logprob in found)
    few = chain_of(3).logprobs(tensor(0.0, -INF, 0.0), 3, chosen=1)
    assert [(token_id, round(logprob, 6)) for token_id, logprob in few] == [
        (0, -0.693147),
        (2, -0.693147),
        (1, -INF),
    ]
    assert len(chain_of(3).logprobs(tensor(0.0, 1.0, 0.0), 1, chosen=1)) == 1


def test_dry_needs_its_breakers():
    with pytest.raises(HotsplitError, match="DRY is on and its sequence breakers have no tokens"):
        SamplerChain(SamplingOptions(dry_multiplier=0.8), 10)
    SamplerChain(SamplingOptions(), 10)
