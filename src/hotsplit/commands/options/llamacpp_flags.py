"""Translates options of llama.cpp and PowerInfer on our command lines: those with a counterpart are
accepted, other known ones are explained in one line, and so is a memory budget given to a command
that has none.

A command's own options pass unchanged, including those with llama.cpp's spelling (-c, -n, --temp,
-ctk)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

Values = Literal["none", "one", "optional"]
TEXT_COMMANDS = ("generate", "chat", "run", "serve")
MODEL_COMMANDS = (*TEXT_COMMANDS, "eval", "profile", "advise", "bench")
WORDS = ("on", "off", "auto", "all", "0", "1", "-1")  # taken as the value if one is optional
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # of NVIDIA's driver on Linux and in WSL
ALL_LAYERS = 99  # the number of layers that conventionally means "everything on the GPU"


@dataclass(frozen=True, kw_only=True)
class Flag:
    """An option of another program or of another command, and what it does in `commands`.

    "same": it is already what we do. "note": it does not change the generated text, and is dropped
    with a note. "refuse": `text` says what to do instead. "rename": `text` is our spelling; if it
    is empty, the value becomes an argument. "layers": a number of GPU layers. "device": a device
    name."""

    does: Literal["same", "note", "refuse", "rename", "layers", "device"]
    values: Values = "none"
    commands: tuple[str, ...] = TEXT_COMMANDS
    text: str = ""
    whose: str = "llama.cpp's"


def _note(text: str, values: Values = "none") -> Flag:
    return Flag(does="note", values=values, commands=MODEL_COMMANDS, text=text)


def _refuse(text: str, commands: tuple[str, ...] = TEXT_COMMANDS) -> Flag:
    return Flag(does="refuse", text=text, commands=commands)


_NUMBERS = (click.types.IntParamType, click.types.FloatParamType)
_DEVICE = re.compile(r"^CUDA(?=[0-9]+$)")
_PLAN = (
    "a plan decides what is on the GPU: hotsplit solve MODEL --profile P --machine M"
    " --vram-budget 8GiB -o PLAN, then --split PLAN; without a plan, everything is on the GPU if there"
    " is one"
)
_RUN_PLANS = (
    "run makes the plan itself: leave the option out, or give --vram SIZE for less of the GPU, and"
    " --device cuda:N for another one"
)
_BUDGET = (
    "hotsplit run MODEL --vram 8GiB does everything within a budget; here the plan decides:"
    " hotsplit solve MODEL --profile P --machine M --vram-budget 8GiB -o PLAN, then --split PLAN"
)
_MEMORY = "weights are copied into memory if they fit, and stay in the mapped file otherwise"
_PASS = "the number of tokens in a pass is chosen automatically"
_LOG = "messages go to stderr, the text to stdout"
_ROPE = (
    "rotary embeddings are computed as the model file says; --rope-scaling and --rope-scale change"
    " that"
)
_TALKS = ("chat", "run")
# A name may appear several times, for different commands; the first match counts.
TABLE: tuple[tuple[str, Flag], ...] = (
    ("-m --model", Flag(does="rename", values="one", commands=MODEL_COMMANDS)),
    ("--predict", Flag(does="rename", values="one", text="--n-predict")),
    ("--chat-template-file", Flag(does="rename", values="one", text="--chat-template")),
    ("-cnv --conversation -i --interactive -if --interactive-first",
     Flag(does="same", commands=_TALKS)),
    ("-cnv --conversation -i --interactive -if --interactive-first",
     _refuse("a conversation is a command of its own: hotsplit chat MODEL", ("generate",))),
    ("-no-cnv --no-conversation", Flag(does="same", commands=("generate", "run"))),
    ("-no-cnv --no-conversation",
     _refuse("to continue a text: hotsplit generate MODEL -p TEXT", ("chat",))),
    ("-o --output", _refuse("the report's form is --json or --md", ("bench",))),
    ("-pg", _refuse("a prompt and the tokens after it are two tests: -p N -n M -d N", ("bench",))),
    ("-st --single-turn", _refuse("for one answer: hotsplit generate MODEL --chat -p TEXT")),
    ("--jinja --no-context-shift --no-escape --no-warmup", Flag(does="same")),
    ("-cb --cont-batching --metrics", Flag(does="same", commands=("serve",))),
    ("-fa --flash-attn", Flag(does="same", values="optional", commands=MODEL_COMMANDS,
                              text="attention never stores all scores")),
    ("-ngl --gpu-layers --n-gpu-layers",
     Flag(does="layers", values="one", commands=MODEL_COMMANDS)),
    ("-ngl --gpu-layers --n-gpu-layers",
     _refuse("GPU memory is given in bytes, not in layers: --vram-budget 8GiB", ("solve",))),
    ("-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ts --tensor-split -sm --split-mode"
     " -mg --main-gpu -nkvo --no-kv-offload", _refuse(_RUN_PLANS, ("run",))),
    ("-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ts --tensor-split -sm --split-mode"
     " -mg --main-gpu", _refuse(_PLAN, MODEL_COMMANDS)),
    ("-vb --vram --vram-budget",
     Flag(does="refuse", commands=("eval",), text=_BUDGET,
          whose="an option of commands that run a model")),
    ("--reset-gpu-index --disable-gpu-index",
     Flag(does="refuse", commands=MODEL_COMMANDS, whose="PowerInfer's",
          text="a plan is used only if --split names it, and solve --force replaces it")),
    ("-dev", Flag(does="device", values="one", commands=MODEL_COMMANDS)),
    ("-b --batch-size -ub --ubatch-size", _note(_PASS, "one")),
    ("-tb --threads-batch", _note("prompts use as many threads as generation does (-t)", "one")),
    ("--mlock", _note(f"{_MEMORY}; they are not locked there")),
    ("--mmap --no-mmap", _note(_MEMORY)),
    ("-nr --no-repack --repack", _note("weights are arranged in memory for decoding")),
    ("--numa --prio --poll -C --cpu-mask -Cr --cpu-range --cpu-strict",
     _note("thread placement is left to the system", "one")),
    ("--no-perf --perf --show-timings", _note("speeds are in the closing line")),
    ("-co --color --simple-io --log-disable --log-colors --log-prefix --log-timestamps",
     _note(_LOG)),
    ("--warmup", _note("only bench has warm-ups, and always")),
    ("-lv --verbosity", _note(_LOG, "one")),
    ("-e --escape", _refuse("write the characters themselves: -p $'a\\nb' or -f FILE")),
    ("-mli --multiline-input", _refuse("Alt-Enter, or a backslash before Enter, makes a new line")),
    ("-hf -hfr --hf-repo", Flag(does="rename", values="one", commands=(*MODEL_COMMANDS, "convert"))),
    ("-hf -hfr --hf-repo -mu --model-url -dr --docker-repo",
     _refuse("fetch and convert it first: hotsplit convert ORG/NAME -o model.gguf")),
    ("--lora --lora-scaled --control-vector",
     _refuse("adapters are not supported; merge them into the checkpoint and convert that")),
    ("--rope-freq-base --rope-freq-scale --yarn-orig-ctx"
     " --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast", _refuse(_ROPE)),
    ("--tfs --tfs-z", _refuse("there is no tail-free sampling (llama.cpp has dropped it, too);"
                              " --min-p cuts the tail")),
    ("--penalize-nl", _refuse("the newline is penalised like any token; leave the option out")),
    ("-nkvo --no-kv-offload", _refuse(_PLAN)),
    ("--prompt-cache-all --prompt-cache-ro",
     _refuse("--prompt-cache keeps only the prompt, never the text after it; leave it out")),
    ("--api-key-file", _refuse("put the key into the variable HOTSPLIT_API_KEY", ("serve",))),
    ("--embedding --embeddings --rerank --reranking",
     _refuse("this server only generates text", ("serve",))),
    ("--ssl-key-file --ssl-cert-file",
     _refuse("put a proxy in front of the server for TLS (docs/serve.md)", ("serve",))),
    ("-nocb --no-cont-batching", _refuse("-np 1 answers one request at a time", ("serve",))),
)  # fmt: skip


def flag_of(name: str, command: str) -> Flag | None:
    """The meaning of llama.cpp's option in a command; None if it has none."""
    for names, flag in TABLE:
        if name in names.split() and command in flag.commands:
            return flag
    return None


def translate(ctx: click.Context, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with llama.cpp's options translated, and notes on options without effect.

    Raises click's UsageError for an option of llama.cpp that the table refuses."""
    own = {name: param for param in ctx.command.params if isinstance(param, click.Option)
           for name in (*param.opts, *param.secondary_opts)}  # fmt: skip
    rest, taken, notes = list(arguments), list[str](), list[str]()
    while rest:
        argument = rest.pop(0)
        name, has_value, value = argument.partition("=")
        if argument == "--":
            taken += [argument, *rest]
            break
        flag = None if name in own else flag_of(name, ctx.command.name or "")
        if flag is None:
            _refuse_a_cluster(ctx, argument, own)
            taken.append(argument)
            if not has_value and rest and _takes_value(own.get(name), rest[0]):
                _check_value(ctx, own[name], argument, rest[0], own)
                taken.append(rest.pop(0))
            continue
        values = [value] if has_value else _values(flag, rest)
        try:
            taken += _translated(name, flag, values, notes, ctx.command.name or "")
        except click.UsageError as error:
            error.ctx = ctx
            raise
    return taken, notes


def _translated(
    name: str, flag: Flag, values: list[str], notes: list[str], command: str
) -> list[str]:
    if flag.does == "refuse":
        raise click.UsageError(f"{name} is {flag.whose}: {flag.text}")
    if flag.does == "note" or values in (["off"], ["0"]) and flag.values == "optional":
        notes.append(f"note: {' '.join([name, *values])} has no effect: {flag.text}")
    if flag.does == "layers":
        return _gpu_layers(name, values, notes, command)
    if flag.does == "device":
        return ["--device", *(_DEVICE.sub("cuda:", v) if v != "none" else "cpu" for v in values)]
    if flag.does == "rename":
        return [flag.text, *values] if flag.text else values
    return []


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
    how = (
        "GPU memory is given in bytes, not in layers: --vram 8GiB" if command == "run" else _BUDGET
    )
    raise click.UsageError(f"{name} {text} is llama.cpp's: {how}")


def _values(flag: Flag, rest: list[str]) -> list[str]:
    """Takes the flag's values out of the arguments that follow it."""
    if not rest or flag.values == "none" or flag.does == "refuse":
        return []
    return [rest.pop(0)] if flag.values == "one" or rest[0] in WORDS else []


def _takes_value(option: click.Option | None, following: str) -> bool:
    """True if an option takes the argument that follows it; as in click, an option whose value may
    be left out does not take another option."""
    if option is None or option.is_flag or option.count:
        return False
    return not (option._flag_needs_value and following[:1] == "-" and len(following) > 1)


def _check_value(
    ctx: click.Context, option: click.Option, name: str, value: str, own: Mapping[str, click.Option]
) -> None:
    """Raises BadOptionUsage if the value of an option is the next option; texts may be anything."""
    if value in own and not isinstance(option.type, click.types.StringParamType):
        raise click.BadOptionUsage(name, f"{name} needs a value, and {value} comes next", ctx)


def _refuse_a_cluster(ctx: click.Context, argument: str, own: Mapping[str, click.Option]) -> None:
    """Raises NoSuchOption for e.g. -nkv, which click would read as -n with the value kv, and for -hff,
    which it would read as -h."""
    option, name = own.get(argument[:2]), argument.partition("=")[0]
    is_word = re.fullmatch(r"-[A-Za-z][A-Za-z][A-Za-z-]*", name) and name not in own
    is_help = argument[:2] in ctx.help_option_names
    is_number = option is not None and (option.is_flag or isinstance(option.type, _NUMBERS))
    if is_word and (is_help or is_number):
        raise click.NoSuchOption(argument, possibilities=[*own], ctx=ctx)
