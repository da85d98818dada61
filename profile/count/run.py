"""Runs windows of text through a model, phase by phase, so that it can be interrupted and resumed.

Each of n processes takes every n-th window. State that changes with every window (sums, or weights
in training) is called a part; this module saves the parts from time to time, sums added up over the
processes, and loads them again."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
from torch import Tensor

from hotsplit.errors import Interrupted
from hotsplit.files.atomic import remove_stale
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.profile.count.resume import Position, Settings, load_position, save_position
from hotsplit.runtime.engine import Engine
from hotsplit.system.signals import NUMBERS, put_back

SAVE_SHARE = 0.05  # largest share of the time spent saving: larger states are saved less often


class SaveSchedule:
    """Saves are due every `seconds`, or less often if one takes long."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._saved_at, self._took_s = seconds, time.monotonic(), 0.0

    @property
    def is_due(self) -> bool:
        since = time.monotonic() - self._saved_at
        return since > max(self._seconds, self._took_s / SAVE_SHARE)

    @contextmanager
    def save(self) -> Iterator[None]:
        """Times a save."""
        began = time.monotonic()
        yield
        self._saved_at = time.monotonic()
        self._took_s = self._saved_at - began


_SAVE, _STOP = 1, 2


class RunPart(Protocol):
    """State that changes with every window: sums, or weights in training."""

    is_sum: bool  # true: the processes' shares add up; false: all hold the same values

    def arrays(self) -> dict[str, Tensor]: ...

    def load(self, arrays: dict[str, Tensor]) -> None: ...

    def check(self) -> None:
        """Raises HotsplitError if the gathered values cannot be right."""
        return


class Tensors(RunPart):
    """A part of given tensors, which are updated in place."""

    def __init__(self, tensors: dict[str, Tensor], *, is_sum: bool) -> None:
        self.tensors, self.is_sum = tensors, is_sum

    def arrays(self) -> dict[str, Tensor]:
        return self.tensors

    def load(self, arrays: dict[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(arrays[name])


# Around every round of windows, with their lengths by rank: several processes train in step.
Lockstep = Callable[[Sequence[int]], AbstractContextManager[None]]


class ResumableRun:
    """A resumable run: `add` and `phase` must be called in the same order in every run."""

    def __init__(
        self,
        engine: Engine,
        ranks: Ranks,
        path: Path,
        settings: Settings,
        on_tokens: Callable[[float], None],
        *,
        force: bool,
        save_every_s: float,
    ) -> None:
        self.engine, self.ranks, self.path, self.settings = engine, ranks, path, settings
        self.on_tokens, self._saves = on_tokens, SaveSchedule(save_every_s)
        self.position = load_position(path, settings, ranks, force=force)
        self.parts: dict[str, RunPart] = {}
        self._phase, self._done = -1, 0
        self._signal: int | None = None
        self._in_phase = False

    def add(self, name: str, part: RunPart) -> None:
        """Includes the part in later saves, and loads what an earlier run saved of it."""
        self.parts[name] = part
        found = self.position.of_part(name)
        if found and (self.ranks.is_first or not part.is_sum):
            part.load({key: torch.from_numpy(array) for key, array in found.items()})

    def total(self, name: str) -> dict[str, Tensor]:
        """A part's arrays, added up over the processes if they are sums. Raises HotsplitError if
        a process's `check` of the part does."""
        part = self.parts[name]
        self.ranks.together(part.check)
        arrays = part.arrays()
        return {k: self.ranks.sum(a) for k, a in arrays.items()} if part.is_sum else arrays

    def phase(self, windows: Sequence[Tensor], lockstep: Lockstep | None = None) -> None:
        """Runs the remaining windows, and saves at their end, since what follows a phase may take
        long. After a signal, saves everything and raises Interrupted."""
        self._phase, self._done = self._phase + 1, 0
        if self.position.phase > self._phase:
            self._done = len(windows)
        elif self.position.phase == self._phase:
            self._done = min(self.position.done, len(windows))
        self.on_tokens(sum(map(len, windows[: self._done])))
        self._in_phase = True
        while self._done < len(windows):
            self._round(windows[self._done : self._done + self.ranks.size], lockstep)
            self._pause(ends_phase=self._done >= len(windows))
        self._in_phase = False
        if self._signal is not None:  # it came while the end of the phase was saved
            raise self._interrupted(self._signal)

    def _round(self, windows: Sequence[Tensor], lockstep: Lockstep | None) -> None:
        """Runs one window per process; at the end of a phase some processes may have none."""
        lengths = [len(window) for window in windows]
        of_ranks = lengths + [0] * (self.ranks.size - len(lengths))
        with lockstep(of_ranks) if lockstep else nullcontext():
            if self.ranks.rank < len(windows):
                self.engine.hidden(windows[self.ranks.rank])
        self._done += len(windows)
        self.on_tokens(sum(lengths))

    def _pause(self, *, ends_phase: bool) -> None:
        """Saves when a save is due, and stops after a signal: all processes together."""
        is_due = ends_phase or (self.ranks.is_first and self._saves.is_due)
        order = self.ranks.largest(_STOP if self._signal else _SAVE if is_due else 0)
        if order:
            self.save()
        if order == _STOP:
            raise self._interrupted(self._signal or signal.SIGTERM)

    def _interrupted(self, number: int) -> Interrupted:
        goes_on = f"{self.path} holds the work so far; the same command continues from there"
        saved = goes_on if self.path.exists() else "nothing was saved yet"
        return Interrupted(f"interrupted; {saved}", number)

    def save(self) -> None:
        with self._saves.save():
            arrays = {
                f"{name}/{key}": array.detach().cpu().numpy()
                for name in self.parts
                for key, array in self.total(name).items()
            }
            position = Position(phase=self._phase, done=self._done, arrays=arrays)
            self.ranks.first_only(lambda: save_position(self.path, self.settings, position))

    def finish(self) -> None:
        """Removes the resume file; called when the outputs are written."""
        if self.ranks.is_first:
            self.path.unlink(missing_ok=True)
            remove_stale(self.path)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """The first SIGINT, SIGTERM or SIGHUP ends the run after the current window, with all of
        the work saved. Between phases it ends the run at once, and only what was done since the
        last phase is lost, such as a part of a search. In a run of one process, a second one of the
        same kind is handled as before the run; the command line counts signals within two seconds
        as one."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python handles signals in the main thread only
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._signal = number
            if self.ranks.size == 1:  # torchrun sends the same signal twice
                put_back(number, before[signal.Signals(number)])
            if not self._in_phase:
                raise self._interrupted(number)

        before = {number: signal.signal(number, note) for number in NUMBERS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
