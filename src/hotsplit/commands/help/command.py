"""`hotsplit help [COMMAND]` and `hotsplit completion SHELL`."""

from collections.abc import Sequence

import click

from hotsplit.commands.options.command_options import FileCommand

PROGRAM = "hotsplit"
COMPLETE_VARIABLE = "_HOTSPLIT_COMPLETE"  # click's for a program of this name
SHELLS = ("bash", "zsh", "fish")
INSTALL = """\b
bash: hotsplit completion bash > ~/.local/share/bash-completion/completions/hotsplit
zsh:  hotsplit completion zsh > ~/.zfunc/_hotsplit   (in a folder of $fpath)
fish: hotsplit completion fish > ~/.config/fish/completions/hotsplit.fish"""


@click.command("help", cls=FileCommand, short_help="Show the help of a command.")
@click.argument("names", nargs=-1, metavar="[COMMAND]")
@click.pass_context
def help_command(ctx: click.Context, names: Sequence[str]) -> None:
    """Show what a command does and its options; without a name, list all commands."""
    parent = ctx.parent
    assert parent is not None and isinstance(parent.command, click.Group)
    if not names:
        click.echo(parent.get_help())
        return
    _, found, _ = parent.command.resolve_command(parent, [names[0]])  # raises for an unknown name
    if len(names) > 1:
        raise click.UsageError(f"no such command '{' '.join(names)}'", ctx=parent)
    assert found is not None
    click.echo(found.get_help(click.Context(found, info_name=names[0], parent=parent)))


@click.command(
    "completion", cls=FileCommand, epilog=INSTALL, short_help="Print a shell's completion script."
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands and options in a shell."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None and ctx.parent is not None
    click.echo(found(ctx.parent.command, {}, PROGRAM, COMPLETE_VARIABLE).source())
