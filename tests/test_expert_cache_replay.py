"""Replays of a cache of experts (benchmarks/expert_cache.py) on random routings: our policy is never
slower than the best of the others by more than 2 %, nor, on a slow link, than the plan."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent.parent / "benchmarks")]

import expert_cache  # noqa: E402

from hotsplit.measure.cache_replay.policies import POLICIES, seconds_T  # noqa: E402

OTHERS = ("static", "lru", "ring", "lfu")


@pytest.fixture(scope="module", params=[0.0, 0.03, 0.3])
def routing(request):
    """Two layers and few tokens, with no drift, a slow and a fast one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_cache, "LAYERS", 2)
        patch.setattr(expert_cache, "TOKENS", 768)
        yield expert_cache.zipf("zipf", drift=request.param, exponent=1.0)


def seconds(case, name: str) -> float:
    return float(seconds_T(case.costs, case.trace.read_TL, POLICIES[name](case)).mean())


@pytest.mark.parametrize("link", expert_cache.LINKS)
def test_our_policy_is_never_much_slower_than_another(routing, link):
    options = expert_cache.OPTIONS["experts' options"]
    case = replace(expert_cache.case_of(routing, 0.5, link), options=options)
    ours_s, of = seconds(case, "ours"), {name: seconds(case, name) for name in OTHERS}
    assert ours_s <= 1.02 * min(of.values()), (ours_s, of)
    if link == min(expert_cache.LINKS):
        assert ours_s <= of["static"] * 1.001


def test_every_choice_is_replayed(routing):
    case = expert_cache.case_of(routing, 0.25, 1e9)
    assert case.trace.read_TL.tolist() == [[8, 8]] * len(routing.replayed_LTK[0])
    token = routing.replayed_LTK[:, 5]
    for layer, is_read_E in enumerate(case.trace.is_read(5)):
        assert np.flatnonzero(is_read_E).tolist() == token[layer].tolist()
    assert [len(slots) for slots in case.slots_LN] == [32, 32]
