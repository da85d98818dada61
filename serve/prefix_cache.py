"""The engine's places for texts, and the finished texts kept in them for reuse.

A new text reuses the keys and values of the text with the longest common prefix, kept or in
progress. It takes over the place of a kept text if it continues all of it (the next turn of a
conversation) or if no other place is left, else it gets a copy-on-write fork of the shared prefix.
If no place is empty, the least recently used kept text is dropped.

With recurrent states, a text can only be continued from a position whose state is kept (see
runtime.cache.state_slots). Where two texts part, the later one keeps its state, for the third.

The longest common prefix is found by comparing token lists: 32 kept texts of 4,096 tokens take
0.1 ms if one matches entirely and the others differ from the start, and 2 ms if all match (shared
Zen 4 core), once per text; a step of a small model takes 30 ms. A radix tree would save that time,
but would be a second record of what is kept. The scheduler decides when texts begin and end."""

from collections.abc import Sequence

from hotsplit.runtime.engine import Engine
from hotsplit.runtime.step.sequences import Sequence as TextSequence

_FIRST_SLICE = 16


class PrefixCache:
    """Opens and closes all of an engine's sequences."""

    def __init__(self, engine: Engine, num_places: int) -> None:
        self._engine, self.num_places = engine, num_places
        self._kept: list[TextSequence] = []  # least recently used first
        self._used: dict[TextSequence, bool] = {}  # whether others may reuse it

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_kept_tokens(self) -> int:
        return sum(sequence.length for sequence in self._kept)

    def known(self, ids: Sequence[int]) -> int:
        """Number of reusable tokens of a prompt; its last token is always computed."""
        return self._nearest(ids)[1]

    def take(self, ids: Sequence[int], *, reuses: bool = True) -> TextSequence:
        """A sequence with the longest known prefix of a prompt; an empty one if there is none or
        `reuses` is false; that one is not reused by others either. At least one place must not be
        in use."""
        assert len(self._used) < self.num_places, "every place is in use"
        found, count, shared = self._nearest(ids) if reuses else (None, 0, 0)
        # Besides the place of a kept one, another is empty or holds a text that may be dropped.
        has_other = len(self._used) + 1 < self.num_places
        if found is None:
            self._make_room()
            sequence = self._engine.sequence()
        elif found in self._kept and (count == found.length or not has_other):
            self._kept.remove(found)
            found.rollback(count)
            sequence = found
        else:
            if found in self._kept:  # makes it the most recently used
                self._kept.append(self._kept.pop(self._kept.index(found)))
            self._make_room()
            sequence = found.fork()
            sequence.rollback(count)
        self._used[sequence] = reuses
        sequence.mark(shared)
        return sequence

    def keep(self, sequence: TextSequence) -> None:
        """Keeps a finished sequence for others, unless it is empty or a kept one begins with it."""
        del self._used[sequence]
        if not sequence.length:
            sequence.close()
            return
        for other in list(self._kept):
            shared = common(other.ids, sequence.ids)
            if shared == other.length:  # the new sequence begins with it
                self._close(other)
            elif shared == sequence.length:
                sequence.close()
                self._kept.remove(other)
                sequence = other
        self._kept.append(sequence)

    def drop(self, sequence: TextSequence) -> None:
        """Closes a sequence that must not be reused."""
        del self._used[sequence]
        sequence.close()

    def _nearest(self, ids: Sequence[int]) -> tuple[TextSequence | None, int, int]:
        """(the sequence with the longest reusable prefix of a prompt, length of that prefix, and of
        the longest that any shares); (None, 0, ...) if none is reusable. The prompt's last token
        does not count."""
        can_fork = self.num_places > 1
        best, most, longest, ids = None, 0, 0, ids[:-1]
        shared_with = [sequence for sequence, reuses in self._used.items() if reuses]
        for sequence in (*self._kept, *shared_with) if can_fork else self._kept:
            shared = common(sequence.ids, ids)
            count, longest = sequence.reusable(shared), max(longest, shared)
            if count >= max(most, 1):
                best, most = sequence, count
        return best, most, longest

    def _make_room(self) -> None:
        if len(self._kept) + len(self._used) == self.num_places:
            self._close(self._kept[0])

    def _close(self, sequence: TextSequence) -> None:
        self._kept.remove(sequence)
        sequence.close()


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix: slices that double in length, then a bisection."""
    most = min(len(a), len(b))
    low, high = 0, min(_FIRST_SLICE, most)  # the first `low` are equal
    while low < most and a[low:high] == b[low:high]:
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
