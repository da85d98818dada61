"""The prompts of `generate` and `run`, from the command line, files and stdin, and what chat
templates get besides messages.

As in llama.cpp, the newline with which editors and `echo` end a file is not part of its text."""

import fcntl
import json
import os
import select
import stat
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hotsplit.commands.options.command_options import joined, option_table, say
from hotsplit.errors import HotsplitError
from hotsplit.files.json_file import read_text
from hotsplit.runtime.text.built_in_templates import BUILT_IN

STDIN = "-"
template_options = option_table(
    f"""
--chat-template | template: text NAME|FILE | Instead of the model's own: {", ".join(BUILT_IN)}, a
    template that the model names, or a Jinja file.
--chat-template-kwargs | variables: text* JSON | Variables for the template, e.g.
    {{"enable_thinking": false}}; may be repeated.
"""
)
# Of a conversation, or of one answer. `template_variables` and `system_message` take their values.
chat_options = joined(
    option_table(
        """
-sys --system --system-prompt | system: text | The system message.
-sysf --system-file --system-prompt-file | system_file: file | The same, from a file.
"""
    ),
    template_options,
    option_table(
        "--context-shift | shifts: flag | When the context is full, drop the oldest part and"
        " continue."
    ),
)
MAX_BYTES = 64 << 20
PIPE_S = 0.3  # in which a program that writes to a pipe has begun
MOST_PROMPTS = 256  # continued together


def prompts_of(prompt: str | None, file: Path | None, many: Path | None) -> list[str]:
    given = [
        name
        for name, value in (("-p", prompt), ("-f", file), ("--prompts", many))
        if value is not None
    ]
    if len(given) != 1:
        what = f"{' and '.join(given)} exclude each other" if given else "there is no prompt"
        raise click.UsageError(
            f"{what}: give one of -p TEXT, -f FILE (- for stdin), --prompts FILE."
        )
    if many is not None:
        text = read_text(many, "file of prompts")
        numbered = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        lines = [line for _, line in numbered]
        if many.suffix == ".jsonl":
            lines = [_prompt_of(line, f"{many}, line {n}") for n, line in numbered]
        if not lines:
            raise HotsplitError(f"{many}: has no prompts; write one per line")
        if len(lines) > MOST_PROMPTS:
            raise HotsplitError(
                f"{many}: has {len(lines)} prompts, wanted at most {MOST_PROMPTS}; split the file"
            )
        prompts = lines
    elif prompt == STDIN or str(file) == STDIN:
        prompts = [_without_end(_stdin())]
    elif file is not None:
        prompts = [_without_end(read_text(file, "prompt"))]
    else:
        assert prompt is not None
        prompts = [_with_stdin(prompt)]
    if not all(prompts):
        raise HotsplitError("the prompt is empty; give it some text")
    return prompts


def note_unread(file: Path | None) -> None:
    """Says that a text on stdin is not read, if there is one beside a file with a prompt."""
    if str(file) != STDIN and _is_waiting(0.0):
        say("note: stdin has a text, which is not read; -f - reads it instead")


def _with_stdin(prompt: str) -> str:
    """The prompt and, an empty line behind it, the text on stdin, if there is one."""
    if not _is_waiting(PIPE_S) or not (text := _without_end(_stdin())):
        return prompt
    say("note: the text on stdin is appended to the prompt")
    return f"{prompt}\n\n{text}"


def _is_waiting(seconds: float) -> bool:
    """True if stdin is a file or a pipe with bytes that nobody has read yet. `seconds`: how long a
    pipe may take to get some; that of a program which never writes stays open."""
    try:
        number = sys.stdin.fileno()
        about = os.fstat(number)
        if stat.S_ISREG(about.st_mode):
            return about.st_size > os.lseek(number, 0, os.SEEK_CUR)
        if not stat.S_ISFIFO(about.st_mode):
            return False
        if not select.select([number], [], [], seconds)[0]:
            if seconds:
                say("note: stdin is an open pipe without a text so far, and is not read")
            return False
        count = fcntl.ioctl(number, termios.FIONREAD, bytes(4))
    except (AttributeError, OSError, ValueError):  # closed, or no file
        return False
    return int.from_bytes(count, sys.byteorder) > 0


def _without_end(text: str) -> str:
    """The text of a file or of stdin without one newline at its end."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _stdin() -> str:
    if sys.stdin is None:
        raise HotsplitError("stdin is closed; give the prompt with -p or -f FILE")
    content = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise HotsplitError(f"stdin: more than {MAX_BYTES >> 20} MiB; give a shorter prompt")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HotsplitError(f"stdin: not UTF-8 at byte {error.start}") from error


def _prompt_of(line: str, where: str) -> str:
    value = _json_of(line, where)
    value = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(value, str):
        raise HotsplitError(f'{where}: wanted a string, or an object with a "prompt"')
    return value


def system_message(text: str | None, path: Path | None) -> str | None:
    """The system message of --system or --system-file."""
    if text is not None and path is not None:
        raise click.UsageError("--system and --system-file exclude each other; give one.")
    return text if path is None else read_text(path, "system message").rstrip("\n")


def template_variables(texts: Sequence[str]) -> dict[str, object]:
    """The variables of all --chat-template-kwargs; later ones replace earlier ones. Raises
    HotsplitError for anything but objects."""
    found: dict[str, object] = {}
    for text in texts:
        value = _json_of(text, "--chat-template-kwargs")
        if not isinstance(value, dict):
            raise HotsplitError('--chat-template-kwargs: wanted an object, e.g. {"name": true}')
        found |= value
    return found


def _json_of(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HotsplitError(f"{source}: not JSON ({str(error)[:100]})") from error
