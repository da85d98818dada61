"""Sequences of a model with recurrent states: whatever forks, rollbacks, drafts,
failing passes and other texts do, a text gets the bits that it gets alone."""

import random
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import pytest
import torch
from delta_models import FEW, STATEFUL, delta_model
from models import byte_level_keys, make_sizes
from test_chat import alone as answer_alone
from test_chat import chat_keys, talk
from test_chat import text_of as said
from test_sequences import Alone, change_texts
from test_serve_scheduler import SAMPLINGS, Bench, check_random_life
from test_speculation import LIES, PROMPT, Eager, Prophet, text_of

from hotsplit import Engine
from hotsplit.costs.state_bytes import MOST_KEPT, num_kept, num_slots
from hotsplit.errors import HotsplitError
from hotsplit.files.safetensors_file import load_arrays, save_arrays
from hotsplit.runtime.generate import prompt_cache
from hotsplit.runtime.generate.draft_model import DraftModel
from hotsplit.runtime.generate.generation import TURN_TAIL
from hotsplit.runtime.generate.prompt_cache import FORMAT, VERSION, restore_prompt, save_prompt
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.batch import rows_of
from hotsplit.runtime.step.sequences import Part

CONTEXT, ROOM = 300, 5


def saved(folder, keys, vocab_size, context_length=CONTEXT, mixer="delta nets"):
    shape = make_sizes(num_layers=4, vocab_size=vocab_size, context_length=context_length)
    path = folder / "m.gguf"
    STATEFUL[mixer](shape, kind="q8_0", experts=FEW, extra_keys=keys).save(path)
    return path


@pytest.fixture(scope="module", params=STATEFUL)
def path(tmp_path_factory, request):
    return saved(tmp_path_factory.mktemp("states"), *byte_level_keys(), mixer=request.param)


@pytest.fixture(scope="module")
def chat_path(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("chat"), *chat_keys(), context_length=512)


# How many rows of a check are accepted, by its turn and its number of rows.
PATTERNS = {
    "all": lambda turn, count: count,
    "none": lambda turn, count: 1,
    "alternating": lambda turn, count: count if turn % 2 else 1,
    "a part": lambda turn, count: 1 + turn % count,
}


class Failure(Exception):
    """A pass that fails after it has written its states."""


class Steps:
    """Counts the rows that native steps compute, and makes one fail after `left` more of them; -1:
    none."""

    def __init__(self, monkeypatch) -> None:
        self.left = -1
        self.real, self.num_failed, self.num_computed = library.run_step, 0, 0
        monkeypatch.setattr(library, "run_step", self.run)

    def run(self, step, rows, logits) -> None:
        self.real(step, rows, logits)
        self.num_computed += len(rows)
        if 0 <= self.left < len(rows):
            self.left = -1
            self.num_failed += 1
            raise Failure
        self.left -= len(rows)

    def of(self, work) -> int:
        """The number of rows that are computed while this works."""
        before = self.num_computed
        work()
        return self.num_computed - before


@pytest.fixture
def steps(monkeypatch):
    return Steps(monkeypatch)


def schedule(engine: Engine, want, chance: random.Random, count: int, steps: Steps) -> None:
    """Takes up to ROOM sequences through random operations, of which some fail."""
    texts = [engine.sequence()]
    for _ in range(count):
        change_texts(engine, texts, chance, chance.random(), 0.2, ROOM)
        if chance.random() < 0.3:
            text = chance.choice(texts)
            text.mark(chance.randint(0, text.length + 9))
        parts = []
        for text in chance.sample(texts, chance.randint(1, len(texts))):
            count = min(text.room, chance.choice((1, 1, 1, 2, 3, 7, 20)))
            tokens = [chance.randrange(50) for _ in range(count)]
            wanted = chance.choice(("last", "all", "none"))
            if tokens:
                parts.append(Part(sequence=text, tokens=tokens, wanted=wanted))
        before = [list(text.ids) for text in texts]
        steps.left = chance.randrange(60)
        try:
            for part, logits_RV in zip(parts, engine.run(parts), strict=True):
                ids = part.sequence.ids
                assert torch.equal(logits_RV, want(ids, len(logits_RV))), ids
        except Failure:
            assert [text.ids for text in texts] == before
        steps.left = -1
    for text in texts:
        text.close()


def check_schedules(kind, experts, mixer, steps, seeds, name) -> None:
    shape = make_sizes(num_layers=4, vocab_size=50, context_length=CONTEXT)
    model = STATEFUL[mixer](shape, kind=kind, experts=experts)
    with Engine.of(model, num_sequences=ROOM) as engine, Engine.of(model) as single:
        texts = Alone(single)

        def want(ids: list[int], count: int) -> torch.Tensor:
            left, steps.left = steps.left, -1
            found = texts.logits(ids)[len(ids) - count :]
            steps.left = left
            return found

        for seed in seeds:
            chance = random.Random(f"{name} {kind} {experts} {seed}")
            schedule(engine, want, chance, 12, steps)
        assert steps.num_failed > len(seeds) / 4
        assert engine._sequences.states.num_free == num_slots(ROOM)


@pytest.mark.parametrize("experts", [None, FEW], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "kind, mixer",
    [
        *((kind, "delta nets") for kind in ("f32", "q8_0", "q4_0")),
        *(("q8_0", mixer) for mixer in ("short convolutions", "n-grams")),
    ],
)
def test_every_row_has_the_bits_of_its_text_alone(steps, kind, experts, mixer):
    check_schedules(kind, experts, mixer, steps, range(8), "fast")


def test_the_comparison_finds_a_state_of_another_text():
    shape = make_sizes(num_layers=4, vocab_size=50, context_length=CONTEXT)
    with Engine.of(delta_model(shape, kind="q8_0"), num_sequences=3) as engine:
        first, second = engine.sequence(), engine.sequence()
        first.extend([1] * 9)
        second.extend([2] * 9)
        fork = first.fork()
        assert torch.equal(first.extend([3]), fork.extend([3]))
        for state in engine._live.weights.layer_states[:1]:
            slots = [engine._sequences.states.states(n)[-1].slot for n in (0, 1)]
            state.write(slots[:1], state.read(slots[1:]))
        assert not torch.equal(first.extend([3]), fork.extend([3]))


def test_keys_are_selected_where_layers_attend_and_states_stay(path, caplog):
    """A short text is read entirely, with the bits of no selection; a long one is not."""
    ids = [n * 7 % 250 for n in range(200)]
    with Engine.load(path) as engine:
        want = engine.logits(ids)
    caplog.set_level("INFO")
    with Engine.load(path, kv_offload="window=32,top=32,sinks=32") as engine:
        got = engine.logits(ids)
        found = engine.logits(ids[:96])
    assert torch.equal(found, want[:96]) and not torch.equal(got, want)
    (line,) = (line for line in caplog.messages if "recurrent states" in line)
    assert "--kv-offload is for keys and values alone" in line and "in 3 layers" in line


def test_a_pass_that_fails_after_others_makes_no_text_repeat_tokens(path, steps):
    with Engine.load(path) as single:
        want = single.logits([3, 4, 5, 7])[-1:]
    with Engine.load(path, num_sequences=2) as engine:
        texts = [engine.sequence() for _ in range(2)]
        for text in texts:
            text.extend([3, 4, 5])
        parts = [Part(sequence=text, tokens=[7]) for text in texts]
        steps.left = 1
        with pytest.raises(Failure):
            engine.run(parts)
        assert steps.of(lambda: [torch.equal(got, want) for got in engine.run(parts)]) == 2
        assert all(torch.equal(text.extend([8]), texts[0].extend([8])) for text in texts[1:])


def test_a_rollback_repeats_the_tokens_after_the_nearest_state(path, steps):
    with Engine.load(path) as engine, Engine.load(path) as single, engine.sequence() as text:
        text.mark(10)
        text.extend(range(30), "none")
        assert [text.reusable(n) for n in (9, 10, 29, 30)] == [0, 10, 10, 30]
        for length, more, count in ((14, [7], 5), (9, [7, 8], 11)):
            text.rollback(length)
            before = steps.num_computed
            got = text.extend(more, "all")
            assert steps.num_computed - before == count
            assert torch.equal(got, single.logits([*range(length), *more])[length:])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_checks_compute_their_rows_alone(path, steps, pattern):
    """A step of several texts computes each row once, whatever is accepted, with the bits of the
    text alone; a long check, whose rows are not all kept, repeats no more than its own."""
    chance = random.Random(pattern)
    with Engine.load(path, num_sequences=3) as engine, Engine.load(path) as single:
        alone = Alone(single)
        texts = [engine.sequence() for _ in range(3)]
        for number, text in enumerate(texts):
            text.extend([number, *range(20, 60)], "none")
        for turn in range(12):
            parts, some = [], chance.sample(texts, chance.randint(1, 3))
            for text in some:
                count = chance.choice((1, 2, 5, MOST_KEPT))
                tokens = [chance.randrange(250) for _ in range(count)]
                parts.append(Part(sequence=text, tokens=tokens, wanted="all"))
            found = []
            count = sum(len(part.tokens) for part in parts)
            assert (
                steps.of(lambda parts=parts, found=found: found.extend(engine.run(parts))) == count
            )
            for text, part, logits_RV in zip(some, parts, found, strict=True):
                want = alone.logits(text.ids)[-len(part.tokens) :]
                assert torch.equal(logits_RV, want), (turn, text.number)
                accepted = PATTERNS[pattern](turn, len(part.tokens))
                text.rollback(text.length - len(part.tokens) + accepted)
        text = texts[0]
        for _ in range(3):
            tokens = [chance.randrange(250) for _ in range(MOST_KEPT + 1)]
            assert steps.of(lambda tokens=tokens: text.extend(tokens, "all")) <= 2 * len(tokens)
            text.rollback(text.length - 2)


@pytest.mark.parametrize(
    "wrong",
    [
        ({"reads": 8},),
        ({"writes": 8},),
        ({"keeps": num_kept(2)},),
        ({"reads": 3, "writes": 3},),
        ({"reads": 3}, {"writes": 3}),
        ({"writes": 3}, {"writes": 3}),
        ({"again": range(num_kept(2) - 1, num_kept(2) + 1)},),
        ({"again": range(-1, 1)},),
        ({"begins": 3},),  # although no rows are repeated
        ({"again": range(2), "begins": 8},),
        ({"again": range(2), "begins": 3, "reads": 3},),
        ({"again": range(2), "begins": 3}, {"writes": 3}),
        ({"again": range(2), "begins": 3}, {"again": range(3, 5), "begins": 3}),
        ({"again": range(2), "keeps": 1},),
        ({"again": range(2)}, {"keeps": 0}),
        ({"keeps": 4}, {"keeps": 4}),
    ],
)
def test_rows_that_would_change_what_is_read_are_refused(path, wrong):
    """Two texts in a step."""
    with Engine.load(path, num_sequences=2) as engine:
        right = rows_of([1], 0, "last", 0) + rows_of([2], 0, "last", 1)
        for row in right:
            engine._live.weights.cache.reserve(row.sequence, 0, 1)
        engine._live.native.run_rows(right)
        rows = [replace(row, **one) for row, one in zip_longest(right, wrong, fillvalue={})]
        with pytest.raises(AssertionError):  # the status of a bad argument
            engine._live.native.run_rows(rows)


def test_a_fork_of_a_checked_text_repeats_its_rows(path, steps):
    with Engine.load(path, num_sequences=2) as engine, Engine.load(path) as single:
        text = engine.sequence()
        text.extend(range(30), "none")
        text.extend([1, 2, 3, 4], "all")
        text.rollback(32)
        fork, want = text.fork(), single.logits([*range(30), 1, 2, 9])[-1:]
        assert [t.reusable(32) for t in (text, fork)] == [32, 30]
        for each, count in ((fork, 3), (text, 1)):
            found = []
            assert steps.of(lambda each=each, found=found: found.append(each.extend([9]))) == count
            assert torch.equal(found[0], want)


def test_the_comparison_finds_kept_rows_of_another_text(path):
    with Engine.load(path) as engine, engine.sequence() as text:
        logits = []
        for is_wrong in (False, True):
            text.rollback(0)
            text.extend(range(30), "none")
            text.extend([1, 2, 3, 4], "all")
            text.rollback(33)
            if is_wrong:
                rows = engine._sequences.states.states(0)[-1].again
                for layer in engine._live.weights.layer_states[:1]:
                    layer.kept_RX[rows[-1]] += 1
            logits.append(text.extend([9]))
        assert not torch.equal(*logits)


@pytest.mark.parametrize("lie", LIES)
def test_adversarial_drafts_change_nothing(path, lie):
    with Engine.load(path, context_length=60) as engine:
        for sampling in (SAMPLINGS[0], SAMPLINGS[1]):
            want = text_of(engine, 40, sampling=sampling)
            drafts = Prophet(PROMPT + want, LIES[lie])
            assert text_of(engine, 40, drafts, sampling=sampling) == want
            assert engine.last_run.drafted > 20
        shifted = text_of(engine, 90, shift_keep=3)
        drafts = Prophet(PROMPT + shifted, LIES[lie])
        assert text_of(engine, 90, drafts, shift_keep=3) == shifted


def test_a_draft_model_with_states_of_its_own_changes_nothing(path):
    with Engine.load(path) as engine, Engine.load(path) as other, other.sequence() as sequence:
        want = text_of(engine, 80)
        assert text_of(engine, 80, Eager(DraftModel(sequence), 4)) == want
        assert engine.last_run.accepted > 40  # the same model


def test_another_answer_and_the_next_turn_begin_near_the_end_of_the_prompt(chat_path, steps):
    with Engine.load(chat_path, num_sequences=2) as engine, talk(engine) as chat:
        said(chat.say("Hello " * 20))
        for message in ("What else?", "And?"):
            before = steps.num_computed
            answer = said(chat.say(message))
            assert steps.num_computed - before < 100  # not the whole conversation
            assert answer == answer_alone(engine, chat.messages[:-1])
            assert said(chat.regenerate()) == answer
            assert chat.run.cached_tokens == chat.run.prefill_tokens - TURN_TAIL
        chat.messages[-1]["content"] = "Plain."  # as if it had been a reasoning that is left out
        length, answer = chat.run.prefill_tokens, said(chat.say("Why?"))
        assert chat.run.cached_tokens == length - TURN_TAIL
        assert answer == answer_alone(engine, chat.messages[:-1])


def test_an_interrupted_prompt_is_computed_again(chat_path, steps):
    with Engine.load(chat_path, num_sequences=2) as engine, talk(engine) as chat:
        said(chat.say("Hello"))
        steps.left = 70
        with pytest.raises(Failure):
            said(chat.say("And " * 30))
        assert said(chat.say("And?")) == answer_alone(engine, chat.messages[:-1])


# ---- the server ----------------------------------------------------------------------------------


def test_served_texts_equal_those_generated_alone(path):
    check_random_life(path, 1, 25)


def test_the_server_reuses_states_only_where_they_are_kept(path):
    """The first text leaves states near the end of its prompt and at its own end; where the second
    one parts from it, none. The second leaves one there, which the third continues."""
    bench = Bench(path, parallel=2, kept=3)
    stem, ends = [n % 250 for n in range(120)], ([1] * 9, [2] * 9, [3] * 9)
    cached = []
    for key, end in enumerate(ends):
        bench.submit(key, stem + end)
        bench.finish()
        cached.append(bench.ended[key].cached_tokens)
        assert bench.tokens[key] == bench.alone(stem + end, SAMPLINGS[0])
    bench.submit("again", stem + ends[0])
    bench.submit("next turn", stem + ends[1] + bench.tokens[1] + [5])
    bench.finish()
    cached += [bench.ended[key].cached_tokens for key in ("again", "next turn")]
    assert cached == [0, 0, 120, 129 - TURN_TAIL, 129 + 19]
    bench.close()


def test_a_text_waits_for_a_prefix_and_continues_its_state(path):
    bench = Bench(path, parallel=2, kept=1)
    stem = [n % 250 for n in range(230)]
    for key in range(2):
        bench.submit(key, [*stem, 7 + key, *range(40)])
    bench.finish()
    assert [bench.ended[key].cached_tokens for key in range(2)] == [0, 230]
    for key in range(2):
        assert bench.tokens[key] == bench.alone([*stem, 7 + key, *range(40)], SAMPLINGS[0])
    bench.close()


# ---- files ---------------------------------------------------------------------------------------


def test_a_prompts_file_holds_the_states(path, tmp_path):
    """In an engine of any number of sequences; its text may end behind its last state, or have
    none but that of the beginning."""
    file, ids = tmp_path / "p", [n * 7 % 250 for n in range(90)]
    with Engine.load(path) as single:
        alone = Alone(single)
        for room, others in ((1, 3), (3, 1)):
            with Engine.load(path, num_sequences=room) as engine, engine.sequence() as text:
                text.mark(82)
                text.extend(ids, "none")
                for length in (90, 86, 5):
                    text.rollback(length)
                    save_prompt(text, tmp_path / f"{length}", engine.prompt_key())
            with Engine.load(path, num_sequences=others) as engine, engine.sequence() as text:
                for length, steps in ((90, ((90, 7), (85, 8), (3, 1))), (86, ()), (5, ())):
                    text.rollback(0)
                    file = tmp_path / f"{length}"
                    assert restore_prompt(text, file, engine.prompt_key()) == length
                    for back, token in steps or ((length, 7),):
                        text.rollback(back)
                        want = alone.logits([*ids[:back], token])[-1:]
                        assert torch.equal(text.extend([token]), want), (length, back)


# What replaces a file's arrays; KIND.0 is one of its first layer.
WRONG = {
    "another shape": lambda found: {"KIND.0": found["KIND.0"][..., :-1]},
    "another type": lambda found: {"KIND.0": found["KIND.0"].astype(np.float64)},
    "too few": lambda found: {"KIND.0": found["KIND.0"][:1]},
    "another layer": lambda found: {"KIND.9": found["KIND.0"]},
    "after the end": lambda found: {"positions": np.array([60, 71])},
    "twice": lambda found: {"positions": np.array([60, 60])},
    "before the beginning": lambda found: {"positions": np.array([0, 70])},
    "no positions": lambda found: {"positions": None},
    "no state": lambda found: {"KIND.0": None},
    "no states": lambda found: {
        name: None for name in found if name.partition(".")[0] in ("KIND", "state", "positions")
    },
}


@pytest.mark.parametrize("wrong", WRONG)
def test_states_of_another_model_are_refused_in_one_line(path, tmp_path, wrong):
    with Engine.load(path) as engine:
        with engine.sequence() as text:
            text.mark(60)
            text.extend(range(70), "none")
            save_prompt(text, tmp_path / "p", engine.prompt_key())
        metadata, arrays = load_arrays(tmp_path / "p", FORMAT, VERSION)
        kind = next(kind for kind in ("conv", "state") if f"{kind}.0" in arrays)
        own = {name.replace(kind, "KIND"): array for name, array in arrays.items()}
        given = {name.replace("KIND", kind): a for name, a in (own | WRONG[wrong](own)).items()}
        given = {name: np.ascontiguousarray(a) for name, a in given.items() if a is not None}
        metadata["sha256"] = prompt_cache._digest(given)
        save_arrays(tmp_path / "p", FORMAT, VERSION, metadata, given)
        with engine.sequence() as text, pytest.raises(HotsplitError) as refusal:
            restore_prompt(text, tmp_path / "p", engine.prompt_key())
    line = str(refusal.value)
    assert "recurrent states are not" in line or "its tensors are" in line
