"""Limits without training: ranks, energies, the allocation of bytes, and the advice."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from models import family_model
from torch.nn import functional as F

from hotsplit.artifacts.limits_file import LayerLimits
from hotsplit.errors import HotsplitError
from hotsplit.measure.advise.choice import Point, choose, timed_points, to_time, with_front
from hotsplit.measure.advise.timings import Rounds, Timings
from hotsplit.profile.sparsity.limit_meter import Closeness, _closeness, _compare
from hotsplit.profile.sparsity.limit_search import (
    PROBE,
    SHARES,
    Allocation,
    Bytes,
    LayerScores,
    allocate,
    num_probes,
)


def scores(rng: np.random.Generator, scale: float = 1.0) -> LayerScores:
    gate_TF, given_TF = (
        torch.from_numpy(rng.exponential(scale, (40, 50)).astype(np.float32)) for _ in range(2)
    )
    factor_F = torch.from_numpy(rng.uniform(0.5, 2.0, 50).astype(np.float32))
    return LayerScores(rank_TF=gate_TF * factor_F, factor_F=factor_F, given_TF=given_TF)


SIZES = Bytes(saved_L=np.full(2, 3000, np.int64), total=14_200)  # of two layers


def test_limits_silence_their_share_of_the_sample() -> None:
    layer = scores(np.random.default_rng(0))
    assert layer.limits(0.0).gate_F is None
    gate_TF = (layer.rank_TF / layer.factor_F).numpy()
    for share in SHARES[1:]:
        limit_F = layer.limits(share).gate_F
        assert limit_F is not None and limit_F.dtype == np.float32
        assert abs((gate_TF <= limit_F).mean() - share) < 2e-3


def test_the_limit_of_values_with_zero_weights_is_finite() -> None:
    layer = scores(np.random.default_rng(1))
    none = replace(layer, rank_TF=layer.rank_TF * 0, factor_F=layer.factor_F * 0)
    limit_F = none.limits(0.5).gate_F
    assert limit_F is not None and np.isfinite(limit_F).all()


def test_lost_energies_equal_those_of_a_loop_in_f64() -> None:
    layer = scores(np.random.default_rng(2))
    lost_A = layer.lost_A()
    order = np.argsort(layer.rank_TF.numpy().ravel())
    given = layer.given_TF.double().numpy().ravel()[order]
    for place, share in enumerate(SHARES):
        lowest = given[: int(share * len(given))]
        assert lost_A[place] == pytest.approx((lowest**2).sum() / 40, rel=1e-9)


def with_prices(seed: int) -> Allocation:
    rng = np.random.default_rng(seed)
    allocation = Allocation([scores(rng), scores(rng, 3.0)], SIZES)
    allocation.calibrate(rng.uniform(0.01, 0.2, 2).tolist(), 0.3)
    return allocation


@pytest.mark.parametrize("seed", range(3))
def test_no_other_choice_that_saves_as_much_loses_less(seed: int) -> None:
    """Compared with every pair of shares of the two layers."""
    allocation = with_prices(seed)
    lost_LA = allocation.energy_LA * allocation.sensitivity_L[:, None]
    saved_LA = allocation.saved_LA
    for share in (0.05, 0.15, 0.3):
        choice = allocation.best(share)
        assert choice is not None and choice.saved_share >= share
        least = min(
            lost_LA[0, a] + lost_LA[1, b]
            for a, b in itertools.product(range(20), repeat=2)
            if saved_LA[0, a] + saved_LA[1, b] >= choice.saved_share * SIZES.total - 1e-6
        )
        assert choice.loss == pytest.approx(least, rel=1e-9)


def test_a_choice_saves_what_it_states() -> None:
    allocation = with_prices(7)
    choice = allocation.best(0.1)
    assert choice is not None
    assert choice.saved_share == pytest.approx(3000 * sum(choice.share_L) / SIZES.total)
    assert allocation.best(0.99) is None


def test_sensitivities_make_the_sum_equal_the_probes() -> None:
    rng = np.random.default_rng(5)
    layers = [scores(rng), scores(rng, 2.0)]
    seen: list[tuple[LayerLimits, ...]] = []

    def kl_of(limits_L: tuple[LayerLimits, ...]) -> float:
        """A planted loss: the second layer is eight times as sensitive."""
        seen.append(limits_L)
        costs = zip(limits_L, (1e-3, 8e-3), strict=True)
        return sum(cost for limits, cost in costs if limits.gate_F is not None)

    allocation = allocate(layers, SIZES, kl_of)
    assert len(seen) == num_probes(2) == 3
    found = allocation.sensitivity_L * allocation.energy_LA[:, SHARES.index(PROBE)]
    assert found == pytest.approx([1e-3, 8e-3], rel=1e-6)


def test_the_bytes_of_a_model_are_those_of_its_matrices() -> None:
    """Without gates, silence is decided by the up projection, which is read in any case."""
    for family, saved in (("llama", ("ffn_up", "ffn_down_t")), ("falcon", ("ffn_down_t",))):
        model = family_model(family)
        found = Bytes.of(model)
        want = [sum(model.tensors[f"blk.{n}.{name}.weight"].num_bytes for name in saved)
                for n in range(model.spec.num_layers)]  # fmt: skip
        assert found.saved_L.tolist() == want
        matrices = {n: e.num_bytes for n, e in model.tensors.items() if len(e.shape) == 2}
        if "output.weight" in matrices:
            del matrices["token_embd.weight"]
        assert found.total == sum(matrices.values())


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
    found = allocate(all_scores, SIZES, lambda limits: -1e-7)
    choices = [found.best(share) for share in (0.1, 0.3)]
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
        point("q4_0", "gates", 0.16, 84, 0.008, 0.85),
    ]
    best, why = choose(with_front(points), 0.01, Timings())
    assert best is not None and best.rule == "gates" and "+18%" in why


def test_a_smaller_type_that_beats_every_rule_is_advised() -> None:
    points = [
        point("f16", "dense", 0, 200, 0.0, 2.0), point("f16", "gates", 0.16, 168, 0.004, 1.7),
        point("q8_0", "dense", 0, 106, 0.001, 1.1), point("q8_0", "gates", 0.16, 90, 0.03, 0.95),
    ]  # fmt: skip
    best, why = choose(with_front(points), 0.01, Timings())
    assert best.name == "q8_0 dense" and why.startswith("no rule pays off here")
    best, why = choose(with_front(points), 0.0, Timings())
    assert best.name == "f16 dense" and "q8_0 dense would be +82% faster" in why


def test_the_reason_tells_costly_rules_from_rules_that_were_not_measured() -> None:
    points = [point("f16", "dense", 0, 200, 0.0, 2.0), point("f16", "gates", 0.2, 160, 0.02, 1.6)]
    _, why = choose(points, 0.01, Timings())
    assert why == (
        "no rule pays off here: every rule costs more than 1.0% of perplexity; take f16 dense"
    )
    assert choose(points[:1], 0.01, Timings())[1] == "no rule was measured; take f16 dense"


def test_a_gain_too_small_to_matter_is_not_advised() -> None:
    points = [point("q8_0", "dense", 0, 100, 0.0, 1.0), point("q8_0", "gates", 0.02, 98, 0.0, 0.98)]
    assert choose(points, 0.01, Timings())[0].rule == "dense"


def test_the_front_has_what_nothing_beats() -> None:
    points = [
        point("f16", "dense", 0, 0, 0.0, 2.0), point("f16", "gates", 0.1, 0, 0.05, 1.9),
        point("q8_0", "dense", 0, 0, 0.01, 1.0), point("q8_0", "gates", 0.1, 0, 0.04, 0.9),
    ]  # fmt: skip
    assert [p.is_on_front for p in with_front(points)] == [True, False, True, True]


def test_a_rule_much_slower_than_its_bytes_say_is_not_advised() -> None:
    points = [point("f16", "dense", 0, 200, 0.0, 2.0), point("f16", "gates", 0.2, 160, 0.0, 1.85)]
    best, why = choose(points, 0.01, Timings())
    assert (
        best.rule == "dense" and "gains +8% over f16 dense" in why and "its bytes say +25%" in why
    )
    points[1] = replace(points[1], seconds=1.7)
    assert choose(points, 0.01, Timings())[0].rule == "gates"


def test_what_was_measured_on_a_part_is_not_refused_within_its_interval() -> None:
    dense = point("f16", "dense", 0, 200, 0.0, 2.0)
    rule = point("f16", "gates", 0.2, 160, 0.02, 1.6)
    unsure = replace(rule.close, perplexity_increase_error=0.015)
    part = replace(rule, close=unsure, is_whole=False)
    assert choose([dense, part], 0.01, Timings())[0] is part
    assert choose([dense, replace(part, is_whole=True)], 0.01, Timings())[0] is dense
    assert choose([dense, part], 0.004, Timings())[0] is dense


def test_seconds_follow_the_bytes_beside_timed_points() -> None:
    points = [
        point("q8_0", "dense", 0, 100, 0), point("q8_0", "gates", 0.16, 80, 0),
        point("q8_0", "gates", 0.08, 90, 0), point("q8_0", "limits", 0.08, 90, 0),
        point("f16", "dense", 0, 200, 0), point("f16", "gates", 0.5, 100, 0),
    ]  # fmt: skip
    q8, f16, more = (points[number].trial for number in (0, 4, 1))
    timings = Timings((Rounds(trials=(f16, q8, more), seconds=((3.0, 1.0, 0.9),)),))
    found = timed_points(points, timings)
    assert [p.seconds for p in found] == pytest.approx([1.0, 0.9, 1.0, 0.9, 3.0, 1.5])
    assert [p.is_timed for p in found] == [True, True, False, False, True, False]
    less = Rounds(trials=(f16, points[2].trial), seconds=((3.0, 1.1),))
    found = timed_points(points, Timings((*timings.groups, less)))
    assert [p.seconds for p in found][:3] == pytest.approx([1.0, 0.9, 1.1])


def test_one_share_of_each_type_is_timed_where_it_may_be_advised() -> None:
    points = [
        point("f16", "dense", 0, 200, 0), point("f16", "gates", 0.08, 184, 0.001),
        point("f16", "gates", 0.16, 168, 0.005), point("f16", "gates", 0.24, 152, 0.03),
        point("q8_0", "gates", 0.16, 84, 0.02), point("q8_0", "gates", 0.08, 92, 0.015),
    ]  # fmt: skip
    assert [p.name for p in to_time(points, 0.01)] == ["f16 gates 16%", "q8_0 gates 8%"]


@pytest.mark.parametrize(("tokens", "loss"), [(100, 0.01), (4096, -1.0), (4096, math.nan)])
def test_impossible_options_of_advise_are_refused(tokens: int, loss: float) -> None:
    from hotsplit.measure.advise.config import AdviseConfig

    with pytest.raises(HotsplitError, match="wanted"):
        AdviseConfig(model=Path("m"), corpora=(Path("c"),), max_tokens=tokens, max_loss=loss)
