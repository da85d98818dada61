"""Continuous batching: each text is the same as when it runs alone, whatever joins, leaves or fails
meanwhile; places and queue are bounded, order is fair, and prefixes are shared."""

import random
import threading
import time

import pytest
import torch
from delta_models import STATEFUL
from models import byte_level_keys, make_model, make_sizes

from hotsplit import Engine
from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import GenerationOptions, SamplingOptions
from hotsplit.runtime.generate.dry import cached_breakers
from hotsplit.runtime.generate.sampler_chain import chain_of
from hotsplit.serve import scheduler as scheduler_module
from hotsplit.serve.prefix_cache import PrefixCache
from hotsplit.serve.scheduler import QueueFull, Scheduler
from hotsplit.serve.texts import DeadlinePassed, Ended, Failed, Said, Stopping, TextJob

CONTEXT = 300
PARALLEL, KEPT = 4, 3
SAMPLINGS = (
    SamplingOptions(temperature=0.0),
    SamplingOptions(seed=5),
    SamplingOptions(seed=6, temperature=1.4, repeat_penalty=1.3, top_k=0),
    SamplingOptions(seed=7, mirostat=2),
    SamplingOptions(seed=8, xtc_probability=0.5, dry_multiplier=0.8, dry_sequence_breakers=()),
)


class Bench:
    """An engine under a scheduler that most tests step by hand, and a second engine with a single
    sequence, which computes each text alone."""

    def __init__(self, model, *, parallel=PARALLEL, kept=KEPT, queue=64, **options):
        places = parallel + kept
        self.engine = Engine.load(model, context_length=CONTEXT, num_sequences=places, **options)
        self.single = Engine.load(model, context_length=CONTEXT)
        self.prefix_cache = PrefixCache(self.engine, parallel + kept)
        self.batches = []
        self.scheduler = Scheduler(
            self.engine, self.prefix_cache, self._post, parallel=parallel, queue=queue
        )
        self.said, self.tokens, self.ended, self.failed = {}, {}, {}, {}

    def _post(self, batch):
        for text, event in batch:
            text.listen(text.number, event)

    def submit(self, key, ids, sampling=SAMPLINGS[0], *, listen=None, draws=None, **more):
        given = {name: more.pop(name) for name in ("deadline", "reuses", "mask") if name in more}
        options = GenerationOptions(**{"max_tokens": 20, **more})
        codec = self.engine.codec
        size = self.engine.model.spec.vocab_size
        draws = draws or chain_of(sampling, cached_breakers(codec), size)
        job = TextJob(ids=ids, codec=codec, draws=draws, options=options, **given)
        self.said[key], self.tokens[key] = "", []

        def hear(number, event):
            if isinstance(event, Said):
                self.said[key] += "".join(token.text for token in event.tokens)
                self.tokens[key] += [token.id for token in event.tokens if token.id is not None]
            elif isinstance(event, Ended):
                self.ended[key] = event.report
            else:
                self.failed[key] = event.error

        return self.scheduler.submit([job], listen or hear)[0]

    def alone(self, ids, sampling, **options):
        found = self.single.generate(
            ids, sampling=sampling, options=GenerationOptions(**{"max_tokens": 20, **options})
        )
        return [token.id for token in found if token.id is not None]

    def finish(self, most=3000):
        for _ in range(most):
            if self.scheduler.is_idle:
                return
            self.scheduler.step()
            self.assert_intact()
        raise AssertionError("it never ends")

    def assert_intact(self):
        """Sequences kept or in use are open, distinct and no more than there are places."""
        cache = self.prefix_cache
        sequences = [*cache._kept, *cache._used]
        numbers = [sequence.number for sequence in sequences]
        assert len(set(numbers)) == len(numbers) <= cache.num_places, numbers
        assert all(sequence.is_open for sequence in sequences)

    def close(self):
        self.engine.close()
        self.single.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(vocab_size=vocab_size, context_length=CONTEXT)
    path = tmp_path_factory.mktemp("serve") / "model.gguf"
    make_model(sizes=shape, kind="q8_0", extra_keys=keys).save(path)
    return path


@pytest.fixture
def bench(model):
    bench = Bench(model)
    yield bench
    bench.close()


def prompts_of(chance, count):
    """Texts of 1 to 245 tokens, many with common prefixes."""
    stems = [[chance.randrange(256) for _ in range(length)] for length in (30, 90, 200)]
    found = []
    for _ in range(count):
        stem = chance.choice(stems)[: chance.randint(1, 200)] if chance.random() < 0.7 else []
        found.append(stem + [chance.randrange(256) for _ in range(chance.choice((1, 5, 45)))])
    return found


@pytest.mark.parametrize("seed", range(3))
def test_texts_equal_those_generated_alone(model, seed):
    check_random_life(model, seed, 25)


@pytest.mark.parametrize("mixer", ["Mamba-2", "Kimi delta attention", "n-grams"])
def test_texts_with_states_equal_those_generated_alone(tmp_path, mixer):
    """Some of them cancelled at any step."""
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(num_layers=2, vocab_size=vocab_size, context_length=CONTEXT)
    model = STATEFUL[mixer](shape, kind="q8_0", period=2, extra_keys=keys)
    model.save(tmp_path / "m.gguf")
    assert check_random_life(tmp_path / "m.gguf", 3, 25) > 1


def check_random_life(model, seed, count):
    """Texts come at random; some are cancelled, some have a deadline in the past, some fail. All
    others equal those generated alone. Returns how many were cancelled."""
    chance, num_cancelled = random.Random(seed), 0
    bench = Bench(model, parallel=chance.choice((1, 2, 4)), kept=chance.choice((0, 1, 3)))
    wanted, texts = {}, {}
    for key, ids in enumerate(prompts_of(chance, count)):
        sampling = chance.choice(SAMPLINGS)
        options = {"max_tokens": chance.choice((1, 3, 20, 60, -1))} if len(ids) > 150 else {}
        reuses = chance.random() < 0.8
        deed = chance.random()
        if deed < 0.1:
            bench.submit(key, ids, sampling, deadline=time.monotonic() - 1)
        elif deed < 0.2:
            bench.submit(key, ids, draws=Failing(chance.randint(0, 5)))
        else:
            texts[key] = bench.submit(key, ids, sampling, reuses=reuses, **options)
            wanted[key] = (ids, sampling, options)
        for _ in range(chance.choice((0, 0, 1, 5))):
            bench.scheduler.step()
            bench.assert_intact()
        if deed > 0.9 and texts:
            gone = chance.choice(list(texts))
            if gone not in bench.ended:
                bench.scheduler.cancel([texts.pop(gone)])
                del wanted[gone]
                num_cancelled += 1
    bench.finish()
    assert len(wanted) > count / 3
    for key, (ids, sampling, options) in wanted.items():
        assert bench.tokens[key] == bench.alone(ids, sampling, **options), key
        ended = bench.ended[key]
        has_end = ended.stopped_by == "end of text"
        assert ended.generated_tokens == len(bench.tokens[key]) + has_end
    assert {type(error) for error in bench.failed.values()} == {DeadlinePassed, ZeroDivisionError}
    bench.close()
    return num_cancelled


class Failing:
    """Draws token 65 `times` times, then raises an unexpected error."""

    def __init__(self, times):
        self.times = times

    def sample(self, logits_V, history, mask_V=None):
        self.times -= 1
        if self.times < 0:
            raise ZeroDivisionError("raised by a test")
        return 65

    def logprobs(self, logits_V, count, chosen):
        return ()


def test_the_comparison_rejects_another_text(bench):
    """If texts were mixed up, the tests above would fail."""
    bench.submit("a", [1, 2, 3], SAMPLINGS[1])
    bench.finish()
    assert bench.tokens["a"] != bench.alone([1, 2, 4], SAMPLINGS[1])
    assert bench.tokens["a"] != bench.alone([1, 2, 3], SAMPLINGS[2])


def test_a_failed_step_fails_only_the_text_at_fault(bench, monkeypatch):
    for key in range(3):
        bench.submit(key, [10 + key] * 5, SAMPLINGS[1])
    bench.scheduler.step()
    victim = bench.scheduler._running[1].sequence
    run = bench.engine.run

    def failing(parts):
        parts = list(parts)
        if any(part.sequence is victim for part in parts):
            raise RuntimeError("raised by a test")
        return run(parts)

    monkeypatch.setattr(bench.engine, "run", failing)
    bench.finish()
    assert isinstance(bench.failed[1], RuntimeError) and 1 not in bench.ended
    for key in (0, 2):
        assert bench.tokens[key] == bench.alone([10 + key] * 5, SAMPLINGS[1])


def test_a_failed_constraint_fails_only_its_own_text(bench):
    class Stuck:
        def mask_V(self, vocab_size):
            raise HotsplitError("nothing is allowed")

        def accept(self, token_id):
            raise AssertionError

        def is_ready(self, within_s):
            return True

    bench.submit("stuck", [1, 2], mask=Stuck())
    bench.submit("free", [1, 2, 3])
    bench.finish()
    assert isinstance(bench.failed["stuck"], HotsplitError)
    assert bench.tokens["free"] == bench.alone([1, 2, 3], SAMPLINGS[0])


class Slow:
    """A mask that allows everything, after `waits` looks at it for every token."""

    def __init__(self, waits):
        self.waits = self.left = waits

    def mask_V(self, vocab_size):
        assert self.left == 0
        return torch.ones(vocab_size, dtype=torch.bool)

    def accept(self, token_id):
        self.left = self.waits

    def is_ready(self, within_s):
        assert within_s <= max(scheduler_module.MASK_S, 1.0)
        self.left = max(0, self.left - 1)
        return self.left == 0


def test_a_slow_mask_holds_up_only_its_own_text(bench):
    bench.submit("slow", [1, 2, 3], SAMPLINGS[1], mask=Slow(waits=4), max_tokens=5)
    bench.submit("free", [1, 2], SAMPLINGS[2], max_tokens=17)
    bench.submit("gone", [4, 5], mask=Slow(waits=10**9))
    bench.scheduler.step()
    assert [len(bench.tokens[key]) for key in ("slow", "free", "gone")] == [0, 1, 0]
    for steps in range(2, 18):
        bench.scheduler.step()
        assert len(bench.tokens["free"]) == steps, "a step without a token for the other"
    assert len(bench.tokens["slow"]) >= 3 and not bench.tokens["gone"]
    (gone,) = (text for text in bench.scheduler._running if text.sequence.ids[0] == 4)
    bench.scheduler.cancel([gone])
    bench.finish()
    assert bench.tokens["slow"] == bench.alone([1, 2, 3], SAMPLINGS[1], max_tokens=5)
    assert bench.tokens["free"] == bench.alone([1, 2], SAMPLINGS[2], max_tokens=17)
    assert not bench.scheduler._undrawn and not bench.failed


def test_the_queue_is_bounded(model):
    bench = Bench(model, parallel=2, kept=0, queue=3)
    for key in range(5):
        bench.submit(key, [key + 1])
    with pytest.raises(QueueFull):
        bench.submit("late", [9])
    bench.finish()
    bench.submit("again", [9])
    bench.finish()
    assert len(bench.ended) == 6
    bench.close()


@pytest.mark.parametrize("queue", [0, 3])
def test_a_request_of_more_texts_than_the_queue_takes_turns(model, queue):
    bench = Bench(model, parallel=2, kept=0, queue=queue)
    codec, options = bench.engine.codec, GenerationOptions(max_tokens=3)
    draws = chain_of(SAMPLINGS[0], cached_breakers(codec), bench.engine.model.spec.vocab_size)
    job = TextJob(ids=[1, 2], codec=codec, draws=draws, options=options)
    for _ in range(2):  # the second time as the first
        ended = []

        def hear(number, event, ended=ended):
            if isinstance(event, Ended):
                ended.append(number)

        bench.scheduler.submit([job] * 11, hear)
        with pytest.raises(QueueFull):
            bench.submit("late", [9])
        bench.finish()
        assert sorted(ended) == list(range(11))
    bench.close()


def test_first_come_first_served(model):
    bench = Bench(model, parallel=1, kept=1)
    order = []
    for key in range(4):
        bench.submit(
            key,
            [key] * 3,
            listen=lambda number, event, key=key: (
                order.append(key) if isinstance(event, Ended) else None
            ),
        )
    bench.finish()
    assert order == [0, 1, 2, 3]
    bench.close()


def test_a_long_prompt_does_not_hold_up_a_running_answer(bench):
    bench.submit("short", [1], max_tokens=200)
    bench.scheduler.step()
    bench.scheduler._row_s = 0.25 / 16  # as if rows were slow: 16 of the prompt per step
    bench.submit("long", list(range(250)), max_tokens=1)
    steps_before = len(bench.tokens["short"])
    while "long" not in bench.ended:
        before = len(bench.tokens["short"])
        bench.scheduler.step()
        assert len(bench.tokens["short"]) == before + 1, "a step without a token for the short one"
        bench.scheduler._row_s = 0.25 / 16
    assert len(bench.tokens["short"]) - steps_before >= 250 // 16


def test_short_prompts_pass_a_long_one(bench):
    bench.scheduler._row_s = 1.0
    bench.submit("first", [1], max_tokens=100)
    bench.scheduler.step()
    bench.submit("long", list(range(250)), max_tokens=1)
    bench.submit("short", [7, 8, 9], max_tokens=1)
    while "short" not in bench.ended:
        bench.scheduler.step()
    assert "long" not in bench.ended


def test_prefixes_are_shared(bench):
    stem = list(range(150))
    bench.submit("first", [*stem, 1], max_tokens=5)
    bench.finish()
    bench.submit("alike", [*stem, 2], max_tokens=5)
    bench.finish()
    bench.submit("on", [*stem, 1, *bench.tokens["first"], 3], max_tokens=5)
    bench.finish()
    bench.submit("not", [*stem, 2], max_tokens=5, reuses=False)
    bench.finish()
    cached = {key: report.cached_tokens for key, report in bench.ended.items()}
    assert cached == {"first": 0, "alike": 150, "on": 155, "not": 0}
    assert bench.tokens["not"] == bench.tokens["alike"]


def test_a_prefix_of_a_kept_text_is_not_kept_again(bench):
    """A finished text is kept only if it is not the prefix of a kept one."""
    stem = list(range(100))
    for key, tail in enumerate(([7] * 40, [], [7] * 20, [8])):
        bench.submit(key, [*stem, *tail], max_tokens=1)
        bench.finish()
        assert bench.prefix_cache.num_kept == (1 if key < 3 else 2)
    assert bench.prefix_cache.num_kept_tokens == 140 + 101


def test_texts_that_arrive_together_share_their_prefix(bench):
    """The others wait until the first has read the common prefix."""
    stem = list(range(200))
    for key in range(3):
        bench.submit(key, [*stem, key])
    bench.finish()
    assert sorted(report.cached_tokens for report in bench.ended.values()) == [0, 200, 200]
    for key in range(3):
        assert bench.tokens[key] == bench.alone([*stem, key], SAMPLINGS[0])


def test_a_text_that_another_waits_for_may_be_cancelled(bench):
    stem = list(range(250))
    first = bench.submit("gone", stem)
    bench.submit("waits", stem)
    bench.scheduler.step()
    bench.scheduler.cancel([first])
    bench.finish()
    assert bench.tokens["waits"] == bench.alone(stem, SAMPLINGS[0])
    assert "gone" not in bench.ended and bench.tokens["gone"] == []


def test_the_least_recently_used_text_is_dropped_first(model):
    bench = Bench(model, parallel=1, kept=2)
    stems = {name: [number] * 100 for number, name in enumerate("abcd")}

    def cached(name):
        bench.submit(name, [*stems[name], 99], max_tokens=1)
        bench.finish()
        return bench.ended[name].cached_tokens

    assert [cached(name) for name in "abc"] == [0, 0, 0]
    assert cached("a") == 100  # and is now the most recently used
    assert cached("d") == 0  # b is dropped
    assert cached("a") == 100
    assert cached("b") == 0
    bench.close()


def test_the_only_place_is_reused_up_to_the_common_prefix(model):
    """A single sequence, as under a plan for one text, cannot be forked; the common prefix is kept
    in place."""
    bench = Bench(model, parallel=1, kept=0)
    for key, tail in enumerate(([1], [2], [2, 3])):
        bench.submit(key, [*range(100), *tail], max_tokens=2)
        bench.finish()
        assert bench.tokens[key] == bench.alone([*range(100), *tail], SAMPLINGS[0], max_tokens=2)
    assert [bench.ended[key].cached_tokens for key in range(3)] == [0, 100, 101]
    bench.close()


def test_stopping_fails_the_unfinished_texts(bench):
    bench.submit("running", [1], max_tokens=-1)
    bench.scheduler.step()
    bench.submit("waiting", [2])
    thread = threading.Thread(target=bench.scheduler.run, daemon=True)
    bench.scheduler.stop()
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert {type(error) for error in bench.failed.values()} == {Stopping}
    with pytest.raises(Stopping):
        bench.submit("late", [3])


def test_the_thread_sleeps_when_there_is_nothing_to_do_and_wakes(bench):
    thread = threading.Thread(target=bench.scheduler.run, daemon=True)
    thread.start()
    done = threading.Event()

    def hear(number, event):
        if isinstance(event, Ended | Failed):
            done.set()

    bench.submit("a", [1, 2], listen=hear)
    assert done.wait(60)
    bench.scheduler.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_a_step_takes_no_more_rows_than_the_native_one(bench, monkeypatch):
    seen = []
    bench.scheduler.on_step = lambda seconds, rows: seen.append(rows)
    for key in range(4):
        bench.submit(key, [key, *range(200)], max_tokens=3)
    bench.finish()
    assert max(seen) <= scheduler_module.STEP_ROWS
