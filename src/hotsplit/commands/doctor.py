"""`hotsplit doctor`: must work even if torch is broken, so it imports none of the stages."""

from dataclasses import asdict

import click

from hotsplit.commands.options.command_options import FileCommand, finish, json_option, say


@click.command(cls=FileCommand, short_help="Check this machine, and say what to fix.")
@json_option
def doctor(as_json: bool) -> None:
    """Show what works on this machine, what does not, and what to do about it.

    Looks at the processor, the C++ library, memory, torch, Triton, NVIDIA's driver and GPUs. Exits
    with 1 if something is wrong."""
    from hotsplit.doctor.examine import examine

    found = examine(say)
    count = sum(finding.state == "wrong" for finding in found.findings)
    summary = "nothing is wrong" if found.is_fine else f"{count} wrong"
    finish(asdict(found), as_json, [*(finding.line for finding in found.findings), summary])
    raise click.exceptions.Exit(0 if found.is_fine else 1)
