"""`hotsplit chat`, with a pipe and with a terminal."""

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_chat import chat_model

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.cli import main
from hotsplit.commands.terminal import terminal

LENGTH = 8
GREEDY = ["--temp", "0", "-n", str(LENGTH), "-t", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat") / "m.gguf")


def piped(monkeypatch, capsys, model, text: str | bytes, *options: str) -> tuple[int, str, str]:
    raw = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    capsys.readouterr()
    code = main(["chat", str(model), *GREEDY, *options])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_a_line_is_a_message_and_answers_go_to_stdout(monkeypatch, capsys, model):
    code, out, err = piped(monkeypatch, capsys, model, "Hello\n\n  \nAnd?\n/regen\nlast")
    lines = out.split("\n")
    assert code == 0 and [len(line) for line in lines] == [LENGTH] * 4 + [0]
    assert lines[1] == lines[2]
    stats = [line for line in err.splitlines() if line.startswith("[") and "context" in line]
    assert len(stats) == 4 and all("8 tokens" in line for line in stats)
    assert " 0 kept" in stats[0] and "1 computed" in stats[2]
    assert ["always gives the same answer" in line for line in stats] == [False, False, True, False]
    assert "stopped by max tokens" in stats[0]
    again = piped(monkeypatch, capsys, model, "Hello\r\nAnd?\r\n")
    assert again[1].split("\n")[:2] == lines[:2]


def test_the_end_token_counts_as_in_llama_cpp(monkeypatch, capsys, model):
    end = ModelFile.load(model).extra_keys["tokenizer.ggml.eos_token_id"]
    code, out, err = piped(monkeypatch, capsys, model, "Hello\n/stats\n", "-l", f"{end}+1000")
    assert code == 0 and not out.strip()
    assert "[1 tokens, " in err and "last answer: 1 tokens, " in err
    _, out, err = piped(monkeypatch, capsys, model, "Hello\n/stats\n", "-l", f"{end}-inf")
    assert f"[{LENGTH} tokens, " in err and f"last answer: {LENGTH} tokens, " in err


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_stdin_is_said(monkeypatch, capsys, model, text):
    """`hotsplit run MODEL < /dev/null` gets here, too."""
    code, out, err = piped(monkeypatch, capsys, model, text)
    (line,) = [line for line in err.splitlines() if line.startswith("hotsplit: ")]
    assert code == 1 and not out and "stdin has no message, so there was nothing to answer" in line
    for leaves in ("/quit", "/bye"):
        assert piped(monkeypatch, capsys, model, f"{leaves}\nnever said\n")[:2] == (0, "")


def test_a_text_ends_an_answer(monkeypatch, capsys, model):
    whole = piped(monkeypatch, capsys, model, "Hello\n")[1].rstrip("\n")
    code, out, err = piped(monkeypatch, capsys, model, "Hello\n", "--stop", whole[2])
    assert code == 0 and out.rstrip("\n") == whole[: whole.index(whole[2])]
    assert "stopped by stop string" in err
    code, _, err = piped(monkeypatch, capsys, model, "Hello\n", "-r", "")
    assert code == 1 and "an empty stop string would end every text" in err


def test_a_backslash_joins_lines_and_two_slashes_make_one(monkeypatch, capsys, model, tmp_path):
    path = tmp_path / "talk.json"
    _, _, err = piped(
        monkeypatch, capsys, model, f"one\\\ntwo\\\n\\\nthree\n//help\n/save {path}\n"
    )
    messages = json.loads(path.read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["one\ntwo\n\nthree", "/help"]
    assert "4 messages written" in err


def test_commands(monkeypatch, capsys, model, tmp_path):
    path = tmp_path / "my talk.json"
    text = (
        f"/system\nHello\n/stats\n/save {path}\n/undo\n/load {path}\n/reset\n/system Be\u00e9"
        " brief.\nHello\n/help\n/quit\nnever said\n"
    )
    code, out, err = piped(monkeypatch, capsys, model, text, "-sys", "Shout.")
    assert code == 0 and out.count("\n") == 2
    said = ("system message: Shout.", "2 messages, ", "taken back: 'Hello'", "2 messages read")
    for line in (*said, "forgotten", "system message: Be\u00e9 brief.", "/regen"):
        assert line in err, line
    first, second = out.splitlines()
    direct = piped(monkeypatch, capsys, model, "Hello\n", "-sys", "Be\u00e9 brief.")
    assert direct[1] == second + "\n" and first != second


def test_wrong_lines_are_reported_and_the_conversation_continues(
    monkeypatch, capsys, model, tmp_path
):
    text = f"/nothing\n/save\n/undo\n/regen\n/load {tmp_path}/none\n/save {'x' * 5000}\n/\n"
    raw = text.encode() + b"\xff\xfe\nHello\n"
    code, out, err = piped(monkeypatch, capsys, model, raw)
    assert code == 1 and len(out.strip("\n")) == LENGTH
    errors = [line for line in err.splitlines() if line.startswith("hotsplit: ")]
    assert len(errors) == 9 and "8 of the lines" in errors[-1] and "UTF-8 at byte 0" in err
    code, out, err = piped(monkeypatch, capsys, model, "x" * 600 + "\nHello\n/reset\nHi\n")
    assert code == 1 and len(out.splitlines()) == 2 and "/reset" in err
    code, out, err = piped(monkeypatch, capsys, model, b"\xff\n\xfe\n")
    assert code == 1 and not out and "2 of the lines failed" in err.splitlines()[-1]


def test_options(monkeypatch, capsys, model, tmp_path):
    path = tmp_path / "system.txt"
    path.write_text("Be brief.\n")
    want = piped(monkeypatch, capsys, model, "Hello\n", "-sys", "Be brief.")[1]
    assert piped(monkeypatch, capsys, model, "Hello\n", "--system-file", str(path))[1] == want
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[-1].content }}{{ '!' if loud }}")
    plain = piped(monkeypatch, capsys, model, "Hello!\n", "--chat-template", str(own))[1]
    loud = ["--chat-template", str(own), "--chat-template-kwargs", '{"loud": true}']
    assert piped(monkeypatch, capsys, model, "Hello\n", *loud)[1] == plain
    named = piped(monkeypatch, capsys, model, "Hello\n", "--chat-template", "chatml")[1]
    assert named == piped(monkeypatch, capsys, model, "Hello\n")[1]
    # Answers of one repeated letter, by a constraint that starts anew for every answer.
    only = piped(monkeypatch, capsys, model, "Hello\nAnd?\n", "--regex", "z{20}")[1]
    assert only == 2 * ("z" * LENGTH + "\n")
    shifted = piped(
        monkeypatch, capsys, model, ("x" * 150 + "\n") * 5, "--context-shift", "-c", "400"
    )
    assert shifted[0] == 0 and "messages are left out" in shifted[2]


def test_control_characters_of_the_model_do_not_reach_a_terminal(monkeypatch, capsys):
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        screen = terminal.Screen()
        screen.write("a\x1b[2Jb\x9bc\n\t\U0001f98a\u72d0")
        screen.end()
        shown = capsys.readouterr().out
        assert ("\x1b[2J" in shown) is not is_terminal
        assert shown.endswith("c\n\t\U0001f98a\u72d0\n")


MARKED = "[reasoning]\nd\n[/reasoning]\n"


@pytest.mark.parametrize(
    ("is_terminal", "variables", "out", "err"),
    [
        (True, {}, "\x1b[2mab\x1b[0m\n\nc\n\x1b[2md\x1b[0m\n", ""),
        (True, {"NO_COLOR": "1"}, f"[reasoning]\nab\n[/reasoning]\n\nc\n{MARKED}", ""),
        (False, {}, "c\n", f"[reasoning]\nab\n[/reasoning]\n{MARKED}"),
    ],
)
def test_reasoning_is_told_from_the_answer(monkeypatch, capsys, is_terminal, variables, out, err):
    """Dim or marked on a terminal; what reads a pipe gets the answer alone."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    screen = terminal.Screen()
    for text, is_reasoning in (("a", True), ("b", True), ("c", False), ("", False), ("d", True)):
        screen.write(text, is_reasoning=is_reasoning)
    screen.end()
    assert capsys.readouterr() == (out, err)


# What a random model writes if it may write nothing else: a thought, then one of two words.
THINKS = 'root ::= "<think>\\nHm.\\n</think>\\n\\n" ("yes" | "no")'


@pytest.mark.parametrize(
    "command", [["generate", "--chat"], ["run", "--chat"], ["chat"], ["run"]], ids=" ".join
)
def test_all_commands_show_thoughts_apart(monkeypatch, capsys, model, tmp_path, command):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Well?\n")))
    name, *more = command
    options = [*more, "-p", "Well?"] if more else []
    shared = [name, str(model), "--temp", "0", "-n", "60", "-t", "1", "--grammar", THINKS]
    code = main([*shared, *options])
    found = capsys.readouterr()
    assert code == 0 and found.out in ("yes\n", "no\n"), found
    assert "[reasoning]\nHm.\n[/reasoning]\n" in found.err
    if not more:
        return
    assert main([*shared, *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["text"] + "\n", report["reasoning"]) == (found.out, "Hm.")
    assert main([*shared, *options, "--json-lines"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()][:-1]
    thought = "".join(event["text"] for event in events if event.get("is_reasoning"))
    text = "".join(event["text"] for event in events if not event.get("is_reasoning"))
    assert (text + "\n", thought) == (found.out, "Hm.")


def test_history_that_cannot_be_written_is_reported(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    history = terminal._history()
    history.append_string("kept in memory")
    assert "no history is kept" in capsys.readouterr().err


# ---- a terminal ----------------------------------------------------------------------------


class Terminal:
    """The command with its own terminal; `shown` is its output that `wait` has not consumed."""

    def __init__(self, model: Path, state: Path, *options: str) -> None:
        self._ours, theirs = pty.openpty()
        own = {"XDG_STATE_HOME": str(state), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        files = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotsplit", "chat", str(model), *options],
            env=os.environ | own | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=_take_terminal,
            **files,
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        rest = text.encode()
        while rest:
            rest = rest[os.write(self._ours, rest[:1000]) :]
            self._read(0)

    def enter(self, text: str) -> None:
        """Types at the next prompt: earlier input does not reach the line editor."""
        self.wait("\x1b[?2004h")  # from here on it takes pastes
        self.type(text)

    def wait(self, text: str) -> str:
        """Output since the last call, up to the text, which must come within a minute."""
        deadline = time.monotonic() + 60
        while text not in self.shown:
            assert time.monotonic() < deadline, (text, self.shown[-2000:])
            self._read(0.1)
        found, _, self.shown = self.shown.partition(text)
        return found + text

    def read_on(self, count: int) -> None:
        """Waits for `count` more characters."""
        deadline, count = time.monotonic() + 60, len(self.shown) + count
        while len(self.shown) < count:
            assert time.monotonic() < deadline, self.shown
            self._read(0.1)

    def end(self) -> int:
        deadline = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.1)
        os.close(self._ours)
        return self.process.wait(1)

    def _read(self, seconds: float) -> None:
        if select.select([self._ours], [], [], seconds)[0]:
            try:
                self.shown += os.read(self._ours, 1 << 16).decode(errors="replace")
            except OSError:  # the other side is closed
                time.sleep(0.05)


def _take_terminal() -> None:
    """Makes stdin the controlling terminal, so that Ctrl-C typed there can send SIGINT."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def said(path: Path) -> list[str]:
    messages = json.loads(path.read_text())["messages"]
    return [message["content"] for message in messages if message["role"] == "user"]


def test_at_a_terminal(model, tmp_path):
    """Runs two sessions; the second has the history of the first. A turn has ended when its line of
    statistics is printed."""
    path = tmp_path / "talk.json"
    long = "\n".join(["pasted \U0001f98a \u72d0"] * 1000)
    assert len(long) > 10_000
    term = Terminal(model, tmp_path / "state", *GREEDY, "-c", "512")
    try:
        term.enter("Hellp\x7fo\r")  # edited
        term.wait("max tokens]")
        term.enter("one\\\rtwo\x1b\rthree\r")  # a backslash, then Alt-Enter
        term.wait("max tokens]")
        term.enter("gone\x03")  # Ctrl-C discards what is typed
        term.type(f"/save {path}\r")
        term.wait("4 messages written")
        assert said(path) == ["Hello", "one\ntwo\nthree"]
        term.enter(f"\x1b[200~{long}\x1b[201~\r")  # a paste
        term.wait("hotsplit: the conversation has")
        term.enter("\x04")
        assert term.end() == 0
    finally:
        term.process.kill()
    mode = (tmp_path / "state/hotsplit/chat_history").stat().st_mode
    assert mode & 0o077 == 0

    term = Terminal(model, tmp_path / "state", *GREEDY, "-c", "512")
    try:
        # The paste of 1,000 lines, /save, the message of three lines, and the first one.
        term.enter("\x1b[A" * 4)
        time.sleep(0.5)
        term.type("\x1b[A" * 1200)
        term.type("\r")
        term.wait("max tokens]")
        path.unlink()
        term.enter(f"/save {path}\r")
        term.wait("2 messages written")
        assert said(path) == ["Hello"]
        term.enter("exit\r")
        term.wait("[/exit leaves; this is sent to the model]")
        term.wait("max tokens]")
        term.enter("\x03")  # Ctrl-C where nothing is typed
        term.wait("Ctrl-D or /quit leaves]")
        term.enter("\x04")
        assert term.end() == 0
    finally:
        term.process.kill()


def test_ctrl_c_stops_an_answer_and_keeps_it(tmp_path):
    model = chat_model(tmp_path / "m.gguf", context_length=32_768)
    path = tmp_path / "talk.json"
    term = Terminal(model, tmp_path / "state", "--temp", "0", "-t", "1", "-c", "32768")
    try:
        term.enter("Hello\r")
        term.read_on(1000)
        term.type("\x03")
        assert "stopped by Ctrl-C]" in term.wait("Ctrl-C]")
        term.enter(f"/save {path}\r")
        term.wait("2 messages written")
        messages = json.loads(path.read_text())["messages"]
        assert 5 < len(messages[1]["content"]) < 32_000
        term.enter("And?\r")
        term.read_on(1000)
        term.type("\x03")
        line = term.wait("Ctrl-C]")
        kept = int(line.split(" kept")[0].split()[-1])
        assert kept >= len(messages[1]["content"]) - 1  # one token per character
        term.enter("/quit\r")
        assert term.end() == 0
    finally:
        term.process.kill()
