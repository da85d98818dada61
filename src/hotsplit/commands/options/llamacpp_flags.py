"""Translates options of llama.cpp and PowerInfer on our command lines, by the table of their
meanings: those with a counterpart are accepted, other known ones are explained in one line, and so
is a memory budget given to a command that has none.

A command's own options pass unchanged, including those with llama.cpp's spelling (-c, -n, --temp,
-ctk)."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from hotsplit.commands.options.llamacpp_table import BUDGET, PREPARING, Flag, flag_of

WORDS = ("on", "off", "auto", "all", "0", "1", "-1")  # taken as the value if one is optional
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # of NVIDIA's driver on Linux and in WSL
ALL_LAYERS = 99  # the number of layers that conventionally means "everything on the GPU"
VARIABLES = "--chat-template-kwargs"

_NUMBERS = (click.types.IntParamType, click.types.FloatParamType)
_DEVICE = re.compile(r"^CUDA(?=[0-9]+$)")


@dataclass
class _Line:
    """What has been read of a command line. `models`: by an option or as an argument."""

    command: str
    taken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    file: str | None = None  # in the repository that is the model


def translate(ctx: click.Context, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with llama.cpp's options translated, and notes on options without effect.
    Raises click's UsageError for an option of llama.cpp that the table refuses, for an option in
    place of another's value, and for two models."""
    own = {
        name: param
        for param in ctx.command.params
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }
    rest, line = list(arguments), _Line(ctx.command.name or "")
    try:
        while rest:
            argument = rest.pop(0)
            name, has_value, value = argument.partition("=")
            if argument == "--":
                line.taken += [argument, *rest]
                break
            flag = None if name in own else flag_of(name, line.command)
            if flag is not None:
                _add(line, name, flag, [value] if has_value else _values(flag, rest))
                continue
            _refuse_a_cluster(ctx, argument, own)
            line.taken.append(argument)
            if not has_value and rest and _takes_value(own.get(name), rest[0]):
                if rest[0] in own and not isinstance(own[name].type, click.types.StringParamType):
                    needed = f"{argument} needs a value, and {rest[0]} comes next"
                    raise click.BadOptionUsage(argument, needed)
                line.taken.append(rest.pop(0))
            elif not argument.startswith("-"):
                line.models.append(argument)
        return _with_model(line), line.notes
    except click.UsageError as error:
        error.ctx = ctx
        raise


def _with_model(line: _Line) -> list[str]:
    """The arguments, with the file that -hff names in the repository of -hf."""
    if line.file is None:
        return line.taken
    if not line.models:
        raise click.UsageError(f"-hff {line.file} is a file of a repository: -hf ORG/NAME")
    repository = line.models[0]
    name = repository.partition(":")[0] if "://" not in repository else repository
    return [f"{name}:{line.file}" if each == repository else each for each in line.taken]


def _add(line: _Line, name: str, flag: Flag, values: list[str]) -> None:
    if (values or [""])[0] in flag.usual:
        return
    if flag.does == "refuse":
        raise click.UsageError(f"{name} is {flag.whose}: {flag.text}")
    if flag.does == "note":
        line.notes.append(f"note: {' '.join([name, *values])} has no effect: {flag.text}")
    elif flag.does == "model":
        if line.models:
            raise click.UsageError(
                f"there are two models, {line.models[0]} and {' '.join(values)}: leave one out"
            )
        line.models += values
        line.taken[:0] = values  # at the end it might be taken for an optional value before it
    elif flag.does == "file":
        line.file = " ".join(values)
    elif flag.does == "layers":
        line.taken += _gpu_layers(name, values, line.notes, line.command)
    elif flag.does == "device":
        devices = [_DEVICE.sub("cuda:", v) if v != "none" else "cpu" for v in values]
        line.taken += ["--device", *devices]
    elif flag.does == "thinking":
        line.taken += [VARIABLES, _variable(name, flag, *values)]
    elif flag.does == "each":
        parts = [part.strip() for value in values for part in value.split(",")]
        line.taken += [word for part in parts for word in (flag.text, part)]
    elif flag.does == "text":
        line.taken += [flag.text, f"@{' '.join(values)}"]
    elif flag.does != "same":
        assert flag.does == "rename", flag
        line.taken += [flag.text, *values]


def _variable(name: str, flag: Flag, value: str = "") -> str:
    """The variable of chat templates that an option for thoughts stands for, as JSON."""
    if name == "--reasoning-effort":
        return json.dumps({"reasoning_effort": value})
    if value not in ("on", "off", "0") or (name == "--reasoning-budget") != (value == "0"):
        raise click.UsageError(f"{name} {value[:20]} is {flag.whose}: {flag.text}")
    return json.dumps({"enable_thinking": value == "on"})


def _gpu_layers(name: str, values: list[str], notes: list[str], command: str) -> list[str]:
    """Arguments for a number of GPU layers: 0 means the CPU, all of them the default, with a note
    where there is no GPU; for a number in between, raises UsageError, since that takes a plan."""
    text = values[0] if values else ""
    if text == "0":
        return ["--device", "cpu"]
    if text in ("all", "auto", "-1") or (
        text.isascii() and text.isdecimal() and int(text[:9]) >= ALL_LAYERS
    ):
        if not any(Path(device).exists() for device in GPU_DEVICES):
            notes.append(f"note: {name} {text[:9]} has no effect: there is no NVIDIA GPU here")
        return []
    how = BUDGET
    if command in ("run", *PREPARING):
        how = (
            "GPU memory is given in bytes, not in layers: --vram 8GiB makes a plan, --split PLAN"
            " takes one"
        )
    raise click.UsageError(f"{name} {text} is llama.cpp's: {how}")


def _values(flag: Flag, rest: list[str]) -> list[str]:
    if not rest or flag.values == "none" or (flag.values == "optional" and rest[0] not in WORDS):
        return []
    return [rest.pop(0)]


def _takes_value(option: click.Option | None, following: str) -> bool:
    """An option whose value may be left out, as in click, does not take another option."""
    if option is None or option.is_flag or option.count:
        return False
    return not (option._flag_needs_value and following[:1] == "-" and len(following) > 1)


def _refuse_a_cluster(ctx: click.Context, argument: str, own: Mapping[str, click.Option]) -> None:
    """Raises NoSuchOption for e.g. -nkv, which click would read as -n kv, and -hff, as -h."""
    option, name = own.get(argument[:2]), argument.partition("=")[0]
    is_word = re.fullmatch(r"-[A-Za-z][A-Za-z][A-Za-z-]*", name) and name not in own
    is_help = argument[:2] in ctx.help_option_names
    is_number = option is not None and (option.is_flag or isinstance(option.type, _NUMBERS))
    if is_word and (is_help or is_number):
        raise click.NoSuchOption(argument, possibilities=[*own], ctx=ctx)
