"""Continuing and ending texts: stop strings, the end of the context, several texts together, the
state of a prompt in a file; and the generate command."""

import json
import random
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from forked import run_command
from hybrid_plans import F, L, make, planned
from models import changed, make_sizes
from test_runtime import saved
from tokenizers import Tokenizer

from hotsplit import Engine
from hotsplit.errors import HotsplitError
from hotsplit.model.spec import Neurons
from hotsplit.options.generation_options import ENDLESS, GenerationOptions, SamplingOptions
from hotsplit.runtime.generate.constraints import Constraint
from hotsplit.runtime.generate.generation import StopFilter
from hotsplit.runtime.generate.ngrams import NgramDrafter
from hotsplit.runtime.generate.prompt_cache import restore_prompt, save_prompt
from hotsplit.runtime.generate.speculation import Speculation

DRAWN = SamplingOptions(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=5)


def text_of(tokens) -> str:
    return "".join(token.text for token in tokens)


# ---- stop strings --------------------------------------------------------------------------------


def test_stop_strings_are_found_wherever_tokens_begin_and_end():
    """Compared with a search in the whole text, for texts cut into random pieces."""
    chance = random.Random(1)
    for _ in range(2000):
        text = "".join(chance.choice("ab") for _ in range(chance.randint(0, 30)))
        stops = [
            "".join(chance.choice("ab") for _ in range(chance.randint(2, 6)))
            for _ in range(chance.randint(1, 3))
        ]
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        pieces, rest = [], text
        while rest:
            cut = chance.randint(1, 4)
            pieces, rest = [*pieces, rest[:cut]], rest[cut:]
        given, is_stopped, filter_ = "", False, StopFilter(stops)
        for piece in pieces:
            more, is_stopped = filter_.push(piece)
            given += more
            if is_stopped:
                break
        assert is_stopped == bool(found), (text, stops)
        if not is_stopped:
            assert given + filter_.flush() == text
        else:  # cut where some stop string begins, before the first complete one ends
            ends = min(text.find(stop) + len(stop) for stop in stops if stop in text)
            assert given == text[: len(given)] and len(given) <= ends
            assert len(given) in [text.find(stop) for stop in stops]


def test_text_is_held_back_only_while_it_may_begin_a_stop_string():
    filter_ = StopFilter(["</s>"])
    assert filter_.push("a<") == ("a", False)
    assert filter_.push("b") == ("<b", False)
    assert filter_.push("</") == ("", False)
    assert filter_.flush() == "</"
    assert StopFilter([]).push("x</s") == ("x</s", False)


def test_a_stop_string_ends_the_text_and_is_not_in_it(codec_model):
    with Engine.load(codec_model) as engine:
        whole = text_of(engine.generate("ab cd", 30, sampling=DRAWN))
        for at, length in ((4, 1), (7, 3), (9, 6)):
            stop = whole[at : at + length]
            options = GenerationOptions(max_tokens=30, stops=(stop, "never said"))
            got = text_of(engine.generate("ab cd", sampling=DRAWN, options=options))
            assert got == whole[: whole.index(stop)]
            assert engine.last_run.stopped_by == "stop string"
        held = GenerationOptions(max_tokens=30, stops=(whole[-2:] + "\0",))
        assert text_of(engine.generate("ab cd", sampling=DRAWN, options=held)) == whole


# With text before it, which is held back, and behind it; the last is nowhere.
SPECIAL_STOPS = {"<|im_end|>": "ab", "b<|im_end|>": "a", "<|im_end|>c": "ab", "im_end": "ab"}
SPECIAL_STOPS |= {"<|im_end|><x>": "abc", "<|im_end|>d": "abcd"}


@pytest.mark.parametrize("stop, want", SPECIAL_STOPS.items())
def test_a_stop_string_may_have_the_text_of_special_tokens(stop, want):
    """That text is hidden, and never passed on."""
    filter_ = StopFilter([stop])
    given = ""
    for piece in ("a", "b", "<|im_end|>", "c", "<|im_end|>", "<x>", "d"):
        more, is_stopped = filter_.push(*(("", piece) if len(piece) > 1 else (piece, "")))
        given += more
        if is_stopped:
            break
    assert given + filter_.flush() == want


def test_a_special_token_whose_text_is_a_stop_string_stops(codec_model):
    """An answer never shows it, and it need not be an end token."""
    with Engine.load(codec_model) as engine:
        tokenizer = Tokenizer.from_str(engine.codec.tokenizer.to_str())
        (name,) = [token for token, i in tokenizer.get_vocab().items() if i == 5]
        tokenizer.add_special_tokens([name])
        engine._codec = replace(engine.codec, tokenizer=tokenizer)
        sampling = SamplingOptions(temperature=0, logit_bias=((5, 1e6),))
        for stop, count in ((name, 1), (f"{name}{name}", 2)):
            options = GenerationOptions(max_tokens=9, stops=(stop,))
            tokens = list(engine.generate("ab", sampling=sampling, options=options))
            assert len(tokens) == count and text_of(tokens) == ""
            assert engine.last_run.stopped_by == "stop string"


# ---- ends ----------------------------------------------------------------------------------------


class Script(Constraint):
    """A mask that allows one token at a time."""

    def __init__(self, ids):
        self.ids = list(ids)

    def mask_V(self, vocab_size):
        return torch.arange(vocab_size) == self.ids[0]

    def accept(self, token_id):
        del self.ids[0]


@pytest.mark.parametrize("stops", [(), ("never",), ("\ufffdz",)])
@pytest.mark.parametrize("count, stopped_by", [(9, "end of text"), (0, "max tokens")])
@pytest.mark.parametrize("end", ["\ufffd", "\ufffd\ufffd", "\ufffd nev", "\u00e9", ""])
def test_the_last_characters_are_there_whatever_ends_the_text(
    codec_model, end, count, stopped_by, stops
):
    with Engine.load(codec_model) as engine:
        (last,) = engine.codec.encode("q")
        engine.codec = replace(engine.codec, end_ids=frozenset([last]))
        ids = engine.codec.encode("ab" + end)
        options = GenerationOptions(max_tokens=len(ids) + count, stops=stops)
        tokens = engine.generate("ab", options=options, constraint=Script([*ids, last]))
        assert text_of(tokens) == "ab" + end
        assert engine.last_run.stopped_by == stopped_by


def test_a_stop_string_may_end_in_text_that_was_held_back(codec_model):
    with Engine.load(codec_model) as engine:
        ids = engine.codec.encode("ab\ufffd")
        options = GenerationOptions(max_tokens=len(ids), stops=("b\ufffd",))
        assert text_of(engine.generate("ab", options=options, constraint=Script(ids))) == "a"
        assert engine.last_run.stopped_by == "stop string"


@pytest.mark.parametrize(
    "stops, text", [((), "ab\ufffd[Q]c"), (("\ufffd[Q",), "ab"), (("b\0",), None)]
)
def test_special_tokens_may_have_a_text(codec_model, stops, text):
    """It is in its place, even where text before it was held back."""
    with Engine.load(codec_model) as engine:
        (mark,) = engine.codec.encode("q")
        ids = [*engine.codec.encode("ab\ufffd"), mark, *engine.codec.encode("c")]
        options = GenerationOptions(max_tokens=len(ids), stops=stops, marks=((mark, "[Q]"),))
        got = text_of(engine.generate("ab", options=options, constraint=Script(ids)))
        assert got == (text or "ab\ufffd[Q]c")


def test_an_unfinished_character_is_replaced_at_the_end(codec_model):
    with Engine.load(codec_model) as engine:
        ids = engine.codec.encode("ab\U0001f600")[:-1]
        options = GenerationOptions(max_tokens=len(ids))
        got = text_of(engine.generate("ab", options=options, constraint=Script(ids)))
        assert got == engine.codec.tokenizer.decode(ids) and got.startswith("ab\ufffd")


def test_the_end_token_can_be_ignored(codec_model):
    with Engine.load(codec_model) as engine:
        end = engine.codec.encode("q")[0]
        engine.codec = replace(engine.codec, end_ids=frozenset([end]))
        sampling = SamplingOptions(temperature=0, logit_bias=((end, 1e6),))
        assert list(engine.generate("ab", 5, sampling=sampling)) == []
        assert engine.last_run.stopped_by == "end of text"
        options = GenerationOptions(max_tokens=5, ignores_end=True)
        ids = [t.id for t in engine.generate("ab", sampling=sampling, options=options)]
        assert ids == [end] * 5


def test_without_a_token_limit_the_context_ends_the_text_or_is_shifted(codec_model):
    with Engine.load(codec_model, context_length=24) as engine:
        endless = GenerationOptions(max_tokens=ENDLESS, ignores_end=True)
        prompt = list(range(3, 13))
        assert len(list(engine.generate(prompt, sampling=DRAWN, options=endless))) == 24 - 10 + 1
        assert engine.last_run.stopped_by == "context"
        shifted = GenerationOptions(max_tokens=40, ignores_end=True, shift_keep=3)
        ids = [t.id for t in engine.generate(prompt, temperature=0.0, options=shifted)]
        assert len(ids) == 40 and engine.last_run.shifts == 3
        # The first token after the first shift equals that of a new text of the tokens kept.
        text = prompt + ids[:14]
        kept = text[:3] + text[3:][-(21 // 2) :]
        assert ids[15] == int(engine.logits([*kept, ids[14]])[-1].argmax())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_tokens": 0}, "max_tokens .-n. is 0, wanted 1 or more, or -1"),
        ({"max_tokens": -2}, "max_tokens .-n. is -2"),
        ({"stops": ("a", "")}, "an empty stop string"),
        ({"num_logprobs": -1}, "num_logprobs is -1, wanted a whole number from 0 to 1000"),
        ({"shift_keep": -1}, "shift_keep is -1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(HotsplitError, match=message):
        GenerationOptions(**options)


def test_logprobs_are_those_of_the_logits(codec_model):
    with Engine.load(codec_model) as engine:
        options = GenerationOptions(max_tokens=6, num_logprobs=3)
        tokens = list(engine.generate("ab cd", sampling=DRAWN, options=options))
        ids = engine.codec.encode("ab cd")
        for token in tokens:
            want_V = engine.logits(ids)[-1].double().log_softmax(0)
            assert token.logprob == pytest.approx(float(want_V[token.id]), abs=1e-5)
            top = torch.topk(want_V, 3)
            assert [p for _, p in token.logprobs] == pytest.approx(top.values.tolist(), abs=1e-5)
            ids.append(token.id)


# ---- sequences -----------------------------------------------------------------------------------


def test_tokens_kept_in_a_sequence_are_not_computed_again(codec_model):
    with Engine.load(codec_model) as engine:
        first = engine.codec.encode("ab cd ef")
        with engine.sequence() as text:
            answer = [t.id for t in engine.generate(first, 6, 0.0, sequence=text)]
            more = [*first, *answer, *engine.codec.encode("gh")]
            got = [t.id for t in engine.generate(more, 6, 0.0, sequence=text)]
            assert engine.last_run.cached_tokens == len(first) + len(answer) - 1
            other = [first[0], *first]
            again = [t.id for t in engine.generate(other, 6, 0.0, sequence=text)]
            assert engine.last_run.cached_tokens == 1
        assert got == [t.id for t in engine.generate(more, 6, 0.0)]
        assert again == [t.id for t in engine.generate(other, 6, 0.0)]


def test_texts_generated_together_equal_those_generated_alone(codec_model):
    prompts = ["ab cd", "ef", "gh ij kl mn", "ab"]
    options = GenerationOptions(max_tokens=20, stops=("zz",))
    with Engine.load(codec_model, num_sequences=4) as engine:
        alone = [text_of(engine.generate(p, sampling=DRAWN, options=options)) for p in prompts]
        texts = [""] * 4
        for number, token in engine.generate_many(prompts, DRAWN, options):
            texts[number] += token.text
        assert texts == alone and len(set(texts)) > 1
        assert [run.stopped_by for run in engine.last_runs] == ["max tokens"] * 4
        with pytest.raises(HotsplitError, match="all 4 sequences"):
            list(engine.generate_many(["ab"] * 5))
        assert text_of(engine.generate("ab cd", sampling=DRAWN, options=options)) == alone[0]


class Drafting(Speculation):
    """Drafts repetitions of the last token."""

    def __init__(self):
        self._drafter = NgramDrafter()

    def draft(self, ids, room, beside=None):
        return [ids[-1]] * min(room, 5)

    def learn(self, rows, accepted, seconds):
        pass


def test_a_step_that_fails_after_a_draft_leaves_the_sequence_consistent(codec_model, monkeypatch):
    with Engine.load(codec_model) as engine, engine.sequence() as text:
        tokens = engine.generate("ab cd", 20, 0.0, sequence=text, drafts=Drafting())
        said = [next(tokens).id for _ in range(3)]
        kept = list(text.ids)

        def fails(*_):
            raise RuntimeError("the machine is on fire")

        monkeypatch.setattr(type(text), "extend", fails)
        with pytest.raises(RuntimeError, match="on fire"):
            list(tokens)
        monkeypatch.undo()
        prompt = engine.codec.encode("ab cd")
        assert text.ids == (prompt + said)[: text.length] and text.length <= len(kept)
        assert text.length >= len(prompt)


def test_use_of_a_sequence_by_another_generation_is_detected(codec_model):
    with Engine.load(codec_model) as engine, engine.sequence() as text:
        first = engine.generate("ab cd", 20, 0.0, sequence=text)
        next(first), next(first)
        next(engine.generate("zz", 20, 0.0, sequence=text))
        with pytest.raises(HotsplitError, match="used for something else"):
            list(first)


def test_a_context_too_short_to_be_shifted(codec_model):
    options = GenerationOptions(max_tokens=5, ignores_end=True, shift_keep=0)
    with (
        Engine.load(codec_model, context_length=2) as engine,
        pytest.raises(HotsplitError, match="a context of 2 is too short to drop half of it"),
    ):
        list(engine.generate([1], options=options))


# ---- the state of a prompt in a file -------------------------------------------------------------


def keep_state(engine, path, ids=(1, 2, 3)) -> torch.Tensor:
    """Saves the state of a text; returns the last layer's keys."""
    with engine.sequence() as text:
        text.extend(list(ids))
        save_prompt(text, path, engine.prompt_key())
        return text.read_state().keys_values[-1][0].clone()


def restored(engine, path, key=None) -> int:
    with engine.sequence() as text:
        return restore_prompt(text, path, key or engine.prompt_key())


def refuses_state(engine, path, message, key=None) -> None:
    with engine.sequence() as text:
        with pytest.raises(HotsplitError, match=message):
            restore_prompt(text, path, key or engine.prompt_key())
        assert text.length == 0


def test_a_state_of_another_type_of_the_same_model_is_refused(tmp_path):
    files = []
    for kind in ("f16", "q8_0"):
        (tmp_path / kind).mkdir()
        files.append(saved(tmp_path / kind, sizes=make_sizes(context_length=64), kind=kind))
    assert files[0].model_id == files[1].model_id
    with Engine.load(files[0].path) as engine:
        keep_state(engine, tmp_path / "p")
    with Engine.load(files[1].path) as engine:
        refuses_state(engine, tmp_path / "p", "other weights")


def test_a_state_of_other_predictor_thresholds_or_another_activation_is_refused(tmp_path):
    """The weights are the same, and so is the model's id, but the state differs."""
    model = saved(tmp_path, sizes=make_sizes(context_length=64), predictor_rank=8)
    higher = replace(model.predictor, threshold_L=tuple(t + 2 for t in model.predictor.threshold_L))
    silu = changed(model.bare_spec, Neurons, activation="silu")
    path = tmp_path / "p"
    with Engine.of(model, mode="predicted", device="cpu") as engine:
        state = keep_state(engine, path)
        assert restored(engine, path) == 3
    for changes, message in (
        ({"predictor": higher}, "made with other predictors: .*thresholds 0, 0.*, this is .*2, 2"),
        ({"bare_spec": silu}, "made with another activation: 'relu', this is 'silu'"),
    ):
        with Engine.of(replace(model, **changes), mode="predicted", device="cpu") as engine:
            assert not torch.equal(keep_state(engine, tmp_path / "other"), state)
            refuses_state(engine, path, message)


def test_a_state_of_another_plan_is_refused(tmp_path):
    """Divided layers add the same numbers in another order."""
    model = make(tmp_path, sizes=make_sizes(num_layers=L, num_neurons=F, context_length=64))
    model.save(model.path)
    path, options = tmp_path / "p", {"mode": "exact", "device": "cpu"}
    plans = [planned(tmp_path, model, name, context_length=64) for name in ("random", "mixed")]
    with Engine.of(model, plans[0], **options) as engine:
        keep_state(engine, path)
    with Engine.of(model, plans[0], **options) as engine:
        assert restored(engine, path) == 3
    for plan, this in ((plans[1], "[0-9a-f]{16} on CPU"), (None, "CPU")):
        with Engine.of(model, plan, **options) as engine:
            message = f"made with another plan or on another device: .* on CPU', this is '{this}'"
            refuses_state(engine, path, message)


def test_a_state_of_something_else_is_refused(tmp_path):
    model = saved(tmp_path, sizes=make_sizes(context_length=64))
    path = tmp_path / "p"
    with Engine.load(model.path, mode="exact") as engine, engine.sequence() as text:
        with pytest.raises(HotsplitError, match="no tokens yet"):
            save_prompt(text, path, engine.prompt_key())
        text.extend([1, 2, 3])
        save_prompt(text, path, engine.prompt_key())
    whole = path.read_bytes()
    (tmp_path / "other").mkdir()
    other = saved(tmp_path / "other", sizes=make_sizes(context_length=64), seed=9)
    for which, mode, message in (
        (other.path, "exact", "another model|other weights"),
        (model.path, "dense", "another mode: 'exact', this is 'dense'"),
    ):
        with Engine.load(which, mode=mode) as engine:
            refuses_state(engine, path, message)
    with Engine.load(model.path, mode="exact", context_length=2) as engine:
        refuses_state(engine, path, "context of 2")
    chance = np.random.default_rng(0)
    with Engine.load(model.path, mode="exact") as engine:
        for at in chance.integers(0, len(whole), 60).tolist():
            broken = bytearray(whole)
            broken[at] ^= 1 << int(chance.integers(8))
            path.write_bytes(bytes(broken))
            refuses_state(engine, path, None)
        with engine.sequence() as text:
            text.extend([1, 2, 3])
            key = engine.prompt_key()
            save_prompt(text, path, replace(key, vocab_size=2))
        refuses_state(engine, path, "another vocabulary", key)
        few = replace(key, vocab_size=2)
        refuses_state(engine, path, "tokens that the model does not have", few)
        for length in (0, 5, 100, len(whole) - 1):
            path.write_bytes(whole[:length])
            refuses_state(engine, path, "not a whole")


# ---- the command ---------------------------------------------------------------------------------


def run(*args, stdin: str | bytes = "", code: int = 0) -> subprocess.CompletedProcess:
    stdin = stdin.encode() if isinstance(stdin, str) else stdin
    done = run_command("generate", *args, stdin=stdin, text=False)
    assert done.returncode == code, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    return done


def test_the_ways_to_give_a_prompt(tmp_path, codec_model):
    common = (codec_model, "-n", 4, "--temp", 0)
    want = run(*common, "-p", "ab cd").stdout
    (tmp_path / "prompt").write_text("ab cd")
    for args, stdin in (
        (("-f", tmp_path / "prompt"), ""),
        (("-p", "-"), "ab cd"),
        (("-f", "-"), "ab cd"),
    ):
        assert run(*common, *args, stdin=stdin).stdout == want
    bare = run(*common, "-p", "ab cd", "--no-display-prompt").stdout
    assert want == b"ab cd" + bare


def test_a_drawn_seed_is_named_and_repeats_the_text(codec_model):
    common = (codec_model, "-n", 12, "--temp", 1.5, "-p", "ab cd")
    first = json.loads(run(*common, "--json").stdout)
    again = json.loads(run(*common, "--json", "--seed", first["seed"]).stdout)
    assert again["token_ids"] == first["token_ids"] and "seed" not in again
    assert len({json.loads(run(*common, "--json").stdout)["seed"] for _ in range(2)}) == 2
    assert b"; seed " in run(*common).stderr
    assert b"; seed " not in run(*common, "--temp", 0).stderr


def test_several_prompts_and_events(tmp_path, codec_model):
    (tmp_path / "p.jsonl").write_text('"ab cd"\n{"prompt": "ef"}\n')
    (tmp_path / "p.txt").write_text("ab cd\n\nef\n")
    common = (codec_model, "-n", 4, "--temp", 0)
    alone = [json.loads(run(*common, "--json", "-p", p).stdout) for p in ("ab cd", "ef")]
    for name in ("p.jsonl", "p.txt"):
        report = json.loads(run(*common, "--prompts", tmp_path / name, "--json").stdout)
        assert [t["token_ids"] for t in report["texts"]] == [t["token_ids"] for t in alone]
    lines = run(*common, "--json-lines", "--logprobs", 2, "-p", "ab cd").stdout.splitlines()
    *events, end = map(json.loads, lines)
    assert [e["id"] for e in events] == alone[0]["token_ids"] == end["token_ids"]
    assert all(e["type"] == "token" and len(e["top_logprobs"]) == 2 for e in events)
    assert end["type"] == "end" and end["stopped_by"] == "max tokens"


def test_the_command_saves_and_reuses_a_prompts_state(tmp_path, codec_model):
    path = tmp_path / "state"
    common = (codec_model, "-n", 4, "--temp", 0, "--json", "--prompt-cache", path)
    first, second = (json.loads(run(*common, "-p", "ab cd ef").stdout) for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, second["prefill_tokens"] - 1)
    assert first["prefill_per_s"] * first["prefill_s"] == pytest.approx(first["prefill_tokens"])
    assert second["prefill_per_s"] * second["prefill_s"] == pytest.approx(1)  # one token
    path.write_bytes(path.read_bytes()[:-1])
    refused = run(*common, "-p", "ab cd ef", code=1).stderr.decode()
    assert "or give --force to compute it again" in refused and refused.count("\n") == 1
    assert "computing it again" in run(*common, "-p", "ab cd ef", "--force").stderr.decode()
    precious = tmp_path / "precious.txt"
    no_cache = "is not a prompt cache, so it is not overwritten"
    precious.write_bytes(b"mine")
    others = {codec_model: "is read by this command", precious: no_cache, tmp_path: no_cache}
    for other, words in others.items():
        kept = None if other == tmp_path else other.read_bytes()
        wrong = (codec_model, "-n", 4, "--prompt-cache", other, "--force", "-p", "ab cd ef")
        assert words in run(*wrong, code=1).stderr.decode()
        assert kept is None or other.read_bytes() == kept
    third = json.loads(run(*common, "-p", "ab cd ef").stdout)
    assert third["cached_tokens"] == third["prefill_tokens"] - 1


def test_input_that_is_not_text_is_refused(tmp_path, codec_model):
    done = run(codec_model, "-p", "-", stdin=b"a\xff", code=1)
    assert "stdin: not UTF-8 at byte 1" in done.stderr.decode()
    for content, message in (
        ("", "has no prompts"),
        ("{}\n", 'an object with a "prompt"'),
        ("{\n", "line 1: not JSON"),
        ('"a"\n\n{\n', "line 3: not JSON"),
    ):
        (tmp_path / "p.jsonl").write_text(content)
        done = run(codec_model, "--prompts", tmp_path / "p.jsonl", code=1)
        assert message in done.stderr.decode()


@pytest.mark.parametrize("drafts", [("--speculate", "ngram-mod"), ("-md",)])
def test_drafts_for_several_prompts_change_no_text(tmp_path, codec_model, drafts):
    """And a line for each says what became of its drafts."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "ab"}\n"cd ef"\n')
    common = (codec_model, "--prompts", tmp_path / "p.jsonl", "-n", 30, "--seed", 3)
    drafts = (*drafts, codec_model) if drafts == ("-md",) else drafts
    done, plain = run(*common, *drafts), run(*common, "--speculate", "none")
    assert done.stdout == plain.stdout
    assert done.stderr.count(b"[speculation (") == 2 and b"speculation" not in plain.stderr
