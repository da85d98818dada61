"""Fills the rest of a budget with the neurons that save the most seconds per byte.

It works on counts, since a layer's hot neurons here are its hottest. It never makes such a
placement slower, and leaves the dense blocks where they are."""

import heapq
from collections.abc import Iterator

import numpy as np

from hotsplit.solver.problem import Problem


def fill(
    problem: Problem, *, num_hot_L: np.ndarray, dense_L: np.ndarray, room_bytes: int
) -> np.ndarray:
    """Counts that are at least `num_hot_L` and take at most `room_bytes` more.

    Greedy: the step that saves the most seconds per byte first, until no step that fits saves
    any."""
    layers = [
        _Layer(problem, layer, int(num_hot_L[layer]), bool(dense_L[layer]))
        for layer in range(problem.num_layers)
    ]
    queue = [(-layer.best_step(room_bytes)[0], index) for index, layer in enumerate(layers)]
    heapq.heapify(queue)
    while queue:
        promised, index = heapq.heappop(queue)
        value, count = layers[index].best_step(room_bytes)
        if value <= 0:
            continue
        if -value > promised:  # the promised step no longer fits
            heapq.heappush(queue, (-value, index))
            continue
        layers[index].num_hot += count
        room_bytes -= count * layers[index].neuron_bytes
        heapq.heappush(queue, (-layers[index].best_step(room_bytes)[0], index))
    return np.array([layer.num_hot for layer in layers])


class _Layer:
    """One layer's number of hot neurons, and what adding more would save."""

    def __init__(self, problem: Problem, layer: int, num_hot: int, is_dense_on_gpu: bool) -> None:
        self.num_hot = num_hot
        self.least = int(problem.min_hot_L[layer])
        self.neuron_bytes = int(problem.neuron_bytes_L[layer])
        self.seconds_N = problem.hottest_s_2LN[int(is_dense_on_gpu), layer]
        self.touched_F = problem.touched_LF[layer]

    def best_step(self, room_bytes: int) -> tuple[float, int]:
        """Seconds saved per byte, and neurons added, of the best step that fits; (0, 0) if none."""
        now_s, best = self.seconds_N[self.num_hot], (0.0, 0)
        for count in self._steps():
            num_bytes = count * self.neuron_bytes
            if 0 < num_bytes <= room_bytes:
                saved = (now_s - self.seconds_N[self.num_hot + count]) / num_bytes
                best = max(best, (float(saved), count))
        return best

    def _steps(self) -> Iterator[int]:
        """Sizes of steps to try: all the rest; C_l from none; else one neuron, or a run of equally
        hot ones, or part of it."""
        left = len(self.touched_F) - self.num_hot
        yield left
        if self.num_hot == 0:
            yield self.least
        elif left:
            yield 1
            yield from self._halves_of_run(left)

    def _halves_of_run(self, left: int) -> Iterator[int]:
        """Yields the length of the run of neurons that are as hot as the next one, then half of it
        and so on: a profile has many neurons that never fire."""
        next_touched = self.touched_F[self.num_hot]
        run = int(np.searchsorted(-self.touched_F, -next_touched, "right")) - self.num_hot
        while run > 1:
            if run < left:
                yield run
            run //= 2
