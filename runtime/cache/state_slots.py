"""The slots of recurrent states: which slot holds the state of a sequence after which token.

A recurrent state (of a gated delta net) has a fixed size whatever the text's length, and what a
token adds to it cannot be taken away again. So a pass never changes a state in place: it begins
with the slot of each sequence's current state and stores the new ones in free slots. If the pass
fails, is cancelled or is repeated, nothing has changed. A fork shares slots; nothing is ever
copied.

A check of drafts on the CPU stores no state. It keeps what its recurrences have read of its rows,
which takes much less memory: 33 KB a row and layer of Qwen3.6-35B, where a state has 2.1 MB. The
next pass begins with the same slot and repeats the accepted ones of these rows, in the recurrences
alone, while the state is in the caches. So a rollback within a check costs nothing. A fork does not
share kept rows, and computes their tokens again.

Besides its current state a sequence has up to SAVED_STATES earlier ones, to which it can be rolled
back: "lasting" ones at positions that its users mark (near the end of a prompt, where texts part),
and a "brief" one before each other pass of several rows, for rejected drafts. Of too many, brief
ones go first, then those that no other sequence has, then the oldest. A rollback to any other
position goes to the nearest state before it, perhaps to the beginning; the tokens after that are
computed again. That gives the same bits, because a row's bits do not depend on how a text is
divided into passes. But on a GPU, rows of a prompt's pass have others than those of a step, which
repeats them: so a check never drops the state before its first new row, or before the tokens that
it repeats itself; a lasting one goes for it.

Which positions are worth a state: Pan et al. 2024, Marconi (arXiv 2411.19379).

Letters: S slots, R kept rows, X width of one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

from hotsplit.costs.state_bytes import MOST_KEPT, SAVED_STATES, num_kept, num_slots
from hotsplit.errors import HotsplitError
from hotsplit.model.operations import Stateful

Saves = Literal["briefly", "lasting"]
NO_SLOT = -1  # zeros: the state before the first token


@dataclass(frozen=True)
class State:
    """The state after the first `position` tokens of a sequence: that in the slot, and after it the
    kept rows `again`. The current one is brief, too, unless its position was marked or another text
    begins with it."""

    position: int
    slot: int
    is_brief: bool = False
    again: range = range(0)

    @property
    def stored_at(self) -> int:
        """The number of tokens after which the slot has the state."""
        return self.position - len(self.again)

    def at(self, position: int) -> "State":
        """The state after fewer tokens, `stored_at` or more."""
        return replace(self, position=position, again=self.again[: position - self.stored_at])


BEGINNING = State(0, NO_SLOT)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive tokens start .. stop-1 of a sequence in a pass. `saves`: positions among them, in
    ascending order, whose states are to be saved, and for how long. `is_check`: all of them may be
    rejected drafts, and their rows can be kept."""

    sequence: int
    start: int
    stop: int
    saves: Mapping[int, Saves] = field(default_factory=dict)
    is_check: bool = False

    @property
    def inner(self) -> dict[int, Saves]:
        """The last ones of `saves` that the pass itself stores."""
        return dict([item for item in self.saves.items() if item[0] > self.start][-SAVED_STATES:])

    @property
    def keeps_rows(self) -> bool:
        """True if rows are kept instead of states."""
        is_short = self.stop - self.start <= MOST_KEPT
        return self.is_check and is_short and self.saves == {self.start: "briefly"}


@dataclass(frozen=True)
class StateRun:
    """Slots of the rows of a stretch: the one that they begin with, after which the kept rows
    `again` are repeated, the one that stores that state, and for each row the one that stores the
    state after it; NO_SLOT: zeros, and none. `keeps`: the first kept row of theirs."""

    reads: int
    writes: tuple[int, ...]
    again: range = range(0)
    begins: int = NO_SLOT
    keeps: int = NO_SLOT
    _placed: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def of_row(self, number: int) -> dict[str, Any]:
        """The fields of row `number` (runtime.step.batch.Row)."""
        fields: dict[str, Any] = {"writes": self.writes[number], "keeps": self.keeps}
        if self.keeps != NO_SLOT:
            fields["keeps"] += number
        if number == 0:
            fields |= {"reads": self.reads, "again": self.again, "begins": self.begins}
        return fields

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """For a GPU's kernels, made once for each GPU: the run, int32 [1, 3] (first row, number of
        rows, the slot that they begin with), and the rows' slots, int32 [T]."""
        if device not in self._placed:
            # The rows' slots begin at 16 bytes: kernels are compiled for that.
            numbers = [0, len(self.writes), self.reads, NO_SLOT, *self.writes]
            placed = torch.tensor(numbers, dtype=torch.int32).to(device)
            self._placed[device] = placed[:3].view(1, 3), placed[4:]
        return self._placed[device]


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """The slots of one layer, and its kept rows, none on a GPU."""

    tensors: tuple[Tensor, ...]  # f32 [S, ...]
    kept_RX: Tensor  # f32

    @classmethod
    def of(
        cls,
        num_sequences: int,
        block: Stateful,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor],
        *,
        keeps_rows: bool,
    ) -> "LayerState":
        """`zeros` allocates, on a GPU from reserved memory."""
        slots, rows = num_slots(num_sequences), num_kept(num_sequences) if keeps_rows else 0
        return cls(
            tensors=tuple(zeros((slots, *shape), torch.float32) for shape in block.state_shapes),
            kept_RX=zeros((rows, block.kept_size), torch.float32) if rows else torch.empty(0, 0),
        )

    def read(self, slots: Sequence[int]) -> tuple[Tensor, ...]:
        """Copies of the tensors of these slots."""
        return tuple(tensor[list(slots)] for tensor in self.tensors)

    def write(self, slots: Sequence[int], state: Sequence[Tensor]) -> None:
        """Stores what `read` returned."""
        for own, given in zip(self.tensors, state, strict=True):
            own[list(slots)] = given.to(own.device)

    def takes(self, count: int, state: Sequence[Tensor]) -> bool:
        """True if `write` accepts these tensors for `count` slots."""
        return len(state) == len(self.tensors) and all(
            given.shape == (count, *own.shape[1:]) and given.dtype == own.dtype
            for own, given in zip(self.tensors, state, strict=True)
        )


class StateSlots:
    """Assigns slots to the states of sequences and counts the users of each slot."""

    def __init__(self, num_sequences: int) -> None:
        self._states: list[tuple[State, ...]] = [(BEGINNING,)] * num_sequences  # by position
        self._num_users = [0] * num_slots(num_sequences)
        self._free = list(reversed(range(len(self._num_users))))
        self._held: dict[int, State] = {}  # by sequence, see `restoring`
        self._length_before: Mapping[int, int] = {}  # of the same sequences

    @property
    def num_free(self) -> int:
        return len(self._free)

    def states(self, sequence: int) -> tuple[State, ...]:
        """The states of a sequence by position, the current one last. A sequence whose beginning
        is not among them can still be rolled back to it."""
        return self._states[sequence]

    def lasting(self, sequence: int) -> tuple[State, ...]:
        """The stored states worth keeping for longer, the current one included."""
        *saved, current = _stored(self._states[sequence])
        states = (*(state for state in saved if not state.is_brief), current)
        return tuple(state for state in states if state.position)

    def nearest(self, sequence: int, length: int) -> int:
        """The latest position with a state among the first `length` tokens; 0 always has one."""
        return _until(self._states[sequence], length)[-1].position

    def rollback(self, sequence: int, length: int) -> int:
        """Makes the state nearest before `length` the current one; returns its position."""
        self._set(sequence, _until(self._states[sequence], length))
        return self._states[sequence][-1].position

    def share(self, source: int, target: int) -> None:
        """Gives `target` the stored states of `source`."""
        self._set(target, _stored(self._states[source]))

    def release(self, sequence: int) -> None:
        self._set(sequence, (BEGINNING,))

    def take(self, sequence: int, positions: Sequence[int]) -> list[int]:
        """Gives a sequence states at these ascending positions; returns their slots, whose content
        the caller writes."""
        self.release(sequence)
        self._make_room(len(positions))
        slots = [self._free[-1 - n] for n in range(len(positions))]
        states = [
            State(*at, is_brief=at[0] == positions[-1]) for at in zip(positions, slots, strict=True)
        ]
        self._set(sequence, tuple(states) or (BEGINNING,))
        return slots

    @contextmanager
    def passing(self, stretches: Sequence[Stretch]) -> Iterator[list[StateRun]]:
        """Yields the slots of a pass over these stretches; afterwards the states that it has stored
        are those of its sequences, unless the block raises.

        Raises HotsplitError if a sequence has no state where its stretch begins."""
        for stretch in stretches:
            self._begin(stretch)
        self._make_room(sum(map(self._num_new, stretches)))
        free = reversed(self._free)
        planned = [self._planned(stretch, free) for stretch in stretches]
        yield [run for run, _ in planned]
        for stretch, (_, states) in zip(stretches, planned, strict=True):
            self._hold_later(stretch.sequence, states)
            *saved, current = states
            held = self._held.get(stretch.sequence)
            while len(saved) > SAVED_STATES:
                saved.remove(min((s for s in saved if s != held), key=self._worth))
            self._set(stretch.sequence, (*saved, current))

    def _begin(self, stretch: Stretch) -> None:
        """Rolls the sequence back to where the stretch begins."""
        found = self.nearest(stretch.sequence, stretch.start)
        if found != stretch.start:
            raise HotsplitError(
                f"a text is to be continued after {stretch.start} tokens, but its state is known"
                f" after {found}; compute the tokens between them first"
            )
        self.rollback(stretch.sequence, found)

    def _stores_start(self, stretch: Stretch) -> bool:
        """Whether a pass stores the state that it begins with: if that is wanted and, because of
        repeated rows, in no slot. States at the stretch's end are worth more."""
        current = self._states[stretch.sequence][-1]
        is_wanted = stretch.start in stretch.saves or not current.is_brief
        return bool(current.again) and is_wanted and len(stretch.inner) < SAVED_STATES

    def _num_new(self, stretch: Stretch) -> int:
        """The number of states that a pass stores."""
        after = 0 if stretch.keeps_rows else 1 + len(stretch.inner)
        return after + self._stores_start(stretch)

    def _planned(self, stretch: Stretch, free: Iterator[int]) -> tuple[StateRun, tuple[State, ...]]:
        """(slots of its rows, the sequence's states after them)."""
        *saved, current = self._states[stretch.sequence]
        run = StateRun(current.slot, (), current.again)
        if self._stores_start(stretch):
            run = replace(run, begins=next(free))
            current = State(current.position, run.begins, current.is_brief)
        first = stretch.saves.get(stretch.start)
        is_saved = not current.is_brief or (first and not stretch.keeps_rows)
        if current.position and is_saved and not current.again:
            saved.append(replace(current, is_brief=current.is_brief and first == "briefly"))
        writes = [NO_SLOT] * (stretch.stop - stretch.start)
        if stretch.keeps_rows:
            begin = (2 * stretch.sequence + _half_beside(run.again)) * MOST_KEPT
            again = range(begin, begin + len(writes))
            saved.append(State(stretch.stop, current.slot, True, again))
            return replace(run, writes=tuple(writes), keeps=begin), tuple(saved)
        for position, how in (*stretch.inner.items(), (stretch.stop, "briefly")):
            writes[position - stretch.start - 1] = slot = next(free)
            saved.append(State(position, slot, how == "briefly"))
        return replace(run, writes=tuple(writes)), tuple(saved)

    @contextmanager
    def restoring(self, length_before: Mapping[int, int]) -> Iterator[None]:
        """If the block raises, each sequence has its latest state of so many first tokens as its
        current one again, although passes inside may have gone on. Other states are dropped before
        these; they go if their slots are needed even then."""
        self._length_before = length_before
        self._held = {sequence: self._states[sequence][-1] for sequence in length_before}
        self._use(list(self._held.values()), 1)
        try:
            yield
        except BaseException:
            for sequence, state in self._held.items():
                earlier = (s for s in self._states[sequence] if s.position < state.position)
                self._set(sequence, (*earlier, state))
            raise
        finally:
            self._use(list(self._held.values()), -1)
            self._held = {}

    def _hold_later(self, sequence: int, states: Sequence[State]) -> None:
        """Holds the latest of a sequence's states that a failing or rejected pass goes back to."""
        held = self._held.get(sequence)
        if held is None:
            return
        length = self._length_before[sequence]
        known = (state for state in states if state.position <= length)
        latest = max((*known, held), key=attrgetter("position"))
        self._use([latest], 1)
        self._use([held], -1)
        self._held[sequence] = latest

    def _make_room(self, count: int) -> None:
        """Drops saved states until so many slots are free, then held ones."""
        while len(self._free) < count:
            held = {NO_SLOT, *(state.slot for state in self._held.values())}
            saved = [
                (self._worth(state), number)
                for number, states in enumerate(self._states)
                for state in states[:-1]
                if state.slot not in held
            ]
            if not saved:  # three slots a sequence suffice without any
                self._use([self._held.popitem()[1]], -1)
                continue
            (_, _, position), number = min(saved)
            left = tuple(s for s in self._states[number] if s.position != position)
            self._set(number, left)

    def _worth(self, state: State) -> tuple[bool, bool, int]:
        """The order in which states are dropped."""
        return not state.is_brief, self._num_users[state.slot] > 1, state.position

    def _set(self, sequence: int, states: tuple[State, ...]) -> None:
        before, self._states[sequence] = self._states[sequence], states
        self._use(states, 1)
        self._use(before, -1)

    def _use(self, states: Sequence[State], more: int) -> None:
        for state in states:
            if state.slot == NO_SLOT:
                continue
            users = self._num_users[state.slot] = self._num_users[state.slot] + more
            if not users:
                self._free.append(state.slot)
            elif users == more:
                self._free.remove(state.slot)


def _half_beside(again: range) -> int:
    """Which half of a sequence's kept rows these are not in."""
    return 1 - again.start // MOST_KEPT % 2 if again else 0


def _until(states: tuple[State, ...], length: int) -> tuple[State, ...]:
    """The states of the first `length` tokens, at least that of the beginning."""
    found = [state for state in states if state.stored_at <= length] or [BEGINNING]
    if found[-1].again:
        last = found.pop()
        last = last.at(min(length, last.position))
        if last.again or not found or found[-1].position < last.position:
            found.append(last if last.position else BEGINNING)
    return tuple(found)


def _stored(states: tuple[State, ...]) -> tuple[State, ...]:
    """The states that are in slots."""
    return _until(states, states[-1].stored_at)
