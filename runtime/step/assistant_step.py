"""Steps of an assistant (model/assistant.py), which guesses tokens from the hidden states, keys and
values of its main model. Of a text it keeps only the hidden states of the main model's latest step.

What it computes decides which tokens are guessed, never which are drawn.

Letters: T tokens, M hidden size of the main model, V vocabulary."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hotsplit.costs.pass_length import PAST_STATES
from hotsplit.model.assistant import JOINED, PROJECTED
from hotsplit.runtime.model.layers import Weights
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step import native_step
from hotsplit.runtime.step.batch import Row, rows_of, runs_of
from hotsplit.runtime.step.draft_step import DraftState
from hotsplit.runtime.step.native_step import RowStruct, row_struct


class AssistantStep:
    """An assistant, on the CPU. It follows texts only while `is_on`, as a draft block does
    (DraftStep)."""

    def __init__(self, weights: Weights, main: Weights) -> None:
        self._main, self._cache = main, main.cache
        self._tables = {layer.attention.cache.table for layer in weights.layers}
        self._step = native_step.build(weights, Traffic(), (JOINED, PROJECTED))
        self.limit_ids = self._step.limit_ids
        self._row = (RowStruct * 1)(row_struct(*rows_of([0], 0)))
        self._joined_2M, self._projected_M = (
            self._step.shared[name][0] for name in (JOINED, PROJECTED)
        )
        self._size = main.spec.hidden_size
        # Of each sequence: the first position, and the hidden states before the output norm.
        self._states: list[tuple[int, np.ndarray]] = []
        self._none = 0, np.empty((0, self._size), np.float32)
        self._states += [self._none] * self._cache.num_sequences
        self.is_on = False

    def saw(self, rows: Sequence[Row], x_TD: np.ndarray) -> None:
        """Notes the last hidden states, before the output norm, of the main model's latest step:
        x_TD begins with those of computed rows."""
        if not self.is_on:
            return
        seen = 0
        for run in runs_of([row for row in rows if row.source is None]):
            seen += len(run)
            num = min(len(run), PAST_STATES)
            first = run[-1].position + 1 - num
            self._states[run[0].sequence] = first, x_TD[seen - num : seen].copy()

    def forget(self, sequence: int) -> None:
        self._states[sequence] = self._none

    def leave(self, sequence: int) -> None:
        """A text that it follows takes no time."""

    def share(self, source: int, target: int) -> None:
        """Makes what is known of a text known of its fork."""
        self._states[target] = self._states[source]

    def read_state(self, sequence: int, ids: Sequence[int]) -> DraftState | None:
        """None: a text that is continued later has a step first, which shows what is needed."""
        return None

    def write_state(self, sequence: int, ids: Sequence[int], state: DraftState) -> None:
        """A state is a draft block's: of no use here."""

    def first(self, sequence: int, length: int, token: int) -> Tensor | None:
        """The logits [V] of the guess after `token`, which follows the first `length` tokens of a
        text; None if the main model's latest step does not show the hidden state of the last."""
        start, x_TD = self._states[sequence]
        is_there = 0 <= length - 1 - start < len(x_TD) and all(
            table.reads(sequence, length - 1, length) for table in self._tables
        )
        norm = self._main.output_norm
        if not is_there or norm is None:
            return None
        hidden_M = norm.apply(torch.from_numpy(x_TD[length - 1 - start]))
        return self._run(sequence, length - 1, token, hidden_M)

    def num_waiting(self, sequence: int) -> int:
        """The number of a text's tokens that the first guess would compute."""
        return 1

    def next(self, sequence: int, token: int, num_guessed: int) -> Tensor:
        """The logits [V] after one guessed token more, the last of `num_guessed`."""
        return self._run(sequence, self._row[0].position, token, self._projected_M)

    def step_seconds(self, sequence: int) -> tuple[float, float]:
        """Seconds of the fastest of a few steps, in an empty text, and for each token that it
        reads: none."""
        found = []
        self._cache.reserve(sequence, 0, 1)
        for _ in range(4):
            began = time.perf_counter()
            self._run(sequence, 0, 0, torch.zeros(self._size))
            found.append(time.perf_counter() - began)
        return min(found), 0.0

    def _run(self, sequence: int, position: int, token: int, hidden_M: Tensor) -> Tensor:
        """`position`: of the last token with keys."""
        (embedded_M,) = self._main.embedding.rows(torch.tensor([token]))
        joined_2M, size, row = self._joined_2M, self._size, self._row[0]
        torch.mul(embedded_M, self._main.spec.embedding_scale, out=joined_2M[:size])
        joined_2M[size:] = hidden_M
        row.token, row.position, row.sequence = token, position, sequence
        return self._step.run_structs(self._row, 1)[0]
