"""Reads text and JSON files from outside, or refuses them with a one-line error."""

import json
import re
from pathlib import Path

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import known_as, require_file
from hotsplit.files.typed import json_kind

# The largest tokenizer.json in use (Gemma 3) has 35 MiB and 2.5 million values. MAX_VALUES limits
# the memory: an empty object takes three bytes of text, but 72 bytes of memory.
MAX_BYTES = 64 << 20
MAX_VALUES = 6_000_000
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_text(path: Path, what: str) -> str:
    """The text of a UTF-8 file or pipe, line endings unchanged; errors call it `what`."""
    if not path.is_fifo():
        require_file(path, what)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise HotsplitError(f"{path}: has over {MAX_BYTES} bytes; wanted a {what}")
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        found = None if path.is_fifo() else known_as(path)
        if found and raw[:1] != b"{":
            raise HotsplitError(f"{path}: is {found}; wanted a {what}") from error
        raise HotsplitError(
            f"{path}: cannot be read as text (byte {error.start} is not UTF-8); wanted a {what};"
            " make or download it again"
        ) from error
    except OSError as error:
        raise HotsplitError(
            f"{path}: cannot be read ({error.strerror}); wanted a {what}"
        ) from error


def read_object(path: Path, what: str) -> dict[str, object]:
    """The JSON object in a file. Raises HotsplitError for other content."""
    return parse_object(path, read_text(path, what), what)


def parse_object(path: Path, text: str, what: str) -> dict[str, object]:
    """Does what `read_object` does, for a text from `path`, which errors quote."""
    if sum(text.count(sign) for sign in ",[{") > MAX_VALUES:
        raise HotsplitError(f"{path}: has over {MAX_VALUES} values; wanted a {what}")
    try:
        value = json.loads(text)
        if SURROGATE.search(text):  # an unpaired surrogate is not a character and cannot be encoded
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # JSON's error, too many digits, surrogates
        raise HotsplitError(
            f"{path}: not JSON, or not whole ({str(error)[:200]}); wanted a {what}; make or"
            " download it again"
        ) from error
    if not isinstance(value, dict):
        raise HotsplitError(f"{path}: holds {json_kind(value)}, wanted a {what} (an object)")
    return value
