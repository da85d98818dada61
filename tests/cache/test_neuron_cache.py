"""The neuron cache without a GPU: its tables keep units and slots one to one, and what cannot work
is refused or said."""

import dataclasses

import numpy as np
import pytest
from models import byte_level_keys, make_model, make_sizes
from random_policy import RandomPolicy
from test_runtime import make_split

from hotsplit.artifacts.cache_plan import CachePlan
from hotsplit.artifacts.split_file import Split
from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.options.neuron_cache_options import CacheCosts, CacheOptions
from hotsplit.runtime.neuron_cache.cache_slots import Residency
from hotsplit.runtime.neuron_cache.native.policy_library import SWAP
from hotsplit.runtime.neuron_cache.setup import first_residents, setup_of

F, L = 160, 3


def test_residency_stays_a_bijection_under_any_swaps():
    random = np.random.default_rng(0)
    for seed in range(20):
        num_slots = random.integers(0, F + 1, L)
        num_slots[random.integers(L)] = random.integers(1, F)
        first = [random.permutation(F)[:count] for count in num_slots]
        policy = RandomPolicy(first, F, most_rows=40, seed=seed)
        residency = Residency(first, F)
        for _ in range(50):
            swaps = policy.step(np.zeros((1, L, 5), np.uint32))
            assert len(swaps) <= 40
            before = residency.slot_LF.copy()
            residency.swap(swaps)
            residency.check()
            assert (residency.num_slots_L == num_slots).all()
            changed = (before != residency.slot_LF).sum()
            assert changed == 2 * len(swaps)
            for layer in range(L):
                hot = set(residency.id_N(layer).tolist())
                assert sorted(hot | set(residency.cold(layer).tolist())) == list(range(F))


def test_impossible_swaps_change_nothing():
    residency = Residency([np.arange(4), np.arange(0)], 9)
    before = residency.slot_LF.copy()
    of_slots = ([(0, 4, 5, 0)], [(1, 0, 5, 0)])  # that do not exist, in a layer with slots or none
    of_units = ([(0, 1, 5, 0)], [(0, 1, 2, 1)])  # one that is elsewhere leaves, or is there already
    twice = ([(0, 1, 5, 1), (0, 1, 6, 1)], [(0, 1, 5, 1), (0, 2, 5, 2)])
    for wrong in (*of_slots, *of_units, *twice):
        with pytest.raises(AssertionError):
            residency.swap(np.array([(*swap, 0.0) for swap in wrong], SWAP))
        assert (residency.slot_LF == before).all()
        residency.check()
    residency.slot_LF[0, 5] = 1
    with pytest.raises(AssertionError):
        residency.check()


def with_cache(tmp_path):
    """A model with a tokenizer and a plan with a cache, for a fast GPU and a slow CPU."""
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(
        num_layers=L, num_neurons=F, context_length=256, vocab_size=vocab_size, width=128
    )
    model = make_model(sizes=shape, kind="q8_0", extra_keys=keys)
    model = dataclasses.replace(model, threshold_L=(0.0,) * L, path=tmp_path / "m.gguf")
    model.save(model.path)
    names = ("hot_s", "hot_row_s", "cold_s", "cold_row_s", "copy_row_s", "gather_row_s")
    times = dict(zip(names, (0.0, 1e-9, 0.0, 1e-6, 1e-7, 1e-8), strict=True))
    each = {f"{name}_L": np.full(L, time) for name, time in times.items()}
    given = CacheCosts(**each, rest_s=1e-5, copy_s=1e-7)
    frequency = tuple(np.full(F, 0.5, np.float32) for _ in range(L))
    cache = CachePlan(most_rows=16, costs=given, frequency=frequency)
    ids = np.random.default_rng(3).permutation(F)
    hot = [ids[:60], ids[30:90], ids[:0]]
    make_split(model, hot, context_length=256, cache=cache).save(tmp_path / "s.gguf")
    return model


def test_a_cache_that_cannot_work_is_refused(tmp_path):
    model = with_cache(tmp_path)
    split = Split.load(tmp_path / "s.gguf")
    assert setup_of(None, split, "dense") is setup_of("off", split, split.mode) is None
    assert setup_of(None, split, split.mode).most_rows == 16
    with pytest.raises(HotsplitError, match=f"are for mode {split.mode}, and the mode is dense"):
        setup_of(CacheOptions(), split, "dense")
    whole = make_split(model, [np.arange(F), np.arange(0), np.arange(F)], context_length=256)
    with pytest.raises(HotsplitError, match="divides no layer"):
        first_residents(model, whole)


def test_commands_refuse_wrong_settings_and_say_that_a_cache_needs_a_gpu(tmp_path, capsys):
    with_cache(tmp_path)
    model, split = str(tmp_path / "m.gguf"), str(tmp_path / "s.gguf")
    command = ["generate", model, "-p", "the", "-n", "3", "--temp", "0", "--device", "cpu"]
    assert main([*command, "--split", split, "-v"]) == 0
    assert "so it is off without one" in capsys.readouterr().err
    for wrong, line in (
        ("decay=2", "decay is 2.0, wanted a number from 0"),
        ("most_rows=300", "room for 16 rows"),
        ("size=3", "wanted on or NAME=VALUE"),
    ):
        assert main([*command, "--split", split, "--neuron-cache", wrong]) == 1
        assert line in capsys.readouterr().err
    assert main([*command, "--neuron-cache", "on"]) == 1
    assert "needs a plan that has room for it" in capsys.readouterr().err
