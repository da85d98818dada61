"""Sequences of a model with recurrent states: whatever forks, rollbacks, drafts, failing passes and
other texts do, a text gets the bits that it gets alone."""

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from delta_models import FEW, RECURRENT, delta_model
from folded import CONV, STATE, Failure, FoldedDecoder, alone
from models import byte_level_keys, make_model, make_sizes
from test_chat import alone as answer_alone
from test_chat import chat_keys, talk
from test_chat import text_of as said
from test_sequences import Alone, change_texts
from test_serve_scheduler import SAMPLINGS, Bench, check_random_life
from test_speculation import LIES, PROMPT, Eager, Prophet, text_of

from hotsplit import Engine
from hotsplit.costs.state_bytes import num_slots
from hotsplit.errors import HotsplitError
from hotsplit.families.expert_keys import Experts
from hotsplit.files.safetensors_file import load_arrays, save_arrays
from hotsplit.runtime.generate import prompt_cache
from hotsplit.runtime.generate.draft_model import DraftModel
from hotsplit.runtime.generate.generation import TURN_TAIL
from hotsplit.runtime.generate.ngrams import NgramDrafter
from hotsplit.runtime.generate.prompt_cache import FORMAT, VERSION, restore_prompt, save_prompt
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.step.sequences import Part, Sequence

CONTEXT, ROOM = 300, 5


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(vocab_size=vocab_size, context_length=CONTEXT, num_layers=1)
    model = make_model(sizes=shape, kind="f16", extra_keys=keys)
    model = dataclasses.replace(model, path=tmp_path_factory.mktemp("m") / "m.gguf")
    model.save(model.path)
    return model.path


@pytest.fixture(scope="module")
def chat_path(tmp_path_factory):
    keys, vocab_size = chat_keys()
    path = tmp_path_factory.mktemp("chat") / "m.gguf"
    make_model(sizes=make_sizes(vocab_size=vocab_size, context_length=512), extra_keys=keys).save(
        path
    )
    return path


def folded(path, num_sequences: int = 1, **more) -> tuple[Engine, FoldedDecoder]:
    context = more.pop("context_length", None)
    engine = Engine.load(path, num_sequences=num_sequences, mode="dense", context_length=context)
    return engine, FoldedDecoder(engine, num_sequences, **more)


Want = Callable[[list[int], int], torch.Tensor]  # the last so many logits of a text alone


def check(text: Sequence, logits_RV: torch.Tensor, vocab_size: int) -> None:
    """The logits after the last tokens are those of the text alone."""
    want_RV = folded_alone(vocab_size)(text.ids, len(logits_RV))
    assert torch.equal(logits_RV, want_RV), text.ids


def folded_alone(vocab_size: int) -> Want:
    def last(ids: list[int], count: int) -> torch.Tensor:
        lengths = range(len(ids) - count + 1, len(ids) + 1)
        found = [alone(ids[:length], vocab_size) for length in lengths]
        return torch.stack(found) if found else torch.empty(0, vocab_size)

    return last


def schedule(
    engine: Engine, want: Want, chance: random.Random, steps: int, fail_after: Callable[[int], None]
) -> None:
    """Takes up to ROOM sequences through random operations. `fail_after`: makes a pass fail after
    so many rows, or parts of the step, from now on; -1: none."""
    texts = [engine.sequence()]
    for _ in range(steps):
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
        fail_after(chance.randrange(60))
        try:
            for part, logits_RV in zip(parts, engine.run(parts), strict=True):
                ids = part.sequence.ids
                assert torch.equal(logits_RV, want(ids, len(logits_RV))), ids
        except Failure:
            assert [text.ids for text in texts] == before
        fail_after(-1)
    for text in texts:
        text.close()


def test_random_schedules(path):
    engine, decoder = folded(path, ROOM)
    with engine:
        want = folded_alone(decoder.vocab_size)
        for seed in range(20):
            schedule(engine, want, random.Random(seed), 8, decoder.fail_after)
        assert decoder.weights.states.num_free == 4 * ROOM


@pytest.mark.slow
def test_a_thousand_random_schedules(path):
    engine, decoder = folded(path, ROOM)
    with engine:
        want = folded_alone(decoder.vocab_size)
        for seed in range(1000):
            schedule(engine, want, random.Random(f"slow {seed}"), 12, decoder.fail_after)


# ---- models with states --------------------------------------------------------------------------


class Faults:
    """Makes native steps fail after they have written their states."""

    def __init__(self, monkeypatch) -> None:
        self.left = -1
        self.real, self.num_failed = library.run_step, 0
        monkeypatch.setattr(library, "run_step", self.run)

    def after(self, rows: int) -> None:
        self.left = rows

    def run(self, step, rows, logits) -> None:
        self.real(step, rows, logits)
        if 0 <= self.left < len(rows):
            self.left = -1
            self.num_failed += 1
            raise Failure
        self.left -= len(rows)


def real_schedules(
    kind: str, experts: Experts | None, monkeypatch, seeds: range, name: str, mixer: str
) -> None:
    shape = make_sizes(num_layers=4, vocab_size=50, context_length=CONTEXT)
    model = RECURRENT[mixer](shape, kind=kind, experts=experts)
    with Engine.of(model, num_sequences=ROOM) as engine, Engine.of(model) as single:
        texts = Alone(single)
        faults = Faults(monkeypatch)

        def want(ids: list[int], count: int) -> torch.Tensor:
            left, faults.left = faults.left, -1
            found = texts.logits(ids)[len(ids) - count :]
            faults.left = left
            return found

        for seed in seeds:
            chance = random.Random(f"{name} {kind} {experts} {seed}")
            schedule(engine, want, chance, 12, faults.after)
        assert faults.num_failed > len(seeds) / 4
        states = engine._sequences.states
        assert states.num_free == num_slots(ROOM)


@pytest.mark.parametrize("experts", [None, FEW], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "kind, mixer",
    [
        ("f32", "delta nets"),
        ("q8_0", "delta nets"),
        ("q4_0", "delta nets"),
        ("q8_0", "short convolutions"),
    ],
)
def test_every_row_has_the_bits_of_its_text_alone(monkeypatch, kind, experts, mixer):
    real_schedules(kind, experts, monkeypatch, range(8), "fast", mixer)


@pytest.fixture(scope="module", params=RECURRENT)
def state_path(tmp_path_factory, request):
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(num_layers=4, vocab_size=vocab_size, context_length=CONTEXT)
    path = tmp_path_factory.mktemp("delta") / "m.gguf"
    model = RECURRENT[request.param](shape, kind="q8_0", experts=FEW, extra_keys=keys)
    model.save(path)
    return path


@pytest.mark.parametrize("lie", ["wrong in the middle", "anything"])
def test_drafts_change_no_text_of_states(state_path, lie):
    with Engine.load(state_path, context_length=60) as engine:
        for sampling in (SAMPLINGS[0], SAMPLINGS[1]):
            want = text_of(engine, 40, sampling=sampling)
            drafts = Prophet(PROMPT + want, LIES[lie])
            assert text_of(engine, 40, drafts, sampling=sampling) == want
            assert engine.last_run.drafted > 20
        shifted = text_of(engine, 90, shift_keep=3)
        drafts = Prophet(PROMPT + shifted, LIES[lie])
        assert text_of(engine, 90, drafts, shift_keep=3) == shifted


def test_a_draft_model_of_states_changes_no_text(state_path):
    with Engine.load(state_path) as engine, Engine.load(state_path) as other:
        want = text_of(engine, 80)
        with other.sequence() as sequence:
            assert text_of(engine, 80, Eager(DraftModel(sequence, 0.0), 4)) == want
        assert engine.last_run.accepted > 40  # the same model


def test_served_texts_of_states_equal_those_generated_alone(state_path):
    check_random_life(state_path, 1, 25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 40))
def test_many_served_texts_of_states_equal_those_generated_alone(state_path, seed):
    check_random_life(state_path, seed, 80)


def test_keys_are_selected_where_layers_attend_and_states_stay(state_path, caplog):
    """A short text is read entirely, with the bits of no selection; a long one is not."""
    ids = [n * 7 % 250 for n in range(200)]
    with Engine.load(state_path) as engine:
        want = engine.logits(ids)
    caplog.set_level("INFO")
    with Engine.load(state_path, kv_offload="window=32,top=32,sinks=32") as engine:
        got = engine.logits(ids)
        found = engine.logits(ids[:96])
    assert torch.equal(found, want[:96]) and not torch.equal(got, want)
    (line,) = (line for line in caplog.messages if "recurrent states" in line)
    assert "--kv-offload is for keys and values alone" in line and "in 3 layers" in line


def test_a_prompts_file_of_states_is_exact_in_any_engine(state_path, tmp_path):
    file, ids = tmp_path / "p", [n * 7 % 250 for n in range(90)]
    for room, others in ((1, 3), (3, 1)):
        with Engine.load(state_path, num_sequences=room) as engine, engine.sequence() as text:
            text.mark(82)
            text.extend(ids)
            save_prompt(text, file, engine.prompt_key())
            want = text.extend([7, 8, 9], "all")
            text.rollback(82)
            begun = text.extend([1, 2], "all")
        with Engine.load(state_path, num_sequences=others) as engine, engine.sequence() as text:
            assert restore_prompt(text, file, engine.prompt_key()) == 90
            assert torch.equal(text.extend([7, 8, 9], "all"), want)
            assert text.reusable(89) == 82
            text.rollback(82)
            assert torch.equal(text.extend([1, 2], "all"), begun)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [None, FEW], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("mixer", RECURRENT)
def test_every_row_of_a_thousand_schedules(monkeypatch, kind, experts, mixer):
    real_schedules(kind, experts, monkeypatch, range(100), "slow", mixer)


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


def test_the_comparison_finds_a_token_that_is_folded_twice(path):
    engine, decoder = folded(path)
    with engine, engine.sequence() as text:
        check(text, text.extend([1, 2, 3], "all"), decoder.vocab_size)
        text.ids.insert(2, 2)
        with pytest.raises(AssertionError):
            check(text, text.extend([5]), decoder.vocab_size)


def test_a_pass_that_fails_after_others_makes_no_text_repeat_tokens(path):
    engine, decoder = folded(path, 2, rows_of_pass=1)
    with engine, engine.sequence() as first, engine.sequence() as second:
        parts = [Part(sequence=text, tokens=[7]) for text in (first, second)]
        for text in (first, second):
            text.extend([3, 4, 5])
        decoder.fail_after(1)
        with pytest.raises(Failure):
            first.owner.run(parts)
        before = decoder.num_computed
        for text, logits_RV in zip((first, second), first.owner.run(parts), strict=True):
            check(text, logits_RV, decoder.vocab_size)
        assert decoder.num_computed - before == 2


def test_a_rollback_repeats_the_tokens_after_the_nearest_state(path):
    engine, decoder = folded(path, rows_of_pass=100)
    with engine, engine.sequence() as text:
        text.mark(10)
        text.extend(range(30), "none")
        assert [text.reusable(n) for n in (9, 10, 29, 30)] == [0, 10, 10, 30]
        text.rollback(14)
        before = decoder.num_computed
        check(text, text.extend([7]), decoder.vocab_size)
        assert decoder.num_computed - before == 5
        text.rollback(9)
        before = decoder.num_computed
        check(text, text.extend([7, 8], "all"), decoder.vocab_size)
        assert decoder.num_computed - before == 11


def test_rejected_drafts_never_repeat_more_than_the_last_ones(path):
    """A draft after a rejected one begins at a state that the same pass has stored."""
    engine, decoder = folded(path, rows_of_pass=100)
    with engine, engine.sequence() as text:
        text.extend(range(60), "none")
        for _ in range(20):
            before = decoder.num_computed
            check(text, text.extend([1, 2, 3, 4], "all"), decoder.vocab_size)
            text.rollback(text.length - 2)
            assert decoder.num_computed - before <= 6


@pytest.mark.parametrize("lie", LIES)
def test_adversarial_drafts_change_nothing(path, lie):
    engine, _ = folded(path, rows_of_pass=64, context_length=60)
    with engine:
        want = text_of(engine, 40)
        assert text_of(engine, 40, Prophet(PROMPT + want, LIES[lie])) == want
        assert engine.last_run.drafted > 20
        shifted = text_of(engine, 70, shift_keep=3)
        assert text_of(engine, 70, Prophet(PROMPT + shifted, LIES[lie]), shift_keep=3) == shifted


def test_drafters_with_states_of_their_own_change_nothing(path):
    engine, _ = folded(path, rows_of_pass=64)
    other, small = folded(path)
    with engine, other, other.sequence() as sequence:
        want = text_of(engine, 100)
        for drafter in (NgramDrafter(), DraftModel(sequence, 0.0)):
            small.num_computed = 0
            assert text_of(engine, 100, Eager(drafter, 4)) == want
        run = engine.last_run
        assert run.accepted > 20 and small.num_computed < 3 * run.drafted


def test_another_answer_and_the_next_turn_begin_near_the_end_of_the_prompt(chat_path):
    engine, decoder = folded(chat_path, 2, rows_of_pass=50)
    with engine, talk(engine) as chat:
        said(chat.say("Hello " * 20))
        for message in ("What else?", "And?"):
            before = decoder.num_computed
            answer = said(chat.say(message))
            assert decoder.num_computed - before < 100  # not the whole conversation
            assert answer == answer_alone(engine, chat.messages[:-1])
            assert said(chat.regenerate()) == answer
            assert chat.run.cached_tokens == chat.run.prefill_tokens - TURN_TAIL
        chat.messages[-1]["content"] = "Plain."  # as if it had been a reasoning that is left out
        length, answer = chat.run.prefill_tokens, said(chat.say("Why?"))
        assert chat.run.cached_tokens == length - TURN_TAIL
        assert answer == answer_alone(engine, chat.messages[:-1])


def test_an_interrupted_prompt_is_computed_again(chat_path):
    engine, decoder = folded(chat_path, 2, rows_of_pass=50)
    with engine, talk(engine) as chat:
        said(chat.say("Hello"))
        decoder.fails_after = decoder.num_computed + 70
        with pytest.raises(Failure):
            said(chat.say("And " * 30))
        assert said(chat.say("And?")) == answer_alone(engine, chat.messages[:-1])


# ---- the server ----------------------------------------------------------------------------------


def fold_both(bench: Bench) -> None:
    FoldedDecoder(bench.engine, bench.prefix_cache.num_places, rows_of_pass=128)
    FoldedDecoder(bench.single, rows_of_pass=128)


def test_served_texts_equal_those_generated_alone(path):
    check_random_life(path, 0, 25, fold_both)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 30))
def test_many_served_texts_equal_those_generated_alone(path, seed):
    check_random_life(path, seed, 60, fold_both)


def test_the_server_reuses_states_only_where_they_are_kept(path):
    """The first text leaves states near the end of its prompt and at its own end; where the second
    one parts from it, none. The second leaves one there, which the third continues."""
    bench = Bench(path, parallel=2, kept=3)
    fold_both(bench)
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
    fold_both(bench)
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
    engine, decoder = folded(path, 2)
    file, ids = tmp_path / "p", [n % 50 for n in range(70)]
    with engine, engine.sequence() as text:
        text.mark(60)
        text.extend(ids, "none")
        save_prompt(text, file, engine.prompt_key())
        with engine.sequence() as other:
            assert restore_prompt(other, file, engine.prompt_key()) == 70
            assert [other.reusable(n) for n in (59, 69, 70)] == [0, 60, 70]
            for length, tokens in ((70, [7]), (65, [8, 9]), (3, [1])):
                other.rollback(length)
                check(other, other.extend(tokens, "all"), decoder.vocab_size)
        text.rollback(66)  # a file of a text whose last state is before its end
        save_prompt(text, file, engine.prompt_key())
        with engine.sequence() as other:
            assert restore_prompt(other, file, engine.prompt_key()) == 66
            check(other, other.extend([7]), decoder.vocab_size)
        text.rollback(5)  # without any state but that of the beginning
        save_prompt(text, file, engine.prompt_key())
        with engine.sequence() as other:
            assert restore_prompt(other, file, engine.prompt_key()) == 5
            check(other, other.extend([7]), decoder.vocab_size)


WRONG = {
    "another shape": {"state.0": np.zeros((2, 1, 2, 3), np.float32)},
    "another type": {"conv.0": np.zeros((2, *CONV), np.float64)},
    "too few": {"state.0": np.zeros((1, *STATE), np.float32)},
    "another layer": {
        f"{n}.1": np.zeros((2, *s), np.float32) for n, s in (("state", STATE), ("conv", CONV))
    },
    "after the end": {"positions": np.array([60, 71])},
    "twice": {"positions": np.array([60, 60])},
    "before the beginning": {"positions": np.array([0, 70])},
    "no positions": {"positions": None},
    "no state": {"state.0": None},
    "no states": {"state.0": None, "conv.0": None, "positions": None},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_states_of_another_model_are_refused_in_one_line(path, tmp_path, monkeypatch, wrong):
    engine, _ = folded(path)
    with engine:
        with engine.sequence() as text:
            text.mark(60)
            text.extend(range(70), "none")
            save_prompt(text, tmp_path / "p", engine.prompt_key())
        metadata, arrays = load_arrays(tmp_path / "p", FORMAT, VERSION)
        given = {**arrays, **WRONG[wrong]}
        given = {name: array for name, array in given.items() if array is not None}
        metadata["sha256"] = prompt_cache._digest(given)
        save_arrays(tmp_path / "p", FORMAT, VERSION, metadata, given)
        with engine.sequence() as text, pytest.raises(HotsplitError) as refusal:
            restore_prompt(text, tmp_path / "p", engine.prompt_key())
    assert "\n" not in str(refusal.value)
    assert "recurrent states are not" in str(refusal.value) or "its tensors are" in str(
        refusal.value
    )
