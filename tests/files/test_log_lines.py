"""Library code reports through loggers; the command line shows the messages as plain lines."""

import io
import logging
import sys
from pathlib import Path

import pytest
from forked import run_python
from models import byte_level_keys, make_model, make_sizes
from rich.console import Console
from rich.progress import Progress

from hotsplit.cli import main
from hotsplit.commands.options import command_options as shared
from hotsplit.runtime import resolved_options
from hotsplit.system.log_lines import NAME, lines_on_stderr


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
        "resolved_options.free_memory_bytes = lambda: 1\n"
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
    monkeypatch.setattr(resolved_options, "free_memory_bytes", lambda: 1)
    given = ["generate", str(model), "-p", "a", "-n", "1", "--device", "cpu", "--kv-offload", SIZES]
    assert main(given) == 0
    lines = capsys.readouterr().err.splitlines()
    for words in (EXPLAINED, WARNED):
        (line,) = [line for line in lines if words in line]
        assert line.startswith(f"{model}: ")
