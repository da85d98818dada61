"""Library code reports through loggers; the command line shows the messages as plain lines, also
while a progress bar is shown, on a terminal and in a log."""

import io
import logging
import os
import pty
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from forked import run_python
from models import byte_level_keys, make_model, make_sizes
from rich.console import Console
from rich.progress import Progress

from hotsplit.cli import main
from hotsplit.commands.options import command_options as shared
from hotsplit.commands.options.command_options import say, wrapped
from hotsplit.runtime import resolved_options
from hotsplit.system import progress as module
from hotsplit.system.log_lines import NAME, lines_on_stderr
from hotsplit.system.progress import progress


def test_the_lines_are_plain(capsys):
    log = logging.getLogger("hotsplit.runtime.some_module")
    with lines_on_stderr():
        log.warning("m.gguf: 100 % of this is slow")
        log.info("m.gguf: mode dense")
        log.debug("nobody wants to know")
        logging.getLogger("another.package").info("nor this")
    said = capsys.readouterr()
    assert said.err == "m.gguf: 100 % of this is slow\nm.gguf: mode dense\n" and not said.out


def test_a_callers_handlers_do_not_repeat_the_lines(capsys, caplog):
    log = logging.getLogger("hotsplit.runtime.some_module")
    with lines_on_stderr(), lines_on_stderr():
        log.warning("once")
    assert capsys.readouterr().err == "once\n" and not caplog.records
    log.warning("for the caller")  # the handlers that were there before are back
    assert [record.message for record in caplog.records] == ["for the caller"]
    logger = logging.getLogger(NAME)
    assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)


def test_a_closed_stderr_loses_lines_and_nothing_else(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with lines_on_stderr():
        logging.getLogger("hotsplit.runtime.some_module").warning("for nobody")


def test_a_line_appears_above_a_progress_bar():
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=60)
    with lines_on_stderr(), Progress(console=console, auto_refresh=False) as bar:
        bar.add_task("loading", total=2)
        bar.refresh()
        logging.getLogger("hotsplit.runtime.some_module").warning("m.gguf: slow")
        bar.refresh()
    lines = terminal.getvalue().splitlines()
    (line,) = [line for line in lines if "m.gguf" in line]
    assert line.endswith("m.gguf: slow") and "loading" not in line
    assert "loading" in lines[lines.index(line) + 1]


SIZES = "sinks=32,window=32,top=32"  # fewer positions than the context
FREE = 1040 << 10  # bytes: enough for keys, values and workspace, and not for weights
EXPLAINED, WARNED = "long texts are computed approximately", "the weights stay in the file"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "m.gguf"
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(vocab_size=vocab_size, context_length=256)
    make_model(sizes=shape, extra_keys=keys).save(path)
    return path


def stderr_of(first: str, path: Path) -> str:
    """The stderr of a program that executes this line and then loads the model."""
    text = (
        f"import logging\nfrom hotsplit import Engine\n{first}\n"
        "from hotsplit.runtime import resolved_options\n"
        f"resolved_options.free_memory_bytes = lambda: {FREE}\n"
        f"with Engine.load({str(path)!r}, device='cpu', kv_offload={SIZES!r}): pass"
    )
    done = run_python(text)
    assert done.returncode == 0 and not done.stdout, done.stderr
    return done.stderr


def test_a_program_shows_warnings_by_default_and_the_rest_on_request(model):
    """Without a handler, Python shows warnings as plain lines and hides messages of level INFO."""
    (warned,) = stderr_of("", model).splitlines()
    assert warned.startswith(f"{model}: ") and WARNED in warned
    asked = stderr_of("logging.basicConfig(level='INFO', format='%(name)s|%(message)s')", model)
    names = dict(line.split("|", 1)[::-1] for line in asked.splitlines())
    assert sum(EXPLAINED in line for line in names) == sum(WARNED in line for line in names) == 1
    assert {"hotsplit.runtime.loading", "hotsplit.runtime.resolved_options"} <= {*names.values()}


def test_a_command_says_them_as_its_own_notes(model, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(shared, "say", said.append)
    given = ["generate", str(model), "-p", "a", "-n", "1", "--device", "cpu", "--kv-offload", SIZES]
    assert main(given) == 0
    assert sum(EXPLAINED in line for line in said) == 1


def test_a_command_shows_warnings_and_information(model, capsys, monkeypatch):
    monkeypatch.setattr(resolved_options, "free_memory_bytes", lambda: FREE)
    given = ["generate", str(model), "-p", "a", "-n", "1", "--device", "cpu", "--kv-offload", SIZES]
    assert main(given) == 0
    lines = capsys.readouterr().err.splitlines()
    for words in (EXPLAINED, WARNED):
        (line,) = [line for line in lines if words in line]
        assert line.startswith(f"{model}: ")


def test_a_log_gets_only_a_few_lines(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with progress("counting", 1000, "tokens") as advance:
        for _ in range(10):
            clock[0] += 10
            advance(50)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines == [
        "counting: 150 tokens of 1,000 (15%)",
        "counting: 300 tokens of 1,000 (30%), about 140 s left",
        "counting: 450 tokens of 1,000 (45%), about 110 s left",
    ]
    with progress("counting", None, "tokens") as advance:
        advance(5)
    assert capsys.readouterr().err == ""


def test_a_slow_beginning_is_not_in_the_estimate(capsys, monkeypatch):
    """Half a minute for the first run, and a second for each of the others."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with progress("probing", 124, "runs") as advance:
        for seconds in (30, *[1] * 60):
            clock[0] += seconds
            advance(1)
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "probing: 1 runs of 124 (1%)"
    assert second.endswith(", about 93 s left") and third.endswith(", about 63 s left")


def test_a_following_part_has_a_bar_of_its_own(capsys, monkeypatch):
    """The verification of a model shows its own bar below that of the conversion."""
    monkeypatch.setattr(
        module, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True, width=80)
    )
    with progress("converting", 10, "MB") as advance:
        advance(10)
        advance.begin("verifying")
        tasks = advance.bar.tasks
        assert [task.description for task in tasks] == ["converting", "verifying"]
        assert tasks[0].finished and tasks[1].total is None
    shown = capsys.readouterr().err.splitlines()
    last = {word: [line for line in shown if word in line][-1] for word in ("conv", "verif")}
    assert "100%" in last["conv"] and "100%" not in last["verif"]


def test_a_log_has_no_total_of_a_part_that_follows(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with progress("converting", 10, "MB") as advance:
        advance(10)
        advance.begin("verifying")
        clock[0] = 40.0
        advance(1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "verifying: 1 MB"


SAID = """
from hotsplit.commands.options.command_options import say
from hotsplit.system.progress import progress
with progress("measuring", None, "timings") as advance:
    for number in range(3):
        advance(1)
        advance.bar.refresh()
        say(f"figure {number}")
"""


def test_a_line_does_not_run_into_a_bar():
    """On a terminal, the bar is erased before a line, which begins in the first column."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", SAID])
    shown = b""
    with suppress(OSError):
        while chunk := os.read(terminal, 1 << 16):
            shown += chunk
    assert os.waitpid(pid, 0)[1] == 0
    text = shown.decode()
    for number in range(3):
        assert re.search(rf"\x1b\[2K(?:\x1b\[0m|\x1b\[\d+A|\r)*figure {number}\r\n", text), text


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("short", ["short"]),
        (
            "a note that is longer than the terminal is wide",
            ["a note that is", "  longer than the", "  terminal is wide"],
        ),
        ("a  table  is not wrapped at all", ["a  table  is not wrapped at all"]),
        (
            "run has more here: hotsplit report /a/b/c --profile 'd e'",
            ["run has more here:", "  hotsplit report /a/b/c --profile 'd e'"],
        ),
        ("wrote /a/name/that-is-longer-than-all", ["wrote", "  /a/name/that-is-longer-than-all"]),
    ],
)
def test_notes_are_wrapped_and_commands_are_not(line, lines):
    assert wrapped(line, 20).split("\n") == lines


def test_a_log_is_not_wrapped(capsys):
    say("word " * 50)
    assert capsys.readouterr().err == "word " * 50 + "\n"
