"""Drafts by a second, smaller model with the same tokens.

It keeps a sequence of its own in sync with the text: the common prefix stays, the rest is rolled
back, and missing tokens are computed. A guess is the model's most probable token.

Models of one family may pad their logits to different sizes: Qwen2.5-0.5B has 151,936 for the same
tokens for which the 7B has 152,064. Ids that only one of them has are neither drafted nor read."""

import math
import time
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer
from torch import Tensor

from hotsplit.files.typed import shown
from hotsplit.runtime.generate.frequent_ids import FrequentIds
from hotsplit.runtime.generate.generation import num_common
from hotsplit.runtime.step.sequences import Sequence as TextSequence

_PRIOR_READ = 0.2  # the time of one more token of a pass, in guesses


class DraftModel:
    """A drafter that uses a second model. `sequence` belongs to that model's engine; the caller
    closes it."""

    name = "draft"
    fault = ""

    def __init__(self, sequence: TextSequence, frequent: FrequentIds | None = None) -> None:
        """Runs a few steps to measure the seconds per token. `frequent`: among the ids that both
        models have; None: all of the draft model's."""
        self._sequence, self._frequent = sequence, frequent
        self._num_ids = None if frequent is None else frequent.num_ids
        self._limit_for(())
        self.token_s = _step_s(sequence)
        self.read_token_s = _PRIOR_READ * self.token_s
        self._logits_V: Tensor | None = None  # after the last of the sequence's tokens

    def unread(self, ids: Sequence[int]) -> int:
        return len(ids) - self._num_kept(ids)

    def prepare(self, ids: Sequence[int]) -> None:
        """Brings the sequence up to date with the text. If the text does not fit into the draft
        model's context, or has an id that the draft model lacks, there are no guesses."""
        sequence = self._sequence
        if self._logits_V is not None and sequence.ids == ids:
            return
        self._limit_for(ids)
        common = self._num_kept(ids)
        sequence.rollback(common)
        sequence.mark(len(ids))  # a draft is usually wrong somewhere, and dropped from there
        missing = ids[common:]
        fits = len(missing) <= sequence.room and (
            self._num_ids is None or max(missing) < self._num_ids
        )
        self.fault = "" if fits else "the text is too long for it, or has a token that it lacks"
        self._logits_V = sequence.extend(missing)[0] if fits else None

    def guesses(self, ids: Sequence[int]) -> Iterator[tuple[int, float]]:
        self.prepare(ids)
        sequence, logits_V = self._sequence, self._logits_V
        while logits_V is not None:
            own_V = logits_V[: self._num_ids]
            token = int(own_V.argmax())
            probability = float(own_V.softmax(0)[token])
            if math.isnan(probability):
                self.fault = "its logits are NaN"
                return
            yield token, probability
            if not sequence.room:
                return
            logits_V = self._logits_V = sequence.extend([token])[0]

    def _num_kept(self, ids: Sequence[int]) -> int:
        """The number of the text's first tokens that need not be computed again."""
        sequence = self._sequence
        return sequence.reusable(min(num_common(sequence.ids, ids), len(ids) - 1))

    def _limit_for(self, ids: Sequence[int]) -> None:
        if self._frequent is not None:
            self._frequent.use_for(ids)


def _step_s(sequence: TextSequence) -> float:
    """Seconds of the fastest of a few steps. Leaves the sequence empty."""
    sequence.rollback(0)
    found = []
    for _ in range(min(4, sequence.room)):
        began = time.perf_counter()
        sequence.extend([0])
        found.append(time.perf_counter() - began)
    sequence.rollback(0)
    return min(found)


def vocabulary_fault(target: Tokenizer, target_size: int, draft: Tokenizer, draft_size: int) -> str:
    """Why a draft model cannot guess a model's tokens; "" if it has the same tokens under the same
    ids, and both models have logits for all of them.

    The sizes are those of the models' logits, which may differ by padding."""
    of_target, of_draft = target.get_vocab(), draft.get_vocab()
    if of_target != of_draft:
        token, number = min(of_target.items() ^ of_draft.items(), key=lambda item: item[1])
        return (
            f"the draft model's tokens differ from the model's, first at token id {number}"
            f" ({shown(token)}); take one with the same vocabulary, usually a smaller one of the"
            " same family"
        )
    last = max(of_target.values(), default=0)
    if target_size != draft_size and last >= min(target_size, draft_size):
        return (
            f"the draft model has {draft_size} logits, the model {target_size}, wanted one for each"
            f" token id up to {last} in both; take another draft model of the same family"
        )
    return ""
