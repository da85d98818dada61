"""The command `hotsplit report`."""

from pathlib import Path
from typing import Any

import click

from hotsplit.commands.options.shared import FILE, FileCommand, OutputPath, finish, report_options
from hotsplit.system.sizes import format_bytes


@click.command(cls=FileCommand)
@click.argument("model", type=FILE)
@click.option(
    "-o", "--output", type=OutputPath(".html"), required=True, help="The page (HTML) to write."
)
@click.option(
    "--profile", type=FILE, help="The profile; a .report.json next to it describes the predictors."
)
@click.option("--split", type=FILE, help="The plan.")
@click.option("--machine", type=FILE, help="The machine file that the plan was solved for.")
@click.option("--predictors", type=FILE, help="predictors.safetensors, or its folder.")
@click.option(
    "--eval-json",
    "evals",
    type=FILE,
    multiple=True,
    help="Output of hotsplit eval --json; may be repeated.",
)
@report_options
def report(as_json: bool, evals: tuple[Path, ...], **options: Any) -> None:
    """Write what the given files say about a model to one HTML page.

    The page needs no network."""
    from hotsplit.artifacts.model_file import ModelFile

    ModelFile.load(options["model"])  # fails early: the other imports take seconds
    from hotsplit.report.config import ReportConfig
    from hotsplit.report.report import report as run

    config = ReportConfig(evals=evals, **options)
    summary = run(config)
    lines = []
    if summary.missing:
        absent = [f"--{name}" for name in ("profile", "machine", "split") if not options[name]]
        wanted = f" (give {', '.join(absent)}; the page says which command makes each, hotsplit cache list what run has made)"
        lines.append(f"no input for: {', '.join(summary.missing)}{wanted if absent else ''}")
    lines.append(
        f"wrote {summary.output}: {summary.num_plots} plots, {format_bytes(summary.num_bytes)}"
    )
    finish(summary, as_json, lines)
