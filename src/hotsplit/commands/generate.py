"""`hotsplit generate`: continues a text, or several together."""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.options.constraints import NAMES, ConstraintOptions, constraint_of
from hotsplit.commands.options.engine import neuron_cache_option
from hotsplit.commands.options.preparation import preparation, preparation_options
from hotsplit.commands.options.sampling import (
    decoding_options,
    model_sampling,
    take_sampling_options,
)
from hotsplit.commands.options.shared import (
    FILE,
    OUTPUT,
    FileCommand,
    context_option,
    finish,
    force_option,
    joined,
    json_option,
    placement_options,
    running_options,
    say,
)
from hotsplit.commands.options.slow_plans import warn_of_slow_plan
from hotsplit.commands.options.speculation import speculating, take_speculation_options
from hotsplit.commands.terminal.prompts import (
    chat_options,
    note_unread,
    prompts_of,
    system_message,
    template_variables,
)
from hotsplit.commands.terminal.terminal import Screen
from hotsplit.commands.terminal.written_texts import Writing, event_of, logprobs_of, report_of
from hotsplit.errors import HotsplitError, Interrupted
from hotsplit.options.engine_config import EngineConfig
from hotsplit.options.generation import GenerationOptions

if TYPE_CHECKING:
    from hotsplit.runtime.engine import Engine
    from hotsplit.runtime.generate.generation import Token


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The prompts and the form of output that the options ask for."""

    prompts: list[str]
    is_many: bool
    is_shown: bool  # print the prompt before its continuation
    output: str  # "text", "json" or "lines"
    prompt_cache: Path | None
    force: bool
    is_chat: bool  # the prompt is a message, and the answer is wanted
    system: str | None
    template: str | None
    variables: Mapping[str, object]  # of the template


# Under the names of `write`'s parameters.
text_options = joined(
    click.option("-p", "--prompt", help="The text to continue; - reads it from stdin."),
    click.option(
        "-f",
        "--file",
        "prompt_file",
        type=click.Path(path_type=Path, allow_dash=True),
        help="The same, from a file; - for stdin. One newline at its end is left out.",
    ),
    click.option(
        "--prompts",
        "prompts_file",
        type=FILE,
        help='Several prompts, one per line (.jsonl: strings, or objects with "prompt"),'
        " generated together.",
    ),
    click.option(
        "--stop",
        "-r",
        "--reverse-prompt",
        "stops",
        multiple=True,
        metavar="TEXT",
        help="Stop where this text appears; may be repeated.",
    ),
    click.option(
        "--ignore-eos", "ignores_end", is_flag=True, help="Continue after the model's end token."
    ),
    click.option(
        "--keep",
        default=4,
        show_default=True,
        help="Tokens at the beginning of the text that --context-shift keeps.",
    ),
    click.option(
        "--logprobs",
        "num_logprobs",
        type=int,
        metavar="N",
        help="With --json or --json-lines: log probabilities of each token and of the N likeliest.",
    ),
    click.option(
        "--no-display-prompt",
        "is_shown",
        flag_value=False,
        default=True,
        type=bool,
        help="Print only the continuation, not the prompt.",
    ),
    click.option(
        "--json-lines",
        is_flag=True,
        help="Print one JSON object per token on stdout, then the report.",
    ),
)


@click.command(cls=FileCommand)
@click.argument("model", type=FILE)
@placement_options
@preparation_options
@text_options
@click.option(
    "--chat",
    "is_chat",
    is_flag=True,
    help="Treat the prompt as a message and print the answer; for a conversation: hotsplit chat.",
)
@chat_options
@click.option(
    "-n",
    "--max-tokens",
    "--n-predict",
    "max_tokens",
    default=128,
    show_default=True,
    help="Maximum tokens to generate; -1: until the text or the context ends.",
)
@click.option(
    "--prompt-cache",
    type=OUTPUT,
    help="Save the prompt's state to this file, and load it from there the next time.",
)
@context_option("Context length in tokens. [default: the plan's, or the model's up to 4,096]")
@force_option
@decoding_options
@neuron_cache_option
@running_options
@json_option
def generate(**options: Any) -> None:
    """Continue a text, or several together.

    The text, or the JSON asked for instead, goes to stdout; everything else goes to stderr."""
    prompts = options["prompts_file"]
    note_unread(options["prompt"], options["prompt_file"])
    with preparation(options, lambda: len(prompts_of(None, None, prompts)) if prompts else 1):
        write(**options)


def write(
    *,
    model: Path,
    split: Path | None,
    threads: int | None,
    as_json: bool,
    json_lines: bool,
    prompt: str | None,
    prompt_file: Path | None,
    prompts_file: Path | None,
    is_shown: bool,
    prompt_cache: Path | None,
    force: bool,
    is_chat: bool,
    system: str | None,
    template: str | None,
    system_file: Path | None = None,
    variables: tuple[str, ...] = (),
    more: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Runs `generate` with its options; `more` goes into the report."""
    given = take_sampling_options(options)
    speculation, draft_model = take_speculation_options(options)
    constraints = ConstraintOptions(**{name: options.pop(name) for name in NAMES})
    endings = endings_of(options)
    prompts = prompts_of(prompt, prompt_file, prompts_file)
    wanted = Wanted(
        prompts=prompts,
        is_many=prompts_file is not None,
        is_shown=is_shown,
        output="lines" if json_lines else "json" if as_json else "text",
        prompt_cache=prompt_cache,
        force=force,
        is_chat=is_chat,
        system=system_message(system, system_file),
        template=template,
        variables=template_variables(variables),
    )
    _check(wanted)
    if wanted.is_many and speculation.type != "none" and not speculation.is_optional:
        raise click.UsageError("--speculate and -md are for one text: leave --prompts out.")
    check_output_options(
        endings.num_logprobs,
        is_json=wanted.output != "text",
        is_chat=is_chat,
        system=wanted.system,
        template=template,
    )
    # Refuses wrong options before the imports, which take seconds.
    config = EngineConfig(num_sequences=max(1, len(prompts)), **options)
    from hotsplit.runtime.engine import load_engine
    from hotsplit.runtime.kernels.threads import threads_in_use, use_threads

    use_threads(threads)
    with load_engine(model, split, config) as engine:
        warn_of_slow_plan(engine, split)
        sampling, drawn = model_sampling(engine, given), None
        if sampling.seed is None and sampling.temperature > 0 and not wanted.is_many:
            drawn = secrets.randbelow(1 << 32)  # the report names it, so the text can be repeated
            sampling = replace(sampling, seed=drawn)
        make = lambda: constraint_of(constraints, engine.codec)  # noqa: E731
        if wanted.is_many:
            code, writings = _write_many(engine, wanted, sampling, endings, make)
            said = None
        else:
            with speculating(engine, speculation, draft_model) as drafts:
                code, writings = _write_one(engine, wanted, sampling, endings, make, drafts)
                said = drafts.line() if drafts else None
        report, lines = report_of(engine, writings, threads_in_use(), drawn, is_many=wanted.is_many)
        lines += [f"[{said}]"] if said else []
    report |= more or {}
    if wanted.output == "lines":
        click.echo(json.dumps({"type": "end", **report}, default=str))
    finish(report, wanted.output == "json", lines if wanted.output == "text" else [])
    if code:
        raise click.exceptions.Exit(code)


def _check(wanted: Wanted) -> None:
    if wanted.prompt_cache and not wanted.prompt_cache.absolute().parent.is_dir():
        raise HotsplitError(f"{wanted.prompt_cache}: its folder does not exist; create it first")
    if wanted.is_many and (wanted.prompt_cache or wanted.is_chat):
        raise click.UsageError("--prompt-cache and --chat are for one text: leave --prompts out.")
    if wanted.is_chat and wanted.prompt_cache:
        raise click.UsageError("--chat does not use a prompt cache: leave --prompt-cache out.")


def check_output_options(
    num_logprobs: int | None,
    *,
    is_json: bool,
    is_chat: bool,
    system: str | None,
    template: str | None,
) -> None:
    """Raises click's UsageError for an option given without the one that it needs."""
    if num_logprobs is not None and not is_json:
        raise click.UsageError("--logprobs goes with --json or --json-lines.")
    if not is_chat and (system is not None or template is not None):
        raise click.UsageError("--system and --chat-template are for --chat.")


def endings_of(options: dict[str, Any]) -> GenerationOptions:
    """Takes out of `options` those for the length of a text, its end and log probabilities."""
    keep, shifts = options.pop("keep"), options.pop("shifts")
    if keep < 0:
        raise HotsplitError(f"--keep is {keep}, wanted 0 or more")
    names = ("max_tokens", "stops", "ignores_end", "num_logprobs")
    given = {name: options.pop(name) for name in names}
    return GenerationOptions(**given, shift_keep=keep if shifts else None)


def _write_one(
    engine: "Engine",
    wanted: Wanted,
    sampling: Any,
    endings: Any,
    make: Callable[[], Any],
    drafts: Any,
) -> tuple[int, list[Writing]]:
    writing = Writing()
    with ExitStack() as stack:
        if wanted.is_chat:
            tokens = _answer(engine, wanted, sampling, endings, make, drafts, stack)
        else:
            tokens = _continuation(engine, wanted, sampling, endings, make, drafts, stack)
        screen = Screen() if wanted.output == "text" else None
        if screen and wanted.is_shown and not wanted.is_chat:
            screen.write(wanted.prompts[0])
        code = _take(((0, token) for token in tokens), [writing], wanted, screen)
        if screen and wanted.is_chat:
            screen.end()
        elif screen:
            click.echo()
    return code, [writing]


def _continuation(
    engine: "Engine",
    wanted: Wanted,
    sampling: Any,
    endings: Any,
    make: Callable[[], Any],
    drafts: Any,
    stack: ExitStack,
) -> "Iterator[Token]":
    """Continues the prompt, and saves its state if asked to; refuses wrong options at once."""
    ids = engine.codec.encode(wanted.prompts[0])
    sequence = None
    if wanted.prompt_cache:
        sequence = stack.enter_context(engine.sequence())
        _restore(engine, sequence, wanted)
    tokens = engine.generate(
        ids, sampling=sampling, options=endings, constraint=make(), drafts=drafts, sequence=sequence
    )

    def all_tokens() -> "Iterator[Token]":
        yield from tokens
        if sequence is not None:
            _save(engine, sequence, len(ids), wanted)

    return all_tokens()


def _answer(
    engine: "Engine",
    wanted: Wanted,
    sampling: Any,
    endings: Any,
    make: Callable[[], Any],
    drafts: Any,
    stack: ExitStack,
) -> "Iterator[Token]":
    """The answer to the prompt, which is sent as a message."""
    from hotsplit.runtime.generate.chat import ChatOptions

    is_free = make() is None  # refuses wrong options
    chat = engine.chat(
        wanted.system,
        template=wanted.template,
        sampling=sampling,
        options=ChatOptions(generation=endings, variables=wanted.variables),
        new_constraint=None if is_free else make,
        drafts=drafts,
    )
    stack.enter_context(chat)
    for token in chat.say(wanted.prompts[0]):
        engine.last_run = chat.run
        yield token


def _write_many(
    engine: "Engine", wanted: Wanted, sampling: Any, endings: Any, make: Callable[[], Any]
) -> tuple[int, list[Writing]]:
    first = make()
    masks = [] if first is None else [first, *(make() for _ in wanted.prompts[1:])]
    writings = [Writing() for _ in wanted.prompts]
    code = _take(engine.generate_many(wanted.prompts, sampling, endings, masks), writings, wanted)
    if wanted.output == "text":
        for prompt, writing in zip(wanted.prompts, writings, strict=True):
            click.echo((prompt if wanted.is_shown else "") + writing.text)
    return code, writings


def _take(
    tokens: "Iterator[tuple[int, Token]]",
    writings: list[Writing],
    wanted: Wanted,
    screen: Screen | None = None,
) -> int:
    """Collects the tokens, and shows them on the screen as they come, or as lines of JSON. Returns 0,
    or the exit code of an interrupt: the report is still printed."""
    try:
        for number, token in tokens:
            writing = writings[number]
            if token.is_reasoning:
                writing.reasoning += token.text
            else:
                writing.text += token.text
            if token.id is not None:
                writing.ids.append(token.id)
                if token.logprob is not None:
                    writing.logprobs.append(logprobs_of(token))
            if screen is not None:
                screen.write(token.text, is_reasoning=token.is_reasoning)
            elif wanted.output == "lines":
                click.echo(json.dumps(event_of(number, token)))
    except KeyboardInterrupt as error:
        return error.exit_code if isinstance(error, Interrupted) else 130
    return 0


def _restore(engine: "Engine", sequence: Any, wanted: Wanted) -> None:
    from hotsplit.runtime.generate.prompt_cache import is_prompt, restore_prompt

    path = wanted.prompt_cache
    assert path is not None
    if not path.exists() and not path.is_symlink():
        return
    try:
        restore_prompt(sequence, path, engine.prompt_key())
    except HotsplitError as error:
        if not is_prompt(path):
            raise HotsplitError(
                f"{path}: exists and is not a prompt cache, so it is not overwritten; give"
                " --prompt-cache another name"
            ) from error
        if not wanted.force:
            raise HotsplitError(f"{error}, or give --force to compute it again") from error
        say(f"note: {error}; computing it again")


def _save(engine: "Engine", sequence: Any, num_prompt: int, wanted: Wanted) -> None:
    """Saves the prompt's state, unless the file has it already or a context shift has dropped it."""
    from hotsplit.runtime.generate.generation import TURN_TAIL
    from hotsplit.runtime.generate.prompt_cache import save_prompt

    assert wanted.prompt_cache is not None
    run, tail = engine.last_run, TURN_TAIL if engine.model.spec.has_states else 1
    if run.shifts or run.cached_tokens + tail >= num_prompt > tail:
        return
    sequence.rollback(num_prompt)
    save_prompt(sequence, wanted.prompt_cache, engine.prompt_key())
