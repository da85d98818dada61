"""Prints tables on stdout, whatever their cells hold."""

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH_OF_A_PIPE = 120  # columns if stdout is not a terminal
Row = Sequence[object]


def print_facts(title: str, rows: Iterable[Row]) -> None:
    """Prints one table of names and values on stdout."""
    print_tables([facts_table(title, rows)])


def print_table(title: str, columns: list[str], rows: Iterable[Row]) -> None:
    print_tables([columns_table(title, columns, rows)])


def print_tables(tables: Iterable[Table]) -> None:
    """Prints tables on stdout. In a pipe or a file, lines lose the trailing spaces with which rich
    fills the last column."""
    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_PIPE
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    text = captured.get()
    if not console.is_terminal:
        text = "".join(f"{line.rstrip(' ')}\n" for line in text.splitlines())
    console.file.write(text)


def facts_table(title: str, rows: Iterable[Row]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(_printable(name), _printable(value))
    return table


_TEXTS = ("type", "shape", "part", "device", "operation", "reads", "writes")


def columns_table(title: str, columns: list[str], rows: Iterable[Row]) -> Table:
    """The first column and those in _TEXTS are left-aligned, all others right-aligned."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for number, column in enumerate(columns):
        is_text = number == 0 or column in _TEXTS
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_printable, row))
    return table


def _printable(value: object) -> str:
    """The value as text, with escapes for control characters and for those that stdout cannot
    encode: a file may hold anything."""
    encoding = sys.stdout.encoding or "utf-8"
    text = str(value).encode(encoding, "backslashreplace").decode(encoding)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
