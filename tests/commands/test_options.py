"""Options of commands: one list of an engine's options for all, wrong ones refused before torch is
imported, which takes seconds on a busy machine, and help that groups many of them."""

import dataclasses
import json
import math
import re
import typing

import click
import pytest
from case_tables import rows_of
from forked import run_python

from hotsplit.cli import main
from hotsplit.commands.all_commands import cli
from hotsplit.commands.help.groups import GROUPS, LEAST, REST
from hotsplit.commands.options.command_options import take_engine_options
from hotsplit.errors import HotsplitError
from hotsplit.options.engine_config import EngineConfig, EngineOptions
from hotsplit.runtime.engine import Engine

DEFAULTS = {field.name: field.default for field in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "fast"}, "mode is 'fast', wanted 'dense', 'exact' or 'predicted'"),
        ({"device": "tpu:0"}, "device 'tpu:0'; wanted cpu or cuda"),
        ({"device": "cuda:-1"}, "wanted cpu or cuda"),
        ({"device": "cuda:x"}, "wanted cpu or cuda"),
        ({"device": "cpu "}, "wanted cpu or cuda"),
        ({"device": ""}, "wanted cpu or cuda"),
        ({"context_length": -1}, "context_length .-c. is -1, wanted 1 or more"),
        ({"num_sequences": 0}, "num_sequences is 0, wanted a whole number from 1 to 1024"),
        ({"num_sequences": 1025}, "num_sequences is 1025, wanted"),
        ({"max_loss": -0.1}, "max_loss is -0.1, wanted 0 or more"),
        ({"max_loss": math.nan}, "max_loss is nan"),
        ({"cache_type_k": "q3"}, "cache type 'q3' is unknown; known: f32"),
        ({"cache_type_v": "q3"}, "cache type 'q3' is unknown; known: f32"),
        ({"kv_offload": "window"}, "'window' in 'window'; wanted on or NAME=VALUE"),
    ],
)
def test_what_no_model_allows_is_refused(options, message):
    with pytest.raises(HotsplitError, match=message):
        EngineConfig(**options)
    with pytest.raises(HotsplitError, match=message):  # before any file is opened
        Engine.load("there is no such file", **options)


def test_what_some_model_allows_is_accepted():
    for device in (None, "cpu", "cpu:0", "cuda", "cuda:0", "cuda:15"):
        assert EngineConfig(device=device).device == device
    types = {"cache_type_k": "q8_0", "cache_type_v": "f16", "kv_offload": "window=2048"}
    EngineConfig(mode="exact", num_sequences=1024, max_loss=math.inf, **types)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="contxt_length"):
        Engine.load("there is no such file", contxt_length=3)


def test_the_keywords_of_load_are_the_fields():
    assert typing.get_type_hints(EngineOptions) == typing.get_type_hints(EngineConfig)


def others(command: click.Command) -> list[str]:
    """The command's engine options whose default differs from the engine's."""
    with command.make_context(command.name, [], resilient_parsing=True) as context:
        given = {name: context.params[name] for name in DEFAULTS if name in context.params}
        return [name for name, value in given.items() if value != DEFAULTS[name]]


COMMANDS = cli.commands


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_has_the_same_defaults(name):
    assert others(COMMANDS[name]) == []


def test_another_default_is_found():
    loss = click.Option(["--max-loss"], type=float, default=0.5)
    flag = click.Option(["--cpu-ffn"], is_flag=True, default=True)
    same = [click.Option(["--device"]), click.Option(["--other"], default=3)]
    wrong = click.Command("wrong", params=[loss, flag, *same])
    assert sorted(others(wrong)) == ["cpu_ffn", "max_loss"]


def test_a_command_takes_the_options_of_an_engine():
    options = {"mode": "exact", "max_loss": 0.5, "limit": 3}
    assert take_engine_options(options) == EngineConfig(mode="exact", max_loss=0.5)
    assert options == {"limit": 3}
    with pytest.raises(HotsplitError, match="max_loss is -1"):
        take_engine_options({"max_loss": -1})


PROGRAM = """
import json, sys
from hotsplit.cli import main
code = main(json.loads(sys.argv[1]))
print(json.dumps([code, "torch" in sys.modules]))
"""


def ended(words: str, cwd) -> tuple[int, bool, list[str]]:
    """(exit code, whether torch was imported, lines on stderr) of a command in a process that has
    imported the command line."""
    done = run_python(PROGRAM, json.dumps(words.split()), cwd=cwd, server="cli")
    assert done.returncode == 0, done.stderr
    code, has_torch = json.loads(done.stdout.splitlines()[-1])
    return code, has_torch, done.stderr.splitlines()


WRONG = """
generate m.gguf => there is no prompt: give one of -p TEXT
generate m.gguf -p a -f b => -p and -f exclude each other
generate m.gguf -f missing => missing: no such file
generate m.gguf -p ab --prompt-cache /no/such/folder/f => its folder does not exist
generate m.gguf -p a --top-p 7 => top_p is 7.0, wanted a number from 0 to 1
generate m.gguf -p a --temp nan => temperature is nan
generate m.gguf -p a -n 0 => max_tokens (-n) is 0
generate m.gguf -p a -t 0 => --threads is 0
generate m.gguf -p a --device x => device 'x'
generate m.gguf -p a --max-loss -1 => max_loss is -1.0
generate m.gguf -p a --logprobs 1 => --logprobs goes with --json
generate m.gguf -p a --logprobs -1 --json => num_logprobs is -1
generate m.gguf -p a --speculate draft => needs a draft model
chat m.gguf --top-p 7 => top_p is 7.0
chat m.gguf -n 0 => max_tokens (-n) is 0
chat m.gguf --chat-template-kwargs 1 => wanted an object
chat m.gguf --system-file none.txt => no such file
chat m.gguf -sys a --system-file b => exclude each other
run m.gguf -p a --top-p 7 => top_p is 7.0
run m.gguf -p a --regex a --grammar b => exclude each other
serve m.gguf --top-p 7 => top_p is 7.0
serve m.gguf --port 99999999 => port is 99999999
eval m.gguf --corpus t --tokens 1 => tokens is 1, wanted 2 or more
eval m.gguf => missing option '--corpus'
bench m.gguf -r 0 => -r is 0
profile m.gguf --corpus t -o p --tokens 0 => tokens is 0
convert m.gguf -o x.gguf --activation tanh => activation 'tanh'
"""


@pytest.mark.parametrize("words, line", rows_of(WRONG))
def test_a_wrong_option_is_refused_without_torch(tmp_path, words, line):
    code, has_torch, lines = ended(words, tmp_path)
    assert code in (1, 2) and len(lines) == 1 and line in lines[0]
    assert not has_torch


def test_a_command_that_goes_on_imports_torch(tmp_path):
    """The check above can fail."""
    code, has_torch, lines = ended("generate m.gguf -p a", tmp_path)
    assert code == 1 and has_torch and "m.gguf: no such file" in lines[-1]


HEADING = re.compile(r"^(\S.*):$", re.MULTILINE)


def help_of(capsys, command: str) -> str:
    assert main(["help", command]) == 0
    return capsys.readouterr().out


def shown_options(command: click.Command) -> list[str]:
    found = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    return [param.opts[-1] for param in found]


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_many_options_are_listed_under_headings_and_few_are_not(capsys, name):
    command = cli.commands[name]
    text, options = help_of(capsys, name), shown_options(command)
    headings = HEADING.findall(text.partition("Examples:")[0])
    if len(options) + 1 <= LEAST:  # 1 for --help
        assert headings in (["Options"], [])
    else:
        assert headings[-1] == REST and len(headings) > 3
        assert headings[:-1] == [title for title, _ in GROUPS if title in headings]
        sections = HEADING.split(text)[2::2]
        counts = [len(re.findall(r"^  -", section, re.MULTILINE)) for section in sections]
        assert max(counts) <= 14 and counts[-1] <= 8
        # A single option gets no heading of its own.
        assert min(counts[:-1]) >= 2
    for option in options:
        assert len(re.findall(rf"^  .*{re.escape(option)}\b", text, re.MULTILINE)) >= 1


def test_an_option_is_under_one_heading():
    names = [name for _, names in GROUPS for name in names.split()]
    assert len(names) == len(set(names))
    used = {param.name for command in cli.commands.values() for param in command.params}
    assert set(names) <= used
