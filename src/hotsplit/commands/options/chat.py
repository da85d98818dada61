"""Values of the options that `chat` shares with `run` and `generate`."""

import json
from pathlib import Path

import click

from hotsplit.errors import HotsplitError
from hotsplit.files.json_file import read_text


def system_message(text: str | None, path: Path | None) -> str | None:
    """The system message of --system or --system-file."""
    if text is not None and path is not None:
        raise click.UsageError("--system and --system-file exclude each other; give one.")
    return text if path is None else read_text(path, "system message").rstrip("\n")


def template_variables(text: str) -> dict[str, object]:
    """The object of --chat-template-kwargs. Raises HotsplitError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HotsplitError(f"--chat-template-kwargs: not JSON ({str(error)[:100]})") from error
    if not isinstance(value, dict):
        raise HotsplitError('--chat-template-kwargs: wanted an object, e.g. {"name": true}')
    return value
