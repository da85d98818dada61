"""Commands that take a checkpoint, or a model and a budget of VRAM, prepare it first, as `run`
does.

The stages are chosen, run and cached by the package hotsplit.run."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.options.command_options import joined, option_table, say, take_engine_options
from hotsplit.convert.options import OUTTYPES
from hotsplit.errors import HotsplitError
from hotsplit.files.steady import suspended
from hotsplit.options.engine_config import EngineConfig

if TYPE_CHECKING:
    from hotsplit.run.prepare import Ready
    from hotsplit.run.stages import RunJob

_SAME = {
    "fp32": "f32",
    "float32": "f32",
    "fp16": "f16",
    "float16": "f16",
    "bfloat16": "bf16",
    "q8": "q8_0",
}
# Types that are read from other files and never written.
_READ_ONLY = ("iq", "tq")


class OuttypeChoice(click.Choice):
    """A type (f32, ..., q6_k) or mixture (q4_k_m, ...) in any case and spelling."""

    def __init__(self) -> None:
        super().__init__(OUTTYPES, case_sensitive=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = str(value).lower()
        if name not in self.choices and name.startswith(_READ_ONLY):
            self.fail(
                f"{name} cannot be written, wanted one of {', '.join(self.choices)}", param, ctx
            )
        return super().convert(_SAME.get(name, name), param, ctx)


OUTTYPE = OuttypeChoice()


ASKED_FROM_S = 600.0  # longer work must be confirmed at a terminal
DEFAULT_TEXT = "profiling on the text in the package (Python's documentation, two old books);"


def vram_option(default: str) -> Callable[[Any], Any]:
    return option_table(
        f"""
-vb --vram --vram-budget | vram: size* | GPU memory to plan the model for, e.g. 8GiB; a bare number
    is GiB; 0 uses only the CPU. Once per GPU. [default: {default}]
"""
    )


tokenizer_option = option_table(
    """
--tokenizer | file | The model's tokenizer.json, if the model has none or one that cannot be used;
    it is written into a copy of the model.
"""
)
outtype_option = option_table(
    "--outtype | type | Type of the matrices. [default: one that fits into memory]", type=OUTTYPE
)
activation_option = option_table(
    """
--activation | text NAME | The activation, which other programs' GGUF files do not record: relu,
    drelu, fatrelu=0.01, ...
"""
)
yes_option = option_table("-y --yes | flag | Do not ask for confirmation of long work.")
# `preparation` takes their values.
preparation_options = joined(
    vram_option("a GGUF runs without a plan; other models as with hotsplit run"),
    tokenizer_option,
    yes_option,
)
all_preparation_options = joined(
    vram_option(
        "run: most of what is free on the first, or on --device; elsewhere a GGUF runs without a"
        " plan"
    ),
    option_table(
        """
--corpus | corpora: file* | Text like yours to profile on, if profiling pays off; may be repeated.
    [default: a text in the package]
--tokens | int | Tokens to profile on. [default: as many as take at most a quarter of an hour]
"""
    ),
    outtype_option,
    tokenizer_option,
    activation_option,
    click.option(
        "--verify/--no-verify",
        "is_verified",
        default=None,
        help="Compare a converted model with its source. [default: if it takes less than a minute]",
    ),
    yes_option,
)
_NAMES = ("vram", "outtype", "tokens", "corpora", "tokenizer", "activation", "is_verified")


@contextmanager
def texts_or_default(corpora: tuple[Path, ...]) -> Iterator[tuple[Path, ...]]:
    """Yields the texts to profile on: the user's, or the package's, which stays in the cache while
    the context is open, as the first of several processes says."""
    if corpora:
        yield corpora
        return
    from hotsplit.profile.corpus.processes import rank_here
    from hotsplit.run.cache_folder import RunCache
    from hotsplit.run.stages import texts_of

    if rank_here() == 0:
        say(f"{DEFAULT_TEXT} --corpus with text like yours makes a better profile")
    with RunCache.open(say) as cache:
        yield texts_of((), cache)


def needs_preparation(model: Path) -> bool:
    """True for all but a GGUF: a folder, or a name on the hub."""
    from hotsplit.convert.hub import named_on_hub

    return named_on_hub(model) is not None or not (model.is_file() or model.suffix == ".gguf")


@contextmanager
def preparation(
    options: dict[str, Any],
    num_sequences: int = 1,
    *,
    is_always: bool = False,
    check: Callable[["RunJob"], None] = lambda job: None,
) -> Iterator[dict[str, Any] | None]:
    """Takes the options of preparation out of a command's options. If one is given, the model is no
    file, or `is_always` and there is no plan, the model is prepared for `num_sequences` texts at a
    time, and the options "model", "split", "mode", "device" and "context_length" become those of
    what was made, whose files stay in the cache while the context is open; so is a draft model.

    Yields what was done, for a report; None if nothing had to be prepared. `check` is called before
    anything is made. Raises HotsplitError if the model cannot be prepared, UsageError beside a plan
    of the user's."""
    yes = options.pop("yes")
    given = {name: value for name in _NAMES if (value := options.pop(name, None)) not in (None, ())}
    model, split, draft = options["model"], options["split"], options.get("model_draft")
    has_draft = draft is not None and needs_preparation(draft)
    is_file = split is not None or not needs_preparation(model)
    for path in (*given.get("corpora", ()), *([] if draft is None or has_draft else [draft])):
        if not path.exists():
            raise HotsplitError(f"{path}: no such file or folder")
    with _draft_prepared(options, yes=yes) if has_draft else nullcontext():
        is_asked = is_always and split is None or given.keys() - {"is_verified"}
        if is_file and not is_asked:
            yield None
            return
        for name, option in (("split", "--split"), ("cpu_ffn", "-cffn")):
            if options.get(name):
                what = "--vram makes a plan" if given.get("vram") else f"{model} is prepared first"
                raise click.UsageError(f"{what}: leave {option} out.")
        engine = replace(take_engine_options(dict(options)), num_sequences=num_sequences)
        with _prepared(model, engine, options["threads"], given, yes=yes, check=check) as (
            ready,
            facts,
        ):
            options |= {
                "model": ready.model,
                "split": ready.split,
                "mode": ready.mode,
                "device": ready.device,
                "context_length": ready.context_length,
            }
            yield facts


@contextmanager
def _draft_prepared(options: dict[str, Any], *, yes: bool) -> Iterator[None]:
    """Prepares the draft model for the CPU; the option "model_draft" becomes its file."""
    engine, draft = EngineConfig(device="cpu"), options["model_draft"]
    with _prepared(draft, engine, options["threads"], {}, yes=yes) as (ready, _):
        options["model_draft"] = ready.model
        yield


@contextmanager
def _prepared(
    model: Path,
    engine: EngineConfig,
    threads: int | None,
    given: dict[str, Any],
    *,
    yes: bool,
    check: Callable[["RunJob"], None] = lambda job: None,
) -> "Iterator[tuple[Ready, dict[str, Any]]]":
    from hotsplit.run.cache_folder import RunCache
    from hotsplit.run.choice import Wishes
    from hotsplit.run.prepare import estimate_of, job_of, prepare, summary
    from hotsplit.run.source import check_tokenizer, look_at
    from hotsplit.runtime.kernels.threads import use_threads
    from hotsplit.runtime.resolved_options import device_of

    use_threads(threads)
    device_of(engine.device)
    wishes = Wishes(engine=engine, **given)
    with RunCache.open(say) as cache:
        source = look_at(model, wishes.activation, cache.folder / "planned.gguf", wishes.tokenizer)
        job = job_of(source, wishes, cache)
        check(job)
        planned = estimate_of(job)
        facts = summary(job, planned)
        if planned.works:
            check_tokenizer(source, job.choice.model)
            say(planned.line)
            is_profiled = any(work.kind in ("look", "profile") for work in planned.works)
            if is_profiled and not wishes.corpora:
                say(f"{DEFAULT_TEXT} --corpus with text like yours makes a better profile")
            is_asked = planned.seconds > ASKED_FROM_S and not yes
            if is_asked and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
                click.confirm("continue?", default=True, abort=True, err=True)
        with suspended():
            ready = prepare(job, planned)
        if ready.made:
            say(f"ready in {ready.seconds:.0f} s; hotsplit cache list shows what is kept")
        yield ready, facts | {"prepared_s": ready.seconds, "made": ready.made}
