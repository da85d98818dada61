"""Handles Ctrl-C, SIGTERM and SIGHUP: the run finishes its current step, saves its state and
ends."""

import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Self

from hotsplit.errors import Interrupted
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.system.signals import MESSAGE, NUMBERS, SAME_S


class Signals:
    """A context manager. During training the first signal is noted, and a second one ends the
    program at once, unless both came together: shells and `timeout` send a signal twice. With
    several processes, later signals are ignored, since torchrun sends every signal twice. Before
    training, the first one ends the program."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_training, self.num_processes = False, 1
        self._told_at = 0.0  # when the first signal came
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in NUMBERS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_new = self.number is not None and now - self._told_at >= SAME_S
        if not self.is_training or (is_new and self.num_processes == 1):
            raise Interrupted(MESSAGE, number)
        if self.number is None:
            self._told_at = now
        self.number = number

    def train(self, ranks: Ranks) -> None:
        """Lets signals end the run after the current step from now on."""
        self.is_training, self.num_processes = True, ranks.size

    def wants_stop(self, ranks: Ranks) -> bool:
        """True if any process got a signal."""
        return ranks.largest(int(self.number is not None)) > 0

    def interrupted(self, state: Path) -> Interrupted:
        return Interrupted(
            f"interrupted; {state} holds the work so far; the same command continues from there",
            self.number or signal.SIGTERM,
        )
