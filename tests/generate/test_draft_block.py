"""Drafts by a model's own draft block change no text, greedy or seeded."""

import random
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import save_tokenizer
from draft_blocks import CASES, random_with_block
from test_speculation import LIES, Eager, text_of

from hotsplit import Engine
from hotsplit.commands.options.speculation_options import speculating
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import (
    GenerationOptions,
    SamplingOptions,
    SpeculationOptions,
)
from hotsplit.runtime.drafting import drafting
from hotsplit.runtime.generate.block_drafter import BlockDrafter
from hotsplit.runtime.generate.frequent_ids import FrequentIds
from hotsplit.runtime.generate.generation import Generation, together
from hotsplit.runtime.generate.prompt_cache import restore_prompt, save_prompt
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step import draft_step
from hotsplit.runtime.step.draft_step import DraftStep

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
GREEDY, SEEDED = SamplingOptions(temperature=0.0), SamplingOptions(temperature=0.7, seed=5)
ALL, ANY = SpeculationOptions(type="mtp", most=4), LIES["anything"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Model files with a block, by case; made on first use."""
    made = {}

    def get(case):
        if case not in made:
            folder = random_with_block(tmp_path_factory.mktemp(case) / "hf", CASES[case])
            save_tokenizer(folder, CASES[case].vocab_size)
            made[case] = folder.parent / "m.gguf"
            convert(ConvertConfig(source=folder, output=made[case], outtype="q8_0"))
        return made[case]

    return get


class ForcedBlock:
    """What a test makes of the text in place of the block's guesses, which are still computed."""

    name, token_s, read_token_s, fault = "mtp", 1e-3, 1e-4, ""

    def __init__(self, drafter, text, lie):
        self.drafter, self.text, self.lie, self.chance = drafter, text, lie, random.Random(0)
        self.follow, self.leave = drafter.follow, drafter.leave
        self.prepare, self.unread = drafter.prepare, drafter.unread

    def guesses(self, ids):
        forced = self.lie(self.text[len(ids) : len(ids) + ALL.most], self.chance)
        for place, guess in enumerate(self.drafter.guesses(ids)):
            if forced and place == len(forced):
                return
            yield (forced[place], 1.0) if forced else guess


@contextmanager
def forcing(engine, lie):
    """A function that makes the drafts of a text whose tokens are known."""
    with drafting(engine, ALL) as made:
        yield lambda text: Eager(ForcedBlock(made.begin()._drafter, text, lie), ALL.most)


@pytest.mark.parametrize("case", CASES)
def test_a_shifted_text_is_the_one_without_drafts(paths, case):
    with Engine.load(paths(case), draft_block=True, context_length=80) as engine:
        for sampling in (GREEDY, SEEDED):
            shifted = text_of(engine, 90, sampling=sampling, shift_keep=3)
            with forcing(engine, ANY) as drafts_of:
                drafts = drafts_of(PROMPT + shifted)
                got = text_of(engine, 90, drafts, sampling=sampling, shift_keep=3)
                run = engine.last_run
                assert got == shifted and run.shifts and run.drafted > run.accepted > 20


def first_guesses(engine, **faults):
    """What the block, perhaps with faults, guesses after each token of a text that is drafted
    wildly, and what it guesses in a text that comes to it at once: equal, unless entries or hidden
    states are wrong."""
    want, kept = text_of(engine, 40, sampling=SEEDED), {}
    with forcing(engine, ANY) as drafts_of:
        drafts = drafts_of(PROMPT + want)
        block = engine._live.draft
        first = block.first

        def keeping(sequence, length, token):
            kept[length + 1] = first(sequence, length, token)
            return kept[length + 1]

        for name, fault in faults.items():
            setattr(block, name, MethodType(fault, block))
        block.first = keeping
        assert text_of(engine, 40, drafts, sampling=SEEDED) == want
        for name in ("first", *faults):
            delattr(block, name)
        ids, again = PROMPT + want, {}
        for length in kept:
            with engine.sequence() as text:
                text.extend(ids[: length - 1])
                again[length] = block.first(text.number, length - 1, ids[length - 1])
    assert len(kept) > 8
    return [
        guess is not None and torch.equal(guess, again[length]) for length, guess in kept.items()
    ]


@pytest.mark.parametrize("case", CASES)
def test_drafts_leave_the_block_as_a_text_that_comes_at_once(paths, case):
    with Engine.load(paths(case), draft_block=True, context_length=80) as engine:
        assert all(first_guesses(engine))


def test_the_comparison_finds_entries_of_drafts_and_states_of_other_rows(paths):
    """Planted: drafts' own keys are kept; the hidden states are those of the rows before."""
    catch_up, run = DraftStep._catch_up, DraftStep._run

    def keeping(self, sequence, following, wanted):
        text = self._texts[sequence]
        del text.waiting[:-1]
        text.num_entries += len(following) - 1
        return catch_up(self, sequence, following[-1:], wanted)

    def shifted(self, sequence, start, tokens, hidden_TD, wanted="last"):
        return run(self, sequence, start, tokens, np.roll(hidden_TD, 1, axis=0), wanted)

    with Engine.load(paths("glm4moe"), draft_block=True, context_length=80) as engine:
        assert not all(first_guesses(engine, _catch_up=keeping))
        assert not all(first_guesses(engine, _run=shifted))


def without_rewinding(monkeypatch):
    monkeypatch.setattr(draft_step._Text, "rewind", lambda self, length, token: None)


@pytest.mark.parametrize("rewinds", [True, False])
def test_no_key_stays_that_was_made_from_a_rejected_draft(paths, monkeypatch, rewinds):
    """Also if keys are computed at once, when it is not known yet what is rejected."""
    monkeypatch.setattr(draft_step, "MOST_WAITING", 1)
    if not rewinds:
        without_rewinding(monkeypatch)
    with Engine.load(paths("glm4moe"), draft_block=True, context_length=80) as engine:
        assert all(first_guesses(engine)) == rewinds


@pytest.mark.parametrize("rewinds", [True, False])
@pytest.mark.parametrize("back", [0, 1, 5])
def test_no_key_stays_that_was_made_from_a_token_of_before(paths, monkeypatch, rewinds, back):
    """A text that is continued otherwise, perhaps after some of its tokens are removed."""
    if not rewinds:
        without_rewinding(monkeypatch)
    begun, other = PROMPT * 2, [7, 8, 2]
    with (
        Engine.load(paths("glm4moe"), draft_block=True, context_length=80) as engine,
        forcing(engine, ANY),
    ):
        block = engine._live.draft

        def guess(*parts):
            with engine.sequence() as text:
                for ids in parts:
                    text.rollback(text.length - (back if text.length else 0))
                    text.extend(ids)
                    logits_V = block.first(text.number, text.length, 1)
            return logits_V

        want, got = guess([*begun[: len(begun) - back], *other]), guess(begun, other)
        assert torch.equal(got, want) == rewinds


@pytest.mark.parametrize("case", CASES)
def test_several_texts_and_forks_draft_in_shared_steps(paths, case):
    prompts = [PROMPT, PROMPT[:5], [7] * 20, PROMPT]
    endings = GenerationOptions(max_tokens=30, ignores_end=True)
    with Engine.load(paths(case), draft_block=True, context_length=80, num_sequences=6) as engine:
        chain = engine._chain
        wants = [text_of(engine, 30, prompt=ids, sampling=SEEDED) for ids in prompts]
        with forcing(engine, ANY) as drafts_of:
            texts = [engine.sequence() for _ in prompts[:3]]
            texts[0].extend(PROMPT[:6], "none")
            texts.append(texts[0].fork())
            made = [
                Generation(
                    text,
                    ids,
                    engine.codec,
                    chain(SEEDED),
                    endings,
                    Traffic(),
                    drafts=drafts_of(ids + want),
                )
                for text, ids, want in zip(texts, prompts, wants, strict=True)
            ]
            got = [[] for _ in prompts]
            for number, token in together(made, engine.run):
                got[number].append(token.id)
            assert got == wants
            assert all(generation.run.accepted > 5 for generation in made)
            assert [text.ids for text in texts] == [
                ids + want[:-1] for ids, want in zip(prompts, wants, strict=True)
            ]


@pytest.mark.parametrize("case", ["glm4moe", "qwen35"])
@pytest.mark.parametrize("length", [7, 70])
def test_a_draft_leaves_the_keys_that_a_fork_shares(paths, case, length):
    """The block writes where the model has written long ago, in blocks that forks share."""
    ids = [3 + place % 20 for place in range(length)]
    with Engine.load(paths(case), draft_block=True, context_length=80, num_sequences=3) as engine:
        with engine.sequence() as text:
            text.extend(ids, "none")
            want_RV = text.extend([5, 9, 4], "all")
        with drafting(engine, ALL), engine.sequence() as text:
            block = engine._live.draft
            text.extend(ids, "none")
            with text.fork() as fork:
                assert block.first(fork.number, length, 5) is not None
                fork.read_state()
                for each in (fork, text):
                    assert torch.equal(each.extend([5, 9, 4], "all"), want_RV)


@pytest.mark.parametrize("length", [12, 11])
@pytest.mark.parametrize("has_drafted", [False, True])
def test_a_saved_prompt_keeps_what_the_block_has_of_it(paths, tmp_path, has_drafted, length):
    """The block guesses as after the text itself, if it goes on, or its last token comes again."""
    path, ids = tmp_path / "p", [*PROMPT, 7]
    with Engine.load(paths("qwen35"), draft_block=True, context_length=80) as engine:
        block = engine._live.draft
        with engine.sequence() as text:
            text.mark(11)
            text.extend(ids, "none")  # it is not followed: nothing is known
            save_prompt(text, tmp_path / "without", engine.prompt_key())
        with drafting(engine, ALL):
            with engine.sequence() as text:
                text.mark(11)
                text.extend(ids, "none")
                if has_drafted:
                    block.first(text.number, 12, 7)
                save_prompt(text, path, engine.prompt_key())
                text.rollback(length)
                text.extend([*ids[length:], 7], "none")
                want_V = block.first(text.number, text.length, 9)
            for file in (path, tmp_path / "without"):
                with engine.sequence() as text:
                    restore_prompt(text, file, engine.prompt_key())
                    text.rollback(length)
                    text.extend([*ids[length:], 7], "none")
                    got_V = block.first(text.number, text.length, 9)
                    assert (got_V is None) == (file != path)
                    assert got_V is None or torch.equal(got_V, want_V)
    with Engine.load(paths("qwen35"), context_length=80) as engine, engine.sequence() as text:
        assert restore_prompt(text, path, engine.prompt_key()) == 12


def test_a_state_of_a_block_of_another_shape_is_refused(paths):
    with Engine.load(paths("qwen35"), draft_block=True, context_length=80) as engine:
        with drafting(engine, ALL), engine.sequence() as text:
            text.extend(PROMPT, "none")
            state = text.read_state()
        draft = state.draft
        for changed in (
            {"hidden_WD": draft.hidden_WD[:0]},
            {"hidden_WD": draft.hidden_WD[:, 1:]},
            {"key_TKX": draft.key_TKX[1:]},
            {"value_TKX": draft.value_TKX.float()},
        ):
            other = replace(state, draft=replace(draft, **changed))
            with engine.sequence() as text, pytest.raises(HotsplitError, match="block's state is"):
                text.write_state(PROMPT, other)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_no_guess(value):
    logits_V = torch.tensor([float("-inf"), value, float("-inf")])
    block = SimpleNamespace(first=lambda *_: logits_V)
    drafter = BlockDrafter(block, (1e-3, 1e-4), FrequentIds(3, None))
    drafter.follow(SimpleNamespace(is_open=True, ids=[1], number=0, length=1))
    assert not list(drafter.guesses([1, 2]))
    assert drafter.fault == "its logits are NaN or infinite"
    logits_V = None
    assert not list(drafter.guesses([1, 2, 3])) and not drafter.fault.startswith("its")
    drafter.follow(SimpleNamespace(is_open=True, ids=[1], number=0, length=1))
    assert not list(drafter.guesses([1, 2]))
    assert drafter.fault == "it has not seen the beginning of the text"


def test_the_controller_drafts_by_the_block_where_a_file_has_one(paths):
    with Engine.load(paths("qwen35"), draft_block=True, context_length=80) as engine:
        want = text_of(engine, 50)
        for options in (ALL, SpeculationOptions(type="auto", is_optional=True)):
            with speculating(engine, options) as drafts:
                assert text_of(engine, 50, drafts) == want
                assert drafts.line().startswith("speculation (mtp): ")
                assert engine._live.draft.is_on
            assert not engine._live.draft.is_on
    with Engine.load(paths("qwen35"), context_length=80) as engine:
        with speculating(engine, SpeculationOptions(type="auto", is_optional=True)) as drafts:
            assert drafts._drafter.name == "ngram"
        with pytest.raises(HotsplitError, match="has no draft block"), speculating(engine, ALL):
            pass


def test_a_text_that_the_block_has_left_is_not_looked_at_until_it_begins_anew(paths):
    with Engine.load(paths("qwen35"), draft_block=True, context_length=80) as engine:
        block, ids = engine._live.draft, [*PROMPT, 7]
        with drafting(engine, ALL), engine.sequence() as text:
            text.extend(ids, "none")
            want_V = block.first(text.number, text.length, 9)
            drafter = BlockDrafter(block, (1e-3, 1e-4), FrequentIds(256, None))
            drafter.follow(text)
            drafter.leave()
            assert block.num_waiting(text.number) == 0 and not list(drafter.guesses([*ids, 9]))
            for tokens in ([9], [3, 4]):
                text.extend(tokens, "none")
                assert block.num_waiting(text.number) == 0
            assert text.read_state().draft is None
            assert block.first(text.number, text.length, 9) is None
            text.rollback(0)
            text.extend(ids, "none")
            assert torch.equal(block.first(text.number, text.length, 9), want_V)
