"""The tokens that end a text or a turn: those that a model file names and, as in llama.cpp, every
token with one of some known texts, whatever its type. Files often name only one of several, or that
of the base model before it was trained to chat."""

import logging
from functools import cache
from itertools import product

import numpy as np
from tokenizers import Tokenizer

from hotsplit.artifacts.model_file import END_KEY, ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.tokens.end_texts import CODE_TEXTS, END_TEXTS

log = logging.getLogger(__name__)
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
    """All tokens that end a text of this model. Raises HotsplitError for a list in the file that
    has anything but ids of tokens."""
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
