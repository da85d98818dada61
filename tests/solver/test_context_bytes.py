"""What the recurrent states of a text take is counted in plans, and said in words."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from delta_models import FEW, RECURRENT, delta_model, spec_of, without_weights
from models import make_inputs, make_machine, make_model, make_sizes
from test_solver_experts import profile_of, random_choices

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.context_bytes import context_words, text_words
from hotsplit.costs.part_bytes import embedding_bytes, kv_bytes, plan_bytes
from hotsplit.costs.state_bytes import kept_bytes, num_slots, slots_bytes, state_bytes
from hotsplit.families.from_config import read_blueprint
from hotsplit.inspection.inspect_file import inspect_file
from hotsplit.model.delta_net import DeltaNet
from hotsplit.options.cache_types import CacheTypes
from hotsplit.options.key_selection import KeySelection
from hotsplit.runtime.cache.state_slots import LayerState
from hotsplit.runtime.device import huge_pages
from hotsplit.runtime.step.workspace import hollow_builder
from hotsplit.runtime.weights.store import CPU
from hotsplit.solver import solve
from hotsplit.solver.advice import advise
from hotsplit.solver.mode_choice import find
from hotsplit.solver.notes import notes_of
from hotsplit.solver.solve import split_of
from hotsplit.solver.verify import verify


@pytest.fixture(autouse=True)
def _no_files(monkeypatch):
    """The inputs of these plans are in memory."""
    monkeypatch.setattr(solve, "sha256_of", lambda path: "0" * 64)


def items(model, num_sequences=1, context_length=64, on_gpu=(), **more):
    count = model.spec.num_layers
    return plan_bytes(
        model,
        context_length=context_length,
        num_hot=[0] * count,
        dense_on_gpu=[layer in on_gpu for layer in range(count)],
        head_on_gpu=False,
        num_sequences=num_sequences,
        **more,
    )


@pytest.mark.parametrize("mixer", RECURRENT)
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_the_bytes_of_states_are_those_of_their_tensors(num_sequences, mixer):
    model = RECURRENT[mixer](make_sizes(num_layers=4))
    taken = []

    def zeros(shape, dtype):
        taken.append(int(np.prod(shape)) * dtype.itemsize)

    for layer, spec in enumerate(model.spec.layers):
        taken.clear()
        if spec.recurrent is not None:
            LayerState.of(num_sequences, spec.recurrent, zeros, keeps_rows=True)
        assert kept_bytes(model, layer, num_sequences) == (taken.pop() if taken else 0)
        assert slots_bytes(model, layer, num_sequences) == sum(taken)
        assert (kv_bytes(model, layer, 10) > 0) == (spec.recurrent is None)
    every = sum(slots_bytes(model, layer, num_sequences) for layer in range(4))
    (short,), _ = items(model, num_sequences, 64, range(4))
    (long,), _ = items(model, num_sequences, 128, range(4))
    assert long["kv_cache"] - short["kv_cache"] == kv_bytes(model, 3, 64) * num_sequences
    assert short["kv_cache"] == every + kv_bytes(model, 3, 64) * num_sequences


def test_states_are_where_their_layer_is_wherever_keys_are():
    model = delta_model(make_sizes(num_layers=4, context_length=4096))
    types = make_inputs(model, None, None, 0, kv_offload=KeySelection.parse("on")).cache_types
    (gpu,), cpu = items(model, on_gpu=(1, 3), cache_types=types)
    assert gpu["kv_cache"] == slots_bytes(model, 1, 1)
    states = slots_bytes(model, 0, 1) + kept_bytes(model, 0, 1)
    assert cpu["kv_cache"] == states * 2 + kv_bytes(model, 3, 64, types)


def planned(model, budget, context_length, machine, id_LTK, **more):
    """(the plan, its notes about the context)."""
    inputs = make_inputs(
        model,
        profile_of(model, id_LTK),
        machine,
        budget,
        mode="dense",
        context_length=context_length,
        **more,
    )
    found = find(inputs, time_limit_s=10)
    split = split_of(found, solve_s=0.0)
    verify(split, model=model, profile=inputs.profile, machine=machine)
    notes = notes_of(inputs, advise(inputs, found.pipeline, found.answer.plan), split)
    return split, [note for note in notes if note.startswith("the context of")]


def test_a_plan_of_a_small_mixture_counts_and_says_it():
    sizes = make_sizes(num_layers=4, context_length=4096, num_kv_heads=1)
    model = delta_model(sizes, experts=FEW)
    chance = np.random.default_rng(0)
    route = model.spec.layers[0].route
    id_LTK = random_choices(chance, 4, 30, route, 1.0)
    (whole,), _ = items(model, context_length=64, on_gpu=range(4))
    budget = sum(whole.values()) + (1 << 18)
    machine = make_machine(cpu_gb_per_s=0.01, layer_s=1e-9)
    split, notes = planned(model, budget, 64, machine, id_LTK)
    assert split.gpu_bytes["kv_cache"] == whole["kv_cache"] and all(split.dense_on_gpu)
    placed = sum(map(len, split.hot))
    assert 0 < placed < 24 and len(notes) == 1
    assert f"{placed} of 24" in notes[0] and "which do not grow with it" in notes[0]
    longer, _ = planned(model, budget, 1024, machine, id_LTK)
    grown = longer.gpu_bytes["kv_cache"] - split.gpu_bytes["kv_cache"]
    assert grown == kv_bytes(model, 3, 1024 - 64)


def test_models_without_states_say_nothing():
    model = make_model()
    assert text_words(model) is None and context_words(model, 64, 1) is None
    assert state_bytes(model, 0) == slots_bytes(model, 0, 2) == 0 and num_slots(2) == 8


def test_inspect_says_what_a_text_keeps(tmp_path):
    delta_model(make_sizes(num_layers=4)).save(tmp_path / "m.gguf")
    rows = dict(inspect_file(tmp_path / "m.gguf").facts)
    assert rows["a text keeps"] == (
        "9.38 KiB of states in 3 layers, whatever its length, and 256 B of keys and values a token"
        " in 1"
    )
    make_model().save(tmp_path / "m.gguf")
    assert "a text keeps" not in dict(inspect_file(tmp_path / "m.gguf").facts)


def test_checks_of_the_full_shape_keep_little_beside_its_states():
    """The delta nets of Qwen3.6-35B-A3B, for drafts of up to 16 tokens; a state after each row of a
    draft of four would take 251 MiB."""
    delta = DeltaNet(
        num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128, epsilon=1e-6
    )
    model = without_weights(spec_of(make_sizes(num_layers=40), delta))
    _, on_cpu = items(model)
    (on_gpu,), _ = items(model, on_gpu=range(40))
    beyond = on_cpu["kv_cache"] - on_gpu["kv_cache"]
    assert beyond == 30 * 4 * 34 * (8192 + 64) <= 40 << 20
    inputs = make_inputs(model, None, None, 0)
    assert inputs.always_on_host == beyond + inputs.workspace + embedding_bytes(model)


def gemma3_12b() -> ModelFile:
    """Its shape, without its weights."""
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
    }
    spec = read_blueprint(Path("config.json"), config, 262208).spec
    return without_weights(spec)


@pytest.mark.parametrize(("num_sequences", "mib"), [(1, 2888), (4, 11552)])
def test_windows_keep_their_share_of_a_long_context(monkeypatch, num_sequences, mib):
    """Gemma 3 12B at 32,768 tokens: what the loader allocates is what plans count, and a quarter of
    what layers without windows would take. The memory is one that only has sizes."""
    without_memory = lambda shape, dtype: torch.zeros(shape, dtype=dtype, device="meta")  # noqa: E731
    monkeypatch.setattr(huge_pages, "zeros", without_memory)
    model = gemma3_12b()
    builder = replace(
        hollow_builder(model, "dense", is_divided=False),
        context_length=32768,
        num_sequences=num_sequences,
        cache_types=CacheTypes.of("f16"),
    )
    held = [builder.attention(layer, a, CPU).cache for layer, a in enumerate(model.spec.attentions)]
    tensors = [(cache.key_BKPX, cache.value_BKPX) for cache in held]
    allocated = [sum(t.untyped_storage().nbytes() for t in pair) for pair in tensors]
    assert all(t.is_meta for pair in tensors for t in pair)
    assert len({cache.table for cache in held}) == 2
    (gpu,), _ = items(model, num_sequences, 32768, range(48))
    assert sum(allocated) == gpu["kv_cache"] == mib << 20
    whole = 8192 * 32768 * num_sequences  # bytes of a layer without a window
    assert [size == whole for size in allocated] == [(n + 1) % 6 == 0 for n in range(48)]
    assert sum(allocated) < 0.25 * 48 * whole


def test_windows_are_said_in_words():
    model = gemma3_12b()
    assert text_words(model) == (
        "64.00 KiB of keys and values a token in 8, and 320.00 KiB of keys and values for each of"
        " the latest 1,600 tokens at most in 40"
    )
    assert context_words(model, 32768, 1) == (
        "the context of 32,768 tokens takes 2.82 GiB: 840.00 MiB of keys and values in 40 layers"
        " with windows, which do not grow with it, and 2.00 GiB of keys and values, 64.00 MiB for"
        " each further 1,024 tokens, as much as 10,356 neurons"
    )
    assert context_words(model, 2048, 1) is None  # rings would take more
