"""The places for texts, and what is kept in those that nobody writes to.

A text that has ended stays, and one that begins alike takes its keys and values over: the whole
place where it goes on with all of them (the next turn of a conversation), else a fork of the part
that they share, which copies nothing until it is written to. Where no place is empty, the text that
was not used for the longest time goes.

The longest beginning in common is found by comparing token lists: 32 kept texts of 4,096 tokens take
0.1 ms where one is alike to its end and the others differ at once, and 2 ms where all are alike
(Zen 4 core, shared), once a text; a step of a small model takes 30. A radix tree would save that and
be another place that says what is kept.
What this module does not know: when a text begins or ends."""

from collections.abc import Iterable, Sequence

from sparkinfer.runtime.generate.text_engine import TextEngine
from sparkinfer.runtime.step.sequences import Sequence as TextSequence

_FIRST_SLICE = 16


class Shelf:
    """All of an engine's sequences are opened and closed here."""

    def __init__(self, engine: TextEngine, num_places: int) -> None:
        self._engine, self.num_places = engine, num_places
        self._kept: list[TextSequence] = []  # the one that was used last is last
        self._used: list[TextSequence] = []

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_kept_tokens(self) -> int:
        return sum(sequence.length for sequence in self._kept)

    @property
    def used_tokens(self) -> int:
        return sum(sequence.length for sequence in self._used)

    def known(self, ids: Sequence[int]) -> int:
        """How many tokens of a prompt are there already; at least one is always computed."""
        return self._nearest(ids)[1]

    def take(self, ids: Sequence[int], *, reuses: bool = True) -> TextSequence:
        """A place that has the longest known beginning of a prompt. There must be one that is not
        in use."""
        assert len(self._used) < self.num_places, "every place is in use"
        found, count = self._nearest(ids) if reuses else (None, 0)
        if found is None:
            sequence = self._empty()
        elif found in self._kept and (count == found.length or not self._has_other(found)):
            self._kept.remove(found)
            found.rollback(count)
            sequence = found
        else:
            if found in self._kept:  # it has been of use just now
                self._kept.append(self._kept.pop(self._kept.index(found)))
            self._make_room()
            sequence = found.fork()
            sequence.rollback(count)
        self._used.append(sequence)
        return sequence

    def keep(self, sequence: TextSequence) -> None:
        """Nobody writes to it any more, and others may go on with it."""
        self._used.remove(sequence)
        if not sequence.length:
            sequence.close()
            return
        for other in list(self._kept):
            shared = common(other.ids, sequence.ids)
            if shared == other.length:  # it adds nothing
                self._close(other)
            elif shared == sequence.length:
                sequence.close()
                self._kept.remove(other)
                sequence = other
        self._kept.append(sequence)

    def drop(self, sequence: TextSequence) -> None:
        """Nobody may go on with it."""
        self._used.remove(sequence)
        sequence.close()

    def check_integrity(self) -> None:
        """Every open sequence is either kept or used."""
        numbers = [sequence.number for sequence in (*self._kept, *self._used)]
        assert len(set(numbers)) == len(numbers) <= self.num_places, numbers
        assert all(sequence.is_open for sequence in (*self._kept, *self._used))

    def _nearest(self, ids: Sequence[int]) -> tuple[TextSequence | None, int]:
        """(the sequence that begins most like a prompt, the tokens that they share)."""
        return longest(ids, (*self._kept, *self._used) if self._can_fork else self._kept)

    @property
    def _can_fork(self) -> bool:
        return self.num_places > 1

    def _has_other(self, kept: TextSequence) -> bool:
        """Whether there is a place beside it: an empty one, or one whose text may go."""
        return len(self._used) + 1 < self.num_places

    def _empty(self) -> TextSequence:
        self._make_room()
        return self._engine.sequence()

    def _make_room(self) -> None:
        if len(self._kept) + len(self._used) == self.num_places:
            self._close(self._kept[0])

    def _close(self, sequence: TextSequence) -> None:
        self._kept.remove(sequence)
        sequence.close()


def longest(
    ids: Sequence[int], sequences: Iterable[TextSequence]
) -> tuple[TextSequence | None, int]:
    """(the one that begins most like a prompt, the tokens that they share); None where none does."""
    best, most, ids = None, 0, ids[:-1]
    for sequence in sequences:
        count = common(sequence.ids, ids)
        if count >= max(most, 1):
            best, most = sequence, count
    return best, most


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike. Compares slices that double in length, then halves
    the one that differs."""
    most = min(len(a), len(b))
    low, high = 0, min(_FIRST_SLICE, most)  # the first `low` are alike
    while low < most and a[low:high] == b[low:high]:
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
