"""Limits without training: ranks, energies, the allocation of bytes, and the advice."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hotsplit.artifacts.limits_file import LayerLimits
from hotsplit.errors import HotsplitError
from hotsplit.measure.advise.choice import (
    Point,
    choose,
    timed_points,
    to_time,
    with_front,
)
from hotsplit.measure.advise.turns import Rounds, Timings
from hotsplit.profile.sparsity.limit_meter import Closeness, _closeness, _compare
from hotsplit.profile.sparsity.limit_scores import INPUTS, SHARES, LayerScores, Ranks
from hotsplit.profile.sparsity.limit_search import (
    PARTS,
    RULES,
    Allocation,
    Bytes,
    allocate,
    num_probes,
)


def ranks(rng: np.random.Generator, tokens: int, size: int, scale: float = 1.0) -> Ranks:
    value_TN = torch.from_numpy(rng.exponential(scale, (tokens, size)).astype(np.float32))
    factor_N = torch.from_numpy(rng.uniform(0.5, 2.0, size).astype(np.float32))
    return Ranks(rank_TN=value_TN * factor_N, factor_N=factor_N)


def scores(rng: np.random.Generator, scale: float = 1.0) -> LayerScores:
    inputs = {name: ranks(rng, 40, 24, scale) for name in INPUTS}
    return LayerScores(
        gate=ranks(rng, 40, 50, scale), hidden=ranks(rng, 40, 50, scale), inputs=inputs
    )


def sizes(num_layers: int = 2) -> Bytes:
    def each(value: int) -> np.ndarray:
        return np.full(num_layers, value, np.int64)

    return Bytes(qkv_L=each(1000), output_L=each(600), gate_L=each(1500), up_L=each(1500),
                 down_L=each(1500), head=2000)  # fmt: skip


def test_a_limit_silences_its_share_of_the_sample() -> None:
    rank = ranks(np.random.default_rng(0), 64, 80)
    assert rank.limit_N(0.0) is None
    value_TN = (rank.rank_TN / rank.factor_N).numpy()
    for share in SHARES[1:]:
        limit_N = rank.limit_N(share)
        assert limit_N is not None and limit_N.dtype == np.float32
        assert abs((value_TN <= limit_N).mean() - share) < 2e-3


def test_the_limit_of_values_with_zero_weights_is_finite() -> None:
    rank = ranks(np.random.default_rng(1), 8, 6)
    none = Ranks(rank_TN=rank.rank_TN * 0, factor_N=rank.factor_N * 0)
    limit_N = none.limit_N(0.5)
    assert limit_N is not None and np.isfinite(limit_N).all()


def test_lost_energies_equal_those_of_a_loop_in_f64() -> None:
    layer = scores(np.random.default_rng(2))
    lost_A = layer.inputs["qkv"].lost_A()
    rank_TN = layer.inputs["qkv"].rank_TN.double().numpy()
    for place, share in enumerate(SHARES):
        smallest = np.sort(rank_TN.ravel())[: int(share * rank_TN.size)]
        assert lost_A[place] == pytest.approx((smallest**2).sum() / len(rank_TN), rel=1e-9)
    lost_AA = layer.neurons_lost_AA()
    gate_TF, hidden_TF = (r.rank_TN.double().numpy() for r in (layer.gate, layer.hidden))
    for row, column in itertools.product(range(0, 20, 3), range(0, 20, 4)):
        if column < row:
            assert lost_AA[row, column] == math.inf
            continue
        closed = gate_TF <= layer.gate.threshold(SHARES[row])
        left = np.sort(hidden_TF[~closed])
        more = max(0, int(SHARES[column] * hidden_TF.size) - int(closed.sum()))
        want = (hidden_TF[closed] ** 2).sum() + (left[:more] ** 2).sum()
        assert lost_AA[row, column] == pytest.approx(want / len(gate_TF), rel=1e-6)


def test_hidden_limits_count_what_the_gates_silence() -> None:
    layer = scores(np.random.default_rng(3))
    limits = layer.limits(0.3, 0.6, {"qkv": 0.25})
    assert limits.gate_F is not None and limits.hidden_F is not None
    gate_TF = (layer.gate.rank_TN / layer.gate.factor_N).numpy()
    hidden_TF = (layer.hidden.rank_TN / layer.hidden.factor_N).numpy()
    closed = gate_TF <= limits.gate_F
    assert abs(closed.mean() - 0.3) < 0.01
    assert abs((closed | (hidden_TF <= limits.hidden_F)).mean() - 0.6) < 0.01
    assert limits.qkv_D is not None and limits.output_H is None
    assert layer.limits(0.3, 0.3, {}).hidden_F is None


def test_cats_has_one_limit_for_all_neurons() -> None:
    limit_F = scores(np.random.default_rng(4)).uniform_gate(0.4).gate_F
    assert limit_F is not None and len(set(limit_F.tolist())) == 1


def with_prices(seed: int) -> Allocation:
    rng = np.random.default_rng(seed)
    allocation = Allocation([scores(rng), scores(rng, 3.0)], sizes())
    part_kl = {part: rng.uniform(0.01, 0.2, 2).tolist() for part in PARTS}
    allocation.calibrate(part_kl, {"neurons": 0.3, "qkv": 0.1, "output": 0.05, "ffn": 0.2})
    return allocation


@pytest.mark.parametrize("seed", range(3))
def test_no_other_choice_that_saves_as_much_loses_less(seed: int) -> None:
    """Compared with every pair of shares of the two layers, under the rule with one share each."""
    allocation = with_prices(seed)
    lost_LA = np.stack([np.diag(a) for a in allocation.neurons_LAA])
    lost_LA = lost_LA * allocation.neurons_price_L[:, None]
    saved_LA = np.stack([np.diag(a) for a in allocation.neurons_saved_LAA])
    for share in (0.05, 0.15, 0.3):
        choice = allocation.best("gates", share)
        assert choice is not None and choice.saved_share >= share
        least = min(
            lost_LA[0, a] + lost_LA[1, b]
            for a, b in itertools.product(range(20), repeat=2)
            if saved_LA[0, a] + saved_LA[1, b] >= choice.saved_share * sizes().total - 1e-6
        )
        assert choice.loss == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_uses_only_its_own_kinds_and_saves_what_it_states(rule: str) -> None:
    allocation, bytes_of = with_prices(7), sizes()
    choice = allocation.best(rule, 0.1)
    assert choice is not None
    kinds = RULES[rule]
    saved = 0.0
    for gate, hidden, inputs in zip(choice.gate_L, choice.hidden_L, choice.inputs_L, strict=True):
        assert gate == 0 or "gate" in kinds
        assert hidden == gate or "hidden" in kinds
        assert set(inputs) <= set(kinds)
        saved += gate * 1500 + max(gate, hidden) * 1500
        saved += inputs.get("qkv", 0) * 1000 + inputs.get("output", 0) * 600
        saved += inputs.get("ffn", 0) * 3000
        assert not (gate and inputs.get("ffn"))
    assert choice.saved_share == pytest.approx(saved / bytes_of.total)
    assert allocation.best(rule, 0.99) is None


def test_sensitivities_make_the_sum_equal_the_probes() -> None:
    rng = np.random.default_rng(5)
    layers = [scores(rng), scores(rng, 2.0)]
    seen: list[tuple[LayerLimits, ...]] = []

    def kl_of(limits_L: tuple[LayerLimits, ...]) -> float:
        """A planted loss: the second layer is eight times as sensitive."""
        seen.append(limits_L)
        loss = 0.0
        for layer, (limits, weight) in enumerate(zip(limits_L, (1.0, 4.0), strict=True)):
            loss += weight * len(limits.present) * (1 + layer) * 1e-3
        return loss

    allocation = allocate(layers, sizes(), kl_of)
    assert len(seen) == num_probes(2) == 4 * 2 + 4
    neurons = allocation.energy_L("neurons")
    planted = [1e-3 * 2, 4 * 2e-3 * 2]
    assert allocation.neurons_price_L * neurons == pytest.approx(planted, rel=1e-6)


# ---- what is compared ---------------------------------------------------------------------------


def test_closeness_equals_that_of_f64() -> None:
    torch.manual_seed(0)
    sums, kl, loss, dense_loss, same, count = [], 0.0, 0.0, 0.0, 0, 0
    for length in (5, 300, 17):
        want, got = torch.randn(length, 50), torch.randn(length, 50)
        next_T = torch.randint(50, (length,))
        sums.append(_compare(F.log_softmax(want, 1), F.log_softmax(got, 1), next_T))
        p, q = (F.log_softmax(x.double(), 1) for x in (want, got))
        kl += (p.exp() * (p - q)).sum().item()
        loss += -q.gather(1, next_T[:, None]).sum().item()
        dense_loss += -p.gather(1, next_T[:, None]).sum().item()
        same += int((want.argmax(1) == got.argmax(1)).sum())
        count += length
    found = _closeness(torch.tensor(sums, dtype=torch.float64))
    assert found.kl == pytest.approx(kl / count, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(loss / count), rel=1e-5)
    assert found.perplexity_increase == pytest.approx(
        math.exp((loss - dense_loss) / count) - 1, rel=1e-4
    )
    assert (found.same_top, found.num_tokens) == (same / count, count)


def test_the_interval_contains_the_truth_in_19_of_20_cases() -> None:
    """The windows are drawn from a known distribution."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        sums = np.zeros((30, 5))
        sums[:, 4] = 100
        sums[:, 0] = 100 * rng.gamma(4.0, 0.25 * 0.05, 30)
        found = _closeness(torch.from_numpy(sums))
        held += abs(found.kl - 0.05) <= found.kl_error
    assert 0.90 <= held / 400 <= 0.98


def test_one_window_has_no_interval() -> None:
    sums = torch.tensor([[1.0, 2.0, 2.0, 10.0, 10.0]], dtype=torch.float64)
    assert _closeness(sums).kl_error == math.inf


def test_probes_that_cost_nothing_leave_no_negative_prices() -> None:
    """Rounding can make a divergence slightly negative; silencing more must still cost more."""
    rng = np.random.default_rng(0)
    all_scores = [scores(rng) for _ in range(2)]
    found = allocate(all_scores, sizes(), lambda limits: -1e-7)
    choices = [found.best("mixed", share) for share in (0.1, 0.3)]
    losses = [choice.loss for choice in choices if choice is not None]
    assert len(losses) == 2 and 0 <= losses[0] < losses[1]
    assert all(choice is not None and choice.saved_share < 0.4 for choice in choices)


# ---- what is advised ----------------------------------------------------------------------------


def close(kl: float) -> Closeness:
    return Closeness(kl=kl, kl_error=0.0, perplexity=10.0, perplexity_increase=kl,
                     perplexity_increase_error=0.0, same_top=1.0, num_tokens=1000)  # fmt: skip


def point(
    kind: str, rule: str, share: float, num_bytes: int, kl: float, seconds: float = 0.0
) -> Point:
    return Point(type=kind, rule=rule, share=share, bytes_per_token=num_bytes, close=close(kl),
                 seconds=seconds)  # fmt: skip


def test_a_rule_that_pays_is_advised() -> None:
    points = [
        point("q4_0", "dense", 0, 100, 0.0, 1.0),
        point("q4_0", "mixed", 0.16, 84, 0.008, 0.85),
    ]
    best, why = choose(with_front(points), 0.01, Timings())
    assert best is not None and best.rule == "mixed" and "+18%" in why


def test_a_smaller_type_that_beats_every_rule_is_advised() -> None:
    points = [
        point("f16", "dense", 0, 200, 0.0, 2.0), point("f16", "mixed", 0.16, 168, 0.004, 1.7),
        point("q8_0", "dense", 0, 106, 0.001, 1.1), point("q8_0", "mixed", 0.16, 90, 0.03, 0.95),
    ]  # fmt: skip
    best, why = choose(with_front(points), 0.01, Timings())
    assert best.name == "q8_0 dense" and why.startswith("no rule pays off here")
    best, why = choose(with_front(points), 0.0, Timings())
    assert best.name == "f16 dense" and "q8_0 dense would be +82% faster" in why


def test_the_reason_tells_costly_rules_from_rules_that_were_not_measured() -> None:
    points = [point("f16", "dense", 0, 200, 0.0, 2.0), point("f16", "mixed", 0.2, 160, 0.02, 1.6)]
    _, why = choose(points, 0.01, Timings())
    assert why == (
        "no rule pays off here: every rule costs more than 1.0% of perplexity; take f16 dense"
    )
    assert choose(points[:1], 0.01, Timings())[1] == "no rule was measured; take f16 dense"


def test_a_gain_too_small_to_matter_is_not_advised() -> None:
    points = [point("q8_0", "dense", 0, 100, 0.0, 1.0), point("q8_0", "mixed", 0.02, 98, 0.0, 0.98)]
    assert choose(points, 0.01, Timings())[0].rule == "dense"


def test_the_front_has_what_nothing_beats() -> None:
    points = [
        point("f16", "dense", 0, 0, 0.0, 2.0), point("f16", "gates", 0.1, 0, 0.05, 1.9),
        point("q8_0", "dense", 0, 0, 0.01, 1.0), point("q8_0", "mixed", 0.1, 0, 0.04, 0.9),
    ]  # fmt: skip
    assert [p.is_on_front for p in with_front(points)] == [True, False, True, True]


def test_a_rule_much_slower_than_its_bytes_say_is_not_advised() -> None:
    points = [point("f16", "dense", 0, 200, 0.0, 2.0), point("f16", "mixed", 0.2, 160, 0.0, 1.85)]
    best, why = choose(points, 0.01, Timings())
    assert (
        best.rule == "dense" and "gains +8% over f16 dense" in why and "its bytes say +25%" in why
    )
    points[1] = replace(points[1], seconds=1.7)
    assert choose(points, 0.01, Timings())[0].rule == "mixed"


def test_what_was_measured_on_a_part_is_not_refused_within_its_interval() -> None:
    dense = point("f16", "dense", 0, 200, 0.0, 2.0)
    rule = point("f16", "mixed", 0.2, 160, 0.02, 1.6)
    unsure = replace(rule.close, perplexity_increase_error=0.015)
    part = replace(rule, close=unsure, is_whole=False)
    assert choose([dense, part], 0.01, Timings())[0] is part
    assert choose([dense, replace(part, is_whole=True)], 0.01, Timings())[0] is dense
    assert choose([dense, part], 0.004, Timings())[0] is dense


def test_seconds_follow_the_bytes_beside_timed_points() -> None:
    points = [
        point("q8_0", "dense", 0, 100, 0), point("q8_0", "mixed", 0.16, 80, 0),
        point("q8_0", "mixed", 0.08, 90, 0), point("q8_0", "hidden", 0.08, 90, 0),
        point("f16", "dense", 0, 200, 0), point("f16", "mixed", 0.5, 100, 0),
    ]  # fmt: skip
    q8, f16, more = (points[number].trial for number in (0, 4, 1))
    timings = Timings((Rounds(trials=(f16, q8, more), seconds=((3.0, 1.0, 0.9),)),))
    found = timed_points(points, timings)
    assert [p.seconds for p in found] == pytest.approx([1.0, 0.9, 1.0, 0.9, 3.0, 1.5])
    assert [p.is_timed for p in found] == [True, True, False, False, True, False]
    less = Rounds(trials=(f16, points[2].trial), seconds=((3.0, 1.1),))
    found = timed_points(points, Timings((*timings.groups, less)))
    assert [p.seconds for p in found][:3] == pytest.approx([1.0, 0.9, 1.1])


def test_every_rule_of_every_type_is_timed_where_it_may_be_advised() -> None:
    points = [
        point("f16", "dense", 0, 200, 0), point("f16", "gates", 0.2, 160, 0.02),
        point("f16", "gates", 0.08, 184, 0.015), point("f16", "mixed", 0.08, 184, 0.001),
        point("f16", "mixed", 0.16, 168, 0.005), point("f16", "mixed", 0.24, 152, 0.03),
        point("q8_0", "mixed", 0.08, 92, 0.002),
    ]  # fmt: skip
    assert [p.name for p in to_time(points, 0.01)] == ["f16 gates 8%", "f16 mixed 16%",
                                                       "q8_0 mixed 8%"]  # fmt: skip


@pytest.mark.parametrize(("tokens", "loss"), [(100, 0.01), (4096, -1.0), (4096, math.nan)])
def test_impossible_options_of_advise_are_refused(tokens: int, loss: float) -> None:
    from hotsplit.measure.advise.config import AdviseConfig

    with pytest.raises(HotsplitError, match="wanted"):
        AdviseConfig(model=Path("m"), corpora=(Path("c"),), max_tokens=tokens, max_loss=loss)
