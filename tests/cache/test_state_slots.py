"""The slots of recurrent states, with states that are hashes of the tokens so far: whatever forks,
rollbacks, failing and forgotten passes do, every slot in use holds the state of exactly its
tokens."""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch

from hotsplit.costs.state_bytes import SAVED_STATES, num_kept, num_slots
from hotsplit.errors import HotsplitError
from hotsplit.model.delta_net import DeltaNet
from hotsplit.runtime.cache import state_slots
from hotsplit.runtime.cache.state_slots import NO_SLOT, LayerState, StateSlots, Stretch
from hotsplit.runtime.step.batch import Row, rows_of, with_slots


class Cancelled(Exception):
    pass


def fold(ids: list[int], state: int = 0) -> int:
    for token in ids:
        state = hash((state, token))
    return state


@dataclass
class Folded:
    """Texts of sequences, and what the slots hold."""

    num_sequences: int
    slots: StateSlots = field(init=False)
    content: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)  # tokens of kept rows
    texts: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = StateSlots(self.num_sequences)

    def compute(self, rows: list[Row]) -> None:
        """What an executor does: reads slots, then writes others."""
        runs: dict[int, list[Row]] = {}
        for row in rows:
            runs.setdefault(row.sequence, []).append(row)
        read = {run[0].reads for run in runs.values()}
        written = [row.writes for row in rows if row.writes != NO_SLOT]
        written += [run[0].begins for run in runs.values() if run[0].begins != NO_SLOT]
        assert len(set(written)) == len(written) and not read & set(written), (read, written)
        keeps = [row.keeps for row in rows if row.keeps != NO_SLOT]
        again = {number for run in runs.values() for number in run[0].again}
        assert len(set(keeps)) == len(keeps) and not again & set(keeps), (again, keeps)
        new, kept = {}, {}
        for run in runs.values():
            state = 0 if run[0].reads == NO_SLOT else self.content[run[0].reads]
            state = fold([self.kept[number] for number in run[0].again], state)
            if run[0].begins != NO_SLOT:
                new[run[0].begins] = state
            for row in run:
                state = fold([row.token], state)
                if row.writes != NO_SLOT:
                    new[row.writes] = state
                if row.keeps != NO_SLOT:
                    kept[row.keeps] = row.token
        self.content |= new
        self.kept |= kept

    def run(self, tokens: dict[int, list[int]], chance: random.Random, *, fails: bool) -> None:
        """Appends tokens to sequences in up to three passes, after those that a rollback left
        uncomputed. Where checks keep no rows, passes also divide the rows of a sequence."""
        rows, checked = [], dict[int, int]()  # where the rows of checked sequences begin
        keeps_rows = chance.random() < 0.5
        for number, more in tokens.items():
            text = self.texts[number]
            start = self.slots.rollback(number, len(text))
            is_check = chance.random() < 0.5
            if is_check and not keeps_rows:
                checked[number] = start
            wanted = "all" if is_check else "last"
            for row in rows_of([*text[start:], *more], start, wanted, number):
                how = chance.choice((None, None, None, "briefly", "lasting"))
                if is_check:
                    how = "briefly" if row.position == len(text) else None
                rows.append(replace(row, saves=how))
        before = {number: self.slots.states(number)[-1].position for number in tokens}
        lengths = {number: len(self.texts[number]) for number in tokens}
        cuts = list(range(len(rows)))
        if keeps_rows:
            cuts = [at for at in cuts if rows[at].sequence != rows[at - 1].sequence]
        cuts = sorted(chance.sample(cuts, min(len(cuts), chance.randrange(3))))
        with suppress(Cancelled), self.slots.restoring(lengths):
            for begin, end in pairwise([0, *cuts, len(rows)]):
                with with_slots(self.slots, rows[begin:end], keeps_rows=keeps_rows) as planned:
                    self.compute(list(planned))
                    if fails and end == len(rows):
                        raise Cancelled
            for number, more in tokens.items():
                self.texts[number] += more
        for number, length in lengths.items():
            if fails:
                assert before[number] <= self.slots.states(number)[-1].position <= length
            elif number in checked:
                assert self.slots.nearest(number, length) >= checked[number]

    def check(self) -> None:
        """Counts of users and contents of slots are right."""
        users: Counter[int] = Counter()
        for number in range(self.num_sequences):
            states = self.slots.states(number)
            assert 1 <= len(states) <= 1 + SAVED_STATES
            assert [s.position for s in states] == sorted({s.position for s in states})
            for state in states:
                ids = self.texts.get(number, [])[: state.position]
                assert (state.slot == NO_SLOT) == (state.stored_at == 0)
                assert not state.again or state is states[-1]
                if state.position:
                    content = 0 if state.slot == NO_SLOT else self.content[state.slot]
                    found = fold([self.kept[row] for row in state.again], content)
                    assert len(ids) == state.position and found == fold(ids)
                if state.slot != NO_SLOT:
                    users[state.slot] += 1
        assert [users[n] for n in range(len(self.slots._num_users))] == self.slots._num_users
        assert sorted([*users, *self.slots._free]) == list(range(num_slots(self.num_sequences)))


def change(texts: Folded, chance: random.Random) -> None:
    """Opens, forks, closes a text, rolls one back, or tries something that is forgotten."""
    slots, free = texts.slots, [n for n in range(texts.num_sequences) if n not in texts.texts]
    deed = chance.random()
    number = chance.choice(list(texts.texts)) if texts.texts else None
    if free and (number is None or deed < 0.2):
        texts.texts[free[0]] = []
    elif number is None:
        return
    elif free and deed < 0.45:
        texts.texts[free[0]] = list(texts.texts[number])
        slots.share(number, free[0])
    elif deed < 0.6:
        del texts.texts[number]
        slots.release(number)
    elif deed < 0.8:
        length = chance.randint(0, len(texts.texts[number]))
        assert slots.nearest(number, length) == slots.rollback(number, length) <= length
        del texts.texts[number][length:]


def schedule(seed: object, steps: int) -> None:
    chance = random.Random(str(seed))
    texts = Folded(chance.randint(1, 5))
    for _ in range(steps):
        change(texts, chance)
        texts.check()
        numbers = chance.sample(list(texts.texts), chance.randint(0, len(texts.texts)))
        if numbers:
            more = {
                n: [chance.randrange(9) for _ in range(chance.choice((1, 1, 2, 5)))]
                for n in numbers
            }
            texts.run(more, chance, fails=chance.random() < 0.2)
        texts.check()


def test_random_schedules():
    for seed in range(40):
        schedule(seed, 40)


@pytest.mark.parametrize(
    "place, name, wrong",
    [
        # A check keeps its rows where those of the check before are.
        (state_slots, "_half_beside", lambda again: 0),
        # The state at the first row of a check is dropped for the check's own further passes.
        (StateSlots, "_hold_later", lambda *given: None),
    ],
)
def test_the_check_finds_a_fault(monkeypatch, place, name, wrong):
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(AssertionError):
        for seed in range(40):
            schedule(seed, 40)


def test_a_rollback_within_a_check_needs_no_other_state():
    slots = StateSlots(1)
    with with_slots(slots, rows_of([7] * 10, 0)):
        pass
    length = 10
    for accepted in (1, 5, 3, 2, 4):
        check = rows_that_save([7] * 5, length, **{f"at_{length}": "briefly"})
        check = [replace(row, has_logits=True) for row in check]
        with with_slots(slots, check, keeps_rows=True) as rows:
            assert all(row.writes == NO_SLOT for row in rows)
        length += accepted
        assert slots.rollback(0, length) == length
        assert slots.num_free >= 2
    slots.share(0, 0)
    assert slots.nearest(0, length) == length - 4


def test_the_check_finds_a_state_of_other_tokens():
    texts = Folded(2, texts={0: []})
    texts.run({0: [1, 2]}, random.Random(0), fails=False)
    texts.check()
    texts.texts[0][1] = 3
    with pytest.raises(AssertionError):
        texts.check()


def rows_that_save(tokens: list[int], start: int, **saves: str) -> list[Row]:
    return [
        Row(token=row.token, position=row.position, saves=saves.get(f"at_{row.position}"))
        for row in rows_of(tokens, start)
    ]


def test_of_too_many_states_brief_ones_go_first_then_the_oldest():
    slots = StateSlots(1)

    def positions() -> list[int]:
        return [state.position for state in slots.states(0)]

    def run(count: int, **saves: str) -> None:
        with with_slots(slots, rows_that_save([7] * count, positions()[-1], **saves)):
            pass

    run(10, at_4="lasting")
    assert positions() == [4, 10]
    run(3, at_10="briefly")
    assert positions() == [4, 10, 13]
    run(3, at_13="briefly")
    assert positions() == [4, 13, 16]
    run(10, at_20="lasting")
    assert positions() == [4, 20, 26]
    run(10, at_30="lasting")
    assert positions() == [20, 30, 36]
    assert slots.num_free == 1
    slots.rollback(0, 29)
    assert positions() == [20] and slots.num_free == 3
    slots.release(0)
    assert slots.num_free == 4


def test_a_lasting_state_stays_so_after_a_rollback():
    """Whatever begins at it: a prompt's pass, which saves its beginning briefly, or a step."""
    for count in (5, 1):
        slots = StateSlots(1)
        with with_slots(slots, rows_that_save([7] * 10, 0, at_4="lasting")):
            pass
        slots.rollback(0, 4)
        for start in (4, 4 + count, 4 + 2 * count):
            with with_slots(
                slots, rows_that_save([7] * count, start, **{f"at_{start}": "briefly"})
            ):
                pass
        assert [state.position for state in slots.lasting(0)] == [4, 4 + 3 * count]


def test_what_several_texts_have_is_dropped_last():
    """A text drops others first if it has too many, and so does a text that needs room."""
    slots = StateSlots(3)
    with with_slots(slots, rows_that_save([7] * 10, 0, at_4="lasting")):
        pass
    slots.share(0, 1)
    slots.rollback(1, 4)
    for start, mark in ((10, 15), (20, 25)):
        with with_slots(slots, rows_that_save([7] * 10, start, **{f"at_{mark}": "lasting"})):
            pass
    assert [state.position for state in slots.lasting(0)] == [4, 25, 30]
    with with_slots(slots, rows_that_save([7] * 10, 30, at_35="lasting")):
        pass
    assert [state.position for state in slots.lasting(0)] == [4, 35, 40]
    with slots.passing([Stretch(sequence=1, start=4, stop=9)]):
        slots._make_room(slots.num_free + 1)
    assert [state.position for state in slots.lasting(0)] == [4, 40]


def test_rows_that_do_not_begin_at_a_state_are_refused():
    slots = StateSlots(1)
    with with_slots(slots, rows_of([1, 2, 3], 0)):
        pass
    wrong = pytest.raises(HotsplitError, match="continued after 2 tokens, but its state is known")
    with wrong, with_slots(slots, rows_of([3], 2)):
        pass
    wrong = pytest.raises(AssertionError, match="cannot be a copy")
    with wrong, with_slots(slots, [Row(token=1, position=3, source=0)]):
        pass


def test_a_wish_for_more_states_than_slots_keeps_the_last():
    stretch = Stretch(sequence=0, start=0, stop=9, saves=dict.fromkeys(range(9), "lasting"))
    slots = StateSlots(1)
    with slots.passing([stretch]) as (run,):
        written = {p + 1 for p, slot in enumerate(run.writes) if slot != NO_SLOT}
    assert run.reads == NO_SLOT and written == {7, 8, 9}


def test_tensors_of_slots_are_read_and_written():
    net = DeltaNet(num_key_heads=1, num_value_heads=2, key_head_dim=3, value_head_dim=4, epsilon=0)
    state = LayerState.of(2, net, lambda size, kind: torch.zeros(size, dtype=kind), keeps_rows=True)
    shapes = [tuple(tensor.shape) for tensor in state.tensors]
    assert shapes == [(num_slots(2), 2, 3, 4), (num_slots(2), 3, 14)]
    assert state.kept_RX.shape == (num_kept(2), 14 + 2 * 2)
    new = torch.randn(2, 2, 3, 4), torch.randn(2, 3, 14)
    assert state.takes(2, new) and not state.takes(1, new)
    assert not state.takes(2, (new[0].double(), new[1])) and not state.takes(2, new[::-1])
    state.write([5, 1], new)
    read = state.read([5, 1])
    assert all(torch.equal(a, b) for a, b in zip(read, new, strict=True))
