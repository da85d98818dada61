"""A conversation at a terminal, or with a script through a pipe.

Answers go to stdout, everything else to stderr."""

import sys
from collections.abc import Generator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hotsplit.commands.options.command_options import say
from hotsplit.commands.options.constraint_options import constraint_of
from hotsplit.commands.options.speculation_options import speculating, speculation_lines
from hotsplit.commands.request import CommandRequest
from hotsplit.commands.terminal.terminal import (
    Lines,
    PipedLines,
    Screen,
    Stop,
    TypedLines,
    note,
    stopping,
)
from hotsplit.errors import HotsplitError, Interrupted
from hotsplit.options.generation_options import SamplingOptions

if TYPE_CHECKING:
    from hotsplit.runtime.engine import Engine
    from hotsplit.runtime.generate.chat import Conversation
    from hotsplit.runtime.generate.generation import Token

HELP = """\
/help            this
/system [TEXT]   show the system message, or set another
/reset           forget the conversation, keep the system message
/regen           another answer to the last message
/undo            take back the last message and its answer
/save FILE       write the conversation (JSON)
/load FILE       continue a saved conversation
/stats           how much of the context is used, and the speed of the last answer
/quit or /bye    leave; so does Ctrl-D
Enter sends, Alt-Enter or a backslash before Enter makes a new line, Ctrl-C stops an answer.
A message that begins with / is written with //."""


def converse(
    engine: "Engine",
    request: CommandRequest,
    sampling: SamplingOptions,
    draft_model: Path | None,
    name: str,
) -> None:
    """Holds a conversation; `name` is the model's display name."""
    from hotsplit.runtime.generate.chat import ChatOptions

    options = ChatOptions(
        generation=request.endings, variables=request.variables, drops_oldest=request.shifts
    )
    new_mask = None
    if request.constraint is not None:
        new_mask = partial(constraint_of, request.constraint, engine.codec)
        new_mask()  # refuses wrong options before the first message
    with (
        speculating(engine, request.speculation, draft_model) as drafts,
        engine.chat(
            request.system,
            template=request.template,
            sampling=sampling,
            options=options,
            new_constraint=new_mask,
            drafts=drafts,
        ) as conversation,
    ):
        if sys.stdin is None or sys.stdout is None:
            raise HotsplitError("stdin or stdout is closed; a conversation needs both")
        is_typed = sys.stdin.isatty()
        if is_typed:
            note(
                f"[{name} on {engine.device}; a context of {engine.context_length} tokens; /help"
                " for help, Ctrl-D to leave]"
            )
        lines = TypedLines() if is_typed else PipedLines()
        talk = Talk(conversation, lines, is_typed, is_greedy=sampling.temperature <= 0)
        talk.run()
        for line in speculation_lines(request.speculation, [] if drafts is None else [drafts]):
            note(line)
    if engine.neuron_cache is not None:
        note(f"[{engine.neuron_cache.line}]")
    if talk.num_errors and not is_typed:
        raise HotsplitError(f"{talk.num_errors} of the lines failed; see above")
    if not talk.num_lines and not is_typed:
        raise HotsplitError(
            "stdin has no message, so there was nothing to answer; write one on each line, or type"
            " at a terminal"
        )


class Talk:
    """One conversation: takes lines until there are no more, or until /quit, /exit or /bye."""

    def __init__(
        self, chat: "Conversation", lines: Lines, is_typed: bool, *, is_greedy: bool = False
    ) -> None:
        self.chat, self.lines, self.is_typed, self.is_greedy = chat, lines, is_typed, is_greedy
        self.num_lines = self.num_errors = 0  # lines that are not blank, and those that failed
        self._num_said = 0  # tokens of the last answer
        self._screen = Screen()
        self._is_over = False

    def run(self) -> None:
        while not self._is_over:
            try:
                line = self.lines.read()
                if line is None:
                    return
                self.take(line)
            except HotsplitError as error:
                self.num_errors += 1
                say(f"hotsplit: {error}")
            except KeyboardInterrupt as error:
                is_ctrl_c = not isinstance(error, Interrupted) or error.is_ctrl_c
                if not self.is_typed or not is_ctrl_c:
                    raise
                note("[stopped]")

    def take(self, line: str) -> None:
        """Handles a message or a command. Raises HotsplitError if it fails."""
        if not line.strip():
            return
        self.num_lines += 1
        name, rest = [*line.strip()[1:].split(maxsplit=1), "", ""][:2]
        if not line.startswith("/"):
            if self.is_typed and line.strip().lower() in ("exit", "quit", "bye"):
                note(f"[/{line.strip().lower()} leaves; this is sent to the model]")
            self._show(self.chat.say(line))
        elif line.startswith("//"):
            self._show(self.chat.say(line[1:]))
        else:
            self._command(name, rest)

    def _show(self, tokens: "Generator[Token, None, None]", hint: str = "") -> None:
        count = 0
        try:
            with stopping() if self.is_typed else nullcontext(Stop()) as stop, closing(tokens):
                for token in tokens:
                    self._screen.write(token.text, is_reasoning=token.is_reasoning)
                    count += token.id is not None
                    if stop.is_asked:
                        break
        finally:
            self._screen.end()
        # The end token counts, though it has no text: as in llama.cpp.
        self._num_said = count + (self.chat.run.stopped_by == "end of text")
        note(self._line(self._num_said, hint))

    def _line(self, count: int, hint: str) -> str:
        from hotsplit.runtime.generate.generation import NOT_STOPPED

        run, chat = self.chat.run, self.chat
        new = run.prefill_tokens - run.cached_tokens
        parts = [
            f"{count} tokens, {run.decode_per_s:.1f}/s",
            f"prompt {run.prefill_tokens}: {run.cached_tokens} kept, {new} computed in"
            f" {run.prefill_s:.2f} s",
            f"context {chat.num_tokens} of {chat.context_length}",
        ]
        if chat.num_dropped:
            parts.append(f"the oldest {chat.num_dropped} messages are left out")
        if run.stopped_by == "context":
            drops = chat.options.drops_oldest
            parts.append(
                "the context is full: the next message leaves the oldest ones out"
                if drops
                else "the context is full: /reset, /undo, or start with a longer one (-c) or with"
                " --context-shift, which leaves out the oldest messages"
            )
        elif run.stopped_by == NOT_STOPPED:
            parts.append("stopped by Ctrl-C" + ("" if count else " before anything was said"))
        elif run.stopped_by != "end of text":
            parts.append(f"stopped by {run.stopped_by}")
        parts += [hint] if hint else []
        return f"[{'; '.join(parts)}]"

    def _command(self, name: str, rest: str) -> None:
        chat = self.chat
        match name:
            case "help":
                say(HELP)
            case "system":
                if rest:
                    chat.system = rest
                is_set = chat.system is not None
                say(f"system message: {chat.system}" if is_set else "no system message set")
            case "reset":
                chat.reset()
                note("[forgotten]")
            case "regen":
                hint = "temperature 0 always gives the same answer" if self.is_greedy else ""
                self._show(chat.regenerate(), hint)
            case "undo":
                note(f"[taken back: {chat.undo()[:60]!r}]")
            case "save":
                path = _path_of(name, rest)
                chat.save(path)
                note(f"[{len(chat.messages)} messages written to {path}]")
            case "load":
                path = _path_of(name, rest)
                chat.load(path)
                note(f"[{len(chat.messages)} messages read from {path}]")
            case "stats":
                used = f"{chat.num_tokens} of {chat.context_length} tokens"
                say(f"{len(chat.messages)} messages, {used}")
                if chat.run.prefill_tokens:
                    say(
                        f"last answer: {self._num_said} tokens, {chat.run.decode_per_s:.1f}/s;"
                        f" prompt {chat.run.prefill_tokens} tokens, {chat.run.cached_tokens} kept,"
                        f" the rest in {chat.run.prefill_s:.2f} s"
                    )
            case "quit" | "exit" | "bye":
                self._is_over = True
            case _:
                line = "no such command; /help lists them, and // begins a message with /"
                raise HotsplitError(f"/{name[:40]}: {line}")


def _path_of(command: str, text: str) -> Path:
    if "\0" in text:
        raise HotsplitError(f"/{command}: a file name cannot contain NUL")
    if not text:
        raise HotsplitError(f"/{command} takes the name of a file, e.g. /{command} talk.json")
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, not encodable, an unknown user
        raise HotsplitError(f"/{command} {text[:60]!r}: not a file name ({error})"[:200]) from error
    return path
