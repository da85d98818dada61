"""Speculation changes no text: whatever is drafted, and however the clock runs, the tokens are
those of single steps."""

import dataclasses
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import click
import pytest
import torch
from click.testing import CliRunner
from models import byte_level_keys, make_model, make_sizes

from hotsplit import Engine
from hotsplit.commands.options.speculation_options import (
    speculating,
    speculation_lines,
    speculation_options,
    take_speculation_options,
)
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry
from hotsplit.options.generation_options import SamplingOptions, SpeculationOptions
from hotsplit.runtime.cache.block_table import NO_BLOCK
from hotsplit.runtime.generate import frequent_ids
from hotsplit.runtime.generate.draft_model import DraftModel
from hotsplit.runtime.generate.drafters import CostlyDrafter
from hotsplit.runtime.generate.generation import Generation, GenerationOptions
from hotsplit.runtime.generate.ngrams import NgramDrafter, NgramPool
from hotsplit.runtime.generate.sampler_chain import SamplerChain
from hotsplit.runtime.generate.speculation import Speculation, check_rows
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step.batch import Wanted
from hotsplit.runtime.step.sequences import Sequences

CONTEXT = 400
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
MODES = ("dense", "exact", "predicted")


def model_path(folder: Path, kind: str, name: str = "m", seed: int = 0) -> Path:
    """A random model with predictors and a byte tokenizer; its greedy texts soon repeat."""
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(vocab_size=vocab_size, context_length=CONTEXT)
    model = make_model(
        sizes=shape, kind=kind, predictor_rank=16, predictor_density=0.3, extra_keys=keys, seed=seed
    )
    model = dataclasses.replace(model, path=folder / f"{name}.gguf")
    model.save(model.path)
    return model.path


def text_of(engine: Engine, count: int, drafts=None, prompt=PROMPT, **options) -> list[int]:
    sampling = options.pop("sampling", SamplingOptions(temperature=0.0))
    ends = GenerationOptions(max_tokens=count, ignores_end=True, **options)
    tokens = engine.generate(list(prompt), sampling=sampling, options=ends, drafts=drafts)
    return [token.id for token in tokens if token.id is not None]


def proposed(drafter, ids: Sequence[int], most: int) -> Sequence[int]:
    if isinstance(drafter, CostlyDrafter):
        return [token for token, _ in itertools.islice(drafter.guesses(ids), most)]
    return drafter.propose(ids, most).tokens


class Eager(Speculation):
    """Drafts all that a drafter proposes, whatever it costs."""

    def __init__(self, drafter, most: int = 16) -> None:
        self.drafter, self.most, self._drafter = drafter, most, drafter
        self.heard: list[tuple[int, int]] = []

    def draft(self, ids: Sequence[int], room: int, beside=None) -> Sequence[int]:
        return proposed(self.drafter, ids, min(room, self.most))

    def learn(self, rows: int, accepted: int, seconds: float) -> None:
        assert seconds > 0
        self.heard.append((rows, accepted))

    def learn_shared(self, texts: int, rows: int, seconds: float) -> None:
        assert rows >= texts >= 1 and seconds > 0


class Prophet(Speculation):
    """Knows the text; drafts it, or what `lie` makes of it."""

    def __init__(self, text: list[int], lie, seed: int = 0) -> None:
        self.text, self.lie, self.chance = text, lie, random.Random(seed)
        self._drafter = NgramDrafter()

    def draft(self, ids: Sequence[int], room: int, beside=None) -> Sequence[int]:
        at = len(ids)
        return self.lie(self.text[at : at + min(room, 40)], self.chance)

    def learn(self, rows: int, accepted: int, seconds: float) -> None:
        pass


LIES = {
    "always right": lambda truth, chance: truth,
    "always wrong": lambda truth, chance: [(token + 1) % 256 for token in truth],
    "wrong in the middle": lambda truth, chance: [*truth[:3], 0, *truth[4:]][: len(truth)],
    "any length": lambda truth, chance: truth[: chance.randrange(20)],
    "anything": lambda truth, chance: [
        token if chance.random() < 0.8 else chance.randrange(256)
        for token in truth[: chance.randrange(30)]
    ],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_no_drafter_changes_greedy_or_seeded_texts(tmp_path, kind, mode):
    path = model_path(tmp_path, kind)
    small = model_path(tmp_path, "f16", "draft")
    with Engine.load(path, mode=mode) as engine, Engine.load(small, mode="dense") as other:
        for sampling in (
            SamplingOptions(temperature=0.0),
            SamplingOptions(temperature=0.1, top_k=3, seed=11),
        ):
            want = text_of(engine, 150, sampling=sampling)
            assert engine.last_run.drafted == 0
            with other.sequence() as sequence:
                for drafter in (NgramDrafter(), NgramPool(3), DraftModel(sequence)):
                    drafts = Eager(drafter)
                    assert text_of(engine, 150, drafts, sampling=sampling) == want, drafter.name
                    run = engine.last_run
                    assert run.accepted > 0 and run.drafted > 20, drafter.name
                    assert run.decode_steps + run.accepted == run.decode_tokens
                    assert sum(rows - 1 for rows, _ in drafts.heard) == run.drafted
                    assert sum(right for _, right in drafts.heard) == run.accepted
            for drafter in (NgramDrafter(), NgramPool(3)):
                drafts = Speculation(drafter, SpeculationOptions())
                for _ in range(2):  # the second time, the drafter has learnt
                    assert text_of(engine, 150, drafts, sampling=sampling) == want


def test_adversarial_drafts_change_nothing(tmp_path):
    """Nor to the end of the context, and past it by dropping half of the text."""
    lengths = {"short": {"count": 200}, "full": {"count": 1000}}
    lengths["shifted"] = {"count": 600, "shift_keep": 3}
    with Engine.load(model_path(tmp_path, "q8_0"), mode="predicted") as engine:
        for sampling in (SamplingOptions(temperature=0.0), SamplingOptions(seed=5)):
            for name, given in lengths.items():
                want = text_of(engine, sampling=sampling, **given)
                assert name != "full" or len(want) + len(PROMPT) == CONTEXT + 1
                for lie in LIES.values():
                    drafts = Prophet(PROMPT + want, lie)
                    assert text_of(engine, drafts=drafts, sampling=sampling, **given) == want
                    assert name != "short" or engine.last_run.drafted > 100
                    assert name != "full" or engine.last_run.stopped_by == "context"


def test_the_comparison_finds_a_changed_text(tmp_path):
    """A verifier that accepts every draft changes the text."""
    with Engine.load(model_path(tmp_path, "q8_0"), mode="exact") as engine:
        want = text_of(engine, 60)
        found = []
        for kind in (Generation, TooSure):
            chain = SamplerChain(SamplingOptions(temperature=0.0), 256)
            drafts = Prophet(PROMPT + want, LIES["wrong in the middle"])
            with engine.sequence() as text:
                options = GenerationOptions(max_tokens=60, ignores_end=True)
                made = kind(text, PROMPT, engine.codec, chain, options, Traffic(), drafts=drafts)
                made.share = 1.0
                found.append([token.id for token in made.tokens()])
        assert found[0] == want and found[1] != want


class TooSure(Generation):
    """A planted fault: accepts this share of the drafted tokens without drawing."""

    share, chance = 0.1, random.Random(2)

    def draw(self):
        if self._right < len(self._draft) and self.chance.random() < self.share:
            self._chain = _Fixed(self._draft[self._right], self._chain)
        return super().draw()


class _Fixed:
    """Draws a given token once, then as `after` does."""

    def __init__(self, token: int, after) -> None:
        self.token, self.after = token, after

    def sample(self, logits_V, history, mask_V):
        token, self.token = self.token, None
        return self.after.sample(logits_V, history, mask_V) if token is None else token


def test_no_token_depends_on_a_clock(tmp_path, monkeypatch):
    path = model_path(tmp_path, "q8_0")
    chance = random.Random(7)
    real, run, now = time.perf_counter, Sequences.run, 0.0

    def jumping_run(self, parts):
        nonlocal now
        now += chance.choice((1e-6, 1e-3, 0.01, 7.0))
        return run(self, parts)

    monkeypatch.setattr(Sequences, "run", jumping_run)
    with Engine.load(path, mode="exact") as engine:
        for sampling in (
            SamplingOptions(temperature=0.0),
            SamplingOptions(temperature=0.2, seed=3),
        ):
            want = text_of(engine, 200, sampling=sampling)
            seen = set()
            for clock in (real, *[lambda: now] * 6):
                monkeypatch.setattr(time, "perf_counter", clock)
                drafts = Speculation(NgramDrafter(), SpeculationOptions())
                assert text_of(engine, 200, drafts, sampling=sampling) == want
                monkeypatch.setattr(time, "perf_counter", real)
                seen.add((drafts.totals.drafts, drafts.totals.drafted))
            assert len(seen) > 1  # the drafts did depend on the clock


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_a_sequence_is_clean_after_an_interruption(tmp_path, num_sequences):
    with Engine.load(
        model_path(tmp_path, "q8_0"), mode="exact", num_sequences=num_sequences
    ) as engine:
        want = text_of(engine, 200)
        logits = engine.logits(PROMPT + want[:160])
        table = engine.layers[0].attention.cache.table
        for count in (1, 2, 7, 30, 90, 140):
            text = engine.sequence()
            drafts = Prophet(PROMPT + want, LIES["anything"], seed=count)
            ends = GenerationOptions(max_tokens=200, ignores_end=True)
            given = {"drafts": drafts, "sequence": text, "options": ends}
            tokens = engine.generate(PROMPT, 200, 0.0, **given)
            found = [token.id for token in itertools.islice(tokens, count)]
            tokens.close()
            assert found == want[:count]
            given = PROMPT + want[:count]
            assert text.ids == given[: len(text.ids)] and len(given) - len(text.ids) <= 1
            # The cache is right as well.
            text.rollback(min(text.length, len(given) - 1))
            assert torch.equal(text.extend(given[text.length :])[0], logits[len(given) - 1])
            text.close()
            if num_sequences > 1:
                assert (table.block_SN == NO_BLOCK).all() and len(table._free) == table.num_blocks


def test_the_draft_models_sequence_is_the_text(tmp_path):
    path, small = model_path(tmp_path, "q8_0"), model_path(tmp_path, "q4_0", "draft")
    with Engine.load(path, mode="dense") as engine, Engine.load(small, mode="dense") as other:
        with other.sequence() as sequence:
            drafter, calls = DraftModel(sequence), []

            class Watched(Eager):
                def draft(self, ids, room, beside=None):
                    tokens = super().draft(ids, room)
                    calls.append(len(tokens))
                    kept = sequence.ids
                    assert kept[: len(ids)] == list(ids)
                    assert kept[len(ids) :] == list(tokens)[: len(kept) - len(ids)]
                    return tokens

            want = text_of(engine, 100)
            assert text_of(engine, 100, Watched(drafter)) == want
            other_prompt = PROMPT[:5] + [77, 78, 79]
            want = text_of(engine, 100, prompt=other_prompt)
            assert text_of(engine, 100, Watched(drafter), prompt=other_prompt) == want
            assert len(calls) > 20
            # Its guesses are its own greedy text.
            guess = proposed(drafter, PROMPT, 12)
        assert guess == text_of(other, 12)


def test_a_draft_model_proposes_nothing_when_full(tmp_path):
    path = model_path(tmp_path, "q8_0")
    with Engine.load(path, mode="dense", context_length=32) as engine, engine.sequence() as text:
        drafter = DraftModel(text)
        assert len(proposed(drafter, PROMPT, 8)) == 8
        # The context's last two positions, and the token after them.
        assert len(proposed(drafter, [1] * 30, 8)) == 3
        assert proposed(drafter, [1] * 33, 8) == []


def test_guesses_are_taken_from_the_first_ids_while_the_text_has_them(tmp_path, monkeypatch):
    """The limited head has the bits of the whole one; a text of later ids takes it whole."""
    monkeypatch.setattr(frequent_ids, "FIRST_IDS", 32)
    path = model_path(tmp_path, "q8_0")
    with Engine.load(path, mode="dense") as engine, engine.sequence() as text:
        limit, size = engine._live.native.limit_ids, engine.model.spec.vocab_size
        for ids, num_logits in ((PROMPT, 32), ([*PROMPT, 100, 101], 32), ([100, 3, 1], size)):
            drafter = DraftModel(text, frequent_ids.FrequentIds(size, limit))
            tokens = proposed(drafter, ids, 4)
            found_V = drafter._logits_V
            limit(None)
            text.rollback(0)
            want_V = text.extend([*ids, *tokens[:3]])[0]
            assert len(found_V) == num_logits and torch.equal(found_V, want_V[:num_logits])


# ---- the distribution of drawn tokens -----------------------------------------------------------

WORDS = 6


class TableText:
    """A text whose next token depends only on the last: its logits are rows of a table."""

    def __init__(self, logits_VV: torch.Tensor) -> None:
        self.logits_VV, self.ids, self.room, self.is_open = logits_VV, [], 1 << 20, True

    @property
    def length(self) -> int:
        return len(self.ids)

    def rollback(self, length: int) -> None:
        assert 0 <= length <= len(self.ids)
        del self.ids[length:]

    def reusable(self, length: int) -> int:
        return length

    def mark(self, position: int) -> None:
        pass

    def extend(self, tokens: Sequence[int], wanted: Wanted = "last") -> torch.Tensor:
        self.ids.extend(tokens)
        return self.logits_VV[list(tokens)][slice(-1, None) if wanted == "last" else slice(None)]


class NoText:
    end_ids = frozenset[int]()
    special_texts: ClassVar[dict[int, str]] = {}

    def stream(self, after, marks):
        return self

    def text(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def p_of_two_tokens(kind: type[Generation], count: int) -> float:
    """The p-value of a chi-square test, against the table, of the second and third token of `count`
    texts, both of which are drafted."""
    logits_VV = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(1))
    share_VV = logits_VV.double().softmax(1)
    prior_V = share_VV[0] @ share_VV  # of the second token; the text begins with 0
    expected = (prior_V[:, None] * share_VV).flatten() * count
    chance, found = random.Random(2), Counter()
    plain = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

    class Any:
        def follow(self, text):
            pass

        def draft(self, ids, room, beside=None):
            return [chance.randrange(WORDS) for _ in range(min(room, 2))]

        def learn(self, rows, accepted, seconds):
            pass

    for seed in range(count):
        chain = SamplerChain(dataclasses.replace(plain, seed=seed), WORDS)
        options = GenerationOptions(max_tokens=4)
        made = kind(TableText(logits_VV), [0], NoText(), chain, options, Traffic(), drafts=Any())
        tokens = [token.id for token in made.tokens()]
        found[tokens[1], tokens[2]] += 1
    counts = torch.tensor([found[pair] for pair in itertools.product(range(WORDS), repeat=2)])
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor(WORDS * WORDS - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


def test_drafted_tokens_are_distributed_as_drawn_ones():
    """Twice as many draws as texts."""
    assert p_of_two_tokens(Generation, 6_000) > 0.01
    assert p_of_two_tokens(TooSure, 5_000) < 1e-6


# ---- end to end ---------------------------------------------------------------------------------


def refuses(engine: Engine, match: str) -> None:
    with pytest.raises(HotsplitError, match=match):
        check_rows(engine._live)


def test_speculation_is_refused_where_rows_may_differ_from_single_steps(tmp_path):
    path = model_path(tmp_path, "q8_0")
    with Engine.load(path) as engine:
        check_rows(engine._live)
        engine._sequences.decoder = dataclasses.replace(engine._live, native=object())
        refuses(engine, "could change the text here")
        optional = SpeculationOptions(type="ngram", is_optional=True)
        with speculating(engine, optional) as drafts:
            assert drafts is None
        (line,) = speculation_lines(optional, [])
        assert "off, since rows of a step may differ" in line
        assert not speculation_lines(SpeculationOptions(), [])
        with (
            pytest.raises(HotsplitError, match="leave --speculate out"),
            speculating(engine, SpeculationOptions(type="ngram")),
        ):
            pass


@click.command()
@speculation_options
@click.pass_context
def command(context: click.Context, **arguments) -> None:
    context.obj.append((take_speculation_options(arguments), arguments.pop("model_draft")))
    is_loaded = arguments.pop("draft_block")
    assert is_loaded == (context.obj[0] in USE_BLOCK) and not arguments


DRAFT, OTHER = SpeculationOptions(type="draft"), Path("d.gguf")
AUTO, MTP = SpeculationOptions(type="auto", is_optional=True), SpeculationOptions(type="mtp")
USE_BLOCK = ((AUTO, None), (MTP, None))


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", (AUTO, None)),
        ("--speculate mtp", (MTP, None)),
        ("--speculate none", (SpeculationOptions(), None)),
        ("--draft-max 0", (SpeculationOptions(), None)),
        ("-md d.gguf --draft 0", (SpeculationOptions(), OTHER)),
        ("--spec-type ngram --draft 7", (SpeculationOptions(type="ngram", most=7), None)),
        ("--speculate ngram-mod --draft-n 9", (SpeculationOptions(type="ngram-mod", most=9), None)),
        ("-md d.gguf --draft-max 4", (SpeculationOptions(type="auto", most=4), OTHER)),
        ("--model-draft d.gguf --speculate draft", (DRAFT, OTHER)),
    ],
)
def test_the_options_of_a_command_are_parsed(line, wanted):
    found = []
    CliRunner().invoke(command, line.split(), obj=found, catch_exceptions=False)
    assert found == [wanted]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("--speculate draft", "needs a draft model: -md SOURCE"),
        ("--speculate ngram -md d.gguf", "-md is for --speculate draft, not for ngram"),
        ("--speculate other", "is not one of"),
        ("--speculate mtp --no-draft-block", "needs the draft block"),
    ],
)
def test_conflicting_options_are_refused(line, match):
    result = CliRunner().invoke(command, line.split(), obj=[])
    assert result.exit_code == 2 and match in result.output


def test_a_draft_longer_than_a_step_is_refused():
    with pytest.raises(HotsplitError, match="--draft-max: most is 128, wanted .* from 1 to 127"):
        CliRunner().invoke(command, ["--draft-max", "128"], obj=[], catch_exceptions=False)


def test_every_type_of_drafter_can_be_chosen(tmp_path):
    path, small = model_path(tmp_path, "q8_0"), model_path(tmp_path, "q4_0", "draft")
    with Engine.load(path, mode="exact", context_length=200) as engine:
        want = text_of(engine, 100)
        with speculating(engine, SpeculationOptions()) as drafts:
            assert drafts is None
        for kind in ("ngram", "ngram-mod", "draft"):
            options = SpeculationOptions(type=kind)
            with speculating(engine, options, small) as drafts:
                assert text_of(engine, 100, drafts) == want
                assert drafts.line().startswith(f"speculation ({kind}): ")
                assert drafts.totals.tokens == 99


@pytest.mark.parametrize("target_pad, draft_pad", [(0, 7), (7, 0)])
def test_a_draft_model_may_have_another_number_of_padded_logits(tmp_path, target_pad, draft_pad):
    """Ids of the padding are neither drafted nor read."""
    keys, vocab_size = byte_level_keys()
    paths = []
    for name, pad in (("m", target_pad), ("draft", draft_pad)):
        shape = make_sizes(vocab_size=vocab_size + pad, context_length=CONTEXT)
        model = make_model(sizes=shape, extra_keys=keys)
        head = model.tensors["output.weight"].read().copy()
        head[vocab_size:] = 10 * head[3]  # a padded logit is the largest whenever that of 3 is
        tensors = model.tensors | {"output.weight": array_entry(head, "f32")}
        paths.append(tmp_path / f"{name}.gguf")
        dataclasses.replace(model, tensors=tensors, path=paths[-1]).save(paths[-1])
    options = SpeculationOptions(type="draft")
    with Engine.load(paths[0], mode="dense") as engine:
        want = text_of(engine, 100)
        with speculating(engine, options, paths[1]) as drafts:
            assert text_of(engine, 100, Eager(drafts._drafter)) == want
            drafter = drafts._drafter
            for last in range(vocab_size):
                assert max(proposed(drafter, [*PROMPT, last], 8)) < vocab_size
            if target_pad:
                assert proposed(drafter, [*PROMPT, vocab_size], 8) == []
                assert len(proposed(drafter, [*PROMPT, 1], 8)) == 8


def test_a_draft_model_of_another_vocabulary_is_refused_or_left_out(tmp_path, caplog):
    path = model_path(tmp_path, "q8_0")
    keys, vocab_size = byte_level_keys()
    fewer = f"draft.gguf: the draft model has {vocab_size - 1} logits, the model {vocab_size}"
    others = "draft.gguf: the draft model's tokens differ from the model's, first at token id 0"
    for more, swapped, match in ((-1, False, fewer), (0, True, others)):
        other = dict(keys)
        if swapped:
            content = json.loads(other["tokenizer.huggingface.json"])
            vocab = content["model"]["vocab"]
            first, second = sorted(vocab, key=vocab.get)[:2]
            vocab[first], vocab[second] = vocab[second], vocab[first]
            other["tokenizer.huggingface.json"] = json.dumps(content)
        shape = make_sizes(vocab_size=vocab_size + more, context_length=CONTEXT)
        model = make_model(sizes=shape, extra_keys=other)
        dataclasses.replace(model, path=tmp_path / "draft.gguf").save(tmp_path / "draft.gguf")
        options = SpeculationOptions(type="draft")
        with Engine.load(path, mode="dense") as engine:
            with (
                pytest.raises(HotsplitError, match=match),
                speculating(engine, options, tmp_path / "draft.gguf"),
            ):
                pass
            caplog.clear()
            options = SpeculationOptions(type="auto")
            with speculating(engine, options, tmp_path / "draft.gguf") as drafts:
                assert drafts.costly is None
                assert text_of(engine, 40, drafts) == text_of(engine, 40)
            (line,) = [record.getMessage() for record in caplog.records if "draft" in record.msg]
            assert match in line and line.endswith("Drafts come from the text alone")
