"""`hotsplit help COMMAND` groups many options under headings and lists every option."""

import re

import click
import pytest

from hotsplit.cli import main
from hotsplit.commands.all_commands import cli
from hotsplit.commands.help.groups import GROUPS, LEAST, REST

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
