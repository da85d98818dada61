"""Masks of answers that may think first: a constraint of the answer, such as a JSON schema, holds
behind the reasoning, and in the final channel of a format with channels."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from tokenizers import Tokenizer
from torch import Tensor

from hotsplit.runtime.answers.answer_reader import AnswerReader
from hotsplit.runtime.answers.channels import ANALYSIS, ASSISTANT, CHANNEL, FINAL
from hotsplit.runtime.answers.formats import AnswerFormat, Reasoning
from hotsplit.runtime.generate.constraints import Constraint
from hotsplit.runtime.text.codec import TextCodec

# Ids and names of the tokens in which a character is followed by others, by that character.
_with_more: WeakKeyDictionary[Tokenizer, dict[str, list[tuple[int, str]]]] = WeakKeyDictionary()


class AnswerMask:
    """Before the answer proper, an answer may be anything within reasoning, but may not end; it is
    the header of a message between two, if the format has channels; and it may begin with
    reasoning, if its mark is a token and the prompt has not dealt with it."""

    def __init__(
        self,
        mask: Constraint,
        known: AnswerFormat,
        codec: TextCodec,
        opened: Reasoning | None = None,
    ) -> None:
        self._mask, self._codec = mask, codec
        self._reader = AnswerReader(known, opened=opened)
        found = {codec.tokenizer.token_to_id(mark): mark for mark in known.marks}
        self._marks = {i: mark for i, mark in found.items() if i is not None}
        self._stream = codec.stream(marks=dict(known.tokens_of(codec)))
        self._num_tokens = codec.tokenizer.get_vocab_size()
        self._is_answer = False  # whether the answer proper has begun
        self._text = ""  # the last characters of the reasoning
        self._begins = frozenset[int]() if opened else _begin_ids(known, codec)
        self._headers: Sequence[Sequence[int]] = ()  # what may come between messages
        self._header: list[int] = []  # what has come of it
        if known.has_channels:
            channels = (ANALYSIS, FINAL)
            self._first = [codec.encode_rendered(channel) for channel in channels]
            self._later = [codec.encode_rendered(ASSISTANT + channel) for channel in channels]
            self._headers = self._later if opened else self._first

    def mask_V(self, vocab_size: int) -> Tensor:
        """bool [V]; raises as the constraint does."""
        if not self._is_answer and (inside := self._reader.inside) is not None:
            return self._free_V(vocab_size, inside)
        if not self._is_answer and self._headers:
            count = len(self._header)
            ids = [ids[count] for ids in self._headers if ids[:count] == self._header]
            return _of_ids(ids, vocab_size)
        allowed_V = self._mask.mask_V(vocab_size)
        if not self._is_answer:
            allowed_V |= _of_ids(self._begins, vocab_size)
        return allowed_V

    def accept(self, token_id: int) -> None:
        was_inside = self._reader.inside is not None
        is_before = was_inside or token_id in self._begins or bool(self._headers)
        if self._is_answer or not is_before:
            self._mask.accept(token_id)
            self._is_answer = True
            return
        text = self._stream.text(token_id)
        self._text = (self._text + text)[-_LONGEST:]
        self._reader.push(text)
        self._begins = frozenset()
        if self._reader.inside is not None:
            self._headers = self._headers and self._later
        self._header = [] if was_inside or self._reader.inside else [*self._header, token_id]
        self._is_answer = bool(self._headers) and self._reader.is_answering

    def is_ready(self, within_s: float) -> bool:
        is_before = not self._is_answer and bool(self._headers or self._reader.inside)
        return is_before or self._mask.is_ready(within_s)

    def _free_V(self, vocab_size: int, inside: Reasoning) -> Tensor:
        """Everything but the end of the answer, marks that do not end this reasoning, and tokens
        that would end it and go on: the constraint would not see the rest."""
        end_ids = {i for i, text in self._marks.items() if text == inside.end}
        refused = {*self._codec.end_ids, *self._marks, *self._beyond(inside.end)} - end_ids
        allowed_V = torch.zeros(vocab_size, dtype=torch.bool)
        allowed_V[: self._num_tokens] = True
        return allowed_V & ~_of_ids(refused, vocab_size)

    def _beyond(self, end: str) -> list[int]:
        tokenizer = self._codec.tokenizer
        tokens = _with_more.setdefault(tokenizer, {})
        if end[-1] not in tokens:
            vocab = tokenizer.get_vocab()
            tokens[end[-1]] = [(i, name) for name, i in vocab.items() if end[-1] in name[:-1]]
        tail = self._text[-len(end) + 1 :]
        return [
            token_id
            for token_id, name in tokens[end[-1]]
            if end in tail + name and not (tail + name).endswith(end)
        ]


_LONGEST = 64  # characters of a mark
Mask = Constraint | AnswerMask  # of one text


def answer_mask(
    mask: Constraint,
    known: AnswerFormat,
    codec: TextCodec,
    prompt: str,
    *,
    continued: str = "",
    is_of_calls: bool = False,
) -> Mask:
    """The constraint of an answer to a rendered prompt, where the answer may think first. It is the
    constraint itself where it is one of the whole answer: where its grammar writes the marks, where
    the answer continues a message behind its reasoning, or of calls in a format with channels."""
    opened = known.opens_reasoning(prompt, continued)
    marks = {CHANNEL} if known.has_channels else {m.end for m in known.reasoning}
    is_whole = any(mark in mask.grammar for mark in marks) or (is_of_calls and known.has_channels)
    has_thought = bool(continued.strip()) or any(prompt.rstrip().endswith(m) for m in marks)
    can_think = known.has_channels or bool(_begin_ids(known, codec))
    if is_whole or (opened is None and (has_thought or not can_think)):
        return mask
    return AnswerMask(mask, known, codec, opened)


def _begin_ids(known: AnswerFormat, codec: TextCodec) -> frozenset[int]:
    """Tokens with which an answer may begin reasoning."""
    if known.has_channels:
        return frozenset()
    found = (codec.tokenizer.token_to_id(marks.begin) for marks in known.reasoning)
    return frozenset(token_id for token_id in found if token_id is not None)


def _of_ids(ids: Sequence[int] | set[int] | frozenset[int], vocab_size: int) -> Tensor:
    found_V = torch.zeros(vocab_size, dtype=torch.bool)
    found_V[[token_id for token_id in ids if token_id < vocab_size]] = True
    return found_V
