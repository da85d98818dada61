"""What `run`, `generate` and `chat` are asked for: texts or a conversation, and how they are
sampled, constrained and shown. The three have the same options."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from hotsplit.commands.options import command_options as common
from hotsplit.commands.options.constraint_options import ConstraintOption, take_constraint
from hotsplit.commands.options.engine_options import neuron_cache_option
from hotsplit.commands.options.preparation import all_preparation_options
from hotsplit.commands.options.sampling_options import decoding_options, take_sampling_options
from hotsplit.commands.options.speculation_options import take_speculation_options
from hotsplit.commands.terminal import prompt_sources
from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import ENDLESS, GenerationOptions, SpeculationOptions

TEXT_TOKENS = 128  # of a text, unless -n says another number
SHIFT_KEEP = 4  # tokens at the beginning of a text that stay in the context, as attention sinks
request_options = common.joined(
    common.option_table(
        """
-p --prompt | text | The text to continue; - reads it from stdin.
-f --file | prompt_file: stdin | The same, from a file; - for stdin. One newline at its end is left
    out.
--prompts | prompts_file: file | Several prompts, one per line (.jsonl: strings, or objects with
    "prompt"), generated together.
--chat | is_chat: flag | Treat the prompt as a message and print the answer, as chat always does.
""",
        stdin=click.Path(path_type=Path, allow_dash=True),
    ),
    prompt_sources.chat_options,
    common.option_table(
        f"""
-n --max-tokens --n-predict | max_tokens: int | Maximum tokens to generate; -1: as many as the
    context has room for. [default: {TEXT_TOKENS} for a text, -1 for an answer]
--stop -r --reverse-prompt | stops: text* | Stop where this text appears; may be repeated.
--ignore-eos | ignores_end: flag | Continue after the model's end token.
--logprobs | num_logprobs: int N | With --json or --json-lines: log probabilities of each token and
    of the N likeliest.
--json-lines | flag | Print one JSON object per token on stdout, then the report.
--prompt-cache | output | Save the prompt's state to this file, and load it from there the next
    time.
"""
    ),
    click.option(
        "--no-display-prompt",
        "is_shown",
        flag_value=False,
        default=True,
        type=bool,
        help="Print only the continuation, not the prompt.",
    ),
    common.context_option(
        "Context length in tokens. [default: the plan's, or the model's up to 4,096]"
    ),
    all_preparation_options,
    decoding_options,
    common.placement_options,
    neuron_cache_option,
    common.ram_option,
    common.running_options,
    common.force_option,
    common.json_option,
)


@dataclass(frozen=True, kw_only=True)
class CommandRequest:
    """What is asked for. Without prompts it is a conversation; `is_answer`: the prompt is a
    message, and the answer is written. `sampling`: the fields of SamplingOptions that are given;
    `shifts`: a full context drops the oldest turns, or the oldest part of a text."""

    prompts: list[str]
    is_many: bool
    is_answer: bool
    is_shown: bool  # print the prompt before its continuation
    output: Literal["text", "json", "lines"]
    prompt_cache: Path | None
    force: bool
    system: str | None
    template: str | None
    variables: Mapping[str, object]  # of the template
    shifts: bool
    endings: GenerationOptions
    sampling: Mapping[str, object]
    constraint: ConstraintOption | None
    speculation: SpeculationOptions


def take_request(
    options: dict[str, Any], *, is_text: bool = False, is_chat: bool = False
) -> CommandRequest:
    """Takes a request out of a command's options; what is left says how the model is prepared and
    loaded. `is_text`: a prompt must be given; `is_chat`: it is a message. Wrong options are refused
    here, before imports that take seconds. Raises click's UsageError for options that exclude each
    other, HotsplitError for wrong values."""
    take = options.pop
    sampling = take_sampling_options(options)
    speculation = take_speculation_options(options)
    constraint = take_constraint(options)
    common.take_engine_options(dict(options))
    names = ("prompt", "prompt_file", "prompts_file")
    sources = [take(name) for name in names]
    is_many, has_prompt = (
        sources[2] is not None,
        is_text or any(each is not None for each in sources),
    )
    is_answer = take("is_chat") or is_chat
    system_text, system_file, template = take("system"), take("system_file"), take("template")
    if has_prompt and not is_answer and (system_text, system_file, template) != (None, None, None):
        raise click.UsageError("--system, --system-file and --chat-template are for --chat.")
    system = prompt_sources.system_message(system_text, system_file)
    variables = prompt_sources.template_variables(take("variables"))
    as_json, as_lines, prompt_cache = take("as_json"), take("json_lines"), take("prompt_cache")
    max_tokens, shifts, num_logprobs = take("max_tokens"), take("shifts"), take("num_logprobs")
    if max_tokens is None:
        max_tokens = ENDLESS if is_answer or not has_prompt else TEXT_TOKENS
    endings = GenerationOptions(
        max_tokens=max_tokens,
        stops=take("stops"),
        ignores_end=take("ignores_end"),
        num_logprobs=num_logprobs,
        shift_keep=SHIFT_KEEP if shifts and has_prompt else None,
    )
    if not has_prompt:
        for is_given, option in (
            (as_json or as_lines, "--json and --json-lines are"),
            (num_logprobs is not None, "--logprobs is"),
            (prompt_cache is not None, "--prompt-cache is"),
        ):
            if is_given:
                raise click.UsageError(f"{option} for a text: give -p TEXT.")
    elif num_logprobs is not None and not (as_json or as_lines):
        raise click.UsageError("--logprobs goes with --json or --json-lines.")
    if is_many and (prompt_cache or is_answer):
        raise click.UsageError("--prompt-cache and --chat are for one text: leave --prompts out.")
    if is_answer and prompt_cache:
        raise click.UsageError("--chat does not use a prompt cache: leave --prompt-cache out.")
    if prompt_cache and not prompt_cache.absolute().parent.is_dir():
        raise HotsplitError(f"{prompt_cache}: its folder does not exist; create it first")
    if has_prompt and sources[0] is None:
        prompt_sources.note_unread(sources[1])
    return CommandRequest(
        prompts=prompt_sources.prompts_of(*sources) if has_prompt else [],
        is_many=is_many,
        is_answer=is_answer,
        is_shown=take("is_shown"),
        output="lines" if as_lines else "json" if as_json else "text",
        prompt_cache=prompt_cache,
        force=take("force"),
        system=system,
        template=template,
        variables=variables,
        shifts=shifts,
        endings=endings,
        sampling=sampling,
        constraint=constraint,
        speculation=speculation,
    )
