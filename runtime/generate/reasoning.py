"""Separates an answer's reasoning, from <think> at its beginning to </think>, from the rest."""

from typing import Literal
from weakref import WeakKeyDictionary

import torch
from tokenizers import Tokenizer
from torch import Tensor

from hotsplit.runtime.generate.constraints import Constraint
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.runtime.text.overlap import overlap

Place = Literal["before", "inside", "after"]
BEGIN, END = "<think>", "</think>"
# Ids and names of the tokens in which END's last character is followed by others.
_beyond: WeakKeyDictionary[Tokenizer, list[tuple[int, str]]] = WeakKeyDictionary()


def opens_reasoning(prompt: str, continued: str = "") -> bool:
    """True if the answer starts inside the reasoning: the chat template has opened it or, where the
    answer continues a message, that message has, without closing it.

    Tags elsewhere, such as in a question, open nothing."""
    if continued.strip():
        return continued.lstrip().startswith(BEGIN) and END not in continued
    return prompt.rstrip().endswith(BEGIN)


def close_reasoning(answer: str, *, is_open: bool) -> str:
    """Appends the closing tag, which templates look for, to an answer that stopped while
    reasoning."""
    has_begun = is_open or answer.lstrip().startswith(BEGIN)
    return f"{answer}\n{END}\n\n" if has_begun and END not in answer else answer


class ReasoningSplitter:
    """Takes an answer in pieces and returns it as (text, whether it is reasoning). Both tags count
    as reasoning; later tags are ordinary text."""

    def __init__(self, *, is_open: bool) -> None:
        self._place: Place = "inside" if is_open else "before"
        self._held = ""

    @property
    def is_over(self) -> bool:
        """True once what follows is the answer."""
        return self._place == "after"

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Adds a piece; returns the text whose kind is certain and holds back the rest."""
        self._held += text
        if self._place == "before":
            begun = self._held.lstrip()
            if len(begun) < len(BEGIN) and BEGIN.startswith(begun):
                return []
            self._place = "inside" if begun.startswith(BEGIN) else "after"
        parts = [(self._reasoning(), True)] if self._place == "inside" else []
        if self._place == "after":
            parts.append((self._take(len(self._held)), False))
        return [part for part in parts if part[0]]

    def flush(self) -> list[tuple[str, bool]]:
        """Returns the held-back text, at the end of the answer."""
        text = self._take(len(self._held))
        return [(text, self._place == "inside")] if text else []

    def _reasoning(self) -> str:
        """Takes the text that is certainly reasoning: all but a possible start of the closing
        tag."""
        at = self._held.find(END)
        if at >= 0:
            self._place = "after"
            return self._take(at + len(END))
        return self._take(len(self._held) - overlap(self._held, END))

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


class AfterReasoning:
    """A mask for an answer that starts inside its reasoning: it applies from the closing tag on.
    Before, the answer may be anything, but may not end."""

    @classmethod
    def of(cls, mask: Constraint, codec: TextCodec) -> "Mask":
        """The mask itself if it is of a grammar that writes the closing tag."""
        return mask if END in mask.grammar else cls(mask, codec)

    def __init__(self, mask: Constraint, codec: TextCodec) -> None:
        self._mask, self._codec = mask, codec
        self._stream, self._end_id = codec.stream(), codec.tokenizer.token_to_id(END)
        self._num_tokens = codec.tokenizer.get_vocab_size()
        self._text = ""  # the last characters of the reasoning
        self._is_inside = True

    def mask_V(self, vocab_size: int) -> Tensor:
        """bool [V]; raises as the mask does."""
        if not self._is_inside:
            return self._mask.mask_V(vocab_size)
        allowed_V = torch.zeros(vocab_size, dtype=torch.bool)
        allowed_V[: self._num_tokens] = True
        refused = [*self._codec.end_ids, *self._beyond_the_tag()]
        allowed_V[[token_id for token_id in refused if token_id < vocab_size]] = False
        return allowed_V

    def accept(self, token_id: int) -> None:
        if not self._is_inside:
            self._mask.accept(token_id)
            return
        self._text = self._text[-len(END) :] + self._stream.text(token_id)
        self._is_inside = token_id != self._end_id and END not in self._text

    def is_ready(self, within_s: float) -> bool:
        return self._is_inside or self._mask.is_ready(within_s)

    def _beyond_the_tag(self) -> list[int]:
        """The tokens that would close the reasoning and go on: the mask would not see the rest."""
        tokenizer = self._codec.tokenizer
        if tokenizer not in _beyond:
            vocab = tokenizer.get_vocab()
            _beyond[tokenizer] = [(i, name) for name, i in vocab.items() if END[-1] in name[:-1]]
        tail = self._text[-len(END) + 1 :]
        return [
            token_id
            for token_id, name in _beyond[tokenizer]
            if END in tail + name and not (tail + name).endswith(END)
        ]


Mask = Constraint | AfterReasoning  # of one text
