"""The user's side of a conversation: a terminal with line editing and history, or a pipe.

In a pipe, each line is a message; a backslash at its end continues it with the next. At a terminal,
Enter sends, Alt-Enter or a backslash before Enter starts a new line, and a paste is one message."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import click

from hotsplit.errors import HotsplitError

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

PROMPT = "> "
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# Characters that a terminal would execute instead of showing: all controls except newline and tab.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Lines(Protocol):
    """The source of messages."""

    def read(self) -> str | None:
        """The next message; None at the end. Raises HotsplitError for a message that is not
        UTF-8; others may follow it."""


class PipedLines:
    """Lines of stdin; a backslash at the end of a line continues it with the next."""

    def read(self) -> str | None:
        parts: list[str] = []
        while line := sys.stdin.buffer.readline():
            try:
                text = line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise HotsplitError(
                    f"a line of stdin is not UTF-8 at byte {error.start}"
                ) from error
            parts.append(text.removesuffix("\\"))
            if not text.endswith("\\"):
                break
        return "\n".join(parts) if parts else None


class TypedLines:
    """Lines of a terminal, with history from earlier runs."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        self._session = PromptSession[str](
            PROMPT,
            history=_history(),
            key_bindings=_bindings(),
            multiline=True,
            prompt_continuation=lambda width, number, is_wrapped: " " * width,
            output=create_output(always_prefer_tty=True),
        )

    def read(self) -> str | None:
        # A Ctrl-C while the line is set up was meant for the last answer, which has ended.
        before = signal.signal(signal.SIGINT, lambda number, frame: None)
        try:
            return self._session.prompt()
        except EOFError:  # Ctrl-D
            return None
        finally:
            signal.signal(signal.SIGINT, before)


class Screen:
    """Shows an answer: its text on stdout, its reasoning dim on a terminal, and otherwise on
    stderr, so that a program that reads stdout gets the answer alone."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout is not None and sys.stdout.isatty()
        is_dim = self._is_terminal and "NO_COLOR" not in os.environ
        self._marks = (_DIM, _PLAIN) if is_dim else ("[reasoning]\n", "\n[/reasoning]")
        self._is_reasoning = False
        self._is_at_start = True  # of a line

    def write(self, text: str, *, is_reasoning: bool = False) -> None:
        if not text:
            return
        if is_reasoning and not self._is_reasoning:
            self.end()
            self._is_reasoning = True
            self._put(self._marks[0])
        elif self._is_reasoning and not is_reasoning:
            self.end()
            self._put("\n" if self._is_terminal else "")
        self._is_at_start = text.endswith("\n")
        self._put(text.translate(_CONTROLS) if self._is_terminal else text)

    def end(self) -> None:
        """Ends the line, unless nothing is on it."""
        if self._is_reasoning:
            self._put(f"{self._marks[1]}\n")
        elif not self._is_at_start:
            self._put("\n")
        self._is_reasoning, self._is_at_start = False, True

    def _put(self, text: str) -> None:
        stream = sys.stderr if self._is_reasoning and not self._is_terminal else sys.stdout
        if stream is not None:
            stream.write(text)
            stream.flush()


class Stop:
    """Records Ctrl-C. The second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.is_asked = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True


@contextmanager
def stopping() -> Iterator[Stop]:
    """Within the block, the first Ctrl-C only sets a flag, so that no step of the model is
    interrupted; see Stop for the second."""
    stop = Stop()
    before = signal.signal(signal.SIGINT, stop.ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def note(line: str) -> None:
    """Prints a line outside the conversation to stderr; dim on a terminal."""
    is_dim = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    click.echo(f"{_DIM}{line}{_PLAIN}" if is_dim else line, err=True)


def state_folder() -> Path:
    """The user's state folder according to the XDG base directory specification."""
    named = os.environ.get("XDG_STATE_HOME", "")
    base = Path(named) if Path(named).is_absolute() else Path.home() / ".local" / "state"
    return base / "hotsplit"


def _history() -> "History":
    """History in a file private to the user; in memory if that cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = state_folder() / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        note(f"{path}: no history is kept ({error})")
        return InMemoryHistory()
    return FileHistory(path)


def _bindings() -> "KeyBindings":
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\" and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("escape", "c-j")  # what a terminal sends if it is typed before the line is ready
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    @bindings.add("<sigint>")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:  # it may have been meant for an answer that has just ended
            run_in_terminal(lambda: note("[Ctrl-D or /quit leaves]"))

    return bindings
