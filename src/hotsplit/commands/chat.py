"""`hotsplit chat`: a conversation at a terminal, or with a script through a pipe.

Answers go to stdout, everything else to stderr. Line editing is in terminal, the conversation in
runtime.generate.chat."""

import sys
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from hotsplit.commands.options.constraints import NAMES, ConstraintOptions, constraint_of
from hotsplit.commands.options.engine import neuron_cache_option
from hotsplit.commands.options.preparation import preparation, preparation_options
from hotsplit.commands.options.sampling import (
    decoding_options,
    model_sampling,
    take_sampling_options,
)
from hotsplit.commands.options.shared import (
    FILE,
    FileCommand,
    context_option,
    placement_options,
    running_options,
    say,
)
from hotsplit.commands.options.slow_plans import warn_of_slow_plan
from hotsplit.commands.options.speculation import speculating, take_speculation_options
from hotsplit.commands.terminal.prompts import chat_options, system_message, template_variables
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
from hotsplit.options.engine_config import EngineConfig
from hotsplit.options.generation import GenerationOptions

if TYPE_CHECKING:
    from hotsplit.runtime.generate.chat import Conversation
    from hotsplit.runtime.generate.constraints import Constraint
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
/quit            leave; so does Ctrl-D
Enter sends, Alt-Enter or a backslash before Enter makes a new line, Ctrl-C stops an answer.
A message that begins with / is written with //."""


@click.command(cls=FileCommand)
@click.argument("model", type=FILE)
@placement_options
@preparation_options
@chat_options
@click.option(
    "-n",
    "--max-tokens",
    "--n-predict",
    "max_tokens",
    default=-1,
    show_default=True,
    help="Maximum tokens per answer; -1: as many as the context has room for.",
)
@click.option(
    "--stop",
    "-r",
    "--reverse-prompt",
    "stops",
    multiple=True,
    metavar="TEXT",
    help="End an answer where this text appears; may be repeated.",
)
@context_option("Context length in tokens. [default: the plan's, or the model's up to 4,096]")
@decoding_options
@neuron_cache_option
@running_options
def chat(**options: Any) -> None:
    """Talk with a model.

    If stdin is not a terminal, each of its lines is a message. /help lists the commands."""
    with preparation(options) as name:
        talk(name=name, **options)


def talk(
    *,
    model: Path,
    split: Path | None,
    system: str | None,
    system_file: Path | None,
    template: str | None,
    variables: tuple[str, ...],
    max_tokens: int,
    shifts: bool,
    stops: tuple[str, ...],
    threads: int | None,
    name: str | None = None,
    ignores_end: bool = False,
    **options: Any,
) -> None:
    """Runs `chat` with its options; `name` is the model's display name."""
    given = take_sampling_options(options)
    speculation, draft_model = take_speculation_options(options)
    constraint = ConstraintOptions(**{name: options.pop(name) for name in NAMES})
    endings = GenerationOptions(max_tokens=max_tokens, stops=stops, ignores_end=ignores_end)
    template_values = template_variables(variables)
    system = system_message(system, system_file)
    config = EngineConfig(**options)  # refuses wrong options before the imports, which take seconds
    from hotsplit.runtime.engine import load_engine
    from hotsplit.runtime.generate.chat import ChatOptions
    from hotsplit.runtime.kernels.threads import use_threads

    chat_options = ChatOptions(generation=endings, variables=template_values, drops_oldest=shifts)
    use_threads(threads)
    with load_engine(model, split, config) as engine:
        warn_of_slow_plan(engine, split)
        sampling = model_sampling(engine, given)
        constraint_of(constraint, engine.codec)  # refuses wrong options before the first message
        new_mask = None
        if constraint != ConstraintOptions():
            new_mask = cast(
                "Callable[[], Constraint]", partial(constraint_of, constraint, engine.codec)
            )
        with (
            speculating(engine, speculation, draft_model) as drafts,
            engine.chat(
                system,
                template=template,
                sampling=sampling,
                options=chat_options,
                new_constraint=new_mask,
                drafts=drafts,
            ) as conversation,
        ):
            if sys.stdin is None or sys.stdout is None:
                raise HotsplitError("stdin or stdout is closed; a conversation needs both")
            is_typed = sys.stdin.isatty()
            if is_typed:
                note(
                    f"[{name or model.name} on {engine.device}; a context of {engine.context_length}"
                    " tokens; /help for help, Ctrl-D to leave]"
                )
            lines = TypedLines() if is_typed else PipedLines()
            conversed = Talk(conversation, lines, is_typed, is_greedy=sampling.temperature <= 0)
            conversed.run()
            if drafts is not None and (line := drafts.line()) is not None:
                note(f"[{line}]")
        if engine.neuron_cache is not None:
            note(f"[{engine.neuron_cache.line}]")
    if conversed.num_errors and not is_typed:
        raise HotsplitError(f"{conversed.num_errors} of the lines failed; see above")
    if not conversed.num_lines and not is_typed:
        raise HotsplitError(
            "stdin has no message, so there was nothing to answer; write one on each line, or type"
            " at a terminal"
        )


class Talk:
    """One conversation: takes lines until there are no more, or until /quit or /exit."""

    def __init__(
        self, chat: "Conversation", lines: Lines, is_typed: bool, *, is_greedy: bool = False
    ) -> None:
        self.chat, self.lines, self.is_typed, self.is_greedy = chat, lines, is_typed, is_greedy
        self.num_lines = self.num_errors = 0  # lines that are not blank, and those that failed
        self._num_said = 0  # tokens of the last answer
        self._screen = Screen()
        self._is_over = False
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda rest: say(HELP),
            "system": self._system,
            "reset": lambda rest: self._reset(),
            "regen": lambda rest: self._regenerate(),
            "undo": lambda rest: note(f"[taken back: {self.chat.undo()[:60]!r}]"),
            "save": lambda rest: self._save(_path_of("save", rest)),
            "load": lambda rest: self._load(_path_of("load", rest)),
            "stats": lambda rest: self._stats(),
            "quit": lambda rest: self._quit(),
            "exit": lambda rest: self._quit(),
        }

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
            if self.is_typed and line.strip().lower() in ("exit", "quit"):
                note(f"[/{line.strip().lower()} leaves; this is sent to the model]")
            self._show(self.chat.say(line))
        elif line.startswith("//"):
            self._show(self.chat.say(line[1:]))
        elif name in self._commands:
            self._commands[name](rest)
        else:
            raise HotsplitError(
                f"/{name[:40]}: no such command; /help lists them, and // begins a message with /"
            )

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

    def _regenerate(self) -> None:
        hint = "temperature 0 always gives the same answer" if self.is_greedy else ""
        self._show(self.chat.regenerate(), hint)

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

    def _system(self, text: str) -> None:
        if text:
            self.chat.system = text
        system = self.chat.system
        say("no system message set" if system is None else f"system message: {system}")

    def _reset(self) -> None:
        self.chat.reset()
        note("[forgotten]")

    def _save(self, path: Path) -> None:
        self.chat.save(path)
        note(f"[{len(self.chat.messages)} messages written to {path}]")

    def _load(self, path: Path) -> None:
        self.chat.load(path)
        note(f"[{len(self.chat.messages)} messages read from {path}]")

    def _stats(self) -> None:
        chat = self.chat
        say(f"{len(chat.messages)} messages, {chat.num_tokens} of {chat.context_length} tokens")
        if chat.run.prefill_tokens:
            say(
                f"last answer: {self._num_said} tokens, {chat.run.decode_per_s:.1f}/s;"
                f" prompt {chat.run.prefill_tokens} tokens, {chat.run.cached_tokens} kept, the rest"
                f" in {chat.run.prefill_s:.2f} s"
            )

    def _quit(self) -> None:
        self._is_over = True


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
