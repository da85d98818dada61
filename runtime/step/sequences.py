"""Sequences: texts whose keys and values an engine keeps.

    with engine.sequence() as text:
        logits_1V = text.extend(ids)          # logits after the last token
        branch = text.fork()                  # shares the tokens so far
        text.rollback(10)                     # forgets all but the first ten tokens

Letters: R rows with logits, V vocabulary, T tokens, K key-value heads, X width of a row as
stored."""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from numbers import Integral
from operator import lt
from typing import Self

import numpy as np
import torch
from torch import Tensor

from hotsplit.costs.state_bytes import SAVED_STATES
from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown
from hotsplit.options.kinds import check_fields, check_kind, kinds_checked
from hotsplit.runtime.cache.kv_cache import KVCache
from hotsplit.runtime.cache.state_slots import LayerState, StateSlots
from hotsplit.runtime.kernels.gpu.launch import ROWS
from hotsplit.runtime.step.batch import WANTED_NAMES, Row, Wanted, is_decoded, rows_of
from hotsplit.runtime.step.decoder import Decoder
from hotsplit.runtime.step.draft_step import DraftState

_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tokens to append to a sequence and to compute."""

    sequence: "Sequence"
    tokens: Several[int]
    wanted: Wanted = "last"


@dataclass(frozen=True, kw_only=True)
class TextState:
    """What an engine keeps of a text: the keys and values [T, K, X] of each layer that has them, as
    stored, from rings the last ones, and of each layer with recurrent states their tensors [P, ...]
    after the first `positions` tokens; `draft`: what its draft block keeps, if that has seen it."""

    keys_values: list[tuple[Tensor, Tensor]]
    positions: list[int] = field(default_factory=list)
    recurrent: list[tuple[Tensor, ...]] = field(default_factory=list)
    draft: DraftState | None = None


class Sequences:
    """The sequences of an engine. `decoder` is None once the engine is closed."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder: Decoder | None = decoder
        self.context_length = decoder.weights.cache.context_length
        self._open: dict[int, Sequence] = {}  # by number, oldest first

    @property
    def live(self) -> Decoder:
        if self.decoder is None:
            raise HotsplitError("the engine is closed")
        return self.decoder

    @property
    def cache(self) -> KVCache:
        return self.live.weights.cache

    @property
    def states(self) -> StateSlots | None:
        """The slots of recurrent states, if the model has any."""
        return self.live.weights.states

    @property
    def layer_states(self) -> tuple[LayerState, ...]:
        """The states of each layer that has any."""
        return self.live.weights.layer_states

    def open(self, *, yields: bool = False, beside: "Sequence | None" = None) -> "Sequence":
        """Opens an empty sequence. If no place is free, closes the oldest sequence that `yields`,
        other than `beside`.

        Raises HotsplitError if all places are in use."""
        num_places = self.cache.num_sequences
        free = next((n for n in range(num_places) if n not in self._open), None)
        if free is None:
            yielding = [s for s in self._open.values() if s.yields and s is not beside]
            if not yielding:
                raise HotsplitError(
                    f"all {num_places} sequences of this engine are in use; close one, or load the"
                    " engine with more (num_sequences)"
                )
            free = yielding[0].number
            yielding[0].close()
        sequence = Sequence(self, free, yields=yields)
        self._open[free] = sequence
        return sequence

    def release(self, number: int) -> None:
        del self._open[number]
        if self.decoder is not None:
            self.cache.release(number)
            if self.states is not None:
                self.states.release(number)
            if self.decoder.draft is not None:
                self.decoder.draft.forget(number)

    @property
    def has_room(self) -> bool:
        """True if a sequence can be opened without closing another."""
        return len(self._open) < self.cache.num_sequences

    @property
    def keeps_all(self) -> bool:
        """True if a text can be continued from any of its positions."""
        return self.states is None and not self.cache.has_rings

    def nearest(self, number: int, length: int) -> int:
        """The latest position among the first `length` from which a sequence can be continued."""
        if self.keeps_all:
            return length
        found = self.cache.nearest(number, length)
        if self.states is not None:
            found = self.states.nearest(number, found)
        return found if found == length else self.nearest(number, found)

    def rollback(self, number: int, length: int) -> int:
        """Drops all of a sequence but its first `length` tokens; returns the position from which it
        can be continued."""
        found = self.nearest(number, length)
        self.cache.rollback(number, length, found)
        if self.states is not None:
            self.states.rollback(number, found)
        return found

    def run(self, parts: Iterable[Part]) -> list[Tensor]:
        """Computes tokens of several sequences, in shared steps where the decoder has them; returns
        each part's logits, f32 [R, V].

        Raises HotsplitError, without changing anything, if a sequence has no room for its tokens,
        is in two parts, or belongs to another engine."""
        parts = list(parts)
        self._check(parts)
        rows = [row for part in parts for row in self._rows(part)]
        decoder = self.live
        size = decoder.most_tokens  # a pass may shorten later ones
        starts = {part.sequence.number: part.sequence.length for part in parts}
        with nullcontext() if self.states is None else self.states.restoring(starts):
            pieces = [decoder.run(rows[at : at + size]) for at in range(0, len(rows), size)]
        if not pieces:
            return []
        logits_RV = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        is_new = [row.position >= starts[row.sequence] for row in rows if row.has_logits]
        for part in parts:
            part.sequence._add(part.tokens)
        if not all(is_new):
            logits_RV = logits_RV[torch.tensor(is_new)]
        if len(parts) == 1:
            return [logits_RV]
        return list(logits_RV.split([_num_logits(part) for part in parts]))

    def check_recurrent(self, count: int, state: TextState) -> None:
        """Raises HotsplitError unless the recurrent states of a text of `count` tokens are of this
        model's layers and shapes, and no more than a sequence can have."""
        layers, positions = self.layer_states, state.positions
        are_known = len(state.recurrent) == len(layers) and all(
            layer.takes(len(positions), given)
            for layer, given in zip(layers, state.recurrent, strict=True)
        )
        are_ascending = all(map(lt, [0, *positions], [*positions, count + 1]))
        most = 1 + SAVED_STATES if layers else 0
        if not are_known or not are_ascending or len(positions) > most:
            raise HotsplitError("recurrent states are not of this model's shape, type and number")

    def _check(self, parts: Several[Part]) -> None:
        for part in parts:
            check_kind("a part", part, Part)
            check_kind("sequence", part.sequence, Sequence)
            if part.sequence.owner is not self:
                raise HotsplitError("a sequence of another engine cannot be run by this one")
            self.check_tokens(part.tokens)
            if part.wanted not in WANTED_NAMES:
                raise HotsplitError(f"wanted={part.wanted!r}; known: {WANTED_NAMES}")
            if not len(part.tokens):
                raise HotsplitError("no tokens to compute; give one or more")
            part.sequence.check_room(len(part.tokens))
        if len({part.sequence.number for part in parts}) < len(parts):
            raise HotsplitError("a sequence is in two parts of one step; join them into one part")

    def check_tokens(self, tokens: Several[int]) -> None:
        """Raises HotsplitError for anything but a list of the model's token ids."""
        if not _are_tokens(tokens):
            raise not_tokens(tokens)
        vocab_size = self.live.vocab_size
        if len(tokens) and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            raise HotsplitError(f"token ids must be in 0..{vocab_size - 1}")

    def _rows(self, part: Part) -> list[Row]:
        """The rows of a part. Rows before them repeat the tokens after the position from which the
        sequence can be continued, if that is not its end; on a GPU those are decode steps again, if
        necessary of their own, because only those are bit-identical."""
        sequence, start = part.sequence, part.sequence.length
        number = sequence.number
        rows = rows_of(part.tokens, start, part.wanted, number)
        if self.keeps_all:
            return rows
        first = self.rollback(number, start)
        if len(rows) > 1 and self.states is not None:
            rows[0] = replace(rows[0], saves="briefly")
        again = self._again(sequence, first)
        if again and self.live.has_hybrid_steps and not is_decoded([*again, *rows]):
            self._repeat(sequence, first)
            again = []
        return sequence._marked([*again, *rows])

    def _again(self, sequence: "Sequence", first: int) -> list[Row]:
        """Rows that repeat the tokens of a sequence from `first` on."""
        wanted: Wanted = "all" if self.live.has_hybrid_steps else "none"
        return rows_of(sequence.ids[first:], first, wanted, sequence.number)

    def _repeat(self, sequence: "Sequence", first: int) -> None:
        rows = sequence._marked(self._again(sequence, first))
        size = ROWS[-1] if self.live.has_hybrid_steps else self.live.most_tokens
        for at in range(0, len(rows), size):
            self.live.run(rows[at : at + size])

    def complete(self, sequence: "Sequence") -> None:
        """Computes the tokens again whose keys and values a rollback has left out of rings."""
        if self.cache.nearest(sequence.number, sequence.length) < sequence.length:
            self._repeat(sequence, self.rollback(sequence.number, sequence.length))


def _are_tokens(tokens: object) -> bool:
    """True for a list, tuple or array of integers; false for text and floats."""
    if isinstance(tokens, Tensor | np.ndarray):
        return tokens.ndim == 1 and str(tokens.dtype).removeprefix("torch.") in _INTEGERS
    if not isinstance(tokens, Several) or isinstance(tokens, str | bytes):
        return False
    return all(isinstance(token, Integral) and not isinstance(token, bool) for token in tokens)


def not_tokens(found: object) -> HotsplitError:
    """The error for a value that is not a list of token ids."""
    return HotsplitError(
        f"{shown(found)} given as token ids; wanted a list of integers, as"
        " engine.codec.encode(text) returns"
    )


def _num_logits(part: Part) -> int:
    return {"none": 0, "last": min(1, len(part.tokens)), "all": len(part.tokens)}[part.wanted]


class Sequence:
    """One sequence, opened by `Engine.sequence` or `fork`; `close` or the end of a `with` block
    closes it."""

    def __init__(self, owner: Sequences, number: int, *, yields: bool) -> None:
        self._owner: Sequences | None = owner
        self.number, self.yields = number, yields
        self.ids: list[int] = []  # the tokens whose keys and values are kept
        self._marks = set[int]()  # coming positions whose states are worth keeping

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def room(self) -> int:
        """Number of tokens that still fit into the context."""
        return self._live.context_length - self.length

    @kinds_checked
    def reusable(self, length: int) -> int:
        """How many of the first `length` tokens need not be computed again after a rollback to
        there: all of them, unless the model has recurrent states, or layers that keep a window
        only."""
        return self._live.nearest(self.number, self._some_of(length, "reusable up"))

    @kinds_checked
    def mark(self, position: int) -> None:
        """Asks for what a text is continued with after its first `position` tokens to be kept, once
        they are computed: recurrent states and windows. Without those, every position is kept."""
        if not self._live.keeps_all and position > 0:
            self._marks.add(position)

    def _marked(self, rows: list[Row]) -> list[Row]:
        """The rows, of which those at marked positions save the state before them."""
        start = rows[0].position
        for position in self._marks.intersection(range(start, start + len(rows))):
            rows[position - start] = replace(rows[position - start], saves="lasting")
        return rows

    def _add(self, tokens: Several[int]) -> None:
        """Notes that tokens have been computed."""
        self.ids.extend(tokens)
        self._marks = {position for position in self._marks if position >= self.length}

    def extend(self, tokens: Several[int], wanted: Wanted = "last") -> Tensor:
        """Appends and computes tokens; returns the logits f32 [R, V] after the last token, after
        each token, or none.

        Raises HotsplitError if they do not fit into the context."""
        return self._live.run([Part(sequence=self, tokens=tokens, wanted=wanted)])[0]

    def rollback(self, length: int) -> None:
        """Forgets all but the first `length` tokens. Raises HotsplitError if there are fewer.

        Those after `reusable(length)` are computed again in the next pass."""
        self._live.rollback(self.number, self._some_of(length, "rollback"))
        del self.ids[length:]

    def _some_of(self, length: int, what: str) -> int:
        """The length, a number of tokens of this text; raises HotsplitError for anything else."""
        is_count = isinstance(length, Integral) and not isinstance(length, bool)
        if not is_count or not 0 <= length <= self.length:
            raise HotsplitError(
                f"{what} to {shown(length)} of {self.length} tokens; wanted a number of tokens to"
                " keep, 0 for none"
            )
        return length

    def fork(self) -> "Sequence":
        """Opens a sequence with the same tokens; keys and values are shared copy-on-write, and
        states as they are."""
        other = self._live.open(yields=self.yields, beside=self)
        self._live.cache.share(self.number, other.number, self.length)
        if self._live.states is not None:
            self._live.states.share(self.number, other.number)
        if (draft := self._live.live.draft) is not None:
            draft.share(self.number, other.number)
        other.ids = list(self.ids)
        return other

    def read_state(self) -> TextState:
        """Copies of what the engine keeps of this text."""
        live = self._live
        live.complete(self)
        found = [] if live.states is None else live.states.lasting(self.number)
        slots, block = [state.slot for state in found], live.live.draft
        return TextState(
            keys_values=[
                layer.read(self.number, layer.table.held_from(self.number), self.length)
                for layer in live.cache.layers
            ],
            positions=[state.position for state in found],
            recurrent=[layer.read(slots) for layer in live.layer_states],
            draft=None if block is None else block.read_state(self.number, self.ids),
        )

    def write_state(self, ids: Several[int], state: TextState) -> None:
        """Fills this empty sequence with the tokens `ids` and what `read_state` returned for them.

        Raises HotsplitError if the state does not have this model's shapes and types, or the
        tokens do not fit into the context."""
        check_kind("state", state, TextState)
        check_fields(state)
        self._live.check_tokens(ids)
        if self.length:
            raise HotsplitError(
                f"the sequence has {self.length} tokens; a state is written to an empty one: roll"
                " it back to 0, or open another"
            )
        live = self._live
        self.check_room(len(ids))
        live.check_recurrent(len(ids), state)
        live.cache.restore(self.number, len(ids), state.keys_values)
        if live.states is not None:
            slots = live.states.take(self.number, state.positions)
            for own, given in zip(live.layer_states, state.recurrent, strict=True):
                own.write(slots, given)
        if (block := live.live.draft) is not None and state.draft is not None:
            block.write_state(self.number, ids, state.draft)
        self.ids = list(ids)

    @kinds_checked
    def check_room(self, count: int) -> None:
        if count > self.room:
            raise HotsplitError(
                f"{count} more tokens after {self.length} exceed the context of"
                f" {self._live.context_length}; shorten the text or load with a longer context"
            )

    @property
    def owner(self) -> Sequences:
        """The engine's sequences. Raises HotsplitError if this one is closed."""
        return self._live

    @property
    def is_open(self) -> bool:
        return self._owner is not None

    def close(self) -> None:
        """Frees the sequence's place. A second call does nothing."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.release(self.number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _live(self) -> Sequences:
        if self._owner is None:
            raise HotsplitError(
                "the sequence is closed, or the engine has been used for something else since"
            )
        return self._owner
