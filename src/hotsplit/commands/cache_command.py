"""`hotsplit cache`: shows and removes what `run` keeps."""

import time
from dataclasses import asdict

import click

from hotsplit.commands.options.command_options import FileCommand, aligned, finish, json_option, say
from hotsplit.files.typed import printable
from hotsplit.system.sizes import format_bytes


@click.command(cls=FileCommand)
@click.argument("action", type=click.Choice(["list", "clear"]))
@click.argument("names", nargs=-1, metavar="[NAME...]")
@json_option
def cache(action: str, names: tuple[str, ...], as_json: bool) -> None:
    """Show or remove the files that `hotsplit run` keeps.

    NAME is a folder's name, a kind, a source or a state (stale: of another version; unfinished), as
    `list` shows them; without a name, `clear` removes everything that is not in use. Sources are
    never touched."""
    from hotsplit.run.cache_folder import cache_folder
    from hotsplit.run.housekeeping import clear, list_cache

    folder = cache_folder()
    if action == "clear":
        cleared = clear(folder, names)
        lines = [f"kept {name}: {why}" for name, why in cleared.kept]
        lines.append(
            f"removed {len(cleared.removed)} from {folder}, {format_bytes(cleared.num_bytes)}"
        )
        finish(asdict(cleared) | {"cache": str(folder)}, as_json, lines)
        return
    if names:
        raise click.UsageError("list shows everything: leave names out.")
    found = list_cache(folder)
    total = sum(artifact.num_bytes for artifact in found)
    content = {"cache": str(folder), "num_bytes": total, "entries": [asdict(s) for s in found]}
    if as_json:
        finish(content, True, [])
        return
    rows = [("what", "file", "size", "last use", "state", "from")]
    rows += [
        (
            s.name,
            s.file or "-",
            format_bytes(s.num_bytes),
            ago(time.time() - s.last_used),
            "in use" if s.is_in_use else s.state,
            printable(s.source) or "-",
        )
        for s in found
    ]
    for line in aligned(rows) if found else []:
        click.echo(line)
    say(f"{len(found)} in {folder}, {format_bytes(total)}")
    if any(s.file for s in found):
        say(f"other commands take a file by its path: {folder}/WHAT/FILE")


def ago(seconds: float) -> str:
    """An age in words, e.g. "5 min ago"."""
    for unit, name in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * unit or (unit == 60 and seconds >= 60):
            return f"{seconds / unit:.0f} {name} ago"
    return "just now"
