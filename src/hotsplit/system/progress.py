"""Progress on stderr: amount done, rate, time left."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

LINE_EVERY_S = 30.0  # if stderr is not a terminal


@dataclass
class Advance:
    """A bar, or lines in place of one; called with the amount just done."""

    bar: Progress
    task: TaskID
    unit: str
    console: Console | None  # for lines instead of a bar
    said_at: float = field(default_factory=lambda: time.monotonic())
    since: tuple[float, float] | None = None  # seconds and amount at the first line

    def __call__(self, amount: float) -> None:
        self.bar.advance(self.task, amount)
        if self.console is not None:
            self._line(self.console)
            return
        speed = self.bar.tasks[-1].speed
        self.bar.update(self.task, rate="" if speed is None else f"{speed:,.0f} {self.unit}/s")

    def _line(self, console: Console) -> None:
        """Prints a line from time to time. The time left is estimated from the speed since the
        first line: before it, part of the time goes into loading files and memory."""
        now = time.monotonic()
        if now - self.said_at < LINE_EVERY_S:
            return
        self.said_at = now
        task = self.bar.tasks[-1]
        line = f"{task.description}: {task.completed:,.0f} {self.unit}"
        if task.total:
            line += f" of {task.total:,.0f} ({task.completed / task.total:.0%})"
            began, done = self.since or (now, task.completed)
            if task.completed > done:
                left = (now - began) * (task.total - task.completed) / (task.completed - done)
                line += f", about {max(0.0, left):,.0f} s left"
        self.since = self.since or (now, task.completed)
        console.print(line, highlight=False, soft_wrap=True)

    def begin(self, label: str) -> None:
        """Starts another part of the work, of unknown length, with its own bar."""
        self.task = self.bar.add_task(label, total=None, rate="")
        self.since = None

    def set_total(self, total: float) -> None:
        self.bar.update(self.task, total=total)


@contextmanager
def progress(label: str, total: float | None, unit: str) -> Iterator[Advance]:
    """Yields a function to call with the amount just done. If stderr is not a terminal, it prints a
    line at most every half minute. `Advance.set_total` sets the total later if it is None at first;
    it may stay unknown."""
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
        yield Advance(bar, task, unit, None if console.is_terminal else console)
