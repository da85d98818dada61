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
from hotsplit.commands.options.speculation import take_speculation_options
from hotsplit.files.steady import suspended
from hotsplit.options.engine_config import EngineConfig

if TYPE_CHECKING:
    from hotsplit.run.estimate import Estimate
    from hotsplit.run.prepare import Ready
    from hotsplit.run.stages import Job

ASKED_FROM_S = 600.0  # longer work must be confirmed at a terminal

yes_option = click.option(
    "-y", "--yes", is_flag=True, help="Do not ask for confirmation of long work."
)


def vram_option(default: str) -> Callable[[Any], Any]:
    return click.option(
        "-vb",
        "--vram",
        "--vram-budget",
        "vram",
        type=SIZE,
        multiple=True,
        help="GPU memory to plan the model for, e.g. 8GiB; a bare number is GiB; 0 uses only the CPU."
        f" Once per GPU. [default: {default}]",
    )


tokenizer_option = click.option(
    "--tokenizer",
    type=FILE,
    help="The model's tokenizer.json, if the model has none or one that cannot be used; it is written"
    " into a copy of the model.",
)
preparation_options = joined(
    vram_option("a GGUF runs without a plan; other models as with hotsplit run"),
    tokenizer_option,
    yes_option,
)
DEFAULT_TEXT = "profiling on the text in the package (Python's documentation, two old books);"


def announce(job: "Job", planned: "Estimate", *, yes: bool) -> None:
    """Announces the work; asks the user if it takes long."""
    if not planned.works:
        return
    say(planned.line)
    if any(work.kind in ("look", "profile") for work in planned.works) and not job.texts:
        say(f"{DEFAULT_TEXT} hotsplit run --corpus with text like yours makes a better profile")
    is_asked = planned.seconds > ASKED_FROM_S and not yes
    if is_asked and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        click.confirm("continue?", default=True, abort=True, err=True)


@contextmanager
def texts_or_default(corpora: tuple[Path, ...]) -> Iterator[tuple[Path, ...]]:
    """Yields the texts to profile on: the user's, or the package's, which stays in the cache while the
    context is open, as the first of several processes says."""
    if corpora:
        yield corpora
        return
    from hotsplit.profile.corpus.processes import rank_here
    from hotsplit.run.cache_folder import Cache
    from hotsplit.run.stages import texts_of

    if rank_here() == 0:
        say(f"{DEFAULT_TEXT} --corpus with text like yours makes a better profile")
    with Cache.open(say) as cache:
        yield texts_of((), cache)


def said_when_ready(ready: "Ready") -> None:
    if ready.made:
        say(f"ready in {ready.seconds:.0f} s; hotsplit cache list shows what is kept")


def needs_preparation(model: Path) -> bool:
    """True for all but a GGUF: a folder, or a name on the hub."""
    from hotsplit.convert.hub_names import named_on_hub

    return named_on_hub(model) is not None or not (model.is_file() or model.suffix == ".gguf")


@contextmanager
def preparation(
    options: dict[str, Any], num_sequences: Callable[[], int] = lambda: 1
) -> Iterator[str | None]:
    """Takes --vram, --tokenizer and --yes out of a command's options. If a budget or a tokenizer is
    given, or the model is no file, the model is prepared for `num_sequences` texts at a time, and the options "model", "split",
    "mode", "device" and "context_length" become those of what was made, whose files stay in the cache
    while the context is open; so is a draft model. Yields the name that the user gave, or None if nothing had to be
    prepared. Raises HotsplitError if it cannot be, UsageError beside a plan of the user's."""
    vram, yes, tokenizer = (options.pop(name) for name in ("vram", "yes", "tokenizer"))
    model: Path = options["model"]
    is_ready = options["split"] is not None or not needs_preparation(model)
    with drafting(options, yes=yes):
        if not vram and tokenizer is None and is_ready:
            yield None
            return
        for name, option in (("split", "--split"), ("cpu_ffn", "-cffn")):
            if options.get(name):
                what = "--vram makes a plan" if vram else f"{model} is prepared first"
                raise click.UsageError(f"{what}: leave {option} out.")
        engine = replace(take_engine_options(dict(options)), num_sequences=num_sequences())
        with _prepared(model, engine, options["threads"], vram, tokenizer, yes=yes) as ready:
            options |= {
                "model": ready.model,
                "split": ready.split,
                "mode": ready.mode,
                "device": ready.device,
                "context_length": ready.context_length,
            }
            yield str(model)


@contextmanager
def drafting(options: dict[str, Any], *, yes: bool) -> Iterator[None]:
    """Prepares a draft model that is no file for the CPU; the option "model_draft" becomes its file."""
    draft: Path | None = options.get("model_draft")
    if draft is None or not needs_preparation(draft):
        yield
        return
    take_speculation_options(dict(options))  # refuses a draft model that would not be used
    with _prepared(draft, EngineConfig(device="cpu"), options["threads"], yes=yes) as ready:
        options["model_draft"] = ready.model
        yield


@contextmanager
def _prepared(
    model: Path,
    engine: EngineConfig,
    threads: int | None,
    vram: tuple[int, ...] = (),
    tokenizer: Path | None = None,
    *,
    yes: bool,
) -> "Iterator[Ready]":
    from hotsplit.run.cache_folder import Cache
    from hotsplit.run.choice import Wishes
    from hotsplit.run.prepare import estimate_of, job_of, prepare
    from hotsplit.run.source import check_tokenizer, look_at
    from hotsplit.runtime.kernels.threads import use_threads

    use_threads(threads)
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
        yield ready
