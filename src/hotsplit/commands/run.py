"""`hotsplit run`: from a checkpoint, a name on the hub or a GGUF to tokens.

The stages are chosen, run and cached by the package hotsplit.run; texts are written by the
command `generate`, conversations held by `chat`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.chat import talk
from hotsplit.commands.generate import check_output_options, endings_of, text_options, write
from hotsplit.commands.options.constraints import NAMES, ConstraintOptions, constraint_of
from hotsplit.commands.options.outtype import OUTTYPE
from hotsplit.commands.options.preparation import (
    announce,
    drafting,
    needs_preparation,
    said_when_ready,
    tokenizer_option,
    vram_option,
    yes_option,
)
from hotsplit.commands.options.sampling import decoding_options, take_sampling_options
from hotsplit.commands.options.shared import (
    FILE,
    FileCommand,
    context_option,
    joined,
    json_option,
    running_options,
    say,
    take_engine_options,
)
from hotsplit.commands.options.speculation import take_speculation_options
from hotsplit.commands.terminal.prompts import (
    chat_options,
    note_unread,
    prompts_of,
    system_message,
    template_variables,
)
from hotsplit.errors import HotsplitError

if TYPE_CHECKING:
    from hotsplit.run.prepare import Ready
    from hotsplit.run.stages import Job

ANSWER_TOKENS, TEXT_TOKENS = -1, 128  # defaults of -n
_PROMPTS = ("prompt", "prompt_file", "prompts_file")
# Options for a text, which a conversation does not take.
_WRITE = (*_PROMPTS, "keep", "num_logprobs", "is_shown", "json_lines", "is_chat", "as_json")
_own_options = joined(
    vram_option("most of what is free on the first, or on --device"),
    click.option(
        "--chat",
        "is_chat",
        is_flag=True,
        help="With a prompt: treat it as a message and print the answer. Without one, run"
        " always holds a conversation.",
    ),
    chat_options,
    click.option(
        "-n",
        "--max-tokens",
        "--n-predict",
        "max_tokens",
        type=int,
        help="Maximum tokens to generate. [default: 128 for a text; for an answer, as many as"
        " the context has room for]",
    ),
    context_option("Context length in tokens. [default: the model's, up to 4,096]"),
    click.option(
        "--corpus",
        "corpora",
        type=FILE,
        multiple=True,
        help="Text like yours to profile on, if profiling pays off; may be repeated. [default: a"
        " text in the package]",
    ),
    click.option(
        "--tokens",
        type=int,
        help="Tokens to profile on. [default: as many as take at most a quarter of an hour]",
    ),
    click.option(
        "--outtype", type=OUTTYPE, help="Type of the matrices. [default: one that fits into memory]"
    ),
    tokenizer_option,
    click.option(
        "--activation",
        metavar="NAME",
        help="The activation, which other programs' GGUF files do not record: relu,"
        " fatrelu=0.01, ...",
    ),
    click.option(
        "--verify/--no-verify",
        "is_verified",
        default=None,
        help="Compare a converted model with its source. [default: if it takes less than a minute]",
    ),
    yes_option,
)


@click.command(cls=FileCommand, short_help="Prepare a model, then continue a text or chat.")
@click.argument("source", type=FILE)
@text_options
@_own_options
@decoding_options
@running_options
@json_option
def run(
    source: Path,
    vram: tuple[int, ...],
    corpora: tuple[Path, ...],
    tokens: int | None,
    outtype: Any,
    activation: str | None,
    tokenizer: Path | None,
    is_verified: bool,
    yes: bool,
    **options: Any,
) -> None:
    """Prepare a model with all that it needs, then continue a text or chat.

    SOURCE is a checkpoint folder, the name of a checkpoint on the hub (org/name) or any GGUF.
    Everything made on the way is cached for the next run: hotsplit cache list."""
    _check_options(options, corpora)
    from hotsplit.run.cache_folder import Cache
    from hotsplit.run.choice import Wishes
    from hotsplit.run.prepare import estimate_of, job_of, prepare, summary
    from hotsplit.run.source import check_tokenizer, look_at
    from hotsplit.runtime.kernels.threads import use_threads

    use_threads(options["threads"])
    engine = take_engine_options(dict(options))
    wishes = Wishes(vram=vram or None, outtype=outtype, tokens=tokens, engine=engine)
    with drafting(options, yes=yes), Cache.open(say) as cache:
        given = look_at(source, activation, cache.folder / "planned.gguf", tokenizer)
        job = job_of(given, wishes, corpora, cache, is_verified=is_verified)
        _check_model(job, options)
        planned = estimate_of(job)
        if planned.works:
            check_tokenizer(given, job.choice.model)
        announce(job, planned, yes=yes)
        ready = prepare(job, planned)
        said_when_ready(ready)
        more = {"run": summary(job, planned) | {"prepared_s": ready.seconds, "made": ready.made}}
        _speak(job, ready, options, more)


def _speak(job: "Job", ready: "Ready", options: dict[str, Any], more: dict[str, Any]) -> None:
    """Writes the text or holds the conversation."""
    options |= {
        "model": ready.model,
        "split": ready.split,
        "mode": ready.mode,
        "device": ready.device,
        "context_length": ready.context_length,
        "cpu_ffn": False,
    }
    if _has_prompt(options):
        write(prompt_cache=None, force=False, more=more, **options)
        return
    for name in _WRITE:
        del options[name]
    talk(name=job.source.name, **options)


# ---- checks before anything is made: of the options alone, then of those that depend on the model


def _has_prompt(options: dict[str, Any]) -> bool:
    """True if a prompt is given; otherwise there will be a conversation."""
    return any(options[name] is not None for name in _PROMPTS)


def _check_options(options: dict[str, Any], corpora: Sequence[Path]) -> None:
    """Checks the options without the model; fills in the default of -n and
    reads the prompt, possibly from stdin."""
    take_sampling_options(dict(options))
    _, model_draft = take_speculation_options(dict(options))
    ConstraintOptions(**{name: options[name] for name in NAMES})
    drafts = [] if model_draft is None or needs_preparation(model_draft) else [model_draft]
    for path in (*corpora, *drafts):
        if str(path) != "-" and not path.exists():
            raise HotsplitError(f"{path}: no such file or folder")
    if options["max_tokens"] is None:
        is_answer = options["is_chat"] or not _has_prompt(options)
        options["max_tokens"] = ANSWER_TOKENS if is_answer else TEXT_TOKENS
    endings_of(dict(options))
    if _has_prompt(options):
        _check_text(options)
    elif options["as_json"] or options["json_lines"]:
        raise click.UsageError("--json and --json-lines are for a text: give -p TEXT.")
    elif options["num_logprobs"] is not None:
        raise click.UsageError("--logprobs is for a text: give -p TEXT.")
    system_message(options["system"], options["system_file"])
    template_variables(options["variables"])
    from hotsplit.runtime.resolved_options import device_of  # imports torch

    device_of(options["device"])


def _check_text(options: dict[str, Any]) -> None:
    is_chat = options["is_chat"]
    note_unread(options["prompt"], options["prompt_file"])
    prompts = prompts_of(*(options[name] for name in _PROMPTS))
    if options["prompts_file"] is None:
        options |= {"prompt": prompts[0], "prompt_file": None}
    if options["prompts_file"] is not None and is_chat:
        raise click.UsageError("--chat is for one text: leave --prompts out.")
    if not is_chat and options["system_file"] is not None:
        raise click.UsageError("--system-file is for --chat.")
    check_output_options(
        options["num_logprobs"],
        is_json=options["as_json"] or options["json_lines"],
        is_chat=is_chat,
        system=options["system"],
        template=options["template"],
    )


def _check_model(job: "Job", options: dict[str, Any]) -> None:
    """Checks the options that depend on the model: whether it can hold a conversation, the chat
    template, and the constraint."""
    from hotsplit.runtime.text.chat_template import chat_template_of, has_template
    from hotsplit.runtime.text.codec import TextCodec

    model, template = job.choice.model, options["template"]
    talks = options["is_chat"] or not _has_prompt(options)
    if not _has_prompt(options) and template is None and not has_template(model):
        raise HotsplitError(
            f"{job.source.name}: has no chat template, so give it a text to continue (-p TEXT),"
            " or a template (--chat-template NAME)"
        )
    if options["prompt"] is not None and not options["is_chat"] and has_template(model):
        say("note: the text is continued; --chat has this chat model answer it as a message")
    constraint = ConstraintOptions(**{name: options[name] for name in NAMES})
    if template is None and constraint == ConstraintOptions():
        return
    codec = TextCodec.of(model)
    constraint_of(constraint, codec)
    if talks and template is not None:
        chat_template_of(model, codec, template)
