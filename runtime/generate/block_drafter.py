"""Drafts by the model's own draft block (multi-token prediction), which guesses from the hidden
states of the model's steps: the most probable token at each place, up to but not including the
first whose probability is too low, as a draft model does (draft_model.py)."""

from collections.abc import Sequence

from torch import Tensor

from hotsplit.runtime.generate.speculation import Guess
from hotsplit.runtime.step.draft_step import DraftStep
from hotsplit.runtime.step.sequences import Sequence as TextSequence


class BlockDrafter:
    """A drafter for texts of the engine that has this block, one after another: `follow` says which
    is next."""

    name = "mtp"
    is_free = False

    def __init__(self, block: DraftStep, min_probability: float, token_s: float) -> None:
        """`token_s`: of a step of the block (DraftStep.step_seconds)."""
        self._block, self._min_probability, self.token_s = block, min_probability, token_s
        self._text: TextSequence | None = None
        self._logits_V: Tensor | None = None  # of the first guess
        self._length = 0  # of the text that they follow

    def follow(self, text: TextSequence) -> None:
        """Drafts for this text from now on."""
        self._text, self._length = text, 0

    def prepare(self, ids: Sequence[int]) -> None:
        """Computes keys and values of the new tokens, and the first guess. All but the last token
        must be in the text followed; propose() returns no tokens for another one, or for one whose
        beginning the block has not seen."""
        text = self._text
        if self._length == len(ids):
            return
        self._length, self._logits_V = len(ids), None
        if text is not None and text.is_open and text.ids[-1:] == list(ids[-2:-1]):
            self._logits_V = self._block.first(text.number, text.length, ids[-1])

    def propose(self, ids: Sequence[int], most: int) -> Guess:
        self.prepare(ids)
        text, logits_V, tokens = self._text, self._logits_V, list[int]()
        while logits_V is not None and text is not None:
            token = int(logits_V.argmax())
            if float(logits_V.softmax(0)[token]) < self._min_probability:  # false for NaN
                break
            tokens.append(token)
            if len(tokens) == most:
                break
            logits_V = self._block.next(text.number, token, len(tokens))
        return Guess(tokens)
