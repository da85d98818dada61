"""Checks of `hotsplit run` before it makes anything: first of the options alone, then of those
that depend on the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.generate import check_output_options, endings_of
from hotsplit.commands.options.chat import system_message, template_variables
from hotsplit.commands.options.constraints import NAMES, ConstraintOptions, constraint_of
from hotsplit.commands.options.sampling import take_sampling_options
from hotsplit.commands.options.shared import say
from hotsplit.commands.options.speculation import take_speculation_options
from hotsplit.commands.terminal.prompts import prompts_of
from hotsplit.errors import HotsplitError

if TYPE_CHECKING:
    from hotsplit.run.stages import Job

ANSWER_TOKENS, TEXT_TOKENS = -1, 128  # defaults of -n
_PROMPTS = ("prompt", "prompt_file", "prompts_file")


def has_prompt(options: dict[str, Any]) -> bool:
    """True if a prompt is given; otherwise there will be a conversation."""
    return any(options[name] is not None for name in _PROMPTS)


def check_options(options: dict[str, Any], corpora: Sequence[Path], *, dry_run: bool) -> None:
    """Checks the options without the model; fills in the default of -n and, unless it is a dry run,
    reads the prompt, possibly from stdin."""
    take_sampling_options(dict(options))
    _, model_draft = take_speculation_options(dict(options))
    ConstraintOptions(**{name: options[name] for name in NAMES})
    for path in (*corpora, *([] if model_draft is None else [model_draft])):
        if str(path) != "-" and not path.exists():
            raise HotsplitError(f"{path}: no such file or folder")
    if options["max_tokens"] is None:
        is_answer = options["is_chat"] or not has_prompt(options)
        options["max_tokens"] = ANSWER_TOKENS if is_answer else TEXT_TOKENS
    endings_of(dict(options))
    if has_prompt(options):
        _check_text(options, dry_run=dry_run)
    elif (options["as_json"] or options["json_lines"]) and not dry_run:
        raise click.UsageError("--json and --json-lines are for a text: give -p TEXT.")
    elif options["num_logprobs"] is not None:
        raise click.UsageError("--logprobs is for a text: give -p TEXT.")
    system_message(options["system"], options["system_file"])
    template_variables(options["variables"])
    from hotsplit.runtime.resolved_options import device_of  # imports torch

    device_of(options["device"])


def _check_text(options: dict[str, Any], *, dry_run: bool) -> None:
    is_chat = options["is_chat"]
    if not dry_run:
        prompts = prompts_of(*(options[name] for name in _PROMPTS))
        if any(not prompt for prompt in prompts):
            raise HotsplitError("the prompt is empty; give it some text")
        if options["prompts_file"] is None:
            options |= {"prompt": prompts[0], "prompt_file": None}
    if options["prompts_file"] is not None and is_chat:
        raise click.UsageError("--chat is for one text: leave --prompts out.")
    if not is_chat and options["system_file"] is not None:
        raise click.UsageError("--system-file is for --chat.")
    check_output_options(
        options["num_logprobs"], is_json=options["as_json"] or options["json_lines"],
        is_chat=is_chat, system=options["system"], template=options["template"],
    )  # fmt: skip


def check_model(job: "Job", options: dict[str, Any], *, dry_run: bool) -> None:
    """Checks the options that depend on the model: whether it can hold a conversation, the chat
    template, and the constraint."""
    from hotsplit.run.source import has_template
    from hotsplit.runtime.text.chat_template import chat_template_of
    from hotsplit.runtime.text.codec import TextCodec

    model, template = job.choice.model, options["template"]
    talks = options["is_chat"] or not has_prompt(options)
    if not has_prompt(options) and template is None and not has_template(model) and not dry_run:
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
