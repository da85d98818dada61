"""Runs a command and turns errors and signals into one line and an exit code.

No command ends in a traceback: an error of the user or the machine is one line with exit code 1, or
2 for a wrong command line, and an unexpected error is one line with exit code 70. With
HOTSPLIT_DEBUG=1, the traceback of any error but a HotsplitError or an interrupt comes first.
All slow imports happen inside the block that ensures this."""

import errno
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING

from hotsplit.errors import HotsplitError, Interrupted
from hotsplit.files.typed import printed_line
from hotsplit.system.processors import (
    can_start_threads,
    let_threads_sleep,
    limit_libraries,
    processors,
)
from hotsplit.system.signals import INTERRUPTED, MESSAGE, ending, message_of
from hotsplit.system.sizes import format_bytes
from hotsplit.system.system_memory import address_space_bytes, advice_on_memory

if TYPE_CHECKING:
    import click

DEBUG_VARIABLE = "HOTSPLIT_DEBUG"
UNEXPECTED = 70  # sysexits.h: EX_SOFTWARE
MOST_LETTERS = 300  # of another library's error message
# How similar two options, or two commands, must be for one to be suggested for the other.
LEAST_ALIKE, LEAST_ALIKE_COMMAND = 0.7, 0.65
# What these modules' imports need, as measured with two processors.
LEAST_ADDRESS_SPACE = {"numpy": 240 << 20, "torch": 768 << 20}
# Beside those that compute: a library that is refused one interrupts, exits or aborts.
LEAST_THREADS = 6
# Messages of the loader where a library does not fit into the address space.
NO_SPACE = ("failed to map", "cannot allocate memory")
# torch's out-of-memory messages, which are plain RuntimeErrors on the CPU.
NO_MEMORY = (
    "can't start new thread",
    "not enough memory",
    "can't allocate memory",
    "out of memory",
    "std::bad_alloc",
)


def run(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, 1 after a failure, 2 after wrong usage, 128 + n if signal n
    ended it, 70 after a bug in this program."""
    is_program = argv is None
    arguments = list(sys.argv[1:] if argv is None else argv)
    if is_program:
        _open_closed_streams()
        if not can_start_threads(LEAST_THREADS + processors().threads):
            _say(
                "hotsplit: the system refuses to start threads; raise the limit on processes"
                " (ulimit -u)"
            )
            return 1
    with ending(is_program=is_program) as signals:
        try:
            with _nothing_printed(arguments) if is_program else nullcontext():
                return _run(arguments, is_program=is_program)
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001  # every error, see the module's docstring
            return _end(signals.instead_of(error), arguments)


def _run(arguments: list[str], *, is_program: bool) -> int:
    if is_program and address_space_bytes() is not None:
        sys.meta_path.insert(0, _LeastAddressSpace)
    let_threads_sleep()
    if is_program:
        limit_libraries()
    import click

    from hotsplit.commands.all_commands import InterruptedCommand, cli
    from hotsplit.commands.options.command_options import say
    from hotsplit.system.log_lines import lines_on_stderr

    if is_program:
        from hotsplit.files import mapped_files

        mapped_files.guard()
    try:
        with lines_on_stderr(say):
            code = cli.main(arguments, prog_name="hotsplit", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except InterruptedCommand as error:
        raise error.how from None
    except click.Abort as error:
        is_signal = isinstance(error.__cause__, KeyboardInterrupt)
        raise (error.__cause__ if is_signal else KeyboardInterrupt()) from None  # type: ignore[misc]
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        _say(usage_line(error, arguments))
        return error.exit_code
    return code if isinstance(code, int) else 0


class _LeastAddressSpace:
    """A finder of modules that refuses those whose libraries would not fit. Halfway through their
    imports, BLAS interrupts or exits the process, and the C library aborts it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        least, most = LEAST_ADDRESS_SPACE.get(name, 0), address_space_bytes()
        if most is not None and most < least:
            raise HotsplitError(
                f"too little address space to load {name}, wanted at least {format_bytes(least)};"
                f" {advice_on_memory()}"
            )


# Programs of llama.cpp, and the commands that do the same.
OF_LLAMACPP = {
    "quantize": "convert MODEL -o FILE --outtype q8_0",
    "perplexity": "eval",
    "cli": "run",
    "server": "serve",
    "imatrix": "profile --imatrix",
    "tokenize": "serve's /tokenize",
}

# Ollama's commands, and what to type here.
OF_OLLAMA = {
    "pull": "hotsplit run ORG/NAME, which downloads what is not there",
    "list": "hotsplit cache list",
    "ls": "hotsplit cache list",
    "rm": "hotsplit cache clear NAME",
    "ps": "GET /metrics of hotsplit serve; a model is loaded as long as its command runs",
    "stop": "Ctrl-C where hotsplit serve runs",
    "show": "hotsplit inspect FILE",
    "create": "hotsplit convert",
}


def usage_line(error: "click.ClickException", arguments: Sequence[str]) -> str:
    """A line on a wrong command line, which names the help that lists the options."""
    from hotsplit.commands.all_commands import cli

    context = getattr(error, "ctx", None)
    # click gives no context to an option that lacks its argument.
    own = arguments[0] if arguments and arguments[0] in cli.commands else None
    command = context.command_path if context else f"hotsplit {own}" if own else "hotsplit"
    possible = getattr(error, "possibilities", None)
    message = error.format_message() if possible is None else error.message
    message = " ".join(message.split()).rstrip(".")
    name = getattr(error, "option_name", "") or getattr(error, "command_name", "")
    least = LEAST_ALIKE if name.startswith("-") else LEAST_ALIKE_COMMAND
    longer = sorted(option for option in possible or () if option.startswith(f"{name}-"))
    close = longer[:1] if name else []
    close = close or get_close_matches(name, possible or (), 1, least)
    if name in OF_OLLAMA:
        message += f"; here: {OF_OLLAMA[name]}"
    elif close:
        message += f", did you mean {close[0]}?"
    elif name in OF_LLAMACPP:
        message += f"; llama.cpp's is {OF_LLAMACPP[name]} here"
    message = message[:1].lower() + message[1:] if message[1:2].islower() else message
    is_from_click = message.startswith("got unexpected extra argument")
    has_hint = is_from_click or type(error).__name__ != "UsageError"  # ours say what to do
    return f"{command}: {message}" + (f"; see {command} --help" if has_hint else "")


def _end(error: BaseException, arguments: list[str]) -> int:
    from hotsplit.files.atomic import remove_unfinished

    remove_unfinished()
    is_known = isinstance(error, HotsplitError | KeyboardInterrupt | BrokenPipeError)
    if os.environ.get(DEBUG_VARIABLE) and not is_known and sys.stderr is not None:
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        # Only one of torchrun's processes reports.
        if os.environ.get("RANK", "0") == "0":
            own = str(error) if isinstance(error, Interrupted) else MESSAGE
            _say(f"hotsplit: {message_of(arguments) if own == MESSAGE else own}")
        return error.exit_code if isinstance(error, Interrupted) else 130
    if isinstance(error, BrokenPipeError):
        _forget_stdout()
        return 1
    if isinstance(error, OSError) and error.filename is None:
        _forget_stdout()
    line, code = line_of(error, arguments)
    _say(line)
    return code


def line_of(error: BaseException, arguments: Sequence[str] = ()) -> tuple[str, int]:
    """(message of an error, exit code)."""
    command = " ".join(["hotsplit", *(name for name in arguments[:1] if name[:1] != "-")])
    if isinstance(error, HotsplitError):
        return f"hotsplit: {error}", 1
    if is_memory(error):
        return f"{command}: out of memory ({_words(error)}); {advice_on_memory()}", 1
    if isinstance(error, OSError):
        reason = error.strerror or _words(error)
        if error.filename is None:
            return f"hotsplit: the output cannot be written: {reason}", 1
        name = error.filename
        name = os.fsdecode(name) if isinstance(name, bytes) else str(name)
        return f"{command}: {name[:MOST_LETTERS]}: cannot be read or written: {reason}", 1
    return (
        f"{command}: unexpected {type(error).__name__}: {_words(error)} (a bug in this program;"
        f" {DEBUG_VARIABLE}=1 shows where)",
        UNEXPECTED,
    )


def is_memory(error: BaseException) -> bool:
    """True if Python or torch ran out of memory."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, ImportError):  # of torch with CUDA, whose libraries are larger
        is_limited = address_space_bytes() is not None
        return is_limited and any(words in str(error).lower() for words in NO_SPACE)
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    is_torch = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    return is_torch or any(words in text for words in NO_MEMORY)


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:MOST_LETTERS] or "no message"


def _say(line: str) -> None:
    """Writes to stderr, which may be closed or full. Names from outside may hold anything."""
    line = printed_line(line)
    with suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty() and line.endswith((MESSAGE, f": {INTERRUPTED}")):
            sys.stderr.write("\n")  # after ^C
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _open_closed_streams() -> None:
    """Takes the numbers of closed standard streams, so that no file of a command gets them. A
    closed stdin stays None. Writing to a closed stdout fails as writing to a full disk does; what
    nobody can read on stderr is dropped."""
    if sys.stdin is None:
        _unused(os.O_RDONLY)
    if sys.stdout is None:
        sys.stdout = open(_unused(os.O_RDONLY), "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(_unused(os.O_WRONLY), "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115


def _unused(flags: int) -> int:
    """Opens /dev/null under the lowest free number, for child processes too; returns the number."""
    descriptor = os.open(os.devnull, flags)
    os.set_inheritable(descriptor, True)
    return descriptor


def _forget_stdout() -> None:
    sys.stdout = None  # type: ignore[assignment]


@contextmanager
def _nothing_printed(arguments: list[str]) -> Iterator[None]:
    """Prevents Python's own tracebacks: of threads, whose errors become one line, of unraisable
    errors, and of characters that stdout cannot encode."""

    def of_thread(found: threading.ExceptHookArgs) -> None:
        if found.exc_value is not None and not isinstance(found.exc_value, SystemExit):
            if os.environ.get(DEBUG_VARIABLE):
                traceback.print_exception(found.exc_value)
            _say(line_of(found.exc_value, arguments)[0])

    def unraisable(found: "sys.UnraisableHookArgs") -> None:
        if os.environ.get(DEBUG_VARIABLE):
            sys.__unraisablehook__(found)

    threading.excepthook, sys.unraisablehook = of_thread, unraisable
    if getattr(sys.stdout, "errors", "") in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    yield
