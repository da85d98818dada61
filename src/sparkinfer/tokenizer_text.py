"""A tokenizer.json, as a text, to the tokenizer that it describes.

The `tokenizers` library reads it; what would there end in a traceback, a panic or a loop without
end is refused here. What this module does not know: where the text was found, or what is done with
the tokenizer."""

from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Tokenizer

from sparkinfer.errors import SparkinferError
from sparkinfer.typed import one_line

# Published models have up to 262,144; the library counts through all numbers up to the largest.
MAX_TOKENS = 1 << 22
TRIAL = "A text of 12 letters\n"


def read_tokenizer(source: str, text: str) -> Tokenizer:
    """Raises SparkinferError, naming `source`, for a text that the library cannot read or use."""
    with refused(f"{source}: the tokenizers library cannot read it"):
        tokenizer = Tokenizer.from_str(text)
        tokenizer.decode(tokenizer.encode(TRIAL).ids)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= MAX_TOKENS:
        raise SparkinferError(
            f"{source}: a token has the number {largest}, wanted less than {MAX_TOKENS}; get"
            " tokenizer.json again"
        )
    return tokenizer


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Turns what tokenizers raises, Exception itself and no type of it, or a panic, into
    SparkinferError."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise SparkinferError(
            f"{what} ({one_line(error)}); get the model's tokenizer.json again"
        ) from error
