"""`hotsplit bench`: measures a model's speed, reports it like llama-bench, and explains it."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hotsplit.commands.options.engine import long_text_options, neuron_cache_option
from hotsplit.commands.options.kept_files import bench_line
from hotsplit.commands.options.preparation import preparation, preparation_options
from hotsplit.commands.options.shared import (
    FILE,
    OUTPUT,
    FileCommand,
    Parsed,
    finish,
    given,
    json_option,
    running_options,
    say,
    split_option,
    take_engine_options,
)
from hotsplit.errors import HotsplitError
from hotsplit.system.sizes import whole_number


def _lengths(text: str) -> tuple[int, ...]:
    """Numbers of tokens in llama-bench's form: 512, or 128,512."""
    try:
        return tuple(whole_number(number) for number in text.split(","))
    except ValueError as error:
        raise HotsplitError(
            f"{text!r} is not a list of numbers; wanted e.g. 512 or 128,512"
        ) from error


_LENGTHS = Parsed("N[,N...]", _lengths)


@click.command(cls=FileCommand)
@click.argument("model", type=FILE)
@split_option
@preparation_options
@click.option("-p", "--n-prompt", "prompt_lengths", type=_LENGTHS, multiple=True,
              help="Prompt lengths to test; 0: none. [default: 512]")  # fmt: skip
@click.option("-n", "--n-gen", "gen_lengths", type=_LENGTHS, multiple=True,
              help="Numbers of tokens to generate; 0: none. [default: 128]")  # fmt: skip
@click.option("-d", "--depth", "--n-depth", "depths", type=_LENGTHS, multiple=True,
              help="Tokens in the cache before a test. [default: 0]")  # fmt: skip
@click.option("-r", "--repetitions", type=int, default=5, show_default=True,
              help="Rounds to measure.")  # fmt: skip
@click.option("--text", type=FILE,
              help="Text to take tokens from, since a sparse mode's speed depends on them. [default: random tokens]")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of random tokens.")
@click.option("--compare", type=FILE, metavar="PROGRAM",
              help="Measure llama.cpp in the same rounds: a Python with llama_cpp, or a llama-bench.")  # fmt: skip
@click.option("--compare-model", type=FILE, metavar="FILE",
              help="The GGUF that llama.cpp loads. [default: MODEL]")  # fmt: skip
@click.option("--compare-gpu-layers", type=int, metavar="N",
              help="Layers that llama.cpp puts on a GPU. [default: none if MODEL runs on the CPU, else all]")  # fmt: skip
@long_text_options
@neuron_cache_option
@running_options
@click.option("--cache-replay", is_flag=True,
              help="Compare policies of the neuron cache on --text instead, with the times in the plan (--split).")  # fmt: skip
@click.option("--cache-tokens", type=click.IntRange(64, 1 << 20), default=2000, show_default=True,
              help="Tokens of the text to replay.")  # fmt: skip
@click.option("--cache-plot", type=OUTPUT, metavar="FILE.png", help="Plot of the replay to write.")
@click.option("--md", "as_markdown", is_flag=True, help="Print llama-bench's table on stdout.")
@json_option
@click.pass_context
def bench(
    ctx: click.Context, prompt_lengths: tuple[tuple[int, ...], ...],
    gen_lengths: tuple[tuple[int, ...], ...], depths: tuple[tuple[int, ...], ...],
    as_markdown: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Measure the speed of prompts and generation on this machine.

    Speeds are compared with the limit set by the memory's speed and, if the step is native,
    broken down by its parts."""
    _check_replay(ctx)
    replayed = {name: options.pop(name) for name in ("cache_replay", "cache_tokens", "cache_plot")}
    if replayed["cache_replay"]:
        content, lines = _run_replay({**options, **replayed})
        return finish(content if as_json else {}, as_json, lines)
    if as_json and as_markdown:
        raise click.UsageError("--json and --md are two forms of one report: leave one out.")
    lengths = {"prompt_lengths": prompt_lengths, "gen_lengths": gen_lengths, "depths": depths}
    options |= {name: sum(values, ()) for name, values in lengths.items() if values}
    with preparation(options):
        _measure(options, as_json=as_json, as_markdown=as_markdown)
    return None


def _measure(options: dict[str, Any], *, as_json: bool, as_markdown: bool) -> None:
    from hotsplit.measure.bench.config import BenchConfig

    engine = take_engine_options(options)
    config = BenchConfig(
        engine=engine, **options
    )  # refuses wrong options before the imports, which take seconds
    from hotsplit.measure.bench.bench import bench as run
    from hotsplit.measure.bench.fields import to_json
    from hotsplit.measure.bench.tables import lines_of, markdown_of
    from hotsplit.system.progress import progress

    with progress("measuring", config.num_runs, "tests") as advance:
        report = run(config, advance)
    kept = bench_line(config.model) if config.split is None else None
    if kept and not as_json:
        say(kept)
    if as_markdown:
        click.echo(markdown_of(report))
        finish({}, False, [f"note: {note}" for note in report.notes])
    else:
        finish(to_json(report) if as_json else {}, as_json, lines_of(report))


# ---- --cache-replay: policies of the neuron cache on a text, without a GPU

# The options of bench that a replay takes; all others are for measurements.
_TAKEN = ("model", "split", "text", "neuron_cache", "cache_tokens", "cache_plot", "as_json")


def _check_replay(ctx: click.Context) -> None:
    """Raises UsageError for options of both a replay and a measurement, and for missing ones."""
    taken = {param.name: param for param in given(ctx)}
    if not ctx.params["cache_replay"]:
        for name in ("cache_tokens", "cache_plot"):
            if name in taken:
                raise click.UsageError(f"--{name.replace('_', '-')} needs --cache-replay.")
        return
    for name in ("split", "text"):
        if name not in taken:
            raise click.UsageError(f"--cache-replay needs --{name}.")
    other = sorted(taken.keys() - {*_TAKEN, "cache_replay"})
    if other:
        names = ", ".join(max(taken[name].opts, key=len) for name in other)
        raise click.UsageError(f"--cache-replay measures nothing: leave out {names}.")


def _run_replay(options: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Replays the policies, and plots them if asked to; returns (JSON, lines for the user)."""
    from hotsplit.files.outputs import check_outputs
    from hotsplit.measure.cache_replay.replay import ReplayConfig, num_stages, replay
    from hotsplit.options.neuron_cache import CacheOptions
    from hotsplit.system.progress import progress

    plot: Path | None = options["cache_plot"]
    settings = options["neuron_cache"]
    config = ReplayConfig(
        model=options["model"],
        split=options["split"],
        text=options["text"],
        num_tokens=options["cache_tokens"],
        options=settings if isinstance(settings, CacheOptions) else CacheOptions(),
    )
    if plot is not None:
        from hotsplit.measure.cache_replay.plot import plot_replay

        inputs = (config.model, config.split, config.text)
        check_outputs([plot], force=True, inputs=inputs)
    with progress("replaying", num_stages(), "stages") as advance:
        report = replay(config, advance)
    lines = report.lines
    if plot is not None:
        plot_replay(report, plot)
        lines = [*lines, f"wrote {plot}"]
    content = {
        "benchmark": "cache_replay", "model": str(config.model), "split": str(config.split),
        "text": str(config.text), **asdict(report), "share_of_bound": report.share_of_bound,
    }  # fmt: skip
    return content, lines
