"""`sparkinfer generate`: a text is continued, or several are, together.

What this module does not know: how tokens are made."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparkinfer.commands.constraint_options import (
    NAMES,
    ConstraintOptions,
    constraint_of,
    constraint_options,
)
from sparkinfer.commands.sampling import sampling_options, take_sampling_options
from sparkinfer.commands.shared import (
    FILE,
    device_option,
    finish,
    force_option,
    json_option,
    mode_option,
    say,
    split_option,
    threads_option,
    thresholds_option,
)
from sparkinfer.errors import SparkinferError
from sparkinfer.json_file import read_text
from sparkinfer.sizes import format_bytes

if TYPE_CHECKING:
    from sparkinfer.runtime.engine import Engine
    from sparkinfer.runtime.generate.generation import GenerationOptions, Token

STDIN = "-"
MOST_PROMPTS = 256  # that go on together


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be written, as the options say."""

    prompts: list[str]
    is_many: bool
    is_shown: bool  # the prompt before its continuation
    output: str  # "text", "json" or "lines"
    prompt_cache: Path | None
    force: bool


@dataclass
class Writing:
    """What was written, for the report."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict] = field(default_factory=list)


@click.command()
@click.argument("model", type=FILE)
@split_option
@click.option("-cffn", "--cpu-ffn", is_flag=True,
              help="Instead of a plan: all neurons on the CPU, the rest on the GPU.")  # fmt: skip
@click.option("-p", "--prompt", help="The text to go on with; - reads it from stdin.")
@click.option("-f", "--file", "prompt_file", type=click.Path(path_type=Path, allow_dash=True),
              help="The same, from a file or (-) stdin.")  # fmt: skip
@click.option("--prompts", "prompts_file", type=FILE,
              help="Several prompts, one a line (.jsonl: strings, or objects with \"prompt\"), which"
              " are continued together.")  # fmt: skip
@click.option("-n", "--max-tokens", "--n-predict", "max_tokens", default=128, show_default=True,
              help="-1: until the text or the context ends.")  # fmt: skip
@click.option("--stop", "-r", "--reverse-prompt", "stops", multiple=True, metavar="TEXT",
              help="Ends the text where it comes; may be repeated.")  # fmt: skip
@click.option(
    "--ignore-eos", "ignores_end", is_flag=True, help="Go on behind the model's end token."
)
@click.option("--context-shift", "shifts", is_flag=True,
              help="At the end of the context go on without the older half of the text.")  # fmt: skip
@click.option("--keep", default=4, show_default=True,
              help="Tokens at the beginning that then stay.")  # fmt: skip
@click.option("--logprobs", "num_logprobs", type=int, metavar="N",
              help="With --json or --json-lines: probabilities of each token and the N likeliest.")  # fmt: skip
@click.option("--prompt-cache", type=FILE,
              help="Keeps the prompt's state in this file, and takes it from there the next time.")  # fmt: skip
@click.option("--no-display-prompt", "is_shown", flag_value=False, default=True, type=bool,
              help="Print the continuation alone.")  # fmt: skip
@click.option(
    "--json-lines", is_flag=True, help="One JSON object a token on stdout, then the report."
)
@click.option("-c", "--context", "--ctx-size", "context_length", type=int)
@force_option
@sampling_options
@constraint_options
@thresholds_option
@mode_option
@threads_option
@device_option
@json_option
def generate(
    model: Path, split: Path | None, threads: int | None, as_json: bool, json_lines: bool,
    prompt: str | None, prompt_file: Path | None, prompts_file: Path | None, is_shown: bool,
    prompt_cache: Path | None, force: bool, **options: Any,
) -> None:  # fmt: skip
    """Continue a text."""
    from sparkinfer.runtime.engine import Engine
    from sparkinfer.runtime.kernels.threads import use_threads

    sampling = take_sampling_options(options)
    constraints = ConstraintOptions(**{name: options.pop(name) for name in NAMES})
    endings = _endings(options)
    prompts = _prompts(prompt, prompt_file, prompts_file)
    wanted = Wanted(
        prompts=prompts, is_many=prompts_file is not None, is_shown=is_shown,
        output="lines" if json_lines else "json" if as_json else "text",
        prompt_cache=prompt_cache, force=force,
    )  # fmt: skip
    if wanted.is_many and prompt_cache:
        raise click.UsageError("--prompt-cache keeps one text: leave --prompts out.")
    num_threads = use_threads(threads)
    with Engine.load(model, split, num_sequences=max(1, len(prompts)), **options) as engine:
        make = lambda: constraint_of(constraints, engine.codec)  # noqa: E731
        write = _write_many if wanted.is_many else _write_one
        is_interrupted, writings = write(engine, wanted, sampling, endings, make)
        report, lines = _report(engine, wanted, writings, num_threads)
    if wanted.output == "lines":
        click.echo(json.dumps({"type": "end", **report}, default=str))
    finish(report, wanted.output == "json", lines if wanted.output == "text" else [])
    if is_interrupted:
        raise click.exceptions.Exit(130)


def _endings(options: dict[str, Any]) -> "GenerationOptions":
    """Takes their options out of those of the engine."""
    from sparkinfer.runtime.generate.generation import GenerationOptions

    keep, shifts = options.pop("keep"), options.pop("shifts")
    names = ("max_tokens", "stops", "ignores_end", "num_logprobs")
    given = {name: options.pop(name) for name in names}
    return GenerationOptions(**given, shift_keep=keep if shifts else None)


def _prompts(prompt: str | None, file: Path | None, many: Path | None) -> list[str]:
    given = [name for name, value in (("-p", prompt), ("-f", file), ("--prompts", many))
             if value is not None]  # fmt: skip
    if len(given) != 1:
        what = f"{' and '.join(given)} exclude each other" if given else "there is no prompt"
        raise click.UsageError(
            f"{what}: give one of -p TEXT, -f FILE (- for stdin), --prompts FILE."
        )
    if many is not None:
        return _lines_of(many)
    if prompt == STDIN or str(file) == STDIN:
        return [_stdin()]
    return [prompt if prompt is not None else read_text(file, "prompt")]  # type: ignore[arg-type]


def _stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise SparkinferError(f"stdin: not UTF-8 at byte {error.start}") from error


def _lines_of(path: Path) -> list[str]:
    lines = [line for line in read_text(path, "file of prompts").splitlines() if line.strip()]
    if path.suffix == ".jsonl":
        lines = [_prompt_of(line, f"{path}, line {n}") for n, line in enumerate(lines, 1)]
    if not lines:
        raise SparkinferError(f"{path}: has no prompts; write one a line")
    if len(lines) > MOST_PROMPTS:
        raise SparkinferError(
            f"{path}: has {len(lines)} prompts, wanted at most {MOST_PROMPTS}; split the file"
        )
    return lines


def _prompt_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SparkinferError(f"{where}: not JSON ({str(error)[:100]})") from error
    value = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(value, str):
        raise SparkinferError(f'{where}: wanted a string, or an object with a "prompt"')
    return value


def _write_one(
    engine: "Engine", wanted: Wanted, sampling: Any, endings: Any, make: Callable[[], Any]
) -> tuple[bool, list[Writing]]:
    writing = Writing()
    with ExitStack() as stack:
        sequence = None
        ids = engine.codec.encode(wanted.prompts[0])
        if wanted.prompt_cache:
            sequence = stack.enter_context(engine.sequence())
            _restore(engine, sequence, wanted)
        tokens = engine.generate(
            ids, sampling=sampling, options=endings, constraint=make(), sequence=sequence
        )
        if wanted.output == "text" and wanted.is_shown:
            click.echo(wanted.prompts[0], nl=False)
        is_interrupted = _take(((0, token) for token in tokens), [writing], wanted)
        if wanted.output == "text":
            click.echo()
        if sequence is not None and not is_interrupted:
            _save(engine, sequence, len(ids), wanted)
    return is_interrupted, [writing]


def _write_many(
    engine: "Engine", wanted: Wanted, sampling: Any, endings: Any, make: Callable[[], Any]
) -> tuple[bool, list[Writing]]:
    first = make()
    masks = [] if first is None else [first, *(make() for _ in wanted.prompts[1:])]
    writings = [Writing() for _ in wanted.prompts]
    is_interrupted = _take(
        engine.generate_many(wanted.prompts, sampling, endings, masks), writings, wanted
    )
    if wanted.output == "text":
        for prompt, writing in zip(wanted.prompts, writings, strict=True):
            click.echo((prompt if wanted.is_shown else "") + writing.text)
    return is_interrupted, writings


def _take(tokens: "Iterator[tuple[int, Token]]", writings: list[Writing], wanted: Wanted) -> bool:
    """Shows tokens as they come; whether it was interrupted, which ends the text and not the report."""
    try:
        for number, token in tokens:
            writing = writings[number]
            writing.text += token.text
            if token.id is not None:
                writing.ids.append(token.id)
                if token.logprob is not None:
                    writing.logprobs.append(_logprobs(token))
            if wanted.output == "text" and not wanted.is_many:
                click.echo(token.text, nl=False)
            elif wanted.output == "lines":
                click.echo(json.dumps(_event(number, token)))
    except KeyboardInterrupt:
        return True
    return False


def _event(number: int, token: "Token") -> dict:
    more = {} if token.logprob is None else _logprobs(token)
    return {"type": "token", "prompt": number, "id": token.id, "text": token.text, **more}


def _logprobs(token: "Token") -> dict:
    most = [{"id": i, "logprob": logprob} for i, logprob in token.logprobs]
    return {"logprob": token.logprob, "top_logprobs": most}


def _restore(engine: "Engine", sequence: Any, wanted: Wanted) -> None:
    from sparkinfer.runtime.generate.prompt_cache import restore_prompt

    path = wanted.prompt_cache
    assert path is not None
    if not path.exists():
        return
    try:
        restore_prompt(sequence, path, engine.prompt_key())
    except SparkinferError as error:
        if not wanted.force:
            raise SparkinferError(f"{error}, or say --force to compute it again") from error
        say(f"note: {error}; computing it again")


def _save(engine: "Engine", sequence: Any, num_prompt: int, wanted: Wanted) -> None:
    """The prompt's state, unless it was in the file already."""
    from sparkinfer.runtime.generate.prompt_cache import save_prompt

    assert wanted.prompt_cache is not None
    run = engine.last_run
    if run.shifts or run.cached_tokens + 1 >= num_prompt > 1:
        return
    sequence.rollback(num_prompt)
    save_prompt(sequence, wanted.prompt_cache, engine.prompt_key())


def _report(
    engine: "Engine", wanted: Wanted, writings: list[Writing], num_threads: int
) -> tuple[dict, list[str]]:
    roles, not_native = engine.bytes_by_role, engine.not_native
    memory = [asdict(report) for report in engine.memory_report()]
    runs = engine.last_runs if wanted.is_many else [engine.last_run]
    texts = [
        {"text": w.text, "token_ids": w.ids, **asdict(run), "prefill_per_s": run.prefill_per_s,
         "decode_per_s": run.decode_per_s, **({"logprobs": w.logprobs} if w.logprobs else {})}
        for w, run in zip(writings, runs, strict=True)
    ]  # fmt: skip
    common = {"mode": engine.mode, "load_s": engine.load_s, "num_threads": num_threads,
              "not_native": not_native, "bytes": roles, "memory": memory}  # fmt: skip
    report = {**common, "texts": texts} if wanted.is_many else {**texts[0], **common}
    where = ", ".join(
        f"{role.upper()} role {format_bytes(sum(items.values()))}" for role, items in roles.items()
    )
    where += "".join(
        f"; {found['device']} reserved at most {format_bytes(found['peak_reserved'])}"
        for found in memory
    )
    slow = f", steps in Python because {not_native}" if not_native else ""
    line = (
        f"[{engine.mode} on {engine.device}; loaded in {engine.load_s:.2f} s; {_speed(runs)},"
        f" {num_threads} threads{slow}; {where}; stopped by"
        f" {', '.join(dict.fromkeys(run.stopped_by for run in runs))}]"
    )
    return report, [line]


def _speed(runs: list[Any]) -> str:
    if len(runs) > 1:
        tokens, seconds = sum(r.decode_tokens for r in runs), max(r.decode_s for r in runs)
        rate = tokens / seconds if seconds else 0.0
        return f"{len(runs)} texts together; decode {tokens} tokens, {rate:.1f}/s"
    run = runs[0]
    kept = f" ({run.cached_tokens} kept)" if run.cached_tokens else ""
    drafts = f", {run.accepted} of {run.drafted} drafted right" if run.drafted else ""
    return (
        f"prefill {run.prefill_tokens} tokens{kept}, {run.prefill_per_s:.1f}/s; decode"
        f" {run.decode_tokens} tokens, {run.decode_per_s:.1f}/s{drafts}"
    )
