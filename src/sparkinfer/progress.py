"""Progress on stderr: how much is done, how fast, how long it will take."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)


@dataclass(frozen=True)
class Advance:
    """Called with the amount just done."""

    bar: Progress
    task: TaskID
    unit: str

    def __call__(self, amount: float) -> None:
        self.bar.advance(self.task, amount)
        speed = self.bar.tasks[0].speed
        self.bar.update(self.task, rate="" if speed is None else f"{speed:,.0f} {self.unit}/s")

    def set_total(self, total: float) -> None:
        self.bar.update(self.task, total=total)


@contextmanager
def progress(label: str, total: float | None, unit: str) -> Iterator[Advance]:
    """Gives what is to be called with the amount just done. Silent where stderr is no terminal.

    A `total` of None is one that `Advance.set_total` tells later."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Advance(bar, bar.add_task(label, total=total, rate=""), unit)
