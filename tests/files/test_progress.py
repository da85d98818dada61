"""Progress bars, and lines printed while one is shown, on a terminal and in a log."""

import os
import pty
import re
import sys
from contextlib import suppress

import pytest
from rich.console import Console

from hotsplit.commands.options.command_options import say, wrapped
from hotsplit.system import progress as module
from hotsplit.system.progress import progress


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
