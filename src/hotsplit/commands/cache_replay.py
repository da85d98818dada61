"""`hotsplit bench --cache-replay`: replays neuron-cache policies on a text, without a GPU."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

# The options of bench that a replay takes; all others are for measurements.
_TAKEN = ("model", "split", "text", "neuron_cache", "cache_tokens", "cache_plot", "as_json")


def check_replay(ctx: click.Context) -> None:
    """Raises UsageError if options of a replay are mixed with those of a measurement, or if a
    replay lacks its plan or text."""
    given = {
        name
        for name in ctx.params
        if ctx.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE
    }
    if not ctx.params["cache_replay"]:
        for name in ("cache_tokens", "cache_plot"):
            if name in given:
                raise click.UsageError(f"--{name.replace('_', '-')} needs --cache-replay.")
        return
    for name in ("split", "text"):
        if name not in given:
            raise click.UsageError(f"--cache-replay needs --{name}.")
    other = sorted(given - {*_TAKEN, "cache_replay"})
    if other:
        names = {param.name: max(param.opts, key=len) for param in ctx.command.params}
        raise click.UsageError(
            f"--cache-replay measures nothing: leave out {', '.join(names[name] for name in other)}."
        )


def run_replay(options: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Replays the policies and plots them if asked to; returns (report for JSON, lines for the
    user)."""
    from hotsplit.files.outputs import check_outputs
    from hotsplit.measure.cache_replay.replay import ReplayConfig, num_stages, replay
    from hotsplit.options.neuron_cache import CacheOptions
    from hotsplit.system.progress import progress

    plot: Path | None = options["cache_plot"]
    given = options["neuron_cache"]
    config = ReplayConfig(
        model=options["model"],
        split=options["split"],
        text=options["text"],
        num_tokens=options["cache_tokens"],
        options=given if isinstance(given, CacheOptions) else CacheOptions(),
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
