"""Commands that take a checkpoint, or a model and a budget of VRAM, prepare it first, as `run` does.

The stages are chosen, run and cached by the package hotsplit.run."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.options.shared import FILE, SIZE, joined, say, take_engine_options
from hotsplit.files.steady import suspended

if TYPE_CHECKING:
    from hotsplit.run.estimate import Estimate
    from hotsplit.run.prepare import Ready
    from hotsplit.run.stages import Job

ASKED_FROM_S = 600.0  # longer work must be confirmed at a terminal

yes_option = click.option(
    "-y", "--yes", is_flag=True, help="Do not ask for confirmation of long work."
)
vram_option = click.option(
    "-vb", "--vram", "--vram-budget", "vram", type=SIZE, multiple=True,
    help="GPU memory to use, e.g. 8GiB; a bare number is GiB; 0 uses only the CPU. Once per GPU."
    " [default: most of what is free on the first, or on --device]",
)  # fmt: skip
tokenizer_option = click.option(
    "--tokenizer", type=FILE,
    help="The model's tokenizer.json, if the model has none or one that cannot be used; it is written"
    " into a copy of the model.",
)  # fmt: skip
preparation_options = joined(
    click.option(
        "-vb", "--vram", "--vram-budget", "vram", type=SIZE, multiple=True,
        help="Plan the model for this much GPU memory first, as hotsplit run does, e.g. 8GiB; once per"
        " GPU. A checkpoint, or a name on the hub, is prepared in any case.",
    ),
    tokenizer_option,
    yes_option,
)  # fmt: skip


def announce(job: "Job", planned: "Estimate", *, yes: bool) -> None:
    """Announces the work; asks the user if it takes long."""
    if not planned.works:
        return
    say(planned.line)
    if any(work.kind in ("look", "profile") for work in planned.works) and not job.texts:
        say("profiling on the text in the package (Python's documentation, two old books);"
            " hotsplit run --corpus with text like yours makes a better profile")  # fmt: skip
    is_asked = planned.seconds > ASKED_FROM_S and not yes
    if is_asked and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        click.confirm("continue?", default=True, abort=True, err=True)


def said_when_ready(ready: "Ready") -> None:
    if ready.made:
        say(f"ready in {ready.seconds:.0f} s; hotsplit cache list shows what is kept")


def needs_preparation(model: Path) -> bool:
    """True for all but a GGUF: a folder, or a name on the hub."""
    return not (model.is_file() or model.suffix == ".gguf")


@contextmanager
def preparation(
    options: dict[str, Any], num_sequences: Callable[[], int] = lambda: 1
) -> Iterator[str | None]:
    """Takes --vram, --tokenizer and --yes out of a command's options. If a budget or a tokenizer is
    given, or the model is no file, the model is prepared for `num_sequences` texts at a time, and the options "model", "split",
    "mode", "device" and "context_length" become those of what was made, whose files stay in the cache
    while the context is open. Yields the name that the user gave, or None if nothing had to be
    prepared. Raises HotsplitError if it cannot be, UsageError beside a plan of the user's."""
    vram, yes, tokenizer = (options.pop(name) for name in ("vram", "yes", "tokenizer"))
    model: Path = options["model"]
    is_ready = options["split"] is not None or not needs_preparation(model)
    if not vram and tokenizer is None and is_ready:
        yield None
        return
    for name, option in (
        ("split", "--split"),
        ("thresholds", "--thresholds"),
        ("cpu_ffn", "-cffn"),
    ):
        if options.get(name):
            what = "--vram makes a plan" if vram else f"{model} is prepared first"
            raise click.UsageError(f"{what}: leave {option} out.")
    from hotsplit.run.cache_folder import Cache
    from hotsplit.run.choice import Wishes
    from hotsplit.run.prepare import estimate_of, job_of, prepare
    from hotsplit.run.source import check_tokenizer, look_at
    from hotsplit.runtime.kernels.threads import use_threads

    use_threads(options["threads"])
    engine = replace(take_engine_options(dict(options)), num_sequences=num_sequences())
    with Cache.open(say) as cache:
        given = look_at(model, None, cache.folder / "planned.gguf", tokenizer)
        job = job_of(given, Wishes(vram=vram or None, engine=engine), (), cache)
        planned = estimate_of(job)
        if planned.works:
            check_tokenizer(given, job.choice.model)
        announce(job, planned, yes=yes)
        with suspended():
            ready = prepare(job, planned)
        said_when_ready(ready)
        options |= {
            "model": ready.model, "split": ready.split, "mode": ready.mode, "device": ready.device,
            "context_length": ready.context_length,
        }  # fmt: skip
        yield given.name
