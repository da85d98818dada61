"""JSON files that others made: read, or refused in one line."""

import json
from pathlib import Path

from sparkinfer.errors import SparkinferError
from sparkinfer.files import require_file


def read_text(path: Path, what: str) -> str:
    """The text of a UTF-8 file, line ends as they are. `what` names it in a refusal."""
    require_file(path, what)
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SparkinferError(
            f"{path}: cannot be read as text ({error}); wanted a {what}; download it again"
        ) from error


def read_object(path: Path, what: str) -> dict[str, object]:
    """Raises SparkinferError unless the file holds one JSON object."""
    try:
        value = json.loads(read_text(path, what))
    except json.JSONDecodeError as error:
        raise SparkinferError(
            f"{path}: not JSON ({error}); wanted a {what}; download it again"
        ) from error
    if not isinstance(value, dict):
        raise SparkinferError(
            f"{path}: holds a {type(value).__name__}, wanted a {what} (an object)"
        )
    return value
