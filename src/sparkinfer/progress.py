"""Progress on stderr: how much is done, how fast, how long it will take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


@contextmanager
def progress(label: str, total: float, unit: str) -> Iterator[Callable[[float], None]]:
    """Gives a function to call with the amount just done. Silent where stderr is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total, rate="")

        def advance(amount: float) -> None:
            bar.advance(task, amount)
            speed = bar.tasks[0].speed
            bar.update(task, rate="" if speed is None else f"{speed:,.0f} {unit}/s")

        yield advance
