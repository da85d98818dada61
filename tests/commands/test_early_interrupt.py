"""Ctrl-C at any moment while a command starts: it prints one line, or Python's own traceback if
none of our code has run yet. How Python starts (the interpreter, site, other packages' .pth files)
is not ours to change."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).parent / "hotsplit"
LINE = "hotsplit: interrupted; nothing half-written was left"
OURS = ("hotsplit", "re/__init__", "enum.py")  # in paths of our files and their imports


def interrupted_after(seconds: float, *words: str) -> tuple[int, str]:
    """(exit code, stderr) of a command that is interrupted this long after its start."""
    none = subprocess.DEVNULL
    process = subprocess.Popen(
        [PROGRAM, *words], stdin=none, stdout=none, stderr=subprocess.PIPE, text=True
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    return process.returncode, error


def frames(error: str) -> list[str]:
    """The files of a traceback, apart from the import hook of an editable installation, and from
    the script if it has not reached its first line."""
    lines = [line for line in error.splitlines() if line.startswith('  File "')]
    files = [line.split('"')[1] for line in lines if f'"{PROGRAM}", line 0,' not in line]
    return [file for file in files if "_editable_skbc" not in file]


def check(seconds: float, *words: str) -> None:
    code, error = interrupted_after(seconds, *words)
    if "KeyboardInterrupt" in error or not error:
        assert code in (-signal.SIGINT, 1, 130), (seconds, code)
        ours = [file for file in frames(error) if any(name in file for name in OURS)]
        assert not ours, (seconds, error)
    else:
        assert error.splitlines()[-1].startswith("hotsplit: "), (seconds, error)
        assert len(error.splitlines()) == 1 and code in (1, 130), (seconds, error)
        assert (code == 130) == (error.strip() == LINE), (seconds, code, error)


@pytest.mark.skipif(not PROGRAM.exists(), reason="the command is not installed next to Python")
@pytest.mark.parametrize("seconds", [0.02, 0.05, 0.1, 0.2, 0.4])
def test_an_interrupt_of_a_start_is_one_line(seconds):
    check(seconds, "generate", "/dev/null/model.gguf", "-p", "x")


@pytest.mark.slow
@pytest.mark.skipif(not PROGRAM.exists(), reason="the command is not installed next to Python")
@pytest.mark.parametrize("command", ["generate -p x", "serve"])
def test_an_interrupt_at_any_time_of_a_start_is_one_line(command):
    name, *more = command.split()
    for number in range(41):
        check(0.05 * number, name, "/dev/null/model.gguf", *more)
    for number in range(60):  # in finer steps, where our own code begins
        check(0.002 * number, name, "/dev/null/model.gguf", *more)


def test_the_check_sees_a_traceback_of_ours(monkeypatch):
    text = 'Traceback (most recent call last):\n  File "/x/bin/hotsplit", line 3\nKeyboardInterrupt'
    monkeypatch.setattr(f"{__name__}.interrupted_after", lambda *words: (-2, text))
    with pytest.raises(AssertionError):
        check(0.0)


@pytest.mark.skipif(not PROGRAM.exists(), reason="the command is not installed next to Python")
def test_the_script_imports_nothing_before_it_can_answer():
    """Its imports are in a `try`: an interrupt during them prints one line and exits with 130."""
    lines = [
        line.strip() for line in PROGRAM.read_text().splitlines() if line.strip() and line[0] != "#"
    ]
    assert lines[:2] == ["try:", "from hotsplit.cli import main"]
