"""Builds a tokenizer from the text of a tokenizer.json.

The `tokenizers` library reads it; text with which it would raise, panic or loop endlessly is
refused here."""

from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Tokenizer

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import one_line, shown

# Published models have up to 262,144; the library loops over all ids up to the largest.
MAX_TOKENS = 1 << 22
TRIAL = "A text of 12 letters\n"


def read_tokenizer(source: str, text: str) -> Tokenizer:
    """The tokenizer. Raises HotsplitError, quoting `source`, for a text that cannot be used."""
    with refused(f"{source}: the tokenizers library cannot read it"):
        tokenizer = Tokenizer.from_str(text)
        tokenizer.decode(tokenizer.encode(TRIAL).ids)
    ids = tokenizer.get_vocab()
    if len(set(ids.values())) < len(ids):  # decoding could not tell them apart
        named = {number: token for token, number in ids.items()}
        token, number = next(each for each in ids.items() if named[each[1]] != each[0])
        raise HotsplitError(
            f"{source}: the tokens {shown(token)} and {shown(named[number])} both have the id"
            f" {number}; get tokenizer.json again"
        )
    largest = max(ids.values(), default=0)
    if largest >= MAX_TOKENS:
        raise HotsplitError(
            f"{source}: a token has the id {largest}, wanted less than {MAX_TOKENS}; get"
            " tokenizer.json again"
        )
    return tokenizer


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Turns tokenizers' exceptions (plain Exception) and panics into HotsplitError."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise HotsplitError(
            f"{what} ({one_line(error)}); get the model's tokenizer.json again"
        ) from error
