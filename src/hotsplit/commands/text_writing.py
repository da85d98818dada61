"""Writes the texts that `run` and `generate` are asked for, and the report on them."""

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.options.command_options import finish, say
from hotsplit.commands.options.constraint_options import constraint_of
from hotsplit.commands.options.speculation_options import speculating, speculation_lines
from hotsplit.commands.request import CommandRequest
from hotsplit.commands.terminal.terminal import Screen
from hotsplit.errors import HotsplitError, Interrupted
from hotsplit.options.generation_options import SamplingOptions
from hotsplit.system.sizes import format_bytes

if TYPE_CHECKING:
    from hotsplit.runtime.engine import Engine
    from hotsplit.runtime.generate.constraints import Constraint
    from hotsplit.runtime.generate.generation import Run, Token
    from hotsplit.runtime.generate.speculation import Speculation


@dataclass
class Writing:
    """A generated text, for the report."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""  # of an answer
    logprobs: list[dict] = field(default_factory=list)


def write(
    engine: "Engine",
    request: CommandRequest,
    sampling: SamplingOptions,
    draft_model: Path | None,
    preparing: Mapping[str, Any] | None,
) -> None:
    """Writes the texts and the report, which has what was done to prepare the model."""
    drawn, drafts_lines = None, list[str]()
    if sampling.seed is None and sampling.temperature > 0 and not request.is_many:
        drawn = secrets.randbelow(1 << 32)  # the report names it, so the text can be repeated
        sampling = replace(sampling, seed=drawn)
    writings = [Writing() for _ in request.prompts]
    if request.is_many:
        masks = [mask for _ in request.prompts if (mask := _mask(engine, request)) is not None]
        num_texts = len(request.prompts)
        from hotsplit.runtime.drafting import drafting

        with drafting(engine, request.speculation, draft_model, num_texts) as made:
            each = [] if made is None else [made.begin() for _ in request.prompts]
            tokens = engine.generate_many(request.prompts, sampling, request.endings, masks, each)
            code = _take(tokens, writings, request)
            drafts_lines = speculation_lines(request.speculation, each)
        if request.output == "text":
            for prompt, writing in zip(request.prompts, writings, strict=True):
                click.echo((prompt if request.is_shown else "") + writing.text)
    else:
        with speculating(engine, request.speculation, draft_model) as drafts:
            code = _write_one(engine, request, sampling, writings, drafts)
            texts = [] if drafts is None else [drafts]
            drafts_lines = speculation_lines(request.speculation, texts)
    report, lines = _report(engine, request, writings, drawn)
    lines += drafts_lines
    if preparing is not None:
        report["run"] = preparing
    if request.output == "lines":
        click.echo(json.dumps({"type": "end", **report}, default=str))
    finish(report, request.output == "json", lines if request.output == "text" else [])
    if code:
        raise click.exceptions.Exit(code)


def _mask(engine: "Engine", request: CommandRequest) -> "Constraint | None":
    option = request.constraint
    return None if option is None else constraint_of(option, engine.codec)


def _write_one(
    engine: "Engine",
    request: CommandRequest,
    sampling: SamplingOptions,
    writings: list[Writing],
    drafts: "Speculation | None",
) -> int:
    write = _answer if request.is_answer else _continuation
    with ExitStack() as stack:
        tokens = write(engine, request, sampling, drafts, stack)
        screen = Screen() if request.output == "text" else None
        if screen and request.is_shown and not request.is_answer:
            screen.write(request.prompts[0])
        code = _take(((0, token) for token in tokens), writings, request, screen)
        if screen and request.is_answer:
            screen.end()
        elif screen:
            click.echo()
    return code


def _continuation(
    engine: "Engine",
    request: CommandRequest,
    sampling: SamplingOptions,
    drafts: "Speculation | None",
    stack: ExitStack,
) -> "Iterator[Token]":
    """Continues the prompt, and saves its state if asked to; refuses wrong options at once."""
    ids = engine.codec.encode(request.prompts[0])
    sequence = None
    if request.prompt_cache:
        sequence = stack.enter_context(engine.sequence())
        _restore(engine, sequence, request.prompt_cache, force=request.force)
    tokens = engine.generate(
        ids,
        sampling=sampling,
        options=request.endings,
        constraint=_mask(engine, request),
        drafts=drafts,
        sequence=sequence,
    )

    def all_tokens() -> "Iterator[Token]":
        yield from tokens
        if request.prompt_cache:
            _save(engine, sequence, len(ids), request.prompt_cache)

    return all_tokens()


def _answer(
    engine: "Engine",
    request: CommandRequest,
    sampling: SamplingOptions,
    drafts: "Speculation | None",
    stack: ExitStack,
) -> "Iterator[Token]":
    from hotsplit.runtime.generate.chat import ChatOptions

    mask = _mask(engine, request)  # refuses wrong options
    chat = engine.chat(
        request.system,
        template=request.template,
        sampling=sampling,
        options=ChatOptions(generation=request.endings, variables=request.variables),
        new_constraint=None if mask is None else lambda: mask,
        drafts=drafts,
    )
    stack.enter_context(chat)
    for token in chat.say(request.prompts[0]):
        engine.last_run = chat.run
        yield token


def _take(
    tokens: "Iterator[tuple[int, Token]]",
    writings: list[Writing],
    request: CommandRequest,
    screen: Screen | None = None,
) -> int:
    """Collects and shows the tokens. Returns 0, or the exit code of an interrupt."""
    try:
        for number, token in tokens:
            writing = writings[number]
            if token.is_reasoning:
                writing.reasoning += token.text
            else:
                writing.text += token.text
            logprobs: dict = {}
            if token.logprob is not None:
                most = [{"id": i, "logprob": logprob} for i, logprob in token.logprobs]
                logprobs = {"logprob": token.logprob, "top_logprobs": most}
            if token.id is not None:
                writing.ids.append(token.id)
                writing.logprobs += [logprobs] * bool(logprobs)
            if screen is not None:
                screen.write(token.text, is_reasoning=token.is_reasoning)
            elif request.output == "lines":
                event = {"type": "token", "prompt": number, "id": token.id, "text": token.text}
                event |= logprobs
                if token.is_reasoning:
                    event["is_reasoning"] = True
                click.echo(json.dumps(event))
    except KeyboardInterrupt as error:
        return error.exit_code if isinstance(error, Interrupted) else 130
    return 0


# ---- the state of a prompt ----------------------------------------------------------------------


def _restore(engine: "Engine", sequence: Any, path: Path, *, force: bool) -> None:
    from hotsplit.runtime.generate.prompt_cache import is_prompt, restore_prompt

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
        if not force:
            raise HotsplitError(f"{error}, or give --force to compute it again") from error
        say(f"note: {error}; computing it again")


def _save(engine: "Engine", sequence: Any, num_prompt: int, path: Path) -> None:
    """Saves the prompt's state, unless the file has it or a shift has dropped it."""
    from hotsplit.runtime.generate.generation import TURN_TAIL
    from hotsplit.runtime.generate.prompt_cache import save_prompt

    run, tail = engine.last_run, TURN_TAIL if engine.model.spec.has_states else 1
    if run.shifts or run.cached_tokens + tail >= num_prompt > tail:
        return
    sequence.rollback(num_prompt)
    save_prompt(sequence, path, engine.prompt_key())


# ---- the report ---------------------------------------------------------------------------------


def _report(
    engine: "Engine", request: CommandRequest, writings: list[Writing], seed: int | None
) -> tuple[dict, list[str]]:
    """The report, and its lines for the user; `seed`: one that was drawn."""
    from hotsplit.runtime.generate.generation import NOT_STOPPED
    from hotsplit.runtime.kernels.threads import threads_in_use

    roles, cache, num_threads = engine.bytes_by_role, engine.neuron_cache, threads_in_use()
    drive = engine.drive
    memory = [asdict(report) for report in engine.memory_report()]
    runs = engine.last_runs if request.is_many else [engine.last_run]
    texts = [
        {
            "text": w.text,
            **({"reasoning": w.reasoning} if w.reasoning else {}),
            "token_ids": w.ids,
            **asdict(run),
            "prefill_per_s": run.prefill_per_s,
            "decode_per_s": run.decode_per_s,
            **({"logprobs": w.logprobs} if w.logprobs else {}),
        }
        for w, run in zip(writings, runs, strict=True)
    ]
    report: dict[str, Any] = {"texts": texts} if request.is_many else dict(texts[0])
    report |= {
        "mode": engine.mode,
        "load_s": engine.load_s,
        "num_threads": num_threads,
        "bytes": roles,
        "memory": memory,
        **({} if seed is None else {"seed": seed}),
        **({} if cache is None else {"neuron_cache": cache.facts}),
        **({} if drive is None else {"drive": drive.facts}),
    }
    places = [
        f"{role.upper()} role {format_bytes(sum(items.values()))}" for role, items in roles.items()
    ]
    parts = [
        f"{engine.mode} on {engine.device}",
        f"loaded in {engine.load_s:.2f} s",
        f"{_speed(runs)}, {num_threads} threads",
        ", ".join(places),
        *(f"{m['device']} reserved at most {format_bytes(m['peak_reserved'])}" for m in memory),
    ]
    scaling = engine.model.spec.rope_scaling
    if scaling.kind != "none":
        parts.append(f"rotary embeddings: {scaling.words}")
    if seed is not None:
        parts.append(f"seed {seed}")
    ends = ["Ctrl-C or a signal" if r.stopped_by == NOT_STOPPED else r.stopped_by for r in runs]
    parts.append(f"stopped by {', '.join(dict.fromkeys(ends))}")
    beside = [f"[{each.line}]" for each in (cache, drive) if each is not None]
    return report, [f"[{'; '.join(parts)}]", *beside]


def _speed(runs: "list[Run]") -> str:
    if len(runs) > 1:
        tokens, seconds = sum(r.decode_tokens for r in runs), max(r.decode_s for r in runs)
        rate = tokens / seconds if seconds else 0.0
        return f"{len(runs)} texts together; decode {tokens} tokens, {rate:.1f}/s"
    run = runs[0]
    if not run.prefill_s:
        return f"interrupted in the prompt of {run.prefill_tokens} tokens"
    kept = f" ({run.cached_tokens} kept)" if run.cached_tokens else ""
    drafts = f", {run.accepted} of {run.drafted} drafted right" if run.drafted else ""
    return (
        f"prefill {run.prefill_tokens} tokens{kept}, {run.prefill_per_s:.1f}/s; decode"
        f" {run.decode_tokens} tokens, {run.decode_per_s:.1f}/s{drafts}"
    )
