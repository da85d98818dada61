"""Thresholds for SiLU models: read off histograms, searched for under a budget, put into files."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch
from checkpoints import random_llama
from models import make_model
from reference import logits_ref

from hotsplit import Engine
from hotsplit.artifacts.profile_file import EDGES, NUM_BINS, Profile
from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.measure.evaluate.config import EvalConfig
from hotsplit.measure.evaluate.quality import evaluate
from hotsplit.options.engine_config import EngineConfig
from hotsplit.profile.collect import profile
from hotsplit.profile.config import ProfileConfig
from hotsplit.profile.count.counting import Counter, gates_of
from hotsplit.profile.sparsity import thresholds as module
from hotsplit.profile.sparsity.thresholds import (
    MOST_STEPS,
    STEP,
    Cost,
    Goal,
    Meter,
    greedy,
    most_runs,
    search,
    thresholds_for,
    up_to,
)

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


# ---- from histograms -------------------------------------------------------------------------


def test_each_layer_is_cut_at_its_own_share():
    histogram_LB = np.zeros((2, NUM_BINS), np.int64)
    histogram_LB[0, [100, 110, 120]] = [50, 30, 20]
    histogram_LB[1, [60, 70]] = [10, 90]
    low, high = thresholds_for(histogram_LB, (0.25, 0.55))
    assert low == pytest.approx((EDGES[100] + EDGES[101]) / 2)
    assert high == pytest.approx((EDGES[70] + EDGES[71]) / 2)
    assert thresholds_for(histogram_LB, 0.0) == (0.0, 0.0)
    assert thresholds_for(histogram_LB, 1.0) == (np.float32(EDGES[-1]),) * 2


def test_the_share_below_is_the_one_asked_for():
    values = np.abs(np.random.default_rng(0).standard_normal(100_000)).astype(np.float32)
    bins = np.searchsorted(EDGES, values, side="right") - 1
    histogram_LB = np.bincount(bins, minlength=NUM_BINS)[None]
    shares = np.linspace(0.02, 0.98, 25)
    cuts = [thresholds_for(histogram_LB, share)[0] for share in shares]
    assert cuts == sorted(cuts)
    found = [(values <= cut).mean() for cut in cuts]
    assert np.abs(np.array(found) - shares).max() < 0.002
    edges_only = [EDGES[np.searchsorted(EDGES, cut) - 1] for cut in cuts]
    rough = [(values <= cut).mean() for cut in edges_only]
    assert np.abs(np.array(rough) - shares).max() > 0.01  # cuts at edges of bins are off by more


# ---- the search ------------------------------------------------------------------------------


def additive(table_LK):
    """A measure whose cost is a sum over layers; it counts its calls."""

    def measure(sparsity_L):
        measure.calls += 1
        levels = [round(share / STEP) for share in sparsity_L]
        total = sum(row[level] for row, level in zip(table_LK, levels, strict=True))
        return Cost(divergence=total, loss=total)

    measure.calls = 0
    return measure


def best_by_total(table_LK):
    """The least cost of every sum of levels, by brute force."""
    best = {}
    for levels in itertools.product(*(range(len(row)) for row in table_LK)):
        cost = sum(row[level] for row, level in zip(table_LK, levels, strict=True))
        best[sum(levels)] = min(cost, best.get(sum(levels), math.inf))
    return best


def is_best(allocations, table_LK):
    best = best_by_total(table_LK)
    return all(a.cost.divergence <= best[sum(a.steps_L)] + 1e-12 for a in allocations)


def convex_table(seed, num_layers, num_levels):
    steps = np.random.default_rng(seed).exponential(size=(num_layers, num_levels - 1))
    return np.concatenate([np.zeros((num_layers, 1)), np.cumsum(np.sort(steps), axis=1)], axis=1)


@pytest.mark.parametrize("seed", range(8))
def test_greedy_finds_what_brute_force_finds(monkeypatch, seed):
    monkeypatch.setattr(module, "MOST_STEPS", 2)
    table_LK = convex_table(seed, 2, 3)
    found = list(greedy(additive(table_LK), 2))
    assert [sum(a.steps_L) for a in found] == list(range(5))
    assert is_best(found, table_LK)


@pytest.mark.parametrize("seed", range(4))
def test_greedy_of_every_level_is_bounded_and_best_for_two_layers(seed):
    table_LK = convex_table(seed, 2, MOST_STEPS + 1)
    measure = additive(table_LK)
    found = list(greedy(measure, 2))
    assert len(found) == 2 * MOST_STEPS + 1 and is_best(found, table_LK)
    assert measure.calls <= most_runs(2)
    assert [a.steps_L for a in greedy(additive(table_LK), 2)] == [a.steps_L for a in found]


def test_the_comparison_rejects_another_order():
    table_LK = convex_table(0, 2, MOST_STEPS + 1)
    backwards = greedy(additive(table_LK[::-1]), 2)
    wrong = list(itertools.takewhile(lambda a: max(a.steps_L) < 4, backwards))
    wrong = [dataclasses.replace(a, cost=additive(table_LK)(a.sparsity_L)) for a in wrong]
    assert len(wrong) > 1 and not is_best(wrong, table_LK)


def test_layers_of_equal_cost_are_taken_in_order():
    found = list(itertools.islice(greedy(additive(np.zeros((3, 20))), 3), 4))
    assert [a.steps_L for a in found] == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)]


def test_more_layers_stay_within_the_bound_and_near_the_best():
    table_LK = convex_table(5, 6, MOST_STEPS + 1)
    measure = additive(table_LK)
    found = list(greedy(measure, 6))
    assert measure.calls <= most_runs(6)
    best = {0: 0.0}  # the least cost of every sum, layer by layer
    for row in table_LK:
        sums: dict[int, float] = {}
        for (total, cost), (level, more) in itertools.product(best.items(), enumerate(row)):
            sums[total + level] = min(sums.get(total + level, math.inf), cost + more)
        best = sums
    assert all(a.cost.divergence <= 1.1 * best[sum(a.steps_L)] + 1e-9 for a in found)
    half = 6 * 10
    uniform = additive(table_LK)([0.5] * 6).divergence
    (at_half,) = [a for a in found if sum(a.steps_L) == half]
    assert at_half.cost.divergence < uniform


def test_a_refused_layer_goes_no_further_and_the_others_do():
    table_LK = np.array([[0.0] + [10.0 + level for level in range(19)], np.arange(20) * 0.1])
    measure = additive(table_LK)
    found = list(greedy(measure, 2, lambda cost: cost.loss <= 1.05))
    assert found[-1].steps_L == (0, 10)
    assert all(a.cost.loss <= 1.05 for a in found)


# ---- on models -------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    """An engine of a random SiLU model, and the model."""
    model = make_model(activation="silu")
    model.save(tmp_path / "m.gguf")
    with Engine.load(tmp_path / "m.gguf", mode="exact") as engine:
        yield engine, model


def magnitudes(engine, windows):
    """histogram_LB of |act(gate)| of all neurons; the engine must not skip any."""
    model = engine.model
    counter = Counter(gates_of(model, (0.0,) * model.spec.num_layers), model.spec.most_neurons)
    with engine.observe(counter.observe, counter.wants):
        for ids_T in windows:
            engine.hidden(ids_T)
    return counter.arrays()["gate_histogram_LB"].numpy()


def test_the_meter_equals_float64(small):
    engine, model = small
    windows = [torch.tensor(IDS), torch.tensor(IDS[::-1][:9])]
    histogram_LB = magnitudes(engine, windows)
    meter = Meter(engine, histogram_LB, windows)
    got = meter((0.5, 0.5))
    cut_L = thresholds_for(histogram_LB, 0.5)
    model = dataclasses.replace(model, threshold_L=cut_L)
    divergence = loss = dense_loss = 0.0
    for ids in windows:
        p, q = (
            np.log(softmax(logits_ref(model, ids.tolist(), silent=silent)[:-1]))
            for silent in (None, by_layer(cut_L))
        )
        divergence += (np.exp(p) * (p - q)).sum()
        places = np.arange(len(ids) - 1), ids[1:].numpy()
        loss, dense_loss = loss - q[places].sum(), dense_loss - p[places].sum()
    count = sum(len(ids) - 1 for ids in windows)
    assert meter.num_tokens == count
    assert got.divergence == pytest.approx(divergence / count, rel=1e-3) and got.divergence > 1e-4
    assert got.loss == pytest.approx(loss / count, rel=1e-5)
    assert meter.dense_loss == pytest.approx(dense_loss / count, rel=1e-5)
    assert meter.increase(got) == pytest.approx(math.exp((loss - dense_loss) / count) - 1, rel=1e-3)
    nothing = meter((0.0, 0.0))
    assert nothing.divergence == 0 and nothing.loss == meter.dense_loss


def softmax(logits_TV):
    e = np.exp(logits_TV - logits_TV.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def by_layer(threshold_L):
    """Returns `silent` for the reference, which calls it once per layer, in order."""
    layers = iter(threshold_L)
    return lambda value: np.abs(value) <= next(layers)


def test_a_model_of_nan_is_refused(small, monkeypatch):
    engine, _ = small
    windows = [torch.tensor(IDS)]
    histogram_LB = magnitudes(engine, windows)
    nan_TV = torch.full((len(IDS), 50), torch.nan)
    monkeypatch.setattr(engine, "logits", lambda ids: nan_TV)
    with pytest.raises(HotsplitError, match="gave NaN"):
        Meter(engine, histogram_LB, windows)


def test_a_model_of_infinities_is_refused(small, monkeypatch):
    engine, _ = small
    meter = Meter(engine, magnitudes(engine, [torch.tensor(IDS)]), [torch.tensor(IDS)])
    logits_TV = torch.zeros(len(IDS), 50)
    logits_TV[:, IDS[1]] = -math.inf
    monkeypatch.setattr(engine, "logits", lambda ids: logits_TV)
    with pytest.raises(HotsplitError, match="gave NaN or infinity; convert its checkpoint again"):
        meter.run()


@pytest.mark.parametrize("budget, sparsity", [(0.02, 1.0), (0.2, 1.0), (9.0, 0.5)])
def test_a_search_keeps_to_its_goal(small, budget, sparsity):
    engine, _ = small
    tune, check = [torch.tensor(IDS)], [torch.tensor(IDS[::-1])]
    histogram_LB = magnitudes(engine, tune)
    goal = Goal(perplexity_budget=budget, sparsity=sparsity)
    lines = []
    found_L, report = search(engine, histogram_LB, tune, check, goal, lines.append)
    assert report.tuned_increase <= budget
    assert sum(report.sparsity_L) / 2 <= sparsity + 1e-9
    assert report.num_runs <= most_runs(2)
    assert engine.model.threshold_L == (0.0, 0.0)  # as it was
    engine.set_thresholds(found_L)
    meter = Meter(engine, histogram_LB, check)
    assert report.perplexity_increase == pytest.approx(meter.increase(meter(report.sparsity_L)))
    assert lines and "min left at most" in lines[-1]
    if budget == 9.0:
        assert sum(report.sparsity_L) / 2 == pytest.approx(0.5)


def test_no_room_for_a_step_is_an_error(small):
    engine, _ = small
    windows = [torch.tensor(IDS)]
    histogram_LB = magnitudes(engine, windows)
    with pytest.raises(HotsplitError, match="no room for one step"):
        search(engine, histogram_LB, windows, windows,
               Goal(perplexity_budget=1.0, sparsity=0.01), print)  # fmt: skip


def test_text_is_taken_from_the_front():
    windows = [torch.zeros(size, dtype=torch.int64) for size in (5, 4, 3)]
    assert [len(w) for w in up_to(windows, 9)] == [5, 4]
    assert [len(w) for w in up_to(windows, 8)] == [5]
    assert [len(w) for w in up_to(windows, 1)] == [5]


# ---- in files and commands -------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a random SiLU model, a text, and a profile with searched thresholds."""
    folder = tmp_path_factory.mktemp("thresholds")
    checkpoint = random_llama(folder / "hf", hidden_act="silu")
    convert(ConvertConfig(source=checkpoint, output=folder / "m.gguf", outtype="f32"))
    (folder / "t.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    report = profile(
        ProfileConfig(model=folder / "m.gguf", corpora=(folder / "t.txt",), output=folder / "p",
                      max_tokens=1900, target_sparsity=0.4, perplexity_budget=5.0)
    )  # fmt: skip
    return folder, report


def test_a_profile_with_a_budget_has_thresholds_for_it(made):
    folder, report = made
    num_layers = len(report.threshold_L)
    assert sum(report.search.sparsity_L) / num_layers == pytest.approx(0.4, abs=STEP / num_layers)
    assert Profile.load(folder / "p").threshold_L == report.threshold_L
    for density, share in zip(report.density_L, report.search.sparsity_L, strict=True):
        assert density == pytest.approx(1 - share, abs=0.05)
    assert json.dumps(dataclasses.asdict(report), default=str)


def test_thresholds_beside_a_model_equal_those_in_it(made, tmp_path):
    folder, _ = made
    convert(
        ConvertConfig(source=folder / "m.gguf", output=tmp_path / "m2", thresholds=folder / "p")
    )
    common = {"corpora": (folder / "t.txt",), "max_tokens": 300}
    inside = evaluate(EvalConfig(model=tmp_path / "m2", **common))
    beside = evaluate(
        EvalConfig(model=folder / "m.gguf", engine=EngineConfig(thresholds=folder / "p"), **common)
    )
    without = evaluate(EvalConfig(model=folder / "m.gguf", **common))
    assert inside == beside and beside.kl_mean > 0 == without.kl_mean
    assert sum(beside.hidden_share_L) < 0.7 * sum(without.hidden_share_L)


def test_generate_takes_thresholds(made, capsys):
    folder, _ = made
    command = ["generate", str(folder / "m.gguf"), "-p", "the fox", "-n", "8", "--temp", "0"]
    read = {}
    for name, options in (("without", []), ("with", ["--thresholds", str(folder / "p")])):
        assert main([*command, "--json", *options]) == 0
        read[name] = json.loads(capsys.readouterr().out)
    tokens = {name: report["decode_tokens"] for name, report in read.items()}
    each = {name: read[name]["ffn_bytes"] / tokens[name] for name in read}
    # A third is the gates, which are read in any case; of the rest 40 % stay unread.
    assert each["with"] / each["without"] == pytest.approx(1 - 0.4 * 2 / 3, abs=0.06)


def damaged(folder, target, **changes):
    found = Profile.load(folder / "p")
    dataclasses.replace(found, **changes).save(target)
    return target


def test_wrong_thresholds_are_refused(made, tmp_path):
    folder, _ = made
    model = folder / "m.gguf"
    num_layers = len(Profile.load(folder / "p").threshold_L)
    for changes, message in (
        ({"model_id": "f" * 64}, "a profile of model ffffffffffff"),
        ({"threshold_L": (math.nan,) * num_layers}, "wanted a finite number"),
        ({"threshold_L": (-1.0,) * num_layers}, "finite numbers, at least 0"),
        ({"threshold_L": (math.inf,) * num_layers}, "wanted a finite number"),
    ):
        path = damaged(folder, tmp_path / "wrong", **changes)
        with pytest.raises(HotsplitError, match=message):
            Engine.load(model, thresholds=path)
        with pytest.raises(HotsplitError, match=message):
            convert(ConvertConfig(source=model, output=tmp_path / "out", thresholds=path))
    assert not (tmp_path / "out").exists()
    with pytest.raises(HotsplitError, match="dense uses no thresholds"):
        Engine.load(model, mode="dense", thresholds=folder / "p")
    with (
        Engine.load(model) as engine,
        pytest.raises(HotsplitError, match=f"wanted {num_layers} finite"),
    ):
        engine.set_thresholds((0.1,) * (num_layers + 1))


def test_thresholds_for_relu_models_are_refused(made, tmp_path):
    folder, _ = made
    checkpoint = random_llama(tmp_path / "hf", hidden_act="relu")
    convert(ConvertConfig(source=checkpoint, output=tmp_path / "m.gguf", outtype="f32"))
    with Engine.load(tmp_path / "m.gguf") as engine:
        model_id = engine.model.model_id
        with pytest.raises(HotsplitError, match="this one is relu"):
            engine.set_thresholds((0.1,) * engine.model.spec.num_layers)
    path = damaged(folder, tmp_path / "p", model_id=model_id)
    with pytest.raises(HotsplitError, match="this one is relu"):
        Engine.load(tmp_path / "m.gguf", thresholds=path)
    config = {
        "model": tmp_path / "m.gguf",
        "corpora": (folder / "t.txt",),
        "output": tmp_path / "q",
    }
    for option in ({"perplexity_budget": 0.01}, {"target_sparsity": 0.5}):
        with pytest.raises(HotsplitError, match="is relu"):
            profile(ProfileConfig(**config, **option))
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("budget", [0.0, -0.01, math.nan, math.inf])
def test_an_impossible_perplexity_budget_is_refused(tmp_path, budget):
    with pytest.raises(HotsplitError, match="perplexity budget"):
        ProfileConfig(model=tmp_path, corpora=(tmp_path,), output=tmp_path / "p",
                      perplexity_budget=budget)  # fmt: skip
