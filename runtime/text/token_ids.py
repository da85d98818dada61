"""The ids of special tokens that a model file names."""

import logging
from functools import cache

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError

log = logging.getLogger(__name__)


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
