"""Converts text to token ids and back, with the model file's tokenizer."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from types import MappingProxyType

import numpy as np
from tokenizers import Tokenizer

from hotsplit.artifacts.model_file import END_KEY, TOKENIZER_KEY, ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown
from hotsplit.options.kinds import check_kind, kinds_checked
from hotsplit.tokens.ggml_tokenizer import ggml_tokenizer
from hotsplit.tokens.tokenizer_kinds import CODE_TEXTS, END_TEXTS
from hotsplit.tokens.tokenizer_text import read_tokenizer, refused

log = logging.getLogger(__name__)
# With this many tokens held back, text is emitted even if they do not decode to whole characters; a
# character has at most 4 bytes.
_MAX_HELD = 8
REPLACEMENT = "\ufffd"  # decoded from bytes that are not valid UTF-8


@dataclass(frozen=True)
class TextCodec:
    tokenizer: Tokenizer
    begin_id: int | None
    end_ids: frozenset[int]

    @classmethod
    @kinds_checked
    def of(cls, model: ModelFile) -> "TextCodec":
        """The codec for the file's tokenizer.json or, in a third-party file, for its keys.

        Raises HotsplitError if the file has neither, or keys that are not supported."""
        content = model.text(TOKENIZER_KEY)
        tokenizer = (
            ggml_tokenizer(model.path, model.extra_keys)
            if content is None
            else read_tokenizer(f"{model.path}: {TOKENIZER_KEY}", content)
        )
        return cls(tokenizer, named_id(model, "bos"), end_ids(model, tokenizer))

    @cached_property
    def special_texts(self) -> dict[int, str]:
        """The texts of special tokens, which are left out of a decoded text, by id."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        return {token_id: token.content for token_id, token in added if token.special}

    @cached_property
    def literal(self) -> "TextCodec":
        """A codec that encodes special tokens in a text as ordinary text; added tokens that are not
        marked as special stay tokens. This is llama.cpp's parse_special=false."""
        tokenizer = Tokenizer.from_str(self.tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return replace(self, tokenizer=tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids, as from the checkpoint's own tokenizer. A text without any becomes the begin
        token, if the model has one.

        Raises HotsplitError for text that is not Unicode (bytes of another encoding)."""
        ids = self._ids(text, add_special_tokens=True)
        self.warn_of_two_begins(ids)
        return ids or ([] if self.begin_id is None else [self.begin_id])

    @kinds_checked
    def warn_of_two_begins(self, ids: Sequence[int]) -> None:
        """Warns, once, of `ids` of a text that begins with the token that the tokenizer has put
        before it; models are trained on one."""
        begin = self.begin_id
        if begin is not None and self.adds_begin and ids[1:2] == [begin]:
            _warn_of_two(self.tokenizer.id_to_token(begin))

    @cached_property
    def adds_begin(self) -> bool:
        """Whether the tokenizer puts the begin token before a text."""
        return self.tokenizer.encode("").ids[:1] == [self.begin_id]

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered chat template: parses special tokens in it and adds none.

        Raises HotsplitError for text that is not Unicode."""
        return self._ids(text, add_special_tokens=False)

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """Token ids of many texts, tokenised in parallel."""
        check_kind("texts", texts if isinstance(texts, list) else None, list[str])
        with refused("its tokenizer cannot encode a text"):
            return [list(encoding.ids) for encoding in self.tokenizer.encode_batch(texts)]

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise HotsplitError(f"{shown(text)} given as text, wanted a string")
        check_unicode(text)
        with refused("its tokenizer cannot encode the text"):
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    @kinds_checked
    def stream(
        self, after: Sequence[int] = (), marks: Mapping[int, str] = MappingProxyType({})
    ) -> "TextStream":
        """A decoder for the tokens that follow `after`. `marks`: special tokens that have a text
        there; the others have none."""
        check_kind("after", list(after), list[int])
        return TextStream(self.tokenizer, after, marks)


class TextStream:
    """Decodes ids one at a time; a character that spans several tokens is emitted with the last
    one. With `flush`, the texts add up to the decoded ids.

    A token's text depends on those before it (a SentencePiece decoder drops the space before the
    first one; bytes combine to characters), so it is the difference between decoding with and
    without it. (tokenizers' DecodeStream raises if bytes that are not UTF-8 follow others.)"""

    def __init__(
        self,
        tokenizer: Tokenizer,
        after: Sequence[int],
        marks: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._tokenizer, self._marks = tokenizer, marks
        self._ids = list(after)  # the last emitted text's ids, then those not emitted yet
        self._num_known = len(self._ids)
        self._known = tokenizer.decode(self._ids)

    def text(self, token_id: int) -> str:
        if token_id in self._marks:
            return self.flush() + self._marks[token_id]
        if not self._tokenizer.decode([token_id, token_id]):  # twice: the first may lose its space
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if len(text) > len(self._known) and not text.endswith(REPLACEMENT):
            return self._emitted(len(self._ids), text)
        if len(self._ids) - self._num_known < _MAX_HELD:
            return ""
        return self._emitted(*self._cut())

    def flush(self) -> str:
        """The text still held back, at the end: U+FFFD, or a character whose last bytes are
        missing, which decodes to U+FFFD too."""
        return self._emitted(len(self._ids), self._tokenizer.decode(self._ids))

    def _cut(self) -> tuple[int, str]:
        """(number of tokens to emit if too many are held back, their text). Leaves out the last
        tokens if they may be an incomplete character, which would decode to replacement
        characters."""
        ends = range(len(self._ids), len(self._ids) - 4, -1)
        texts = ((end, self._tokenizer.decode(self._ids[:end])) for end in ends)
        return min(texts, key=lambda end_text: len(end_text[1]))

    def _emitted(self, end: int, text: str) -> str:
        new = text[len(self._known) :]
        self._ids, self._num_known = self._ids[self._num_known :], end - self._num_known
        self._known = self._tokenizer.decode(self._ids[: self._num_known])
        return new


@cache
def _warn_of_two(begin: str) -> None:
    log.warning(
        f"note: the text begins with {begin}, which the tokenizer adds as well, so the model reads"
        " it twice; leave it out of the text"
    )


def check_unicode(text: str, what: str = "text") -> None:
    """Raises HotsplitError for a text with surrogates, which stand for bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise HotsplitError(f"the {what} is not UTF-8 at character {error.start}") from error


def overlap(text: str, mark: str) -> int:
    """Length of the longest proper prefix of `mark` that `text` ends with: how much of its end may
    belong to a mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


# ---- the tokens that end a text -----------------------------------------------------------------

END_KINDS = ("eos", "eot", "eom")  # end of a text, a turn, a message
# A text that ends nothing in a vocabulary that has all of the others: there it ends a part of a
# turn (Harmony, Solar), or is HTML (Gemma).
NOT_ENDS = (
    *(
        ("<|end|>", {*pair})
        for pair in product(("<|return|>", "<|flush|>"), ("<|call|>", "<|calls|>"))
    ),
    ("</s>", {"<|tool_response>"}),
)


def end_ids(model: ModelFile, tokenizer: Tokenizer) -> frozenset[int]:
    """All tokens that end a text or a turn of this model: those that its file names and, as in
    llama.cpp, every token with one of some known texts, whatever its type. Files often name only
    one of several, or that of the base model before it was trained to chat. Raises HotsplitError
    for a list in the file that has anything but ids of tokens."""
    named = {kind: named_id(model, kind) for kind in (*END_KINDS, *CODE_TEXTS)}
    unnamed = (texts for kind, texts in CODE_TEXTS.items() if named[kind] is None)
    known = {
        text: token_id
        for texts in (END_TEXTS, *unnamed)
        for text in texts
        if (token_id := tokenizer.token_to_id(text)) is not None
        and token_id < model.spec.vocab_size
    }
    no_ends = {known.get(text) for text, others in NOT_ENDS if others <= known.keys()}
    listed = model.extra_keys.get(END_KEY, [])
    numbers = listed if isinstance(listed, list) else [listed]
    return frozenset(
        {
            *(i for i in (*known.values(), *named.values()) if i is not None and i not in no_ends),
            *(checked_id(model, END_KEY, number) for number in numbers),
        }
    )


def named_id(model: ModelFile, kind: str) -> int | None:
    """The id under `tokenizer.ggml.KIND_token_id`. None without that key and, with a note, for a
    number that is no token: some files state one for a token that they do not use.

    Raises HotsplitError for anything but a number. (A token that is added to every text must
    exist; ggml_tokenizer checks that.)"""
    key = f"tokenizer.ggml.{kind}_token_id"
    value = model.extra_keys.get(key)
    if isinstance(value, int | np.integer) and not 0 <= int(value) < model.spec.vocab_size:
        _note_unused(f"{model.path}: {key} {value}", model.spec.vocab_size)
        return None
    return None if value is None else checked_id(model, key, value)


def checked_id(model: ModelFile, key: str, value: object) -> int:
    """`value`, found under `key`. Raises HotsplitError for anything but the id of a token."""
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_number or not 0 <= int(value) < model.spec.vocab_size:  # type: ignore[call-overload]
        raise HotsplitError(
            f"{model.path}: {key} is {str(value)[:40]!r}, wanted a token of the model, 0 to"
            f" {model.spec.vocab_size - 1}; download the file again, or convert its checkpoint"
        )
    return int(value)  # type: ignore[call-overload]


@cache
def _note_unused(what: str, vocab_size: int) -> None:
    """Once for each: a file is read several times."""
    log.info(f"note: {what} is not a token of the model, 0 to {vocab_size - 1}, and is ignored")
