"""What the draft controller (speculation.py) knows of drafters and of a step's other texts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hotsplit.runtime.step.sequences import Sequence as TextSequence


@dataclass(frozen=True)
class Guess:
    """Tokens that may follow. `trust`: the drafter's confidence in them, 0 to NUM_TRUSTS - 1."""

    tokens: Sequence[int]
    trust: int = 2


@dataclass(frozen=True)
class Beside:
    """What a step computes beside a text: the number of other texts, their rows, with the drafts
    that are known already, and the tokens expected from them."""

    texts: int = 0
    rows: int = 0
    tokens: float = 0.0

    @classmethod
    def of(cls, texts: int) -> "Beside":
        """So many texts without drafts."""
        return cls(texts, texts, float(texts))

    def with_draft(self, rows: int, tokens: float) -> "Beside":
        """`rows`, `tokens`: how many more come by the draft of one of them."""
        return Beside(self.texts, self.rows + rows, self.tokens + tokens)


ALONE = Beside()


@runtime_checkable
class Drafter(Protocol):
    """Drafts in negligible time, whatever their length."""

    name: str

    def prepare(self, ids: Sequence[int]) -> None:
        """Reads the text, which usually has grown since the last call."""

    def propose(self, ids: Sequence[int], most: int) -> Guess:
        """At most `most` tokens that may follow `ids`, the text last prepared."""


@runtime_checkable
class CostlyDrafter(Protocol):
    """Drafts in time that counts, and tells the probability of each guess."""

    name: str
    token_s: float  # an estimate of a guess's seconds
    read_token_s: float  # the same of a token that is read with others
    fault: str  # why it made no guess when it was last asked; "": it made one

    def unread(self, ids: Sequence[int]) -> int:
        """The number of tokens that prepare() would compute."""

    def prepare(self, ids: Sequence[int]) -> None:
        """Reads the text, which usually has grown since the last call."""

    def guesses(self, ids: Sequence[int]) -> Iterable[tuple[int, float]]:
        """Tokens that may follow `ids`, the text last prepared, and their probabilities given those
        before. Each is computed when it is asked for, and the first in prepare()."""


@runtime_checkable
class Follower(CostlyDrafter, Protocol):
    """A drafter that reads what the model computes of a text."""

    def follow(self, text: TextSequence) -> None:
        """Drafts for this text from now on."""

    def leave(self) -> None:
        """Drafts no more for the text, which then takes no more time."""
