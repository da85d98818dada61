"""Steps of a draft block, which guesses tokens from the hidden states of the model's steps.

The block's keys and values at position p are made from the model's hidden state at p and the token
at p + 1, in the blocks of the model's own table (`BlockTable`). They are computed when they are
needed, for all tokens that have come since, in a pass whose last row is the first guess. Those of
further guesses are made from the block's own hidden states, and are written over by that pass.

What the block computes decides which tokens are guessed, never which are drawn.

Letters: T tokens, W of them without keys and values, D hidden size, V vocabulary, K key-value
heads, X width of a row as stored."""

import time
from collections.abc import Sequence
from ctypes import Array
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hotsplit.costs.pass_length import MOST_WAITING, PAST_STATES
from hotsplit.errors import HotsplitError
from hotsplit.runtime.cache.kv_cache import KVCache
from hotsplit.runtime.kernels.gpu.launch import ROWS
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.ops.norm import Norm
from hotsplit.runtime.step import native_step
from hotsplit.runtime.step.batch import Row, Wanted, rows_of, runs_of
from hotsplit.runtime.step.hybrid_step import HybridStep
from hotsplit.runtime.step.native_step import NativeStep, RowStruct, row_struct

_TIMED_ROWS = 16  # of a pass without logits


@dataclass
class _Text:
    """The block's side of a text: it has keys and values for the first `num_entries` positions, and
    the tokens of the `waiting` ones after those, whose hidden states before the output norm begin
    `hidden_TD`. `is_whole`: the model's steps have shown the text from its beginning;
    `is_left`: later ones are not looked at.

    The last key was made from the token `following` it. `past` are tokens and hidden states of the
    last positions with keys, which are made again if other tokens follow."""

    hidden_TD: np.ndarray
    num_entries: int = 0
    waiting: list[int] = field(default_factory=list)
    is_whole: bool = True
    is_left: bool = False
    following: int | None = None
    past: list[tuple[int, np.ndarray]] = field(default_factory=list)

    def rewind(self, length: int, token: int | None) -> None:
        """Drops keys after the first `length` tokens, and the last one of these if it was made from
        another token than this one, which follows them. Does nothing where too little is known."""
        back = self.num_entries - length + (self.num_entries > length or token != self.following)
        if back > 0 and length > 0 and back <= len(self.past):
            self.waiting, (state, *_) = [self.past[-back][0]], [self.past[-back][1]]
            self.hidden_TD[0] = state
            self.following = self.past[-back][0]
            self.num_entries -= back
            del self.past[-back:]


@dataclass(frozen=True)
class DraftState:
    """Keys and values of a text's first tokens, and the hidden states, before the output norm, of
    those after them: one at most."""

    key_TKX: Tensor
    value_TKX: Tensor
    hidden_WD: Tensor


class _HybridBlock:
    """The hybrid step of a block that has a part on a GPU, with the names of a native one."""

    limit_ids = None  # the head computes all logits

    def __init__(self, step: HybridStep, norm: Norm) -> None:
        """`norm`: the block's output norm."""
        bias_D = None if norm.bias_D is None else norm.bias_D.cpu()
        self._step, self._norm = step, replace(norm, weight_D=norm.weight_D.cpu(), bias_D=bias_D)
        self.max_rows, hidden_TD = step.max_rows, step.host.values["hidden"]
        self.shared = {"hidden": hidden_TD, "head_in": torch.zeros(1, hidden_TD.shape[1])}

    def run_rows(self, rows: Sequence[Row]) -> Tensor:
        """The logits of rows that want them; "head_in" then has the last row's hidden state."""
        logits_RV = self._step.run_rows(rows)
        assert self._step.hidden is not None
        num_rows = next(count for count in ROWS if count >= len(rows))
        x_TD = self._step.hidden("step", num_rows)
        self.shared["head_in"][0] = self._norm.apply(x_TD[len(rows) - 1])
        return logits_RV

    def run_structs(self, structs: Array[RowStruct], num_logits: int) -> Tensor:
        names = ("token", "position", "sequence")
        places = [{name: getattr(each, name) for name in names} for each in structs]
        return self.run_rows([Row(**place, has_logits=True) for place in places])


class DraftStep:
    """The draft block of a model, on the CPU or with a part on a GPU. It follows texts only while
    `is_on`."""

    def __init__(self, weights: Weights, most_rows: int, placed: HybridStep | None = None) -> None:
        """`weights`: the model's; `most_rows`: of a step or pass of the model; `placed`: the step
        of a block with a part on a GPU."""
        norm = weights.output_norm
        assert weights.draft is not None and norm is not None and norm.bias_D is None
        self._weight_D, self._epsilon = norm.weight_D.cpu().numpy(), norm.epsilon
        self._shape = MOST_WAITING + most_rows, weights.spec.hidden_size  # of waiting states
        self._cache: KVCache = weights.cache
        (self._layer,) = weights.draft.cache.layers
        self._step: NativeStep | _HybridBlock
        if placed is None:
            self._step = native_step.build(weights.draft, Traffic(), ("hidden", "head_in"))
        else:
            assert weights.draft.output_norm is not None
            self._step = _HybridBlock(placed, weights.draft.output_norm)
        self.limit_ids = self._step.limit_ids
        self._row = (RowStruct * 1)(row_struct(*rows_of([0], 0)))  # of further guesses
        self._hidden_TD, self._own_TD = (
            self._step.shared[name].numpy() for name in ("hidden", "head_in")
        )
        self._texts = [self._new_text() for _ in range(self._cache.num_sequences)]
        self.is_on = False

    def saw(self, rows: Sequence[Row], x_TD: np.ndarray) -> None:
        """Notes the tokens and hidden states, before the output norm, of the model's latest step:
        x_TD begins with those of computed rows."""
        if not self.is_on:
            return
        if len(rows) == 1 and rows[0].source is None:  # a step of a text that goes on
            text = self._texts[rows[0].sequence]
            if text.is_left:
                return
            num = len(text.waiting)
            if 0 < num < MOST_WAITING and rows[0].position == text.num_entries + num:
                text.waiting.append(rows[0].token)
                text.hidden_TD[num] = x_TD[0]
                return
        computed = [row for row in rows if row.source is None]
        seen = 0
        for run in runs_of(computed):
            text, start = self._texts[run[0].sequence], run[0].position
            if text.is_left:
                if start:
                    seen += len(run)
                    continue
                text = self._texts[run[0].sequence] = self._new_text()
            text.rewind(start, run[0].token)
            end = text.num_entries + len(text.waiting)
            if not text.num_entries <= start <= end:
                is_whole = start == 0 or (text.is_whole and start < end)
                text = self._texts[run[0].sequence] = self._new_text(start, is_whole=is_whole)
            num = start - text.num_entries
            text.waiting[num:] = [row.token for row in run]
            text.hidden_TD[num : num + len(run)] = x_TD[seen : seen + len(run)]
            seen += len(run)
            if len(text.waiting) > MOST_WAITING:
                self._catch_up(run[0].sequence, text.waiting[1:], "none")

    def _new_text(self, num_entries: int = 0, *, is_whole: bool = True) -> _Text:
        hidden_TD = np.empty(self._shape, np.float32)  # what is not written to takes no memory
        return _Text(hidden_TD, num_entries, is_whole=is_whole)

    def leave(self, sequence: int) -> None:
        """Looks no more at a text, unless it begins anew."""
        self._texts[sequence] = self._new_text(is_whole=False)
        self._texts[sequence].is_left = True

    def forget(self, sequence: int) -> None:
        self._texts[sequence] = self._new_text()

    def share(self, source: int, target: int) -> None:
        """Makes what is known of a text known of its fork."""
        own = self._texts[source]
        other = self._texts[target] = self._new_text(own.num_entries, is_whole=own.is_whole)
        other.waiting += own.waiting
        other.is_left = own.is_left
        other.following, other.past = own.following, [*own.past]
        other.hidden_TD[: len(own.waiting)] = own.hidden_TD[: len(own.waiting)]

    def read_state(self, sequence: int, ids: Sequence[int]) -> DraftState | None:
        """What is known of a text's tokens `ids`; None if not all of them were seen."""
        text, length = self._texts[sequence], len(ids)
        text.rewind(length, None)  # another token may follow
        del text.waiting[max(0, length - text.num_entries) :]
        if not text.is_whole or text.num_entries + len(text.waiting) < length:
            return None
        if len(text.waiting) > 1:
            self._catch_up(sequence, ids[text.num_entries + 1 :], "none")
        hidden_WD = torch.from_numpy(text.hidden_TD[: len(text.waiting)].copy())
        keys_values = self._layer.read(sequence, 0, min(text.num_entries, length))
        return DraftState(*keys_values, hidden_WD)

    def write_state(self, sequence: int, ids: Sequence[int], state: DraftState) -> None:
        """Fills an empty text, whose positions are reserved, with what `read_state` returned.
        Raises HotsplitError for a state of other shapes or types."""
        hidden_WD, count = state.hidden_WD, len(state.key_TKX)
        shape = (len(ids) - count, self._shape[1])
        is_known = hidden_WD.shape == shape and hidden_WD.dtype == torch.float32
        if (
            not is_known
            or shape[0] > 1
            or not self._layer.takes(count, state.key_TKX, state.value_TKX)
        ):
            raise HotsplitError("the draft block's state is not of this model's shape and type")
        self._layer.write(sequence, 0, state.key_TKX, state.value_TKX)
        text = self._texts[sequence] = self._new_text(count)
        text.waiting += ids[count:]
        text.hidden_TD[: shape[0]] = hidden_WD.numpy()

    def first(self, sequence: int, length: int, token: int) -> Tensor | None:
        """The logits [V] of the guess after `token`, which follows the first `length` tokens of a
        text, those of the model's steps that are left of it; None for a text whose beginning the
        block has not seen, and if they were asked for before."""
        text = self._texts[sequence]
        text.rewind(length, token)
        del text.waiting[max(0, length - text.num_entries) :]
        if not text.is_whole or not text.waiting:
            return None
        return self._catch_up(sequence, [*text.waiting[1:], token], "last")[0]

    def num_waiting(self, sequence: int) -> int:
        """The number of a text's tokens whose keys and values are not computed yet."""
        return len(self._texts[sequence].waiting)

    def next(self, sequence: int, token: int, num_guessed: int) -> Tensor:
        """The logits [V] after one guessed token more, the last of `num_guessed`."""
        start = self._texts[sequence].num_entries + num_guessed - 1
        self._cache.reserve(sequence, start, start + 1)
        self._hidden_TD[0] = self._own_TD[0]
        self._row[0].token, self._row[0].position, self._row[0].sequence = token, start, sequence
        return self._step.run_structs(self._row, 1)[0]

    def step_seconds(self, sequence: int) -> tuple[float, float]:
        """Seconds of the fastest of a few steps, in an empty text, and for each of several tokens
        of which only keys and values are computed."""
        rows = min(_TIMED_ROWS, self._step.max_rows)

        def fastest_s(num: int, wanted: Wanted) -> float:
            hidden_TD, found = np.zeros((num, self._shape[1]), np.float32), []
            for _ in range(4):
                began = time.perf_counter()
                self._run(sequence, 0, [0] * num, hidden_TD, wanted)
                found.append(time.perf_counter() - began)
            return min(found)

        return fastest_s(1, "last"), fastest_s(rows, "none") / rows

    def _catch_up(self, sequence: int, following: Sequence[int], wanted: Wanted) -> Tensor:
        """Computes keys and values of waiting tokens, from the tokens `following` each; returns the
        logits after the last one, if they are wanted."""
        text, most = self._texts[sequence], self._step.max_rows
        for first in range(0, len(following), most):
            tokens = following[first : first + most]
            hidden_TD = text.hidden_TD[: len(tokens)]
            kept = slice(max(0, len(tokens) - PAST_STATES), len(tokens))
            states = hidden_TD[kept].copy()
            text.past += zip(text.waiting[kept], states, strict=True)
            del text.past[:-PAST_STATES]
            text.following = tokens[-1]
            mean_T1 = np.square(hidden_TD).mean(axis=1, keepdims=True)
            hidden_TD = hidden_TD / np.sqrt(mean_T1 + self._epsilon) * self._weight_D
            logits_RV = self._run(sequence, text.num_entries, tokens, hidden_TD, wanted)
            left = text.hidden_TD[len(tokens) : len(text.waiting)]
            text.hidden_TD[: len(left)] = left
            del text.waiting[: len(tokens)]
            text.num_entries += len(tokens)
        return logits_RV

    def _run(
        self,
        sequence: int,
        start: int,
        tokens: Sequence[int],
        hidden_TD: np.ndarray,
        wanted: Wanted = "last",
    ) -> Tensor:
        self._cache.reserve(sequence, start, start + len(tokens))
        self._hidden_TD[: len(tokens)] = hidden_TD
        return self._step.run_rows(rows_of(tokens, start, wanted, sequence))
