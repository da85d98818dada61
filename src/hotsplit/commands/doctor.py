"""`hotsplit doctor`: must work even if torch is broken, so it imports none of the stages."""

from dataclasses import asdict
from pathlib import Path

import click

from hotsplit.commands.options.shared import OUTPUT, FileCommand, finish, report_options, say


@click.command(cls=FileCommand, short_help="Check this machine, and say what to fix.")
@click.option(
    "--report",
    type=OUTPUT,
    help="Write the findings, without names and paths, to a file for an issue.",
)
@report_options
def doctor(report: Path | None, force: bool, as_json: bool) -> None:
    """Show what works on this machine, what does not, and what to do about it.

    Looks at the processor and its kernels, memory, torch, Triton, NVIDIA's driver and GPUs. Exits
    with 1 if something is wrong."""
    from hotsplit.doctor.examine import examine
    from hotsplit.doctor.finding import report_of
    from hotsplit.files.atomic import partial_file
    from hotsplit.files.outputs import check_output

    if report is not None:
        check_output(report, force=force)
    found = examine(say)
    lines = [finding.line for finding in found.findings]
    count = sum(finding.state == "wrong" for finding in found.findings)
    lines.append("nothing is wrong" if found.is_fine else f"{count} wrong")
    if report is not None:
        with partial_file(report) as partial:
            partial.write_text(report_of(found.findings), encoding="utf-8")
        lines.append(f"wrote {report}")
    finish(asdict(found), as_json, lines)
    raise click.exceptions.Exit(0 if found.is_fine else 1)
