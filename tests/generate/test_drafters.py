"""Drafts from the text: the longest match, compared with a slow and obvious search; the pool."""

import random

import pytest

from hotsplit.runtime.generate import ngrams
from hotsplit.runtime.generate.generation import num_common
from hotsplit.runtime.generate.ngrams import NgramDrafter, NgramPool


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


def test_the_length_of_a_common_beginning():
    for first, second, want in (
        ([], [1], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 4], [1, 2, 3], 2),
        ([0], [1], 0),
        ([1, 2], (1, 2, 3), 2),
        ((1, 2), [1, 3], 1),
    ):
        assert num_common(first, second) == num_common(second, first) == want
