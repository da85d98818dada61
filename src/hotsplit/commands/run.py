"""`hotsplit run`: from a checkpoint, a name on the hub or a GGUF to tokens.

The stages are chosen, run and cached by the package hotsplit.run; texts are written by the
command `generate`, conversations held by `chat`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.chat import talk
from hotsplit.commands.generate import text_options, write
from hotsplit.commands.options.constraints import constraint_options
from hotsplit.commands.options.engine import cache_type_options, rope_options
from hotsplit.commands.options.outtype import OUTTYPE
from hotsplit.commands.options.sampling import sampling_options
from hotsplit.commands.options.shared import (
    FILE,
    FileCommand,
    Size,
    context_option,
    finish,
    joined,
    json_option,
    let_threads_sleep,
    running_options,
    say,
    take_engine_options,
)
from hotsplit.commands.options.speculation import speculation_options
from hotsplit.commands.run_checks import check_model, check_options, has_prompt

if TYPE_CHECKING:
    from hotsplit.run.estimate import Estimate
    from hotsplit.run.prepare import Ready
    from hotsplit.run.stages import Job

ASKED_FROM_S = 600.0  # longer work must be confirmed at a terminal
# Options for a text, which a conversation does not take.
_WRITE = ("prompt", "prompt_file", "prompts_file", "keep", "num_logprobs", "is_shown", "json_lines",
          "is_chat", "as_json")  # fmt: skip
_own_options = joined(
    click.option("-vb", "--vram", "--vram-budget", "vram", type=Size(), multiple=True,
                 help="GPU memory to use, e.g. 8GiB; a bare number is GiB; 0 uses only the CPU. Once per"
                 " GPU. [default: most of what is free on the first, or on --device]"),
    click.option("--chat", "is_chat", is_flag=True,
                 help="With a prompt: treat it as a message and print the answer. Without one, run"
                 " always holds a conversation."),
    click.option("-sys", "--system", "--system-prompt", "system", metavar="TEXT",
                 help="The system message."),
    click.option("-sysf", "--system-file", "--system-prompt-file", "system_file", type=FILE,
                 help="The same, from a file."),
    click.option("--chat-template", "template", metavar="NAME|FILE",
                 help="A template to use instead of the model's own."),
    click.option("--chat-template-kwargs", "variables", metavar="JSON", default="{}",
                 help='Variables for the template, e.g. {"enable_thinking": false}.'),
    click.option("-n", "--max-tokens", "--n-predict", "max_tokens", type=int,
                 help="Maximum tokens to generate. [default: 128 for a text; for an answer, as many as"
                 " the context has room for]"),
    context_option("Context length in tokens. [default: the model's, up to 4,096]"),
    click.option("--context-shift", "shifts", is_flag=True,
                 help="When the context is full, drop the oldest part and continue."),
    click.option("--corpus", "corpora", type=FILE, multiple=True,
                 help="Text like yours to profile on, if profiling pays off; may be repeated. [default: a"
                 " text in the package]"),
    click.option("--tokens", type=int,
                 help="Tokens to profile on. [default: as many as take at most a quarter of an hour]"),
    click.option("--outtype", type=OUTTYPE,
                 help="Type of the matrices. [default: one that fits into memory]"),
    click.option("--activation", metavar="NAME",
                 help="The activation, which other programs' GGUF files do not record: relu,"
                 " fatrelu=0.01, ..."),
    click.option("--verify/--no-verify", "is_verified", default=None,
                 help="Compare a converted model with its source. [default: if it takes less than a"
                 " minute]"),
    click.option("--dry-run", is_flag=True, help="Print what would be done, and how long it would take."),
    click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation of long work."),
)  # fmt: skip


@click.command(cls=FileCommand, short_help="Prepare a model, then continue a text or chat.")
@click.argument("source", type=FILE)
@text_options
@_own_options
@sampling_options
@constraint_options
@speculation_options
@rope_options
@cache_type_options
@running_options
@json_option
def run(
    source: Path, vram: tuple[int, ...], corpora: tuple[Path, ...], tokens: int | None,
    outtype: Any, activation: str | None, is_verified: bool, dry_run: bool, yes: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Prepare a model with all that it needs, then continue a text or chat.

    SOURCE is a checkpoint folder, the name of a checkpoint on the hub (org/name) or any GGUF.
    Everything made on the way is cached for the next run: hotsplit cache list."""
    let_threads_sleep()
    check_options(options, corpora, dry_run=dry_run)
    from hotsplit.run.cache_folder import Cache
    from hotsplit.run.choice import Wishes
    from hotsplit.run.prepare import estimate_of, job_of, prepare, summary
    from hotsplit.run.source import look_at
    from hotsplit.runtime.kernels.threads import use_threads

    use_threads(options["threads"])
    engine = take_engine_options(dict(options))
    wishes = Wishes(vram=vram or None, outtype=outtype, tokens=tokens, engine=engine)
    with Cache.open(say) as cache:
        given = look_at(source, activation, cache.folder / "planned.gguf")
        job = job_of(given, wishes, corpora, cache, is_verified=is_verified)
        check_model(job, options, dry_run=dry_run)
        planned = estimate_of(job)
        if dry_run:
            finish(summary(job, planned), options["as_json"], [planned.line])
            return
        _announce(job, planned, yes=yes)
        ready = prepare(job, planned)
        if ready.made:
            say(f"ready in {ready.seconds:.0f} s; hotsplit cache list shows what is kept")
        more = {"run": summary(job, planned) | {"prepared_s": ready.seconds, "made": ready.made}}
        _speak(job, ready, options, more)


def _announce(job: "Job", planned: "Estimate", *, yes: bool) -> None:
    """Announces the work; asks the user if it takes long."""
    if not planned.works:
        return
    say(planned.line)
    if any(work.kind in ("look", "profile") for work in planned.works) and not job.texts:
        say("profiling on the text in the package (Python's documentation, two old books); --corpus"
            " with text like yours makes a better profile")  # fmt: skip
    is_asked = planned.seconds > ASKED_FROM_S and not yes
    if is_asked and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        click.confirm("continue?", default=True, abort=True, err=True)


def _speak(job: "Job", ready: "Ready", options: dict[str, Any], more: dict[str, Any]) -> None:
    """Writes the text or holds the conversation."""
    options |= {
        "model": ready.model, "split": ready.split, "mode": ready.mode, "device": ready.device,
        "context_length": ready.context_length, "thresholds": None, "cpu_ffn": False,
    }  # fmt: skip
    if has_prompt(options):
        write(prompt_cache=None, force=False, more=more, **options)
        return
    for name in _WRITE:
        del options[name]
    talk(name=job.source.name, drops_oldest=options.pop("shifts"), **options)
