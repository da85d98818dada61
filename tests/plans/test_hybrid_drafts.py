"""Drafts on hybrid steps, with both roles on the CPU: they change no text, also where the rows of a
check are divided among steps. A draft block gets the model's hidden states of prompts and steps."""

import dataclasses
import random

import pytest
import torch
from checkpoints import save_tokenizer
from delta_models import FEW, RECURRENT
from draft_blocks import CASES, random_with_block
from fake_cuda import library
from hybrid_plans import random_plan
from models import make_sizes
from passes import CPU, passing, plain_backend, reference_kernels
from reference import rel_error
from test_draft_block import ALL, ANY, PROMPT, SEEDED, forcing
from test_fake_step import checked_cuda
from test_speculation import text_of

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.costs import part_bytes
from hotsplit.costs.part_bytes import draft_bytes, draft_gpu_bytes
from hotsplit.runtime.cache.state_slots import StateSlots
from hotsplit.runtime.drafting import drafting
from hotsplit.runtime.kernels.gpu.launch import ROWS
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.resolved_options import placement_of_block
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.draft_step import DraftStep
from hotsplit.runtime.step.sequences import Part

CONTEXT = 80
LENGTHS = (3, 11, 40)  # of prompts


@pytest.fixture(scope="module", params=["glm4moe", "qwen35", "qwen3next", "nemotron3"])
def file(request, tmp_path_factory):
    folder = random_with_block(tmp_path_factory.mktemp("m") / "hf", CASES[request.param])
    save_tokenizer(folder, CASES[request.param].vocab_size)
    path = folder.parent / "m.gguf"
    convert(ConvertConfig(source=folder, output=path, outtype="q8_0"))
    return ModelFile.load(path)


def by_plan(file, seed, *, draft_block=True, num_sequences=1, is_placed=False):
    """An engine with a random plan, whose steps, of up to 4 rows, and passes are hybrid ones.
    `is_placed`: so are those of the block."""
    split = random_plan(file, seed, context=CONTEXT, num_sequences=num_sequences)
    engine = Engine.of(file, split, device="cpu", draft_block=draft_block)
    step = passing(engine, split, max_rows=4)
    draft = engine._live.draft
    if is_placed:
        weights, homes = engine._live.weights, (CPU,) * len(split.budgets)
        placement = Placement.of_split(split, homes)
        backend, block = plain_backend(reference_kernels()), placement_of_block(file, placement)
        placed = hybrid_builder.build(weights.draft, block, Traffic(), backend, max_rows=4)
        draft = DraftStep(weights, step.most_tokens, placed)
    engine._sequences.decoder = dataclasses.replace(engine._live, native=step, draft=draft)
    return engine


def first_guesses(engine, ids):
    """The block's logits after prompts of LENGTHS and three steps."""
    found = []
    with drafting(engine, ALL):
        block = engine._live.draft
        for length in LENGTHS:
            with engine.sequence() as text:
                text.extend(ids[:length], "none")
                found.append(block.first(text.number, length, ids[length]))
                for token in ids[length : length + 3]:
                    text.extend([token])
                found.append(block.first(text.number, length + 3, ids[length + 3]))
    return torch.stack(found)


@pytest.mark.parametrize("is_placed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_block_has_the_hidden_states_of_passes_and_steps(file, seed, is_placed):
    with Engine.of(file, device="cpu", draft_block=True, context_length=CONTEXT) as engine:
        ids = PROMPT + text_of(engine, 50, sampling=SEEDED)
        want_RV = first_guesses(engine, ids)
    with by_plan(file, seed, is_placed=is_placed) as engine:
        assert rel_error(first_guesses(engine, ids), want_RV) < 5e-3
        hidden = engine._live.native.hidden
        engine._live.native.hidden = lambda *given: hidden(*given).roll(1, dims=0) * 1.5
        assert rel_error(first_guesses(engine, ids), want_RV) > 0.02  # planted: other rows


def check_drafts(engine):
    want = text_of(engine, 40, sampling=SEEDED)
    with forcing(engine, ANY) as drafts_of:
        assert text_of(engine, 40, drafts_of(PROMPT + want), sampling=SEEDED) == want
        assert engine.last_run.drafted > engine.last_run.accepted > 5


@pytest.mark.parametrize("is_placed", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_drafts_of_the_block_change_no_text(file, seed, is_placed):
    with by_plan(file, seed, is_placed=is_placed) as engine:
        check_drafts(engine)


def differing_rows(mixer, seed, experts=None):
    """How many rows of random checks of one text or two, in steps together, do not have the
    bits of a row alone; the prompts are passes."""
    sizes = make_sizes(num_layers=4, vocab_size=50, context_length=CONTEXT)
    model = RECURRENT[mixer](sizes, kind="q8_0", experts=experts)
    chance = random.Random(seed)
    prompts = [[n, *PROMPT, *range(20, 30)] for n in range(1 + seed // 2)]
    with (
        by_plan(model, seed, draft_block=False) as single,
        by_plan(model, seed, draft_block=False, num_sequences=len(prompts)) as engine,
    ):
        assert engine._live.native.has_equal_rows
        texts, count = [engine.sequence() for _ in prompts], 0
        for text, prompt in zip(texts, prompts, strict=True):
            for mark in (14, 7)[seed % 2 :]:  # lasting states
                text.mark(mark)
            text.extend(prompt, "none")
        for _ in range(8):
            parts = []
            for text in chance.sample(texts, chance.randint(1, len(texts))):
                tokens = [chance.randrange(50) for _ in range(chance.randint(1, 7))]
                parts.append(Part(sequence=text, tokens=tokens, wanted="all"))
            for part, got_RV in zip(parts, engine.run(parts), strict=True):
                text, start = part.sequence, part.sequence.length - len(part.tokens)
                text.rollback(start + chance.randint(1, len(part.tokens)))
                with single.sequence() as alone:
                    alone.extend(prompts[text.number], "none")
                    for token in text.ids[alone.length :]:
                        at, (want_V,) = alone.length - start, alone.extend([token])
                        count += at >= 0 and not torch.equal(got_RV[at], want_V)
    return count


# One text and two, with two lasting states and with one: each with either.
@pytest.mark.parametrize("experts, seeds", [(None, (1, 2)), (FEW, (0, 3))], ids=["dense", "moe"])
@pytest.mark.parametrize("mixer", RECURRENT)
def test_rows_of_divided_checks_have_the_bits_of_rows_alone(mixer, experts, seeds):
    assert not any(differing_rows(mixer, seed, experts) for seed in seeds)


@pytest.mark.parametrize("mixer", RECURRENT)
def test_the_comparison_finds_a_check_without_its_first_state(mixer, monkeypatch):
    """With two lasting states, and with one: rows of a prompt, which were a pass, are then repeated
    in steps."""
    monkeypatch.setattr(StateSlots, "_hold_later", lambda *given: None)
    assert all(differing_rows(mixer, seed) for seed in range(2))


@pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux")
def test_a_plan_on_a_device_has_the_block_beside_it(file, monkeypatch, caplog):
    """Not where the device rounds several rows differently, which then is said."""
    split = random_plan(file, 1, context=CONTEXT)
    with checked_cuda(), Engine.of(file, split, device="cuda", draft_block=True) as engine:
        assert engine.has_draft_block
        check_drafts(engine)
        more = engine.bytes_by_role["cpu"]
    monkeypatch.setattr(part_bytes, "INEXACT_ROWS", ("q8_0",))
    with (
        caplog.at_level("INFO"),
        checked_cuda(),
        Engine.of(file, split, device="cuda", draft_block=True) as engine,
    ):
        assert not engine.has_draft_block
        items = draft_bytes(file, CONTEXT, has_head=not split.head_on_gpu)
        assert all(more[i] - n == engine.bytes_by_role["cpu"][i] for i, n in items.items())
    assert "the draft block is not loaded, since a GPU rounds rows of q8_0" in caplog.text


def test_no_check_is_too_long_for_a_step(file):
    """A longer one would be a pass, whose rows are not those of single steps."""
    options = dataclasses.replace(ALL, most=100, least=40)
    with by_plan(file, 0) as engine, drafting(engine, options) as made:
        assert made.begin().options.most == made.begin().options.least == ROWS[-1] - 1
    with (
        Engine.of(file, device="cpu", draft_block=True) as engine,
        drafting(engine, options) as made,
    ):
        assert (made.begin().options.most, made.begin().options.least) == (100, 40)


@pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux")
@pytest.mark.parametrize("seed", [1, 3])
def test_a_plan_on_a_device_has_the_block_on_it(file, seed):
    """With one of the seeds, the head is in main memory; bytes are those of the plan."""
    given = {"context": CONTEXT, "draft_on_gpu": True}
    plans = (random_plan(file, number, **given) for number in range(seed, 99, 10))
    split = next(plan for plan in plans if len(plan.budgets) == 1)
    guesses = []
    with checked_cuda(), Engine.of(file, split, device="cuda", draft_block=True) as engine:
        weights = engine._live.weights.draft
        (layer,) = weights.layers
        assert layer.device.type == "cuda" and layer.attention.cache.device.type == "cuda"
        assert weights.head is engine._live.weights.head
        del weights, layer  # what they hold is freed with the engine
        check_drafts(engine)
        ids = PROMPT + text_of(engine, 50, sampling=SEEDED)
        guesses.append(first_guesses(engine, ids))
        gpu, cpu = (engine.bytes_by_role[role] for role in ("gpu", "cpu"))
    with Engine.of(file, device="cpu", draft_block=True, context_length=CONTEXT) as engine:
        guesses.append(first_guesses(engine, ids))
    assert rel_error(*guesses) < 5e-3
    assert gpu == split.gpu_bytes
    without, _ = dataclasses.replace(split, draft_on_gpu=False).items_of_gpus(file)
    own = draft_gpu_bytes(file, CONTEXT)
    assert {i: gpu[i] - n for i, n in own.items()} == {
        i: sum(items[i] for items in without) for i in own
    }
    items = draft_bytes(file, CONTEXT, is_on_gpu=True)
    assert all(cpu[i] == split.cpu_bytes[i] + n for i, n in items.items())
