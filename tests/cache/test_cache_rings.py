"""Layers with windows keep a ring of blocks: the logits have the bits that they have with the keys
and values of the whole context, whatever is rolled back, forked, saved and computed again."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import test_sequences
import torch
from checkpoints import random_model, save_tokenizer
from models import changed, family_spec, make_model, make_sizes
from reference import rel_error
from test_families import GATED, OSS, converted
from test_runtime import make_split
from test_sequences import Alone, change_texts, schedule
from test_smallthinker import CASES, checkpoint, logits_ref
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs import cache_layout
from hotsplit.errors import HotsplitError
from hotsplit.model.spec import Attention
from hotsplit.runtime.cache.block_table import NO_BLOCK, BlockTable
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step import hybrid_builder, native_step
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.step.batch import rows_of
from hotsplit.runtime.step.pass_device import PassSetup
from hotsplit.serve.prefix_cache import PrefixCache

WINDOW, CONTEXT = 9, 300
SIZES = make_sizes(num_layers=3, num_neurons=64, context_length=CONTEXT)


@pytest.fixture(autouse=True)
def _short_passes(monkeypatch):
    """Passes of 64 tokens and blocks of 32: of 10 blocks, rings keep 4, a saved window 2."""
    monkeypatch.setattr(cache_layout, "PREFILL_CHUNK", 64)
    monkeypatch.setattr(cache_layout, "BLOCK_LENGTH", 32)
    monkeypatch.setattr(native_step, "MAX_ROWS", 64)


@pytest.fixture(scope="module")
def model():
    """Three layers: windows of 9 and 18, and one without between them."""
    spec = family_spec("llama", SIZES)
    windows = (WINDOW, None, 2 * WINDOW)
    layers = [
        changed(spec.with_layers([layer]), Attention, head_dim=32, window=window).layers[0]
        for layer, window in zip(spec.layers, windows, strict=True)
    ]
    return make_model(spec=spec.with_layers(layers))


def without_rings(monkeypatch, model, **options) -> Engine:
    with monkeypatch.context() as patch:
        patch.setattr(cache_layout, "PREFILL_CHUNK", CONTEXT)
        engine = Engine.of(model, device="cpu", context_length=CONTEXT, **options)
    assert not engine._sequences.cache.has_rings
    return engine


def with_rings(model, **options) -> Engine:
    engine = Engine.of(model, device="cpu", context_length=CONTEXT, **options)
    assert [table.window for table in engine._sequences.cache.tables] == [WINDOW, None, 2 * WINDOW]
    return engine


def planned(model: ModelFile, **options) -> Split:
    """All on a GPU."""
    hot = [range(layer.neurons.number) for layer in model.spec.layers]
    return make_split(model, hot, context_length=CONTEXT, **options)


@pytest.mark.parametrize("types", [{}, {"cache_type_k": "q8_0", "cache_type_v": "q4_0"}])
def test_random_schedules_beyond_the_window(monkeypatch, model, types):
    """Texts end, fork, are marked and rolled back to any place; blocks are dropped and windows
    taken back."""
    seen, turn, rollback = Counter(), BlockTable._turn, BlockTable.rollback

    def counted_turn(table, sequence, start, stop):
        before = table._first[sequence]
        turn(table, sequence, start, stop)
        seen["dropped"] += table._first[sequence] > before

    def counted_rollback(table, sequence, position):
        seen["taken back"] += (
            table.is_ring and position > 0 and not table._is_held(sequence, position)
        )
        rollback(table, sequence, position)

    def with_marks(engine, texts, chance, *more):
        change_texts(engine, texts, chance, *more)
        for text in texts:
            if chance.random() < 0.4:
                text.mark(chance.randint(1, text.length + 60))

    monkeypatch.setattr(BlockTable, "_turn", counted_turn)
    monkeypatch.setattr(BlockTable, "rollback", counted_rollback)
    monkeypatch.setattr(test_sequences, "change_texts", with_marks)
    with (
        without_rings(monkeypatch, model, **types) as single,
        with_rings(model, num_sequences=8, **types) as engine,
    ):
        alone = Alone(single)
        for seed in (5, 14):
            assert schedule(engine, alone, random.Random(seed), 20) > 10
        for table in engine._sequences.cache.tables:
            assert (table.block_SN == NO_BLOCK).all() and len(table._free) == table.num_blocks
    assert seen["dropped"] > 5 and seen["taken back"] > 0, seen


def mirrored(one: Engine, other: Engine, steps: int) -> int:
    """Takes texts of two engines through the same random operations, with rollbacks to where all is
    kept; returns the number of logits compared, which have the same bits."""
    chance, pairs, compared = random.Random(steps), [(one.sequence(), other.sequence())], 0
    for _ in range(steps):
        pair = chance.choice(pairs)
        if len(pairs) < one._sequences.cache.num_sequences and chance.random() < 0.2:
            pairs.append((pair[0].fork(), pair[1].fork()))
        elif chance.random() < 0.3:
            back = chance.randint(0, min(80, pair[1].length))
            length = pair[1].reusable(pair[1].length - back)
            for text in pair:
                text.rollback(length)
        count = min(pair[0].room, chance.choice((1, 2, 40, 90)))
        tokens = [chance.randrange(50) for _ in range(count)]
        for text in pair:
            text.mark(text.length + count // 2)
        if tokens:
            wanted = chance.choice(("last", "all"))
            got = [text.extend(tokens, wanted) for text in pair]
            assert torch.equal(*got), (pair[0].length, count)
            compared += len(got[0])
    return compared


def with_steps(engine: Engine, split: Split) -> Engine:
    """Hybrid steps with both roles on the CPU."""
    decoder, cpu = engine._live, torch.device("cpu")
    step = hybrid_builder.build(
        decoder.weights,
        Placement.of_split(split, (cpu,)),
        engine.traffic,
        plain_backend(reference_kernels()),
        max_rows=4,
        passes=PassSetup(num_rows=64),
    )
    engine._sequences.decoder = replace(decoder, native=step)
    return engine


def test_a_rollback_within_a_draft_never_repeats_tokens():
    """Wherever in its blocks a ring is."""
    table, length = BlockTable(2, CONTEXT, WINDOW), 0
    chance = random.Random(0)
    while length + 64 <= CONTEXT:
        count = chance.choice((1, 2, 17, 64))
        table.commit(0, table.plan(0, length, length + count))
        accepted = length + chance.choice((1, count))
        assert all(table.nearest(0, n) == n for n in range(length, length + count + 1))
        table.rollback(0, accepted)
        length = accepted
    assert table.held_from(0) > 0 and table.nearest(0, length - 128) < length - 128


def test_hybrid_steps_read_rings(monkeypatch, model):
    split, options = planned(model, num_sequences=3), {"num_sequences": 3}
    with without_rings(monkeypatch, model, **options) as one, with_rings(model, **options) as other:
        assert mirrored(with_steps(one, split), with_steps(other, split), 12) > 100


def test_a_saved_text_has_what_rings_hold(monkeypatch, model):
    """It goes on with the same bits, also after a rollback to before what was saved, and where it
    was saved with all positions; the other way round it is refused."""
    ids = np.random.default_rng(1).integers(0, 50, 200).tolist()
    with without_rings(monkeypatch, model) as whole, with_rings(model) as engine:
        text, want = engine.sequence(), whole.logits([*ids, 5])
        text.extend(ids)
        assert text.reusable(20) == 0
        text.rollback(20)
        text.extend(ids[20:], "none")
        state = text.read_state()
        assert [len(keys) for keys, _ in state.keys_values] == [200 - 96, 200, 200 - 96]
        other = whole.sequence()
        other.extend(ids)
        for given in (state, other.read_state()):
            text.rollback(0)
            text.write_state(ids, given)
            assert text.reusable(150) == 150 and text.reusable(100) == 0
            assert torch.equal(text.extend([5], "last")[0], want[-1])
            for length in (150, 100):
                text.rollback(length)
                assert torch.equal(text.extend(ids[length:], "all"), want[length:-1])
        other.rollback(0)
        with pytest.raises(HotsplitError, match="were saved with a longer context"):
            other.write_state(ids, state)


def test_an_observed_pass_and_timed_steps_use_rings(monkeypatch, model):
    found = []
    ids = torch.arange(250) % 50
    with without_rings(monkeypatch, model) as one, with_rings(model) as other:
        for engine in (one, other):
            assert engine.decode_seconds(steps=3, start=200) > 0
            found.append([])
            with engine.observe(
                lambda name, layer, x: found[-1].append(x.clone()),
                lambda name, layer: name == "layer_out",
            ):
                for start in range(0, 250, 60):
                    engine._live.run(rows_of(ids[start : start + 60].tolist(), start))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True)) and len(found[0]) == 15


def test_a_server_reuses_a_prefix_whose_window_is_saved(monkeypatch, model):
    """Where the second text parts from the first, it saves its window for the third."""
    chance = random.Random(0)
    shared = [chance.randrange(50) for _ in range(100)]
    with without_rings(monkeypatch, model) as one, with_rings(model, num_sequences=4) as engine:
        places, known = PrefixCache(engine, 4), []
        for _ in range(4):
            ids = shared + [chance.randrange(50) for _ in range(150)]
            text = places.take(ids)
            known.append(text.length)
            assert torch.equal(text.extend(ids[text.length :])[0], one.logits(ids)[-1])
            places.keep(text)
    assert known == [0, 0, 100, 100]


LONG = {"max_position_embeddings": CONTEXT, "sliding_window": 8}
GEMMA3 = Gemma3TextConfig(
    **GATED | LONG | {"num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 48},
    layer_types=["sliding_attention", "full_attention"] * 2,
)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
WINDOWS = CASES["windows"] | {"max_position_embeddings": CONTEXT, "sliding_window_size": 8}
FAMILIES = {
    "gemma3": lambda folder: random_model(folder, GEMMA3),
    "gpt-oss": lambda folder: random_model(
        folder, GptOssConfig(**OSS | LONG, rope_parameters=ROPE)
    ),
    "smallthinker": lambda folder: checkpoint(folder, WINDOWS),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_rings_give_the_logits_of_transformers(tmp_path, family):
    """A text of 30 windows in uneven pieces, one of which is rolled back and given again.
    SmallThinker is not in transformers: by its definition in float64."""
    folder = FAMILIES[family](tmp_path / "hf")
    ids = np.random.default_rng(7).integers(0, 300, 250).tolist()
    if family == "smallthinker":
        want = logits_ref(folder, ids)
    else:
        save_tokenizer(folder, 320)
        with torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, experts_implementation="eager"
            )
            want = model(torch.tensor([ids])).logits[0]
    path = converted(folder, tmp_path / "m.gguf", outtype="f32")
    with Engine.load(path, mode="dense", device="cpu", context_length=CONTEXT) as engine:
        assert engine._sequences.cache.has_rings
        text, found = engine.sequence(), []
        for start, stop in pairwise((0, 3, 60, 61, 130, 131, 200, 250)):
            text.extend(ids[start : start + 2], "none")
            text.rollback(start)
            found.append(text.extend(ids[start:stop], "all"))
    assert rel_error(torch.cat(found), want) < 1e-5
