"""Text with any drafter is the text without, token by token with its bytes and log probabilities:
greedy and seeded, one to four texts at a time, with cancels, forks, rollbacks, grammars, stops,
windows and recurrent states, whatever is guessed. Planted faults are found."""

import copy
import itertools
import random
from types import SimpleNamespace

import pytest
from assistants import random_assistant
from checkpoints import random_model, save_tokenizer
from draft_blocks import CASES, random_with_block
from models import byte_level_keys, changed, family_spec, make_model, make_sizes
from test_families import CASES as MAIN
from test_serve_scheduler import SAMPLINGS, Bench
from test_speculation import Eager

from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.costs import cache_layout
from hotsplit.model.spec import Attention
from hotsplit.options.generation_options import GenerationOptions, SpeculationOptions
from hotsplit.runtime.cache.state_slots import StateRun, StateSlots
from hotsplit.runtime.drafting import drafting
from hotsplit.runtime.generate import speculation
from hotsplit.runtime.generate.constraints import Constraint, regex_constraint
from hotsplit.runtime.generate.draft_costs import Account
from hotsplit.runtime.generate.drafters import ALONE
from hotsplit.runtime.generate.generation import Generation
from hotsplit.runtime.generate.speculation import Speculation, Totals
from hotsplit.runtime.step import native_step
from hotsplit.runtime.step.decoder import Decoder
from hotsplit.runtime.step.sequences import Sequences
from hotsplit.serve.answers import timings_of
from hotsplit.serve.texts import Said

CONTEXT, LONG, WINDOW = 100, 300, 9
# gemma4: an E-model with an assistant, both with windows.
RINGS = ("windows", "gemma4")
FAMILIES = (*CASES, *RINGS)
LONGEST = 6


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Model files by family, all with a block but RINGS; made on first use."""
    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = folder / "m.gguf"
            if family == "windows":
                with_windows().save(made[family])
            elif family == "gemma4":
                config = copy.deepcopy(MAIN["gemma4-stock"])
                config.max_position_embeddings, config.sliding_window = LONG, WINDOW
                source = random_model(folder / "hf", config)
                save_tokenizer(source, config.vocab_size)
                convert(ConvertConfig(source=source, output=made[family], outtype="q8_0"))
                source, own = random_assistant(folder / "own", config), assistant_of(made[family])
                convert(ConvertConfig(source=source, output=own, outtype="q8_0"))
            else:
                source = random_with_block(folder / "hf", CASES[family])
                save_tokenizer(source, CASES[family].vocab_size)
                convert(ConvertConfig(source=source, output=made[family], outtype="q8_0"))
        return made[family]

    return get


def assistant_of(path):
    return path.with_name("assistant.gguf")


def with_windows():
    keys, vocab_size = byte_level_keys()
    sizes = make_sizes(num_layers=3, vocab_size=vocab_size, context_length=LONG)
    spec = family_spec("llama", sizes)
    layers = [
        changed(spec.with_layers([layer]), Attention, head_dim=32, window=window).layers[0]
        for layer, window in zip(spec.layers, (WINDOW, None, 2 * WINDOW), strict=True)
    ]
    return make_model(spec=spec.with_layers(layers), kind="q8_0", extra_keys=keys)


def wrong(tokens):
    return [(token + 1) % 250 for token in tokens]


# What is guessed of the true continuation.
PATTERNS = {
    "all": lambda truth, chance: truth,
    "none": lambda truth, chance: wrong(truth),
    "alternating": lambda truth, chance: [
        token if place % 2 == 0 else 0 for place, token in enumerate(truth)
    ],
    "any": lambda truth, chance: chance.choice(
        [truth, wrong(truth), [*truth[:2], *wrong(truth[2:])], []]
    )[: chance.randrange(LONGEST + 1)],
}


class Knowing(Eager):
    """Guesses by a pattern from texts that are known; the drafter, if any, guesses all the same."""

    totals = Totals()

    def __init__(self, drafter, texts, pattern, seed):
        super().__init__(drafter, LONGEST)
        self.costly, self.texts = drafter, texts
        self.pattern, self.chance = PATTERNS[pattern], random.Random(seed)

    def draft(self, ids, room, beside=ALONE):
        if self.costly is not None:
            list(itertools.islice(self.costly.guesses(ids), self.chance.randrange(3)))
        texts = (text[len(ids) :] for text in self.texts if text[: len(ids)] == ids)
        truth = next((rest for rest in texts if rest), [])
        return self.pattern(truth[: min(room, self.most)], self.chance)


def jobs_of(chance, count, codec, context):
    """Arguments of texts, many with a common beginning, and some that are there twice."""
    most = context // 2 - 10
    stems = [[chance.randrange(3, 30) for _ in range(most)] for _ in range(3)]
    jobs = []
    for number in range(count):
        ids = chance.choice(stems)[: chance.randrange(most)] + [chance.randrange(3, 30)]
        num_tokens = chance.choice((12, context // 3))
        options = {"max_tokens": num_tokens, "ignores_end": chance.random() < 0.7}
        kind, mask = number % 4, None
        if kind == 1:
            options["num_logprobs"] = 2
        elif kind == 2:
            options["stops"] = ("a", "the")
        elif kind == 3 and codec.end_ids:
            mask = lambda: regex_constraint("[a-z ]{20,60}", codec)  # noqa: E731
        jobs.append((ids, chance.choice(SAMPLINGS), GenerationOptions(**options), mask))
    return jobs + chance.sample(jobs, count // 4)


def texts_of(bench, seed, count):
    """Arguments of texts, and their tokens without drafts."""
    engine = bench.engine
    jobs = jobs_of(random.Random(seed), count, engine.codec, engine.context_length)
    return jobs, [
        list(
            bench.single.generate(
                ids, sampling=sampling, options=options, constraint=mask and mask()
            )
        )
        for ids, sampling, options, mask in jobs
    ]


def life(bench, jobs, wants, new_drafting, seed):
    """Serves texts with drafts, some of which are cancelled and left for others to continue;
    returns the numbers of those that differ from those without drafts, and the tokens drafted and
    accepted."""
    chance, got, reports, left = random.Random(seed), [[] for _ in jobs], [], set()
    known = [
        ids + [token.id for token in want if token.id is not None]
        for (ids, *_), want in zip(jobs, wants, strict=True)
    ]
    with new_drafting(bench.engine, known) as bench.scheduler._drafting:
        for number, (ids, sampling, options, mask) in enumerate(jobs):

            def hear(_, event, number=number):
                if isinstance(event, Said):
                    got[number] += event.tokens
                else:
                    reports.append(getattr(event, "report", None))

            fields = {name: getattr(options, name) for name in GenerationOptions.__annotations__}
            fields |= {"mask": mask and mask(), "listen": hear}
            text = bench.submit(number, ids, sampling, **fields)
            for _ in range(chance.randrange(4)):
                bench.scheduler.step()
            while bench.scheduler.num_waiting > 8:
                bench.scheduler.step()
            if chance.random() < 0.2:
                bench.scheduler.cancel([text])
                left.add(number)
        bench.finish()
    for sequence in list(bench.prefix_cache._kept):
        bench.prefix_cache._close(sequence)
    differ = [
        number
        for number, want in enumerate(wants)
        if got[number] != (want[: len(got[number])] if number in left else want)
    ]
    ended = [report for report in reports if report is not None]
    assert len(ended) >= len(jobs) - len(left) or differ
    timings = timings_of(ended)
    return differ, timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)


def knowing(pattern, seed, family="qwen35"):
    """Drafts of the pattern, beside those of the block or the assistant."""

    def new_drafting(engine, texts):
        kind = SpeculationOptions(type={"windows": "ngram", "gemma4": "draft"}.get(family, "mtp"))
        own = assistant_of(engine.model.path) if family == "gemma4" else None
        return _Known(drafting(engine, kind, own), texts, pattern, seed)

    return new_drafting


class _Known:
    def __init__(self, context, texts, pattern, seed):
        self.context, self.given, self.numbers = context, (texts, pattern), itertools.count(seed)

    def __enter__(self):
        made = self.context.__enter__()

        def begin():
            costly = made.begin().costly
            return Knowing(costly, *self.given, next(self.numbers))

        return SimpleNamespace(begin=begin, end=made.end)

    def __exit__(self, *error):
        return self.context.__exit__(*error)


@pytest.fixture
def bench_of(paths, monkeypatch):
    benches = []

    def get(family, parallel):
        context = LONG if family in RINGS else CONTEXT
        monkeypatch.setattr("test_serve_scheduler.CONTEXT", context)
        monkeypatch.setattr(cache_layout, "BLOCK_LENGTH", 32)  # shorter than what texts share
        if family in RINGS:  # of 4 blocks of 10
            monkeypatch.setattr(cache_layout, "PREFILL_CHUNK", 64)
            monkeypatch.setattr(native_step, "MAX_ROWS", 64)
        given = {} if family in RINGS else {"draft_block": True}
        benches.append(Bench(paths(family), parallel=parallel, kept=2, **given))
        return benches[-1]

    yield get
    for bench in benches:
        bench.close()


@pytest.mark.parametrize(
    "pattern, family", [*itertools.product(PATTERNS, (*CASES, "windows")), ("any", "gemma4")]
)
def test_forced_acceptance_changes_no_text(bench_of, family, pattern):
    check(bench_of, family, pattern, seed=0, count=10)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_forced_acceptance_changes_none_of_many_texts(bench_of, family, pattern):
    check(bench_of, family, pattern, seed=1, count=40)


def check(bench_of, family, pattern, *, seed, count):
    parallel = 1 + (seed + list(PATTERNS).index(pattern)) % 4
    bench = bench_of(family, parallel)
    assert bench.engine._sequences.cache.has_rings == (family in RINGS)
    jobs, wants = texts_of(bench, seed, count)
    forced = knowing(pattern, seed, family)
    differ, drafted, accepted = life(bench, jobs, wants, forced, seed)
    assert not differ
    share = {"all": (0.8, 1.0), "none": (0.0, 0.0), "alternating": (0.1, 0.6), "any": (0.1, 0.9)}
    least, most = share[pattern]
    assert drafted > 5 * count and least <= accepted / drafted <= most


@pytest.mark.parametrize("kind", ["auto", "mtp", "ngram", "ngram-mod", "draft", "assistant"])
def test_no_drafter_changes_a_text(bench_of, paths, monkeypatch, kind):
    """The controllers decide, but for them every draft pays."""
    monkeypatch.setattr(speculation, "_MARGIN", -100)
    monkeypatch.setattr(speculation, "_FREE_DECIDING", 1e9)
    monkeypatch.setattr(Speculation, "_round_gain", lambda self, most: 1.1)
    monkeypatch.setattr(Account, "can_pay", lambda self, seconds: True)
    families = {"auto": "qwen35moe", "mtp": "qwen35moe", "assistant": "gemma4"}
    family = families.get(kind, "windows")
    bench, own = bench_of(family, 3), paths(family)
    models = {"draft": own, "assistant": assistant_of(own)}
    options = SpeculationOptions(type="draft" if kind in models else kind, least=1)

    def new_drafting(engine, texts):
        return drafting(engine, options, models.get(kind), 3)

    differ, drafted, accepted = life(bench, *texts_of(bench, 3, 12), new_drafting, 3)
    assert not differ and drafted > 8 and (accepted or kind in ("mtp", "assistant"))


def test_shared_steps_that_fail_change_no_text(bench_of, monkeypatch):
    """Their texts are computed one by one, and nothing is known of what a shared step costs."""
    bench = bench_of("glm4moe", 3)
    jobs, wants = texts_of(bench, 4, 6)
    run = bench.engine.run

    def failing(parts):
        if len(parts) > 1:
            raise RuntimeError("raised by a test")
        return run(parts)

    monkeypatch.setattr(bench.engine, "run", failing)
    auto = SpeculationOptions(type="auto")
    assert not life(bench, jobs, wants, lambda engine, texts: drafting(engine, auto), 4)[0]


# ---- planted faults -----------------------------------------------------------------------------


def a_wrong_guess_is_taken(patch):
    draw = Generation.draw

    def faulty(self):
        if self._right < len(self._draft) and self._mask is None:
            chain, token = self._chain, self._draft[self._right]
            self._chain = SimpleNamespace(sample=lambda *_: token, logprobs=chain.logprobs)
            try:
                return draw(self)
            finally:
                self._chain = chain
        return draw(self)

    patch.setattr(Generation, "draw", faulty)


def wrong_guesses_stay(patch):
    close = Generation.close

    def faulty(self):
        self._right = len(self._draft)
        close(self)
        self._length = self.sequence.length

    patch.setattr(Generation, "close", faulty)


def the_row_is_the_next_one(patch):
    take = Generation.take
    patch.setattr(Generation, "take", lambda self, rows, s: take(self, rows.roll(-1, 0), s))


def states_stay_after_wrong_guesses(patch):
    patch.setattr(StateSlots, "nearest", lambda self, sequence, length: length)
    patch.setattr(StateSlots, "rollback", lambda self, sequence, length: None)


def an_accepted_row_is_not_repeated(patch):
    of_row = StateRun.of_row

    def faulty(self, number):
        fields = of_row(self, number)
        return fields | ({"again": fields["again"][:-1]} if fields.get("again") else {})

    patch.setattr(StateRun, "of_row", faulty)


def an_accepted_guess_does_not_move_the_grammar(patch):
    accept = Constraint.accept

    def faulty(self, token):
        self.count = getattr(self, "count", 0) + 1
        if self.count % 3:
            accept(self, token)

    patch.setattr(Constraint, "accept", faulty)


def a_seed_draws_once_more_for_a_draft(patch):
    take = Generation.take

    def faulty(self, rows, seconds):
        if self._draft:
            self._chain.sample(rows[0], self.ids, None)
        take(self, rows, seconds)

    patch.setattr(Generation, "take", faulty)


def rows_of_wide_steps_have_other_bits(patch):
    run = Decoder.run

    def faulty(self, rows):
        logits_RV = run(self, rows)
        return logits_RV + 1e-6 * (len(rows) > 2 and sum(r.has_logits for r in rows) > 2)

    patch.setattr(Decoder, "run", faulty)


def two_texts_have_each_others_rows(patch):
    run = Sequences.run

    def faulty(self, parts):
        found = run(self, parts)
        places = [place for place, rows in enumerate(found) if len(rows) > 1]
        if len(places) > 1:
            first, second = (found[place][:1].clone() for place in places[:2])
            found[places[0]][:1], found[places[1]][:1] = second, first
        return found

    patch.setattr(Sequences, "run", faulty)


def accepted_guesses_are_not_counted(patch):
    emit = Generation._emit

    def faulty(self, token):
        self._left += self._right > 0
        return emit(self, token)

    patch.setattr(Generation, "_emit", faulty)


def none(patch):
    pass


FAULTS = (
    none,
    a_wrong_guess_is_taken,
    wrong_guesses_stay,
    the_row_is_the_next_one,
    states_stay_after_wrong_guesses,
    an_accepted_row_is_not_repeated,
    an_accepted_guess_does_not_move_the_grammar,
    a_seed_draws_once_more_for_a_draft,
    rows_of_wide_steps_have_other_bits,
    two_texts_have_each_others_rows,
    accepted_guesses_are_not_counted,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(bench_of, monkeypatch, fault):
    bench = bench_of("qwen35", 3)
    jobs, wants = texts_of(bench, 5, 16)
    with monkeypatch.context() as patch:
        fault(patch)
        assert bool(life(bench, jobs, wants, knowing("any", 5), 5)[0]) == (fault is not none)
