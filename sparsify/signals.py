"""Handles Ctrl-C, SIGTERM and SIGHUP: the run finishes its current step, saves its state and
ends."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Self

from sparkinfer.errors import Interrupted
from sparkinfer.profile.ranks import Ranks

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """A context manager. During training the first signal is noted and a second one ends the
    program at once; of several processes it does not, since torchrun sends every signal twice.
    Before training, the first one ends the program."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_training, self.num_processes = False, 1
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in NUMBERS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.is_training or (self.number is not None and self.num_processes == 1):
            raise Interrupted("interrupted; nothing half-written was left", number)
        self.number = number

    def train(self, ranks: Ranks) -> None:
        """Makes a signal end the run after the current step."""
        self.is_training, self.num_processes = True, ranks.size

    def wants_stop(self, ranks: Ranks) -> bool:
        """True if any process got a signal."""
        return ranks.largest(int(self.number is not None)) > 0

    def interrupted(self, state: Path) -> Interrupted:
        return Interrupted(
            f"interrupted; {state} holds the work so far; the same command continues from there",
            self.number or signal.SIGTERM,
        )
