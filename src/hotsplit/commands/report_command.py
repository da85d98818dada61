"""The command `hotsplit report`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from hotsplit.commands.options.command_options import (
    FILE,
    FileCommand,
    OutputPath,
    finish,
    option_table,
    report_options,
)
from hotsplit.errors import HotsplitError
from hotsplit.system.sizes import format_bytes


@click.command(cls=FileCommand)
@click.argument("model", type=FILE)
@option_table(
    """
-o --output | page! | The page (HTML) to write.
--profile | file | The profile; a .report.json next to it describes the predictors.
--split | file | The plan.
--machine | file | The machine file that the plan was solved for.
--predictors | file | predictors.safetensors, or its folder.
--eval-json | evals: file* | Output of hotsplit eval --json; may be repeated.
""",
    page=OutputPath(".html"),
)
@report_options
def report(as_json: bool, evals: tuple[Path, ...], **options: Any) -> None:
    """Write what the given files say about a model to one HTML page.

    The page needs no network."""
    from hotsplit.artifacts.model_file import ModelFile

    if find_spec("matplotlib") is None:
        raise HotsplitError("plots need matplotlib: pip install 'hotsplit[report]'")
    ModelFile.load(options["model"])  # fails early: the other imports take seconds
    from hotsplit.report.make_report import report as run
    from hotsplit.report.report_config import ReportConfig

    config = ReportConfig(evals=evals, **options)
    summary = run(config)
    lines = []
    if summary.missing:
        absent = [f"--{name}" for name in ("profile", "machine", "split") if not options[name]]
        wanted = (
            f" (give {', '.join(absent)}; the page says which command makes each, hotsplit"
            " cache list what run has made)"
        )
        lines.append(f"no input for: {', '.join(summary.missing)}{wanted if absent else ''}")
    lines.append(
        f"wrote {summary.output}: {summary.num_plots} plots, {format_bytes(summary.num_bytes)}"
    )
    finish(summary, as_json, lines)
