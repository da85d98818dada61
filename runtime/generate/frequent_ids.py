"""The ids that a drafter takes its guesses from.

The product with the head is a third of a small model's work, and most of a draft block's.
Vocabularies list frequent tokens first, so a guess is taken from the first ids alone
(frequency-ranked drafts: Zhao et al. 2025, FR-Spec), unless the text shows that its own tokens are
others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotsplit.options.generation_options import FIRST_IDS

_RECENT, _LEAST_SHARE = 256, 0.75  # the share of a text's last tokens that must be among these


@dataclass(frozen=True)
class FrequentIds:
    """`num_ids`: those that guesses may have. limit(n): from then on the drafter computes the
    logits of the first n ids alone, or of all with None; None: it can't."""

    num_ids: int
    limit: Callable[[int | None], None] | None

    def use_for(self, ids: Sequence[int]) -> None:
        """Limits the drafter, or not, by the end of this text."""
        if self.limit is None or self.num_ids < 2 * FIRST_IDS:
            return
        recent = ids[-_RECENT:]
        is_limited = sum(token < FIRST_IDS for token in recent) >= _LEAST_SHARE * len(recent)
        self.limit(FIRST_IDS if is_limited else None)
