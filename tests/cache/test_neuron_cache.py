"""The neuron cache with both roles on the CPU: logits equal those without it bit for bit, whatever
is swapped; tables keep neurons and places one to one; the same text gives the same swaps."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from models import byte_level_keys, make_model, make_sizes, sparse_model
from paths import SEARCH_PATH
from random_policy import RandomPolicy, divided, random_setup
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.cache_plan import CachePlan
from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.model.spec import Activation
from hotsplit.options.neuron_cache import CacheCosts, CacheOptions
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.neuron_cache.native.library import SWAP
from hotsplit.runtime.neuron_cache.residency import Residency
from hotsplit.runtime.step.sequences import Part

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels are not built")
F, L, V = 160, 3, 50


def saved(tmp_path, kind="q8_0", activation: Activation = "relu", **shape):
    sizes = {"num_layers": L, "num_neurons": F, "context_length": 96} | shape
    model = sparse_model(sizes=make_sizes(**sizes), kind=kind, activation=activation)
    model = dataclasses.replace(model, path=tmp_path / "m.gguf")
    model.save(model.path)
    return model


class Texts:
    """Texts that grow, are rolled back, forked and closed at random, the same way on each
    engine."""

    def __init__(self, engines, seed):
        self.engines, self.random = engines, np.random.default_rng(seed)
        self.texts = [[engine.sequence()] for engine in engines]  # per engine, the same texts

    def step(self):
        """Changes some texts and computes a step; returns each engine's logits."""
        random, own = self.random, self.texts[0]
        room = own[0].owner.context_length
        action, one = random.random(), random.integers(len(own))
        if action < 0.03 and len(own) < 4:
            for engine, texts in zip(self.engines, self.texts, strict=True):
                texts.append(texts[one].fork() if own[one].length else engine.sequence())
        elif action < 0.05 and len(own) > 1:
            for texts in self.texts:
                texts.pop(one).close()
        elif action < 0.08:
            length = int(random.integers(own[one].length + 1))
            for texts in self.texts:
                texts[one].rollback(length)
        chosen = [n for n in range(len(own)) if random.random() < 0.7] or [0]
        counts = [int(random.choice([1, 1, 1, 2, 5, 17])) for _ in chosen]
        for number, count in zip(chosen, counts, strict=True):
            if own[number].length + count > room:
                for texts in self.texts:
                    texts[number].rollback(0)
        tokens = [random.integers(V, size=count).tolist() for count in counts]
        wanted = [str(random.choice(["last", "all"])) for _ in chosen]
        found = []
        for texts in self.texts:
            parts = [
                Part(sequence=texts[n], tokens=ids, wanted=want)
                for n, ids, want in zip(chosen, tokens, wanted, strict=True)
            ]
            found.append(torch.cat(texts[0].owner.run(parts)))
        self.num_tokens = sum(counts)
        return found


def grown_alike(model, mode, num_tokens, seed=0, **options):
    """Compares engines with and without a cache over at least `num_tokens`; returns the cache."""
    split, setup = divided(model.path, 0.4, 4), random_setup(seed=seed, **options)
    with (
        Engine.load(model.path, mode=mode, num_sequences=4) as plain,
        Engine.load(model.path, split, mode=mode, neuron_cache=setup) as cached,
    ):
        texts, done = Texts((plain, cached), seed), 0
        while done < num_tokens:
            want, got = texts.step()
            assert torch.equal(got, want), done
            done += texts.num_tokens
            cached.neuron_cache.slots.check()
        return cached.neuron_cache


@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0", "q6_k"])
def test_logits_equal_those_without_a_cache_bit_for_bit(tmp_path, kind, mode):
    width = 256 if kind == "q6_k" else 64
    cache = grown_alike(saved(tmp_path, kind, width=width), mode, 300)
    assert cache.num_swaps > 100


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
def test_logits_stay_equal_bit_for_bit_over_thousands_of_tokens(tmp_path, kind, mode):
    model = saved(tmp_path, kind, num_neurons=1100, width=128, context_length=900)
    cache = grown_alike(model, mode, 5000, most_rows=64)
    assert cache.num_swaps > 5000


@pytest.mark.parametrize("activation", ["fatrelu", "drelu"])
def test_any_activation(tmp_path, activation):
    assert grown_alike(saved(tmp_path, "f32", activation), "exact", 100).num_swaps


def test_with_three_threads(tmp_path, restore_library):
    library.set_threads(3)
    model = saved(tmp_path, num_neurons=1056, width=256)
    assert grown_alike(model, "predicted", 60, most_rows=64).num_swaps > 100


def planned(tmp_path, model, hot=None):
    ids = np.random.default_rng(3).permutation(F)
    hot = [ids[:60], ids[:0], ids] if hot is None else hot
    make_split(model, hot).save(tmp_path / "s.gguf")
    return tmp_path / "s.gguf"


def decoded(engine, ids):
    with engine.sequence() as text:
        return torch.cat([text.extend([token]) for token in ids])


@contextmanager
def plain_and_cached(path):
    with (
        Engine.load(path, mode="exact") as plain,
        Engine.load(path, divided(path), mode="exact", neuron_cache=random_setup()) as cached,
    ):
        yield plain, cached


IDS = np.random.default_rng(1).integers(0, V, 30).tolist()


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_a_plan_says_which_neurons_have_slots_at_first(tmp_path, mode):
    """Layers whose neurons are all hot or all cold get no slots."""
    model = saved(tmp_path)
    split = planned(tmp_path, model)
    with Engine.load(model.path, mode=mode) as plain:
        want = decoded(plain, IDS)
    with Engine.load(model.path, split=split, mode=mode, neuron_cache=random_setup()) as engine:
        hot = [len(block.id_N) for layer in engine.layers for block in layer.ffn.blocks]
        assert hot == [F, F, F]
        assert engine.neuron_cache.residency.num_slots_L.tolist() == [60, 0, 0]
        row_bytes = engine.layers[0].ffn.blocks[0].down.row_bytes
        with Engine.load(model.path, split=split, mode=mode) as static:
            before, after = (e.bytes_by_role["cpu"]["neuron_cache"] for e in (static, engine))
        assert (before, after) == (0, 60 * 3 * row_bytes)
        assert torch.equal(decoded(engine, IDS), want)
        assert engine.neuron_cache.num_swaps > 20


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_a_plan_sums_apart_unless_its_cache_is_on(tmp_path, kind):
    """With the cache on the bits are those without a plan, and with it off the plan's own, which
    differ by rounding. A text that was saved with the one sum is refused by the other."""
    model = saved(tmp_path, kind)
    split, found, keys = planned(tmp_path, model), {}, {}
    for name, options in (
        ("no plan", {}),
        ("on", {"split": split, "neuron_cache": random_setup()}),
        ("off", {"split": split, "neuron_cache": "off"}),
    ):
        with Engine.load(model.path, mode="exact", **options) as engine:
            found[name], keys[name] = decoded(engine, IDS), engine.prompt_key()
    assert torch.equal(found["on"], found["no plan"]) and keys["on"] == keys["no plan"]
    assert not torch.equal(found["on"], found["off"]) and keys["on"] != keys["off"]
    difference = (found["on"] - found["off"]).double().norm() / found["off"].double().norm()
    assert difference < (1e-5 if kind == "f32" else 1e-3)


def test_biases_move_with_their_rows(tmp_path):
    from checkpoints import random_model, save_tokenizer
    from test_families import CASES, converted

    folder = random_model(tmp_path / "hf", CASES["opt"])
    save_tokenizer(folder, 320)
    path = converted(folder, tmp_path / "m.gguf", outtype="f32")
    with plain_and_cached(path) as (plain, cached):
        assert cached.layers[0].ffn.blocks[0].gate.bias_N is not None
        ids = IDS[:20]
        assert torch.equal(decoded(cached, ids), decoded(plain, ids))
        assert cached.neuron_cache.num_swaps > 10


def test_an_observed_pass_reads_the_same_rows(tmp_path):
    """The ordinary path, which observers select, follows the tables too."""
    model = saved(tmp_path, "f32")
    seen = {}
    with plain_and_cached(model.path) as (plain, cached):
        decoded(cached, IDS)
        for engine in (plain, cached):
            with engine.observe(
                lambda n, i, t, e=engine: seen.__setitem__((e, n, i), t.clone()),
                lambda n, i: n in ("ffn_gate", "ffn_out"),
            ):
                decoded(engine, IDS[:1])
        for layer in range(L):
            for name in ("ffn_gate", "ffn_out"):
                assert torch.equal(seen[cached, name, layer], seen[plain, name, layer])


def test_the_policy_sees_the_bits_of_decoded_tokens(tmp_path):
    """It sees each token once: it learns from those of a prompt; the last one counts as decoded."""
    model = saved(tmp_path, "f32")
    split = divided(model.path)
    with Engine.load(model.path, split, mode="exact", neuron_cache=random_setup()) as engine:
        policy = engine.neuron_cache.policy
        with engine.sequence() as text:
            text.extend(IDS[:7])
            text.extend(IDS[7:9], wanted="all")
            text.extend(IDS[9:10])
        assert [len(bits) for bits in policy.learned] == [6]
        assert [len(bits) for bits in policy.shown] == [1, 2, 1]
        together = np.concatenate([policy.learned[0], *policy.shown])
    with Engine.load(model.path, split, mode="exact", neuron_cache=random_setup()) as engine:
        decoded(engine, IDS[:10])
        assert (np.concatenate(engine.neuron_cache.policy.shown) == together).all()


def swapped(tmp_path, ids, copy_bytes_per_s=None):
    path, setup = tmp_path / "m.gguf", random_setup(copy_bytes_per_s=copy_bytes_per_s)
    with Engine.load(path, divided(path, 0.4), mode="predicted", neuron_cache=setup) as engine:
        logits = decoded(engine, ids)
        return logits, engine.neuron_cache.residency.slot_LF.copy()


def test_a_run_can_be_repeated(tmp_path):
    """The same text gives the same tables, however slow the copies are."""
    saved(tmp_path)
    logits, slots = swapped(tmp_path, IDS)
    for rate in (None, 2e6):
        again, same = swapped(tmp_path, IDS, rate)
        assert torch.equal(again, logits) and (same == slots).all()
    other = swapped(tmp_path, IDS[::-1])[1]
    assert (other == slots).all()  # this policy makes the same swaps for any text


KILLED = """
import sys, torch
from pathlib import Path
from random_policy import divided, random_setup
from hotsplit import Engine
path = Path(sys.argv[1])
with Engine.load(path, divided(path, 0.4), mode="predicted", neuron_cache=random_setup()) as engine:
    with engine.sequence() as text:
        for token in map(int, sys.argv[2].split()):
            text.extend([token])
        print(engine.neuron_cache.num_swaps, flush=True)
        while True:
            text.rollback(1)
            text.extend([1, 2])
"""


def test_a_killed_process_leaves_nothing_behind(tmp_path):
    """The model's file is unchanged, and a later run gives the logits and slots of an earlier
    one."""
    saved(tmp_path)
    before = (tmp_path / "m.gguf").read_bytes()
    logits, slots = swapped(tmp_path, IDS)
    ids = " ".join(map(str, IDS[:9]))
    env = os.environ | {"PYTHONPATH": SEARCH_PATH}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "m.gguf"), ids]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
        assert int(process.stdout.readline()) > 5
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "m.gguf").read_bytes() == before
    again, same = swapped(tmp_path, IDS)
    assert torch.equal(again, logits) and (same == slots).all()


@pytest.mark.parametrize("wrong", ["stale slot", "wrong row", "half a row"])
def test_the_comparison_finds_wrong_rows(tmp_path, wrong):
    model = saved(tmp_path, "f32")
    with plain_and_cached(model.path) as (plain, cached):
        slots = cached.neuron_cache.slots
        if wrong == "stale slot":  # the tables change, but the rows do not arrive
            slots._copier.start = lambda copies: None
        elif wrong == "wrong row":
            slots._table.stride_LM[0, 1] //= 2
        else:
            slots._table.size_LM[:] //= 2
        assert not torch.equal(decoded(cached, IDS), decoded(plain, IDS))


# ---- with the policy, from a plan ----------------------------------------------------------------


def with_cache(tmp_path, activation="relu", predictor_rank=0, **costs):
    """A model with a tokenizer and a plan with a cache, for a fast GPU and a slow CPU."""
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(
        num_layers=L, num_neurons=F, context_length=256, vocab_size=vocab_size, width=128
    )
    model = make_model(
        sizes=shape,
        kind="q8_0",
        activation=activation,
        extra_keys=keys,
        predictor_rank=predictor_rank,
    )
    model = dataclasses.replace(model, threshold_L=(0.0,) * L, path=tmp_path / "m.gguf")
    model.save(model.path)
    zeros = np.zeros(L)
    times = {
        "hot_s_L": zeros,
        "hot_row_s_L": zeros + 1e-9,
        "cold_s_L": zeros,
        "cold_row_s_L": zeros + 1e-6,
        "copy_row_s_L": zeros + 1e-7,
        "gather_row_s_L": zeros + 1e-8,
    }
    given = CacheCosts(**times | {"rest_s": 1e-5, "copy_s": 1e-7} | costs)
    frequency = tuple(np.full(F, 0.5, np.float32) for _ in range(L))
    cache = CachePlan(most_rows=16, costs=given, frequency=frequency)
    ids = np.random.default_rng(3).permutation(F)
    hot = [ids[:60], ids[30:90], ids[:0]]
    make_split(model, hot, context_length=256, cache=cache).save(tmp_path / "s.gguf")
    return model


def followed(tmp_path, ids, options=None, mode="exact"):
    """(logits of a text, the cache after it), with swaps that the policy decides."""
    options = options or CacheOptions()
    with Engine.load(
        tmp_path / "m.gguf", tmp_path / "s.gguf", mode=mode, neuron_cache=options
    ) as engine:
        logits, cache = decoded(engine, ids), engine.neuron_cache
        cache.complete()  # what the last step began
        cache.slots.check()
        row_bytes = sum(m.row_bytes for m in engine.layers[0].ffn.blocks[0].matrices)
        assert cache.num_bytes == cache.num_swaps * row_bytes
        return logits, cache


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_the_policy_follows_a_text(tmp_path, mode):
    """The policy beats the plan's hit rate and estimated time; the logits are those without a cache
    bit for bit."""
    with_cache(tmp_path, predictor_rank=8 * (mode == "predicted"))
    ids = [*IDS[:7]] * 8
    with Engine.load(tmp_path / "m.gguf", mode=mode) as plain:
        want = decoded(plain, ids)
    logits, cache = followed(tmp_path, ids, mode=mode)
    assert torch.equal(logits, want)
    report = cache.policy.report()
    assert report.num_steps == len(ids) and 0 < report.num_swaps <= cache.num_swaps
    assert report.hit_rate > report.planned_hit_rate and report.seconds < report.planned_seconds
    again, other = followed(tmp_path, ids, mode=mode)
    assert torch.equal(again, logits) and other.facts == cache.facts
    assert "hits" in cache.line and "copied" in cache.line


def test_a_slow_link_stops_the_swaps(tmp_path):
    """Copies that cannot finish during a step are not begun."""
    with_cache(tmp_path, copy_row_s_L=np.ones(L), copy_s=1.0)
    cache = followed(tmp_path, IDS)[1]
    assert cache.num_swaps == 0 and "0 B copied" in cache.line


def test_the_commands_say_what_the_cache_did(tmp_path, capsys):
    with_cache(tmp_path)
    model, split = str(tmp_path / "m.gguf"), str(tmp_path / "s.gguf")
    options = ["-p", "the", "-n", "40", "--temp", "0", "--json"]
    command = ["generate", model, "--split", split, *options]
    found = {}
    for setting in ("off", "on", "decay=0.9,most_rows=8"):
        assert main([*command, "--neuron-cache", setting]) == 0
        found[setting] = json.loads(capsys.readouterr().out)
    assert "neuron_cache" not in found["off"]
    assert found["on"]["neuron_cache"]["num_swaps"] > 0
    assert found["on"]["text"] == found["decay=0.9,most_rows=8"]["text"]
    assert main([*command[:-1], "--neuron-cache", "on"]) == 0
    assert "[neuron cache: hits" in capsys.readouterr().err
    assert (
        main(
            [
                "bench",
                model,
                "--split",
                split,
                "-p",
                "0",
                "-n",
                "4",
                "-r",
                "1",
                "--neuron-cache",
                "on",
            ]
        )
        == 0
    )
    assert "note: neuron cache:" in capsys.readouterr().err
    for wrong, line in (
        ("decay=2", "decay=2; wanted 0"),
        ("most_rows=300", "room for 16 rows"),
        ("size=3", "wanted on or NAME=VALUE"),
    ):
        assert main([*command, "--neuron-cache", wrong]) == 1
        assert line in capsys.readouterr().err
    assert main(["generate", model, "-p", "the", "--neuron-cache", "on"]) == 1
    assert "needs a plan that has room for it" in capsys.readouterr().err


# ---- residency -----------------------------------------------------------------------------------


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
    for wrong in (
        [(0, 4, 5, 0)],  # no such slot
        [(1, 0, 5, 0)],  # a layer without slots
        [(0, 1, 5, 0)],  # the leaving neuron is elsewhere
        [(0, 1, 2, 1)],  # the incoming neuron is there already
        [(0, 1, 5, 1), (0, 1, 6, 1)],  # a slot twice
        [(0, 1, 5, 1), (0, 2, 5, 2)],  # a neuron twice
    ):
        with pytest.raises(AssertionError):
            residency.swap(np.array([(*swap, 0.0) for swap in wrong], SWAP))
        assert (residency.slot_LF == before).all()
        residency.check()
    residency.slot_LF[0, 5] = 1
    with pytest.raises(AssertionError):
        residency.check()


# ---- refusals ------------------------------------------------------------------------------------


def test_a_cache_that_cannot_work_is_refused(tmp_path):
    model = saved(tmp_path)

    def refused(match, setup, **options):
        with pytest.raises(HotsplitError, match=match):
            Engine.load(model.path, neuron_cache=setup, **options)

    refused("needs a plan", random_setup(), mode="exact")
    split = divided(model.path)
    refused("mode dense reads every neuron", random_setup(), split=split, mode="dense")
    refused("stay in the file", random_setup(), split=split, mode="exact", is_resident=False)
    split = planned(tmp_path, model, [np.arange(F), np.arange(0), np.arange(F)])
    refused("divides no layer", random_setup(), split=split, mode="exact")
    half = make_split(model, [np.arange(F // 2)] * 3, home=(0, 0, 1, 1))
    half.save(split)
    refused("is on one GPU, and the plan has 2", random_setup(), split=split, mode="exact")
