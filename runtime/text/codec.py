"""Text to token ids and back, with the tokenizer that the model file carries.

What this module does not know: the model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from sparkinfer.errors import SparkinferError
from sparkinfer.model_file import END_KEY, TOKENIZER_KEY, ModelFile
from sparkinfer.runtime.text.ggml_tokenizer import ggml_tokenizer

REPLACEMENT = "\ufffd"  # what bytes decode to that are no whole character


@dataclass(frozen=True)
class TextCodec:
    tokenizer: Tokenizer
    begin_id: int | None
    end_ids: frozenset[int]

    @classmethod
    def of(cls, model: ModelFile) -> "TextCodec":
        """The file's tokenizer.json, or in a file that others made, what its keys tell.

        Raises SparkinferError where the file has neither, or keys that are not understood."""
        content = model.text(TOKENIZER_KEY)
        ends = {_token_id(model, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")}
        more = model.extra_keys.get(END_KEY)
        ends |= {int(i) for i in more} if isinstance(more, list) else set()
        return cls(
            ggml_tokenizer(model.path, model.extra_keys)
            if content is None
            else Tokenizer.from_str(content),
            _token_id(model, "tokenizer.ggml.bos_token_id"),
            frozenset(end for end in ends if end is not None),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids as the checkpoint's own tokenizer gives them; for no text, the begin token.

        Raises SparkinferError for what is not Unicode (bytes of another encoding)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise SparkinferError(f"the text is not UTF-8 at character {error.start}") from error
        ids = list(self.tokenizer.encode(text).ids)
        return ids or ([] if self.begin_id is None else [self.begin_id])

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """Token ids of many texts, tokenised in parallel."""
        return [list(encoding.ids) for encoding in self.tokenizer.encode_batch(texts)]

    def stream(self, after: Sequence[int] = ()) -> "TextStream":
        """For the tokens that follow `after`."""
        return TextStream(self.tokenizer, after)


class TextStream:
    """Turns ids into text one at a time; a character that spans tokens comes with its last one.

    A token's text depends on those before it (a SentencePiece decoder drops the space before the
    first one; bytes become characters together), so it is what decoding with it adds to decoding
    without it. (tokenizers' DecodeStream raises where bytes that are no UTF-8 follow others.)"""

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(after)  # those of the last text given out, then what is not given out yet
        self._num_known = len(self._ids)

    def text(self, token_id: int) -> str:
        self._ids.append(token_id)
        known = self._tokenizer.decode(self._ids[: self._num_known])
        text = self._tokenizer.decode(self._ids)
        if len(text) <= len(known) or text.endswith(REPLACEMENT):
            return ""
        self._ids = self._ids[self._num_known :]
        self._num_known = len(self._ids)
        return text[len(known) :]


def _token_id(model: ModelFile, key: str) -> int | None:
    value = model.extra_keys.get(key)
    return int(value) if isinstance(value, int | np.integer) else None
