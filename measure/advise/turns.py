"""Times models in turns, on a machine whose speed changes from one moment to the next.

In a round each open model decodes the same few tokens of the user's text, and the next round goes
on where this one ended. So a slow spell of seconds or minutes slows all models of a round alike,
and the ratio of two times of one round is nearly free of it. Two models are compared by the median
of these ratios and its 95 % interval. Medians of each model's own times would not do: they may come
from different spells.

Models that do not fit into memory together are timed in groups, each beside the reference, and a
rule, where possible, also beside the dense model of its type. Two models that share no group are
compared through the reference.

Letters: T tokens."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from hotsplit.measure.advise.choice import Point
from hotsplit.measure.advise.timings import Rounds, Timings, Trial
from hotsplit.measure.timing.interleave import take_turns
from hotsplit.model.modes import Mode
from hotsplit.runtime.engine import Engine
from hotsplit.system.system_memory import free_memory_bytes

STEPS = 8  # tokens of a model's turn; one more comes first and is not counted
FEW, MORE = 5, 20  # rounds for all models, and further ones for those that may be recommended
MOST_POSITIONS = 512  # at most, tokens of the text that are decoded again and again
MEMORY_SHARE = 0.5  # of the free memory, for models that are open at once
COPIES = 2  # an open model takes at most twice the bytes of its file: mapped, and packed


class Decoder(Protocol):
    """An open model."""

    def step(self, position: int) -> None:
        """Decodes the text's token at a position; those before it have been decoded."""

    def close(self) -> None: ...


class TextDecoder:
    """An engine that decodes a given text."""

    def __init__(self, path: Path, mode: Mode, ids_T: Sequence[int]) -> None:
        self.engine, self.ids_T = Engine.load(path, mode=mode, device="cpu"), ids_T

    def step(self, position: int) -> None:
        self.engine._step(self.ids_T[position], position)

    def close(self) -> None:
        self.engine.close()
        del self.engine
        gc.collect()  # unmaps the file, too


class Turns:
    """Opens models, times them in turns, and keeps all rounds."""

    def __init__(
        self,
        reference: Point,
        open_point: Callable[[Point], Decoder],
        num_bytes: Callable[[Point], int],
        num_positions: int,
        free_disk: Callable[[], float] = lambda: math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`num_bytes` gives the size of a point's model file, and `free_disk` the space for the
        files that `open_point` makes; `num_positions` is the number of tokens of the text, which is
        decoded over and over."""
        assert num_positions > STEPS, num_positions
        self.reference, self.open_point, self.num_bytes = reference, open_point, num_bytes
        self.num_positions, self.free_disk, self.clock = num_positions, free_disk, clock
        self.timings = Timings()
        self.opened: dict[Trial, tuple[Point, Decoder]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def time(self, points: Sequence[Point], num_rounds: int) -> None:
        """Times the points beside the reference."""
        for group in self.groups(points):
            self.rounds(group, num_rounds)

    def groups(self, points: Sequence[Point]) -> list[list[Point]]:
        """Groups of the reference and as many of the points as there is room for, at least one in
        each, whether it fits or not. A rule is in the group of the dense model of its type if these
        two and the reference fit together: how much faster it is depends on the spell."""
        used = [point for point, _ in self.opened.values()]
        memory = MEMORY_SHARE * (free_memory_bytes() + sum(map(self.num_bytes, used)))
        disk = self.free_disk() + self._made_bytes(used)

        def fits(together: Sequence[Point]) -> bool:
            whole = COPIES * sum(map(self.num_bytes, together))
            return whole <= memory and self._made_bytes(together) <= disk

        groups = [[self.reference]]
        others = [point for point in points if point.trial != self.reference.trial]
        for kind in dict.fromkeys(point.type for point in others):
            same = [point for point in others if point.type == kind]
            has_own = any(point.rule == "dense" for point in same)
            if has_own and len(groups[-1]) > 1 and not fits([*groups[-1], *same]):
                groups.append([self.reference])
            for number, point in enumerate(same):
                if len(groups[-1]) > 1 and not fits([*groups[-1], point]):
                    dense = [p for p in same[:number] if p.rule == "dense"]
                    beside = [self.reference, *dense]
                    groups.append(beside if fits([*beside, point]) else [self.reference])
                groups[-1].append(point)
        return groups

    def _made_bytes(self, points: Sequence[Point]) -> int:
        """Bytes of the points' trial files, which stay on the disk while they are open."""
        return sum(self.num_bytes(point) for point in points if point.rule != "dense")

    def rounds(self, group: Sequence[Point], count: int) -> None:
        """Times a group, of which the reference is the first, and closes all other models."""
        self.close([trial for trial in self.opened if trial not in {p.trial for p in group}])
        for point in group:
            if point.trial not in self.opened:
                self.opened[point.trial] = point, self.open_point(point)
        turns = {p.trial: partial(self._turn, self.opened[p.trial][1]) for p in group}
        times = take_turns(turns, count)
        found = Rounds(trials=tuple(times), seconds=tuple(zip(*times.values(), strict=True)))
        self.timings = Timings((*self.timings.groups, found))

    def _turn(self, decoder: Decoder, number: int) -> float:
        """Seconds per token of STEPS tokens, after one that refills the processor's caches; each
        round goes on in the text where the previous one ended."""
        places = self.num_positions // (STEPS + 1)  # in the text
        at = max(0, number - 1) % places * (STEPS + 1)
        decoder.step(at)
        began = self.clock()
        for position in range(at + 1, at + 1 + STEPS):
            decoder.step(position)
        return (self.clock() - began) / STEPS

    def close(self, trials: Sequence[Trial] | None = None) -> None:
        """Closes these models, or all."""
        for trial in list(self.opened) if trials is None else trials:
            self.opened.pop(trial)[1].close()
