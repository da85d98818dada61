"""Drafts from n-grams: the tokens that followed the text's last tokens at an earlier occurrence.

`NgramDrafter` searches the text for the longest match of its end, through an index of n-grams
(prompt lookup decoding, Saxena 2023; llama.cpp's ngram-simple). `NgramPool` stores the token that
followed each n-gram in a hash table of fixed size, shared by successive texts (llama.cpp's
ngram-mod, common/ngram-mod.cpp), so its drafts may come from earlier texts."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from hotsplit.runtime.generate.drafters import Guess

_SIZES = (12, 6, 3, 2)  # lengths of the n-grams in the index, looked up longest first
_LONGEST_MATCH = 32  # tokens compared; longer matches carry no more information
_NUM_LATEST = 4  # latest occurrences of an n-gram compared, besides those near the last guess
_MOST_TOKENS = 1 << 15  # in the index, about 1 KB each; with more, only the last half is indexed
_TRUST = (3, 5, 9, 17)  # lengths of a match from which its trust is 1, 2, 3, 4


class NgramDrafter:
    """Drafts from the longest match of the text's end, among the latest occurrences of its last
    n-gram and those near the source of the last draft. Of equally long matches it takes the one
    nearest to that source, or the latest if there was no draft: where a text is copied with
    changes, drafts resume after the change."""

    name = "ngram"

    def __init__(self) -> None:
        self._ids: Sequence[int] = ()  # the indexed text
        self._num_known = self._first = 0  # end and start of its indexed part
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> its ends, ascending
        self._lag: int | None = None  # tokens from the last draft's source to the text's end

    def propose(self, ids: Sequence[int], most: int) -> Guess:
        """A draft of `most` tokens, or none. A source that reaches the end of the text repeats."""
        self.prepare(ids)
        for size in _SIZES:
            ends = self._ends.get(tuple(ids[-size:]), ()) if len(ids) >= size else ()
            if ends:
                length, start = self._longest(ids, ends, size)
                self._lag = lag = len(ids) - start
                tokens = list(ids[start : start + most])
                while len(tokens) < most:
                    tokens.append(tokens[-lag])
                return Guess(tokens, trust=sum(length >= step for step in _TRUST))
        return Guess(())

    def _longest(self, ids: Sequence[int], ends: Sequence[int], size: int) -> tuple[int, int]:
        """(length of the longest match, position after it)."""
        near = len(ids) - (self._lag or 0)
        at = bisect_left(ends, near)
        found = set(ends[-_NUM_LATEST:]) | set(ends[max(0, at - 1) : at + 1])
        rated = [(_match(ids, end, size), -abs(end - near), end) for end in found]
        length, _, end = max(rated)
        return length, end

    def prepare(self, ids: Sequence[int]) -> None:
        """Indexes the n-grams that are followed by a token."""
        known = self._num_known
        is_same = ids is self._ids or ids[:known] == self._ids[:known]
        if not is_same or len(ids) < known:
            self._ends, self._lag, self._first, known = {}, None, 0, 0
        if len(ids) - self._first > _MOST_TOKENS:
            self._ends, self._first = {}, len(ids) - _MOST_TOKENS // 2
            known = self._first
        self._ids = ids
        for end in range(known, len(ids)):
            for size in _SIZES:
                if end >= size:
                    gram = tuple(ids[end - size : end])
                    ends = self._ends.get(gram)
                    if ends is None:
                        self._ends[gram] = [end]
                    else:
                        ends.append(end)
        self._num_known = len(ids)


def _match(ids: Sequence[int], end: int, length: int) -> int:
    """Length of the match that ends at `end` with the end of the text; known to be `length` or
    more."""
    longest = min(end, _LONGEST_MATCH)
    while length < longest and ids[end - 1 - length] == ids[-1 - length]:
        length += 1
    return length


_EMPTY = -1
_FACTOR = 6364136223846793005  # of Knuth's MMIX generator, as in llama.cpp's hash
_WORD = (1 << 64) - 1


class NgramPool:
    """A hash table of `num_entries` 4-byte ids: the token that last followed each n-gram. Different
    n-grams may share an entry, which only makes some drafts wrong."""

    name = "ngram-mod"

    def __init__(self, size: int = 8, num_entries: int = 1 << 20) -> None:
        assert size >= 1 and num_entries >= 1, (size, num_entries)
        self._size = size
        self._entries = array("i", [_EMPTY]) * num_entries
        self._highest = pow(_FACTOR, size, _WORD + 1)
        # Hash of the text's last n-gram; zeros precede the text.
        self._start = sum(pow(_FACTOR, age, _WORD + 1) for age in range(size)) & _WORD
        self._hash = self._start
        self._ids: Sequence[int] = ()
        self._num_known = 0

    def propose(self, ids: Sequence[int], most: int) -> Guess:
        self.prepare(ids)
        if len(ids) < self._size:
            return Guess(())
        window, state = list(ids[-self._size :]), self._hash
        while len(window) < self._size + most:
            token = self._entries[state % len(self._entries)]
            if token == _EMPTY:
                break
            window.append(token)
            state = self._next(state, window[-1 - self._size], token)
        return Guess(window[self._size :], trust=2)

    def prepare(self, ids: Sequence[int]) -> None:
        known = self._num_known
        is_same = ids is self._ids or ids[:known] == self._ids[:known]
        if not is_same or len(ids) < known:
            known, self._hash = 0, self._start
        self._ids = ids
        for end in range(known, len(ids)):
            if end >= self._size:
                self._entries[self._hash % len(self._entries)] = ids[end]
            leaving = ids[end - self._size] if end >= self._size else 0
            self._hash = self._next(self._hash, leaving, ids[end])
        self._num_known = len(ids)

    def _next(self, state: int, leaving: int, token: int) -> int:
        """The rolling hash, sum of (token + 1) * FACTOR ** age, moved on by one token."""
        return (state * _FACTOR + token + 1 - self._highest * (leaving + 1)) & _WORD
