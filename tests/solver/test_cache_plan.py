"""The neuron cache in a plan: its file, its times compared with the plan's, its bytes."""

from dataclasses import replace

import numpy as np
import pytest
from models import (
    make_inputs,
    make_machine,
    make_model,
    make_profile,
    make_sizes,
    power_law_frequencies,
)
from test_runtime import make_split

from hotsplit.artifacts.cache_plan import CachePlan
from hotsplit.artifacts.model_gguf import SPLIT_ARCHITECTURE
from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry, read_gguf, write_gguf
from hotsplit.options.neuron_cache_options import CacheCosts
from hotsplit.solver.cache_costs import cache_costs, expected_reads
from hotsplit.solver.problem import of_counts, placement_seconds

CLOSE = 1e-9
S = "hotsplit.split."


def made(mode: str, *, density: float | None = None, machine=None, hot=(20, 0, 96, 50)):
    """(inputs, problem, placement) with two layers divided; the dense block of one of them is on
    the GPU."""
    rank = 8 if mode == "predicted" else 0
    shape = make_sizes(num_layers=4)
    model = make_model(sizes=shape, kind="f16", predictor_rank=rank, predictor_density=density)
    profile = make_profile(model, power_law_frequencies(4, 96, density=0.3))
    machine = machine or make_machine(cpu_gb_per_s=0.005, gpu_gb_per_s=0.5, chosen_share=0.5)
    inputs = make_inputs(model, profile, machine, 1 << 30, mode=mode)
    problem = inputs.pipeline().model
    placement = of_counts(problem, np.array(hot), np.array([True, True, False, False]), True)
    return inputs, problem, placement


def seconds(costs: CacheCosts, hot_rows_L: np.ndarray, cold_rows_L: np.ndarray) -> float:
    """The seconds of a step that reads these rows, by CacheCosts."""
    hot_L = costs.hot_s_L + costs.hot_row_s_L * hot_rows_L
    cold_L = costs.cold_s_L + costs.cold_row_s_L * cold_rows_L
    return float(np.maximum(hot_L, cold_L).sum() + costs.rest_s)


SLOW_GPU = make_machine(cpu_gb_per_s=0.5, gpu_gb_per_s=0.01, launch_s=1e-7, hand_over_s=1e-7)


@pytest.mark.parametrize("machine", [None, SLOW_GPU])
@pytest.mark.parametrize(
    "mode, density", [("exact", None), ("predicted", None), ("predicted", 0.4)]
)
def test_the_expected_step_takes_the_plans_seconds(mode, density, machine):
    inputs, problem, placement = made(mode, density=density, machine=machine)
    costs = cache_costs(inputs, problem, placement)
    reads_LF = np.take_along_axis(expected_reads(inputs), problem.order_LF.astype(int), axis=1)
    hot_L = (reads_LF * placement.hot_LF).sum(axis=1)
    cold_L = (reads_LF * ~placement.hot_LF).sum(axis=1)
    want = placement_seconds(problem, placement)
    assert seconds(costs, hot_L, cold_L) == pytest.approx(want, rel=CLOSE)
    assert abs(seconds(costs, hot_L, 2 * cold_L + 1) / want - 1) > CLOSE or machine is SLOW_GPU
    assert abs(seconds(costs, 2 * hot_L, cold_L) / want - 1) > CLOSE or machine is not SLOW_GPU
    is_cached_L = [True, False, False, True]
    for name in ("hot_s_L", "hot_row_s_L", "cold_s_L", "cold_row_s_L", "copy_row_s_L"):
        assert (getattr(costs, name) > 0).tolist() == is_cached_L, name


def test_the_times_of_a_row_by_hand():
    """Mode exact, f16, no predictor: rows of up and down have 64 values. One thread gathers, at
    half the CPU's rate; it reads and writes every byte and spends 10 us on each swap."""
    parts = made(
        "exact",
        machine=make_machine(
            cpu_gb_per_s=2.0,
            gpu_gb_per_s=100.0,
            launch_s=3e-6,
            hand_over_s=7e-6,
            copy_latency_s=5e-6,
        ),
    )
    costs, machine = cache_costs(*parts), parts[0].machine
    link = machine.gpus[0].host_to_device_gb_per_s.best * 1e9
    gather = machine.cpu_bandwidth_gb_per_s[min(machine.cpu_bandwidth_gb_per_s)].best * 1e9
    assert costs.copy_s == 5e-6
    for layer, num_hot in ((0, 20), (3, 50)):
        assert costs.hot_row_s_L[layer] == pytest.approx(2 * 128 / 100e9)
        assert costs.hot_s_L[layer] == pytest.approx(3 * 3e-6 + num_hot * 128 / 100e9)
        assert costs.cold_row_s_L[layer] == pytest.approx(2 * 128 / 2e9)
        assert costs.cold_s_L[layer] == pytest.approx(7e-6 + (96 - num_hot) * 128 / 2e9)
        assert costs.copy_row_s_L[layer] == pytest.approx(3 * 128 / link)
        assert costs.gather_row_s_L[layer] == pytest.approx(2 * 3 * 128 / gather + 1e-5)


def test_a_row_at_the_rate_of_chosen_rows():
    """All gates are read, other rows are chosen: a chosen row takes longer per byte than the
    layer's mean."""
    inputs, problem, placement = made("exact")
    costs = cache_costs(inputs, problem, placement)
    for layer in (0, 3):
        density = inputs.profile.frequency_LF[layer].mean()
        want = 2 * 128 / inputs.machine.cpu_rate("f16", density=density)
        assert costs.cold_row_s_L[layer] == pytest.approx(want)
        assert want > 2 * 128 * problem.cpu_s_per_byte_L[layer] * 1.01


def a_cache(num_layers: int = 2, num_neurons: int = 96, *, most_rows: int = 4) -> CachePlan:
    some_L = np.linspace(1e-6, 1e-5, num_layers)
    random = np.random.default_rng(0)
    return CachePlan(
        most_rows=most_rows,
        costs=CacheCosts(
            hot_s_L=some_L,
            hot_row_s_L=some_L / 7,
            cold_s_L=some_L * 3,
            cold_row_s_L=some_L / 3,
            copy_row_s_L=some_L / 9,
            gather_row_s_L=some_L / 11,
            rest_s=1 / 3,
            copy_s=1e-5 / 3,
        ),
        frequency=tuple(random.random((num_layers, num_neurons)).astype(np.float32)),
    )


@pytest.fixture(scope="module")
def model():
    return make_model()


def a_plan(model, **changes) -> Split:
    hot = [np.arange(9, dtype=np.int32)[::-1], np.arange(0, dtype=np.int32)]
    return make_split(model, hot, cache=a_cache(**changes))


def test_a_plan_keeps_its_cache_in_its_file(tmp_path, model):
    plan = a_plan(model)
    plan.save(tmp_path / "plan")
    again = Split.load(tmp_path / "plan")
    again.check_against(model, tmp_path / "plan")
    assert again.cache.most_rows == 4 and again.gpu_bytes == plan.gpu_bytes
    for name, value in vars(plan.cache.costs).items():
        assert np.array_equal(getattr(again.cache.costs, name), value), name  # to the bit
    assert np.array_equal(again.cache.frequency_LF, plan.cache.frequency_LF)
    assert again.cache.frequency_LF.dtype == np.float32
    keys, tensors = read_gguf(tmp_path / "plan", "plan")
    assert keys[S + "version"] == 1 and keys[S + "cache.rest_s"] == 1 / 3
    assert tensors["cache.hot_s"].read().tolist() == [1e-6, 1e-5]


def own_content(path):
    """The keys and tensors of a plan, without the keys that the writer adds."""
    keys, tensors = read_gguf(path, "plan")
    return {k: v for k, v in keys.items() if k[:5] != "GGUF." and k[:8] != "general."}, tensors


def changed(name: str, edit):
    def change(keys, tensors):
        tensors[name] = edit(np.array(tensors[name].read()))

    return change


def key(name: str, value):
    def change(keys, tensors):
        keys[S + name] = value

    return change


def without(*names: str):
    def change(keys, tensors):
        for name in names:
            keys.pop(S + name, None)
            tensors.pop(name, None)

    return change


def as_f32(array: np.ndarray):
    return array_entry(array, "f32")


HOSTILE = {
    "no row": (key("cache.most_rows", np.uint32(0)), "cache.most_rows is 0"),
    "too many rows": (key("cache.most_rows", np.uint32(1 << 20)), "wanted at most 65536"),
    "rows as text": (key("cache.most_rows", "4"), "cache.most_rows is '4'"),
    "rest below 0": (key("cache.rest_s", np.float64(-1)), "rest_s of the cache"),
    "rest of NaN": (key("cache.rest_s", np.float64("nan")), "rest_s is nan"),
    "copy of ages": (key("cache.copy_s", np.float64(1e40)), "copy_s of the cache"),
    "no copy": (without("cache.copy_s"), "key 'cache.copy_s' is missing"),
    "tensors without keys": (
        without("cache.copy_s", "cache.rest_s", "cache.most_rows"),
        "unknown tensor 'blk.0.ffn_freq",
    ),
    "times below 0": (changed("cache.cold_s", lambda a: -a), "cold_s_L of the cache"),
    "times of NaN": (changed("cache.hot_row_s", lambda a: a * np.nan), "hot_row_s_L of the cache"),
    "times of one layer": (changed("cache.hot_s", lambda a: a[:1]), "not cover the same number"),
    "times of f32": (changed("cache.hot_s", as_f32), "cache.hot_s is f32 .2., wanted f64"),
    "times in rows": (changed("cache.hot_s", lambda a: a[None]), "cache.hot_s is f64 .1, 2."),
    "no times": (without("cache.gather_row_s"), "tensor 'cache.gather_row_s' of the neuron cache"),
    "frequency of NaN": (
        changed("blk.1.ffn_frequency", lambda a: as_f32(a * np.nan)),
        "layer 1: .* not within 0..1",
    ),
    "frequency above 1": (
        changed("blk.0.ffn_frequency", lambda a: as_f32(a + 1)),
        "layer 0: .* not within 0..1",
    ),
    "frequencies of some": (
        changed("blk.1.ffn_frequency", lambda a: as_f32(a[:-1])),
        r"float32 \[95\], wanted f32 \[96\]",
    ),
    "no frequencies": (without("blk.1.ffn_frequency"), "tensor .blk.1.ffn_frequency. of the"),
    "mode dense": (key("mode", "dense"), "mode dense, which reads every neuron"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_caches_are_refused_in_one_line(tmp_path, model, name):
    change, words = HOSTILE[name]
    a_plan(model).save(tmp_path / "plan")
    keys, tensors = own_content(tmp_path / "plan")
    change(keys, tensors)
    tensors = {
        name: array_entry(entry, "f64") if isinstance(entry, np.ndarray) else entry
        for name, entry in tensors.items()
    }
    write_gguf(tmp_path / "new", SPLIT_ARCHITECTURE, keys, tensors)
    with pytest.raises(HotsplitError, match=words) as refused:
        Split.load(tmp_path / "new")
    assert "run hotsplit solve again" in str(refused.value)


def test_a_cache_of_another_model_is_refused(model):
    plan = a_plan(model, num_neurons=95)
    with pytest.raises(HotsplitError, match="frequencies of 95 neurons a layer"):
        plan.check_against(model, model.path)
    with pytest.raises(HotsplitError, match="a neuron cache of 3 layers for 2"):
        a_plan(model, num_layers=3).validate()
    more = replace(a_plan(model), cache=a_cache(most_rows=5))
    with pytest.raises(HotsplitError, match="neuron_cache of .* takes .* bytes on the GPU"):
        replace(more, vram_budget_bytes=1 << 30).check_against(model, model.path)
