"""Replays of the neuron cache: the bound is at most the time of the best choices, found by brute
force; the policies work as published; the script compares them."""

import json
import sys

import numpy as np
import pytest
from paths import ROOT

sys.path[:0] = [str(ROOT / "benchmarks")]

import cache_policies  # noqa: E402
import expert_cache  # noqa: E402
from cache_policies import POLICIES, ReplayCase, Trace, compare, hindsight, ours, seconds_T, static  # noqa: E402
from models import byte_level_keys, make_model, make_sizes, save_solver_files, solver_files  # noqa: E402
from test_cache_policy import make_costs  # noqa: E402

from hotsplit.options.neuron_cache_options import CacheOptions  # noqa: E402
from hotsplit.runtime.neuron_cache.policy import CachePolicy, packed  # noqa: E402
from hotsplit.solver.solve import SolveConfig, solve  # noqa: E402


def make_case(is_read_TLF, num_slots, *, costs=None, frequency_LF=None, options=None):
    _, num_layers, num_neurons = is_read_TLF.shape
    return ReplayCase(
        trace=Trace(num_neurons=num_neurons, bits_TLW=packed(is_read_TLF)),
        slots_LN=tuple(np.arange(num_slots) for _ in range(num_layers)),
        frequency_LF=np.zeros((num_layers, num_neurons)) if frequency_LF is None else frequency_LF,
        costs=make_costs(num_layers) if costs is None else costs,
        options=options or CacheOptions(),
    )


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_is_below_the_bound(seed):
    random = np.random.default_rng(seed)
    chance_LF = random.random((2, 40)) ** 3
    is_read_TLF = random.random((120, 2, 40)) < chance_LF
    costs = make_costs(2, random=random)
    case = make_case(is_read_TLF, 8, costs=costs, frequency_LF=np.roll(chance_LF, 3, axis=1))
    report = compare(case)
    for result in (*report.policies, report.hindsight):
        assert result.ms >= report.bound_ms * (1 - 1e-6), result
    assert report.of["ours"].ms <= report.of["static"].ms * 1.01
    assert max(result.hit_rate for result in report.policies[:2]) <= report.belady_hit_rate


def test_the_replayed_policy_is_that_of_the_engine():
    random = np.random.default_rng(5)
    is_read_TLF = random.random((200, 2, 40)) < random.random((2, 40)) ** 2
    case = make_case(is_read_TLF, 10)
    outcome = ours(case)
    policy = CachePolicy(case.slots_LN, case.frequency_LF, case.costs, case.options)
    for bits_1LW in case.trace.bits_TLW[:, None]:
        policy.step(np.ascontiguousarray(bits_1LW))
    report = policy.report()
    assert seconds_T(case.costs, case.trace.read_TL, outcome).sum() == pytest.approx(report.seconds)
    still = seconds_T(case.costs, case.trace.read_TL, static(case)).sum()
    assert still == pytest.approx(report.planned_seconds)
    assert outcome.num_copied == report.num_swaps > 0
    assert hindsight(case).num_copied == 0
    assert {"static", "lru", "ring", "lfu", "sparkinfer"} <= set(POLICIES)


@pytest.mark.parametrize("link", expert_cache.LINKS)
@pytest.mark.parametrize("drift", [0.0, 0.03, 0.3])
def test_the_policy_of_experts_is_never_much_slower_than_another(drift, link):
    """Random routings of two layers and few tokens, with no drift, a slow and a fast one. On a slow
    link the plan is never better."""
    routing = expert_cache.zipf("zipf", drift=drift, exponent=1.0, seed=7, tokens=768, layers=2)
    case = expert_cache.case_of(routing, 0.5, link)
    names = ("ours", "static", "lru", "ring", "lfu")
    seconds = {name: case.seconds(POLICIES[name](case)) for name in names}
    ours_s = seconds.pop("ours")
    assert ours_s <= 1.02 * min(seconds.values()), (ours_s, seconds)
    assert link > min(expert_cache.LINKS) or ours_s <= seconds["static"] * 1.001


def test_the_script_compares_policies_on_a_text(tmp_path, capsys, monkeypatch):
    """A model with a byte tokenizer, a plan for it with a cache, and a text."""
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(num_layers=3, vocab_size=vocab_size)
    model = make_model(sizes=shape, kind="f16", extra_keys=keys)
    folder = save_solver_files(tmp_path, model)
    config = SolveConfig(
        **solver_files(folder),
        output=folder / "s.gguf",
        mode="exact",
        vram_budget_bytes=(1 << 16) + (110 << 10),
        neuron_cache=CacheOptions(most_rows=3),
    )
    solve(config, lambda *given: 1 << 16)
    (folder / "t.txt").write_text("Which neurons does this text use? " * 9)
    given = [str(folder / name) for name in ("m.gguf", "s.gguf", "t.txt")]
    monkeypatch.setattr(sys, "argv", ["cache_policies.py", *given, "--tokens", "80"])
    assert cache_policies.main() == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["num_tokens"] == 80 and found["num_cached_layers"] >= 1
    assert [p["name"] for p in found["policies"]] == list(POLICIES)
    # Copies of the others may exceed their slots.
    bounded = [p for p in found["policies"] if p["name"] not in ("lru", "ring")]
    assert all(p["ms"] >= found["bound_ms"] * (1 - 1e-6) for p in bounded)
    assert "of the gap between static and the bound" in captured.err
