"""Drafts by the model's own draft block (multi-token prediction) or an assistant, which guess from
the hidden states of the model's steps: the most probable token at each place."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from hotsplit.runtime.generate.frequent_ids import FrequentIds
from hotsplit.runtime.step.assistant_step import AssistantStep
from hotsplit.runtime.step.draft_step import DraftStep
from hotsplit.runtime.step.sequences import Sequence as TextSequence


class BlockDrafter:
    """A drafter for texts of the engine that has this block, one after another: `follow` says which
    is next."""

    fault = ""

    def __init__(
        self,
        block: DraftStep | AssistantStep,
        seconds: tuple[float, float],
        frequent: FrequentIds,
        name: str = "mtp",
    ) -> None:
        """`seconds`: of a guess, and of a token that is read (DraftStep.step_seconds)."""
        self.name = name
        self._block, self._frequent = block, frequent
        self.token_s, self.read_token_s = seconds
        self._text: TextSequence | None = None
        self._logits_V: Tensor | None = None  # of the first guess
        self._length = 0  # of the text that they follow

    def follow(self, text: TextSequence) -> None:
        """Drafts for this text from now on."""
        self._text, self._length = text, 0

    def leave(self) -> None:
        """Drafts no more for the text, which then takes no more time."""
        if self._text is not None:
            self._block.leave(self._text.number)
            self._text = None

    def unread(self, ids: Sequence[int]) -> int:
        return 1 if self._text is None else self._block.num_waiting(self._text.number)

    def prepare(self, ids: Sequence[int]) -> None:
        """Computes keys and values of the new tokens, and the first guess. All but the last token
        must be in the text followed; there are no guesses for another one, or for one whose
        beginning the block has not seen."""
        text = self._text
        if self._length == len(ids):
            return
        self._length, self._logits_V = len(ids), None
        if text is not None and text.is_open and text.ids[-1:] == list(ids[-2:-1]):
            self._frequent.use_for(ids)
            self._logits_V = self._block.first(text.number, text.length, ids[-1])
        is_unseen = self._logits_V is None
        self.fault = "it has not seen the beginning of the text" if is_unseen else ""

    def guesses(self, ids: Sequence[int]) -> Iterator[tuple[int, float]]:
        self.prepare(ids)
        text, logits_V, num = self._text, self._logits_V, 0
        while logits_V is not None and text is not None:
            array_V = logits_V.numpy()
            token = int(array_V.argmax())
            if not math.isfinite(array_V[token]):  # NaN counts as the largest
                self.fault = "its logits are NaN or infinite"
                return
            probability = 1 / float(np.exp(array_V - array_V[token]).sum())
            yield token, probability
            num += 1
            logits_V = self._block.next(text.number, token, num)
