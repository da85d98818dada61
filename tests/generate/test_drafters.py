"""Drafts: the longest match in the text, compared with a slow and obvious search, and the pool; the
controller with known costs and drafters, which chooses nearly the best length, stops where drafts
do not pay, resumes, and loses little by trying."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import SpeculationOptions
from hotsplit.runtime.generate import ngrams
from hotsplit.runtime.generate.draft_costs import Acceptance, RowCosts
from hotsplit.runtime.generate.drafters import Beside, Guess
from hotsplit.runtime.generate.ngrams import NgramDrafter, NgramPool
from hotsplit.runtime.generate.speculation import Speculation


def longest_match(ids: list[int]) -> tuple[int, set[int]]:
    """(length of the longest suffix that occurs earlier, what followed it), slow and obvious."""
    best, after = 0, set()
    for end in range(1, len(ids)):
        length = 0
        while length < end and ids[end - 1 - length] == ids[-1 - length]:
            length += 1
        if length > best:
            best, after = length, set()
        if length == best:
            after.add(ids[end])
    return best, after


def test_lookup_finds_the_longest_match(monkeypatch):
    monkeypatch.setattr(ngrams, "_NUM_LATEST", 60)  # all occurrences are compared
    chance, num_guesses = random.Random(4), 0
    for _ in range(30):
        ids = [chance.randrange(4) for _ in range(chance.randrange(2, 60))]
        drafter = NgramDrafter()
        for stop in range(1, len(ids) + 1):
            guess = drafter.propose(ids[:stop], 5)
            length, after = longest_match(ids[:stop])
            assert bool(guess.tokens) == (length >= 2)
            if guess.tokens:
                assert guess.tokens[0] in after and len(guess.tokens) == 5
                num_guesses += 1
    assert num_guesses > 500


def test_lookup_compares_the_latest_matches():
    """A match of five tokens comes before `num_between` matches of three. Only the latest four
    matches are compared, so four or more of three tokens hide the longer one."""
    for num_between, want in ((0, 4), (3, 4), (4, 5), (9, 5)):
        between = [token for n in range(num_between) for token in (20 + n, 1, 2, 3)]
        ids = [5, 6, 1, 2, 3, 4, *between, 5, 6, 1, 2, 3]
        assert NgramDrafter().propose(ids, 1).tokens == [want], num_between


def test_lookup_continues_after_a_change_and_in_repetitions():
    source = list(range(100, 160))
    text = [*source, 1, 1, 1, *source[:20], 7, *source[21:23]]
    assert NgramDrafter().propose(text, 8).tokens == source[23:31]
    assert NgramDrafter().propose([5, 1, 2, 3, 1, 2, 3, 1, 2, 3], 7).tokens == [1, 2, 3, 1, 2, 3, 1]
    assert NgramDrafter().propose([1, 2, 3, 4], 8).tokens == ()
    # Of two equally long matches, the one nearest to the source of the last draft wins.
    drafter, text = NgramDrafter(), [50, 51, 52, 9, 9, 60, *source, 9, 9, 70, 71, 72, 50, 51, 52]
    assert drafter.propose(text, 3).tokens == [9, 9, 60]
    assert drafter.propose([*text, 8, 9, 9], 1).tokens == [60]


@pytest.mark.parametrize("drafter", [NgramDrafter, lambda: NgramPool(3, 1 << 12)])
def test_a_growing_index_equals_one_made_at_once(drafter):
    """Compared while the text grows, shrinks and is replaced."""
    chance = random.Random(6)
    grown, ids = drafter(), []
    for _ in range(300):
        deed = chance.random()
        if deed < 0.02:
            ids = ids[: chance.randrange(len(ids) + 1)]
        ids.extend(chance.randrange(5) for _ in range(chance.randrange(3)))
        got = grown.propose(list(ids) if deed > 0.5 else ids, 6)
        assert len(got.tokens) <= 6 and all(0 <= token < 5 for token in got.tokens)
        fresh = drafter()
        fresh.prepare(ids)
        for name in {"_ends", "_hash", "_num_known"} & set(vars(fresh)):
            assert getattr(grown, name) == getattr(fresh, name)
    ids = [*range(40), *range(10)]
    assert grown.propose(ids, 6).tokens == drafter().propose(ids, 6).tokens == list(range(10, 16))
    assert list(grown.propose(ids, 0).tokens) == []


def test_the_pool_drafts_from_another_text():
    pool = NgramPool(4)
    pool.propose(list(range(50)), 1)
    assert pool.propose([90, 91, 20, 21, 22, 23], 5).tokens == [24, 25, 26, 27, 28]
    assert pool.propose([90, 91, 20, 21, 23, 23], 5).tokens == []
    assert pool.propose([46, 47, 48], 5).tokens == ()
    assert NgramPool(4).propose([46, 47, 48, 49], 5).tokens == []
    # If there are more tokens than entries, the latest replace older ones; guesses still come from
    # the text.
    small = NgramPool(2, 16)
    ids = [n % 9 for n in range(1000)]
    assert set(small.propose(ids, 16).tokens) <= set(range(9))


def test_the_index_of_an_endless_text_is_bounded(monkeypatch):
    monkeypatch.setattr(ngrams, "_MOST_TOKENS", 100)
    drafter, ids = NgramDrafter(), []
    for n in range(2000):
        ids.append(n % 37)
        guess = drafter.propose(ids, 5)
        if n > 40:
            assert guess.tokens == [(n + 1 + i) % 37 for i in range(5)]
        assert sum(len(ends) for ends in drafter._ends.values()) <= 4 * 100


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time passes only where a test says so: on a busy machine any call may take long."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now_s)
    return clock


class Luck:
    """Its i-th guess is right with probability right(i), for a text of ones."""

    name = "chance"

    def __init__(self, right, seed: int = 0) -> None:
        self.right, self.chance = right, random.Random(seed)

    def prepare(self, ids: Sequence[int]) -> None:
        pass

    def guess(self, place: int) -> int:
        return 1 if self.chance.random() < self.right(place) else 2


class Chance(Luck):
    def propose(self, ids: Sequence[int], most: int) -> Guess:
        return Guess([self.guess(place) for place in range(most)])


class Model(Luck):
    """Says how probable its guesses are; `told` may be another probability than the true one."""

    token_s, read_token_s, fault = 0.0, 0.0, ""

    def __init__(self, right, told=None) -> None:
        super().__init__(right)
        self.told = told or right

    def unread(self, ids: Sequence[int]) -> int:
        return 1

    def guesses(self, ids: Sequence[int]) -> Iterator[tuple[int, float]]:
        for place in itertools.count():
            yield self.guess(place), self.told(place)


def live(speculation: Speculation, cost, count: int) -> tuple[float, Counter]:
    """Generates `count` tokens or a few more, all of them 1, in steps that take cost(rows) seconds:
    (seconds, number of drafts of each length)."""
    ids, seconds, lengths = [1], 0.0, Counter()
    while len(ids) <= count:
        draft = speculation.draft(ids, 16)
        accepted = next((i for i, token in enumerate(draft) if token != 1), len(draft))
        seconds += cost(1 + len(draft))
        lengths[len(draft)] += 1
        speculation.learn(1 + len(draft), accepted, cost(1 + len(draft)))
        ids.extend([1] * (1 + accepted))
    return seconds, lengths


def rate(length: int, right, cost) -> float:
    reached, expected = 1.0, 1.0
    for place in range(length):
        reached *= right(place)
        expected += reached
    return expected / cost(length + 1)


COSTS = {
    "memory-bound": lambda rows: 0.1 * (1 + 0.05 * (rows - 1)),
    "a jump, then a line": lambda rows: 0.1 * (1 if rows == 1 else 1.4 + 0.22 * (rows - 1)),
    "compute-bound": lambda rows: 0.1 * rows,
    "tiles of eight": lambda rows: 0.1 * (1 + 0.9 * ((rows - 1) // 8) + 0.04 * rows),
}
RIGHTS = {
    "often": lambda place: 0.95,
    "half": lambda place: 0.5,
    "falling": lambda place: 0.95 * 0.8**place,
    "never": lambda place: 0.0,
}


@pytest.mark.parametrize("right", RIGHTS)
@pytest.mark.parametrize("cost", COSTS)
def test_the_length_is_nearly_the_best_of_all(cost, right):
    speculation = Speculation(Chance(RIGHTS[right]), SpeculationOptions())
    rates = [rate(length, RIGHTS[right], COSTS[cost]) for length in range(17)]
    live(speculation, COSTS[cost], 3000)
    seconds, lengths = live(speculation, COSTS[cost], 3000)
    assert 3000 / seconds > 0.94 * max(rates), (rates, lengths)
    assert 3000 / seconds > 0.985 * rates[0]
    if rates[0] > 1.1 * max(rates[1:]):
        assert lengths[0] > 0.95 * lengths.total()
    with_best = rates[max(lengths, key=lengths.get)]
    assert with_best > 0.95 * max(rates), (rates, lengths)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_the_estimated_speedup_counts_every_step(count):
    """The first step never has a draft, so that the time of a single row is known from it on."""
    speculation = Speculation(Chance(RIGHTS["often"]), SpeculationOptions())
    cost = COSTS["tiles of eight"]
    seconds, lengths = live(speculation, cost, count)
    totals = speculation.totals
    assert totals.steps == lengths.total() and totals.step_s == pytest.approx(seconds)
    assert totals.baseline_s == pytest.approx(totals.tokens * cost(1))
    assert totals.gain == pytest.approx(totals.baseline_s / (seconds + totals.draft_s))


@pytest.mark.parametrize("kind", [Chance, Model])
def test_drafting_turns_off_and_on_again(kind):
    drafter = kind(RIGHTS["often"])
    speculation = Speculation(drafter, SpeculationOptions())
    cost = COSTS["a jump, then a line"]
    live(speculation, cost, 1000)
    assert (speculation.totals.num_off, speculation.totals.num_on) == (0, 0)
    assert speculation.totals.gain > 1.5
    drafter.right = RIGHTS["never"]
    live(speculation, cost, 1000)
    assert speculation.totals.num_off >= 1
    _, lengths = live(speculation, cost, 2000)
    assert lengths[0] > 0.95 * lengths.total()
    drafter.right = RIGHTS["often"]
    live(speculation, cost, 1000)
    seconds, _ = live(speculation, cost, 2000)
    assert speculation.totals.num_on >= 1 and 2000 * cost(1) / seconds > 1.5
    line = speculation.line()
    assert line.startswith("speculation (chance): ") and "x the speed of the text; on at" in line


@pytest.mark.parametrize("kind", [Chance, Model])
@pytest.mark.parametrize("cost", COSTS)
def test_trying_costs_little_from_the_first_token_on(cost, kind):
    """Wherever the text is cut off, the loss is at most 0.8 % and two single steps (the account's
    share and opening balance, with a margin), and three more for the first try of a draft model:
    for a drafter that is always wrong and for one that is right three times in ten."""
    for right in (lambda place: 0.0, lambda place: 0.3):
        speculation = Speculation(kind(right), SpeculationOptions())
        took = count = 0
        for _ in range(60):
            seconds, lengths = live(speculation, COSTS[cost], 20)
            took += seconds
            count = speculation.totals.tokens
            assert took < COSTS[cost](1) * (1.008 * count + (2 if kind is Chance else 5)), (
                took,
                count,
                lengths,
            )


def test_a_slow_drafter_is_hardly_called(clock):
    class Slow(Model):
        calls = 0

        def prepare(self, ids):
            self.calls += 1
            clock.now_s += 0.005

    drafter = Slow(RIGHTS["often"])
    speculation = Speculation(drafter, SpeculationOptions())
    live(speculation, lambda rows: 1e-4 * rows, 2000)
    assert 1 <= drafter.calls < 8


@pytest.mark.parametrize(
    "token_s, guesses, reason",
    [
        (0.08, True, "a guess takes 80 ms, a step of the model 100 ms and one of two rows 150 ms"),
        (5.0, True, "a guess takes 5e+03 ms, a step of the model 100 ms and one of two rows"),
        (0.001, False, "no first guess was probable enough"),
        (0.001, True, None),
    ],
)
def test_a_loaded_model_that_drafts_nothing_says_why(token_s, guesses, reason):
    drafter = Model(RIGHTS["often" if guesses else "never"])
    drafter.token_s = token_s
    speculation = Speculation(drafter, SpeculationOptions())
    assert speculation.line().endswith(
        "the draft model is loaded, but drafted nothing: no step was made"
    )
    live(speculation, COSTS["compute-bound" if token_s > 0.01 else "memory-bound"], 40)
    line = speculation.line()
    assert (speculation.totals.drafted == 0) == (reason is not None)
    assert ("drafted nothing: " + reason in line) if reason else (" drafted tokens " in line)


@pytest.mark.parametrize(
    ("right", "cost", "line"),
    [
        ("often", "a jump, then a line", " drafted tokens accepted: "),
        ("never", "a jump, then a line", ", 0% of "),
        ("often", "compute-bound", " drafted tokens accepted: "),
    ],
)
def test_a_draft_model_is_tried_and_then_decided_by_what_was_measured(clock, right, cost, line):
    """A guess takes two tenths of a step; half a step a row, which is assumed before the first try,
    would forbid every draft."""

    class Timed(Model):
        token_s = 0.02

        def guess(self, place):
            clock.now_s += self.token_s
            return super().guess(place)

    speculation = Speculation(Timed(RIGHTS[right], RIGHTS["often"]), SpeculationOptions())
    live(speculation, COSTS[cost], 200)
    pays = right == "often" and cost != "compute-bound"
    assert speculation.totals.drafts >= 1
    assert (speculation.totals.drafts > 4) == pays == (speculation.totals.gain > 1.2), (
        speculation.line()
    )
    assert ("; on at the end" if pays else "; off at the end") in speculation.line()
    assert line in speculation.line()


class Reader(Model):
    """A model that is right eight times in ten, whose guess takes 0.38 steps of 0.1 s and a token
    that it reads 0.085: the 0.5B beside the 1.5B at AVX2."""

    token_s, read_token_s = 0.038, 0.0076

    def __init__(self, clock, right=lambda place: 0.8) -> None:
        super().__init__(right)
        self.clock, self.num_read, self.length = clock, 0, 0

    def unread(self, ids):
        return len(ids) - self.length

    def prepare(self, ids):
        self.clock.now_s += 0.0085 * self.unread(ids)
        self.num_read, self.length = self.num_read + self.unread(ids), len(ids)

    def guess(self, place):
        self.clock.now_s += self.token_s * (place > 0)
        return super().guess(place)


AT_AVX2 = {1: 1.0, 2: 1.42, 3: 1.91, 4: 2.36, 6: 3.44, 8: 4.29}
AT_AVX512 = {1: 1.0, 2: 1.0, 3: 0.98, 4: 1.0, 6: 1.38, 8: 1.7}


def lived(clock, ratios, prompt: int, count: int, right=lambda place: 0.8):
    """The speed of a text over that without drafts, and the tokens that the draft model has read;
    steps take what these ratios say, which are known from before."""
    drafter = Reader(clock, right)
    speculation = Speculation(drafter, SpeculationOptions(), ratios=ratios)
    cost = RowCosts(ratios)
    cost.learn(1, 0.1)
    began, ids, took = clock.now_s, [1] * prompt, 0.0
    while len(ids) < prompt + count:
        draft = speculation.draft(ids, prompt + count - len(ids) - 1)
        accepted = next((i for i, token in enumerate(draft) if token != 1), len(draft))
        step_s = cost.seconds(1 + len(draft))
        took += step_s
        speculation.learn(1 + len(draft), accepted, step_s)
        ids.extend([1] * (1 + accepted))
    return 0.1 * count / (took + clock.now_s - began), drafter.num_read


@pytest.mark.parametrize("count", [20, 120, 400])
def test_a_draft_model_that_does_not_pay_by_known_costs_reads_nothing(clock, count):
    gain, num_read = lived(clock, AT_AVX2, 50, count)
    assert num_read == 0 and gain == pytest.approx(1.0)


def test_a_draft_model_that_pays_by_known_costs_is_asked_at_once(clock):
    gain, num_read = lived(clock, AT_AVX512, 20, 120)
    assert num_read > 100 and gain > 1.2


@pytest.mark.parametrize(("prompt", "count", "reads"), [(500, 40, False), (500, 400, True)])
def test_a_long_text_is_read_once_its_answer_is_long_enough(clock, prompt, count, reads):
    gain, num_read = lived(clock, AT_AVX512, prompt, count)
    assert (num_read > 0) == reads and gain > 0.99


def test_guesses_that_are_never_right_cost_what_the_account_holds(clock):
    """The opening balance and the text that was read: six steps of this text."""
    gain, num_read = lived(clock, AT_AVX512, 20, 300, lambda place: 0.0)
    assert 0 < num_read < 60 and gain > 300 / 306


@pytest.mark.parametrize(
    "of_text, of_model",
    [("often", "never"), ("never", "often"), ("half", "often"), ("often", "half")],
)
def test_a_text_takes_the_draft_that_gains_more(clock, of_text, of_model):
    """A guess of the model takes two tenths of a step. Neither beside the other loses what the
    better one gains alone."""

    class Timed(Model):
        token_s = 0.02

        def guess(self, place):
            clock.now_s += self.token_s
            return super().guess(place)

    def seconds(*drafters):
        speculation, began = (
            Speculation(drafters[0], SpeculationOptions(), *drafters[1:]),
            clock.now_s,
        )
        took, _ = live(speculation, COSTS["memory-bound"], 1500)
        return took + clock.now_s - began, speculation

    alone = [seconds(Chance(RIGHTS[of_text]))[0], seconds(Timed(RIGHTS[of_model]))[0]]
    both_s, speculation = seconds(Timed(RIGHTS[of_model]), Chance(RIGHTS[of_text]))
    assert both_s < 1.08 * min(alone), (both_s, alone)
    totals = speculation.totals
    share = totals.drafts_of_text / totals.drafts
    assert share > 0.8 if of_text == "often" else share < 0.2 or of_text == "half"
    assert ("from the text" in speculation.line()) == (totals.drafts_of_text > 0)


@pytest.mark.parametrize("num_texts", [2, 4])
@pytest.mark.parametrize("cost", ["memory-bound", "compute-bound"])
@pytest.mark.parametrize("right", ["often", "never"])
def test_texts_that_share_steps_draft_where_it_pays_all(num_texts, cost, right):
    """All texts together take at most 1 % more than without drafts, and less where rows are
    cheap and guesses right; the account is theirs together."""
    texts, ids, seconds, num_steps = [], [[1] for _ in range(num_texts)], 0.0, 400
    for seed in range(num_texts):
        speculation = Speculation(Chance(RIGHTS[right], seed), SpeculationOptions())
        speculation.begin_with(texts[0].learnt if texts else speculation.learnt)
        texts.append(speculation)
    for _ in range(num_steps):
        beside, drafts = Beside.of(num_texts - 1), []
        for speculation, own in zip(texts, ids, strict=True):
            drafts.append(speculation.draft(own, 16, beside))
            if drafts[-1]:
                beside = beside.with_draft(len(drafts[-1]), speculation.expected - 1)
        rows = num_texts + sum(map(len, drafts))
        step_s = COSTS[cost](rows)
        seconds += step_s
        texts[0].learn_shared(num_texts, rows, step_s)
        for speculation, own, draft in zip(texts, ids, drafts, strict=True):
            right_ones = next((i for i, token in enumerate(draft) if token != 1), len(draft))
            speculation.learn(1 + len(draft), right_ones, step_s)
            own.extend([1] * (1 + right_ones))
    plain_s = (sum(map(len, ids)) - num_texts) / num_texts * COSTS[cost](num_texts)
    assert seconds < 1.01 * plain_s
    assert (seconds < plain_s / 2) == (cost == "memory-bound" and right == "often")


def test_a_draft_beyond_the_room_is_cut():
    class Endless(Chance):
        def propose(self, ids, most):
            return Guess([1] * 1000, trust=4)

    for drafter in (Endless(None), Model(lambda place: 1.0)):
        speculation = Speculation(drafter, SpeculationOptions(most=8))
        live(speculation, COSTS["memory-bound"], 200)
        ids = [1] * 5
        assert len(speculation.draft(ids, 100)) == 8
        for room in (0, 1, 2, 7):
            assert len(speculation.draft(ids, room)) == room


def test_drafts_have_the_requested_length():
    for options in (SpeculationOptions(most=3), SpeculationOptions(most=12, least=6)):
        speculation = Speculation(Chance(RIGHTS["often"]), options)
        _, lengths = live(speculation, COSTS["memory-bound"], 200)
        drafted = [length for length in lengths if length]
        assert drafted and options.least <= min(drafted) and max(drafted) <= options.most


def test_costs_are_interpolated_between_measured_ones():
    costs = RowCosts()
    assert costs.single_s is None
    costs.learn(1, 1.0)
    assert 1.0 < costs.seconds(9) < 9.0  # a guess
    for seconds in (5.0, 5.2, 90.0):  # one of them was delayed
        costs.learn(9, seconds)
    assert costs.seconds(9) == 5.2
    assert costs.seconds(5) == pytest.approx(1 + 4.2 / 2)
    assert costs.seconds(17) == pytest.approx(5.2 + 4.2)
    for _ in range(9):
        costs.learn(9, 2.0)
    assert (costs.seconds(1), costs.seconds(9)) == (1.0, 2.0)


def test_steps_are_compared_with_single_ones_of_their_time():
    """The first steps of a text are slow: a check among them costs what it does later."""
    costs = RowCosts()
    costs.learn(1, 0.3)
    costs.learn(2, 0.36)
    for _ in range(9):
        costs.learn(1, 0.1)
    assert costs.curve(2) == pytest.approx([0, 0.1, 0.12])


def test_a_first_single_row_after_steps_of_several_texts_is_the_new_unit():
    costs = RowCosts()
    costs.learn(2, 0.3, texts=2)
    costs.learn(4, 0.6, texts=2)
    costs.learn(1, 0.2)
    assert costs.curve(4) == pytest.approx([0, 0.2, 0.3, 0.45, 0.6])


def test_costs_that_were_known_before_are_replaced_by_measured_ones():
    costs = RowCosts({1: 1.0, 2: 1.5, 4: 2.0})
    assert costs.is_known and costs.single_s is None
    costs.learn(1, 0.1)
    assert costs.curve(6) == pytest.approx([0, 0.1, 0.15, 0.175, 0.2, 0.2333, 0.2667], abs=1e-4)
    costs.learn(2, 0.11)  # with what was known, 1.1 and 1.5 steps
    assert costs.curve(4) == pytest.approx([0, 0.1, 0.13, 0.165, 0.2])
    for _ in range(8):
        costs.learn(2, 0.11)
    assert costs.curve(2) == pytest.approx([0, 0.1, 0.11])
    shared = RowCosts({1: 1.0, 2: 1.5, 4: 2.0})
    shared.learn(2, 0.3)  # of two texts
    assert shared.curve(4) == pytest.approx([0, 0.2, 0.3, 0.35, 0.4])


def test_the_expected_acceptance_follows_the_counts():
    acceptance = Acceptance(4)
    for n in range(2000):
        acceptance.learn(0, 0, n % 4 > 0)
        acceptance.learn(0, 1, n % 2 > 0)
    found = acceptance.expected(0, 4)
    assert found[0] == 1 and found[1] == pytest.approx(1.75, abs=0.05)
    assert found[2] == pytest.approx(1.75 + 0.375, abs=0.07)
    assert found[3] < found[4] < found[2] + 0.375
    assert acceptance.expected(4, 2)[1] > 1.8  # nothing was learned about this trust


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"most": 0}, "most is 0, wanted a whole number from 1 to 127"),
        ({"most": 4, "least": 5}, "at least 5 tokens, wanted 0 to 4"),
        ({"least": -1}, "least is -1, wanted a whole number from 0"),
    ],
)
def test_wrong_options_of_drafts_are_refused(values, match):
    with pytest.raises(HotsplitError, match=match):
        SpeculationOptions(**values)


@pytest.mark.parametrize("kind", [Chance, Model])
@pytest.mark.parametrize(("step_s", "least"), [(2e-4, 0.98), (1e-3, 0.985), (0.02, 0.99)])
def test_deciding_takes_a_small_share_of_the_time(clock, monkeypatch, kind, step_s, least):
    """To decide takes 25 us, as much as an eighth of the shortest of these steps. No draft pays."""
    speculation = Speculation(kind(RIGHTS["never"]), SpeculationOptions())
    check = speculation._check

    def checked(ids):
        clock.now_s += 25e-6
        check(ids)

    monkeypatch.setattr(speculation, "_check", checked)
    took, _ = live(speculation, lambda rows: step_s * rows, 3000)
    assert 3000 * step_s / (took + clock.now_s) > least
    assert speculation.totals.steps >= 2990
    assert speculation.totals.step_s == pytest.approx(took)


def test_drafts_are_decided_on_at_each_step_while_they_pay(clock, monkeypatch):
    speculation = Speculation(Chance(RIGHTS["often"]), SpeculationOptions())
    check, num_checked = speculation._check, Counter()

    def checked(ids):
        clock.now_s += 25e-6
        num_checked[len(ids)] += 1
        check(ids)

    monkeypatch.setattr(speculation, "_check", checked)
    _, lengths = live(speculation, lambda rows: COSTS["memory-bound"](rows) / 500, 3000)
    assert lengths.total() < 1.05 * num_checked.total()
