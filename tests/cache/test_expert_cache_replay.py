"""Replays of a cache of experts (benchmarks/expert_cache.py) on random routings: our policy is never
slower than the best of the others by more than 2 %, nor, on a slow link, than the plan."""

import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from paths import ROOT

sys.path[:0] = [str(ROOT / "benchmarks")]

import expert_cache  # noqa: E402
from cache_policies import POLICIES, case_of, compare, record  # noqa: E402
from test_hybrid_experts import made_plan, stock  # noqa: E402

from hotsplit import Engine  # noqa: E402
from hotsplit.artifacts.cache_plan import CachePlan  # noqa: E402
from hotsplit.options.neuron_cache import CacheCosts, CacheOptions  # noqa: E402

OTHERS = ("static", "lru", "ring", "lfu")


@pytest.fixture(scope="module", params=[0.0, 0.03, 0.3])
def routing(request):
    """Two layers and few tokens, with no drift, a slow and a fast one."""
    return expert_cache.zipf(
        "zipf", drift=request.param, exponent=1.0, seed=7, tokens=768, layers=2
    )


def seconds(case, name: str) -> float:
    return case.seconds(POLICIES[name](case))


@pytest.mark.parametrize("link", expert_cache.LINKS)
def test_our_policy_is_never_much_slower_than_another(routing, link):
    case = expert_cache.case_of(routing, 0.5, link)
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


def test_no_routing_is_judged_by_which_options_were_chosen(monkeypatch):
    monkeypatch.setattr(expert_cache, "zipf", lambda name, **given: given)
    judged, tuned = expert_cache.judged(), expert_cache.of_tuning()
    for one, other in product(judged, tuned):
        assert one["seed"] != other["seed"]
        assert (one["drift"], one["exponent"]) != (other["drift"], other["exponent"])


def test_layers_without_experts_are_left_out(tmp_path, monkeypatch):
    """A profile has -1 for them."""
    id_LTK = np.array([[[-1, -1]] * 3, [[0, 2]] * 3, [[1, 3]] * 3], np.int16)

    class Found:
        routing_LTK = id_LTK

    monkeypatch.setattr(expert_cache.Profile, "load", lambda path: Found)
    found = expert_cache.recorded(tmp_path / "a", tmp_path / "b")
    assert found.num_experts == 4 and np.array_equal(found.replayed_LTK, id_LTK[1:])


def test_a_plan_of_a_mixture_is_replayed_on_what_routers_choose():
    """The layer with slots is replayed; the other has its router on the CPU."""
    model = stock()
    split = replace(made_plan(model, [[1, 2], [0, 3, 5]], [0, 1]), num_experts=12)
    times = {
        f"{name}_L": np.ones(2)
        for name in ("hot_s", "hot_row_s", "cold_s", "cold_row_s", "copy_row_s", "gather_row_s")
    }
    costs = CacheCosts(**times, rest_s=1.0, copy_s=0.0)
    cache = CachePlan(most_rows=3, costs=costs, frequency=(np.ones(12, np.float32),) * 2)
    ids, seen = [3, 41, 7, 7, 12], []
    with Engine.of(model, mode="dense", device="cpu", context_length=32) as engine:
        trace = record(engine, ids, 3)
        see = engine.observe(
            lambda name, layer, chosen: seen.append(chosen.clone()),
            lambda name, layer: (name, layer) == ("ffn_experts", 1),
        )
        with see:
            engine.logits(ids[:3])
    case = case_of(replace(split, cache=cache), trace, CacheOptions())
    assert case.units == "experts" and [len(slots) for slots in case.slots_LN] == [3]
    assert case.trace.read_TL.tolist() == [[4]] * 5
    for token, chosen in enumerate(seen[0].tolist()):
        assert np.flatnonzero(case.trace.is_read(token)[0]).tolist() == sorted(chosen)
    assert "experts each in 1 layers" in compare(case).lines[0]
