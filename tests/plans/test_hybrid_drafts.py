"""A draft block beside hybrid steps, with both roles on the CPU: it gets the model's hidden states
of prompts and steps, and its drafts change no text."""

import dataclasses

import pytest
import torch
from checkpoints import save_tokenizer
from draft_blocks import CASES, random_with_block
from fake_cuda import library
from hybrid_plans import random_plan
from passes import passing
from reference import rel_error
from test_draft_block import ALL, ANY, PROMPT, SEEDED, forcing
from test_fake_step import checked_cuda
from test_speculation import text_of

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.costs.part_bytes import draft_bytes
from hotsplit.runtime import loading
from hotsplit.runtime.drafting import drafting

CONTEXT = 80
LENGTHS = (3, 11, 40)  # of prompts


@pytest.fixture(scope="module", params=["glm4moe", "qwen35"])
def file(request, tmp_path_factory):
    folder = random_with_block(tmp_path_factory.mktemp("m") / "hf", CASES[request.param])
    save_tokenizer(folder, CASES[request.param].vocab_size)
    path = folder.parent / "m.gguf"
    convert(ConvertConfig(source=folder, output=path, outtype="q8_0"))
    return ModelFile.load(path)


def by_plan(file, seed):
    """An engine with a random plan, whose steps and passes are hybrid ones."""
    split = random_plan(file, seed, context=CONTEXT)
    engine = Engine.of(file, split, device="cpu", draft_block=True)
    step = passing(engine, split)
    engine._sequences.decoder = dataclasses.replace(engine._live, native=step)
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


@pytest.mark.parametrize("seed", range(3))
def test_the_block_has_the_hidden_states_of_passes_and_steps(file, seed):
    with Engine.of(file, device="cpu", draft_block=True, context_length=CONTEXT) as engine:
        ids = PROMPT + text_of(engine, 50, sampling=SEEDED)
        want_RV = first_guesses(engine, ids)
    with by_plan(file, seed) as engine:
        assert rel_error(first_guesses(engine, ids), want_RV) < 5e-3
        hidden = engine._live.native.hidden
        engine._live.native.hidden = lambda *given: hidden(*given).roll(1, dims=0) * 1.5
        assert rel_error(first_guesses(engine, ids), want_RV) > 0.02  # planted: other rows


def check_drafts(engine):
    want = text_of(engine, 40, sampling=SEEDED)
    with forcing(engine, ANY) as drafts_of:
        assert text_of(engine, 40, drafts_of(PROMPT + want), sampling=SEEDED) == want
        assert engine.last_run.drafted > engine.last_run.accepted > 5


@pytest.mark.parametrize("seed", range(3))
def test_drafts_of_the_block_change_no_text(file, seed):
    with by_plan(file, seed) as engine:
        check_drafts(engine)


@pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux")
def test_a_plan_on_a_device_has_the_block_beside_it(file, monkeypatch, caplog):
    """Not where the device rounds several rows differently, which then is said."""
    split = random_plan(file, 1, context=CONTEXT)
    with checked_cuda(), Engine.of(file, split, device="cuda", draft_block=True) as engine:
        assert engine.has_draft_block
        check_drafts(engine)
        more = engine.bytes_by_role["cpu"]
    monkeypatch.setattr(loading, "INEXACT_ROWS", ("q8_0",))
    with (
        caplog.at_level("INFO"),
        checked_cuda(),
        Engine.of(file, split, device="cuda", draft_block=True) as engine,
    ):
        assert not engine.has_draft_block
        items = draft_bytes(file, CONTEXT, has_head=not split.head_on_gpu)
        assert all(more[i] - n == engine.bytes_by_role["cpu"][i] for i, n in items.items())
    assert "the draft block is not loaded, since a GPU rounds rows of q8_0" in caplog.text
