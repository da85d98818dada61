"""The command `sparkinfer report`."""

from pathlib import Path
from typing import Any

import click

from sparkinfer.commands.shared import (
    FILE,
    FileCommand,
    finish,
    force_option,
    json_option,
    let_threads_sleep,
    output,
)
from sparkinfer.sizes import format_bytes


@click.command(cls=FileCommand)
@click.argument("model", type=FILE)
@click.option(
    "-o", "--output", type=output(".html"), required=True, help="The page (HTML) to write."
)
@click.option("--profile", type=FILE, help="Firings; predictors by the .report.json beside it.")
@click.option("--split", type=FILE, help="The plan.")
@click.option("--machine", type=FILE, help="The machine that it was solved for.")
@click.option("--predictors", type=FILE, help="predictors.safetensors, or its folder.")
@click.option("--eval-json", "evals", type=FILE, multiple=True,
              help="What sparkinfer eval --json printed; may be repeated.")  # fmt: skip
@force_option
@json_option
def report(as_json: bool, evals: tuple[Path, ...], **options: Any) -> None:
    """Write all that is known of a model as one HTML page that needs no network."""
    let_threads_sleep()
    from sparkinfer.report.config import ReportConfig
    from sparkinfer.report.report import report as run

    config = ReportConfig(evals=evals, **options)
    summary = run(config)
    lines = [f"no input for: {', '.join(summary.missing)}"] if summary.missing else []
    lines.append(
        f"wrote {summary.output}: {summary.num_plots} plots, {format_bytes(summary.num_bytes)}"
    )
    finish(summary, as_json, lines)
