"""Options, sizes and output shared by several commands."""

import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click

from hotsplit.commands.help.groups import examples_of, write_options
from hotsplit.commands.options.kept_files import with_copy
from hotsplit.commands.options.llamacpp_flags import translate
from hotsplit.errors import HotsplitError
from hotsplit.files.outputs import check_apart
from hotsplit.files.steady import reading
from hotsplit.files.typed import escaped
from hotsplit.model.modes import MODES
from hotsplit.options.engine_config import EngineConfig, check_device, check_threads
from hotsplit.system.sizes import UNITS, parse_bytes


class OutputPath(click.Path):
    """A file that the command writes; every other path but a FolderPath is an input. With
    `endings`, names with the ending of another kind of file are refused."""

    def __init__(self, *endings: str) -> None:
        super().__init__(path_type=Path)
        self.endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        ending = Path(os.fsdecode(path)).suffix
        if self.endings and ending in ENDINGS and ending not in self.endings:
            self.fail(
                f"{os.fsdecode(path)} is named like another kind of file; wanted a name that ends"
                f" in {' or '.join(self.endings)}",
                param,
                ctx,
            )
        return path


class FolderPath(click.Path):
    """A folder in which the command writes files; the command checks these itself."""


WIDEST = 100  # columns of a note
_COMMAND = ": hotsplit "
FILE = click.Path(path_type=Path)
OUTPUT = OutputPath()
ENDINGS = (".gguf", ".safetensors", ".json")  # of files that commands write
FOLDER = FolderPath(path_type=Path)


def _plain(kind: click.ParamType) -> click.ParamType:
    """The type of an option; a number's accepts only the digits 0 to 9, not the others that
    Python's int and float take."""
    if not isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return kind
    plain = copy(kind)

    def convert(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.isascii():
            plain.fail(f"{value!r} is not a number in plain digits (0 to 9)", param, ctx)
        return kind.convert(value, param, ctx)

    plain.convert = convert  # type: ignore[method-assign]
    return plain


class FileCommand(click.Command):
    """A command that refuses an output that is also an input or another output, under any name, and
    writes none if an input changes meanwhile. A command that derives further file names, next to an
    output or in a folder, checks these itself (outputs.check_outputs)."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.epilog = self.epilog or examples_of(self.name)
        for param in self.params:
            param.type = _plain(param.type)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # true while the shell completes a line
            args, notes = translate(ctx, args)
            for note in notes:
                say(note)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            advice = self._advice(error, ctx.params)
            raise error if advice is None else click.UsageError(advice, ctx) from error

    def _advice(self, error: click.UsageError, given: Mapping[str, Any]) -> str | None:
        """Advice on arguments that no parameter takes; None if there is none to give."""
        found = re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", error.message, re.DOTALL)
        if found is None:
            return None
        if len(found[1]) > 1 and found[1].upper() in UNITS:
            return f"a size is one word: write 8{found[1]}, not 8 {found[1]}"
        if any(param.name == "prompt" for param in self.params):
            text = shlex.quote(found[1])[:200]
            if any(given.get(name) for name in ("prompt", "prompt_file", "prompts_file")):
                return f"there is a model and a text already: leave {text} out"
            return f"a text is given with -p: -p {text}"
        return None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_options(self, ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        inputs, outputs = paths_of(self, ctx.params)
        if os.environ.get("RANK", "0") == "0":  # one of torchrun's processes checks for all
            check_apart(outputs, inputs)
        makes = any(isinstance(p.type, OutputPath | FolderPath) for p in self.params)
        new = [] if ctx.params.get("force") else [p for p in outputs if not os.path.lexists(p)]
        with reading(*inputs, new=new) if makes else nullcontext():
            try:
                return super().invoke(ctx)
            except HotsplitError as error:
                model = ctx.params.get("model")
                if model is None:
                    raise
                raise with_copy(error, ctx.command_path, model) from error.__cause__


def paths_of(command: click.Command, given: Mapping[str, Any]) -> tuple[list[Path], list[Path]]:
    """The inputs and outputs given on the command line."""
    inputs: list[Path] = []
    outputs: list[Path] = []
    for param in command.params:
        if not isinstance(param.type, click.Path) or isinstance(param.type, FolderPath):
            continue
        value = given.get(param.name or "")
        values = value if isinstance(value, tuple) else (value,)
        to = outputs if isinstance(param.type, OutputPath) else inputs
        to += [path for path in values if path is not None and str(path) != "-"]
    return inputs, outputs


class Parsed(click.ParamType):
    """Values that `parse` makes of texts; it may raise HotsplitError. Defaults are values."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value) if isinstance(value, str) else value
        except HotsplitError as error:
            self.fail(str(error), param, ctx)


# A number of bytes, e.g. 8GiB, 512MiB or 8 (GiB, as in SparkInfer's --vram-budget).
SIZE = Parsed("size", parse_bytes)


def joined(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator that adds all of these options, in this order."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_KINDS: dict[str, Any] = {
    "text": str,
    "int": int,
    "float": float,
    "file": FILE,
    "output": OUTPUT,
    "size": SIZE,
}


def option_table(rows: str, **kinds: click.ParamType) -> Callable[[Any], Any]:
    """A decorator that adds the options of a table: spellings | kind | help. An indented line
    continues the row before it. The kind is `NAME: KIND METAVAR = DEFAULT`, of which only KIND must
    be there: a flag, one of _KINDS, or of `kinds`; "!" behind it: required, "*": may be repeated. A
    NAME of EngineConfig's fields has its default."""
    return joined(
        *(_option(row, kinds) for row in rows.replace("\n    ", " ").strip().splitlines())
    )


def _option(row: str, kinds: Mapping[str, click.ParamType]) -> Callable[[Any], Any]:
    spellings, words, text = row.split(" | ", 2)
    words, _, default = words.partition(" = ")
    name, mark, words = words.rpartition(": ")
    kind, _, metavar = words.partition(" ")
    attributes: dict[str, Any] = {"help": text, "metavar": metavar or None}
    if kind == "flag":
        attributes["is_flag"] = True
    else:
        of = kinds.get(kind.rstrip("!*")) or _KINDS[kind.rstrip("!*")]
        attributes |= {"type": of, "required": "!" in kind, "multiple": "*" in kind}
    if default:
        is_number = attributes["type"] in (int, float)
        value = attributes["type"](default) if is_number else default
        attributes |= {"default": value, "show_default": True}
    elif hasattr(EngineConfig, name):
        attributes["default"] = getattr(EngineConfig, name)
    return click.option(*spellings.split(), *([name] if mark else []), **attributes)


split_option = option_table(
    "-spif-ms --split --sparkinfer-model-split | split: file | Plan made by hotsplit solve."
)
force_option = option_table("--force | flag | Overwrite existing files.")
json_option = option_table("--json | as_json: flag | Print the report as a JSON object on stdout.")
report_options = joined(force_option, json_option)
host_budget_option = option_table(
    "--ram | host_budget_bytes: size | Main memory to use, e.g. 16GiB. [default: all of it]"
)

ram_option = option_table(
    """
--ram | ram_bytes: size | Main memory that the process takes at most, e.g. 16GiB; experts of a
    mixture that do not fit are read from the drive. [default: what is free]
"""
)


def _checked(check: Callable[[Any], None]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that refuses a wrong value before the command imports anything."""

    def checked(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        check(value)
        return value

    return checked


threads_option = click.option(
    "-t",
    "--threads",
    type=int,
    callback=_checked(check_threads),
    help="CPU threads. [default: one per physical core, within a container's CPU quota; beside"
    " a GPU one fewer if there are more than two]",
)


def engine_option(name: str, *flags: str, **attributes: Any) -> Callable[[Any], Any]:
    """An option for a field of EngineConfig, with that field's default."""
    return click.option(*flags, name, default=getattr(EngineConfig, name), **attributes)


def take_engine_options(options: dict[str, Any]) -> EngineConfig:
    """Takes the fields of EngineConfig out of the options. Raises HotsplitError like it."""
    names = [field.name for field in fields(EngineConfig) if field.name in options]
    return EngineConfig(**{name: options.pop(name) for name in names})


device_option = engine_option(
    "device",
    "--device",
    callback=_checked(check_device),
    help="cpu, cuda or cuda:N. [default: CUDA if available]",
)
cpu_ffn_option = option_table(
    "-cffn --cpu-ffn | cpu_ffn: flag | Without a plan: all neurons on the CPU, the rest on the GPU."
)
mode_option = option_table(
    """
--mode | mode: mode | How feed-forward layers are computed. [default: the plan's mode; in a new plan
    the fastest within --max-loss, without one that which reads least, by the file's record]
""",
    mode=click.Choice(MODES),
)
max_loss_option = engine_option(
    "max_loss",
    "--max-loss",
    type=float,
    show_default=True,
    help="Largest rise in perplexity of an automatically chosen mode; 0.01 is 1 %.",
)


placement_options = joined(split_option, cpu_ffn_option)
running_options = joined(mode_option, max_loss_option, threads_option, device_option)


def context_option(help_text: str) -> Callable[[Any], Any]:
    """The context length, whose meaning the command describes."""
    return engine_option(
        "context_length", "-c", "--context", "--ctx-size", type=int, help=help_text
    )


def given(ctx: click.Context) -> list[click.Parameter]:
    """The parameters that are given on the command line."""
    source = click.core.ParameterSource.COMMANDLINE
    return [p for p in ctx.command.params if ctx.get_parameter_source(str(p.name)) is source]


def texts_and_model(model: Path, texts: Iterable[Path]) -> list[Path]:
    """The input files: the model, and each text, including those in folders."""
    from hotsplit.profile.corpus.sources import STDIN, find_sources

    given = [path for path in texts if path != STDIN and path.exists()]
    folders = [path for path in given if path.is_dir()]
    found = [source.path for folder in folders for source in find_sources([folder], "text")]
    return [model, *given, *found]


def say(line: str) -> None:
    """Writes a line, or a table of several, for people to stderr, wrapped on a terminal."""
    if sys.stderr is not None:
        line = "\n".join(map(escaped, line.split("\n")))
        is_terminal = sys.stderr.isatty()
        width = min(WIDEST, shutil.get_terminal_size().columns)
        print(wrapped(line, width) if is_terminal else line, file=sys.stderr, flush=True)  # noqa: T201


def wrapped(line: str, width: int) -> str:
    """A long line, wrapped; tables are left as they are, and a command at the end gets an unbroken
    line of its own, so that it can be copied."""
    if len(line) <= width or "  " in line.strip() or "\n" in line:
        return line
    words, mark, command = line.rpartition(_COMMAND)
    if not mark:
        words, command = line, ""
    lines = textwrap.wrap(
        words + mark[:1],
        width,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([*lines, *([f"  {mark[2:]}{command}"] if mark else [])])


def finish(report: Any, as_json: bool, lines: list[str]) -> None:
    """Prints the report on stdout as JSON, or its short form on stderr."""
    if as_json:
        content = report if isinstance(report, dict) else asdict(report)
        click.echo(json.dumps(content, default=str))
    else:
        for line in lines:
            say(line)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def speed_lines(rows: Sequence[tuple[str, float, str]]) -> list[str]:
    """Speeds in tokens a second as lines, from (name, seconds of a token, remark)."""
    width = max(24, *(len(name) for name, *_ in rows))
    return [
        f"  {name:{width}} {1 / seconds:>9,.1f} tokens/s" + f"  ({remark})" * bool(remark)
        for name, seconds, remark in rows
    ]


def mean(values: list[float] | tuple[float, ...]) -> float:
    return sum(values) / len(values)
