"""Improves the neurons of a placement, whose dense blocks stay where they are: fills the rest of a
budget with those that save the most seconds per byte, or chooses, for given numbers of hot neurons,
those with which GPU and CPU take equally long.

`fill` works on counts, since a layer's hot neurons there are its hottest, and never makes a
placement slower. The hottest are the best choice only while the CPU takes longer; `balanced`
chooses others.

Letters: L layers, F neurons, S first ranks of a window, H hot and C cold neurons of a layer."""

import heapq
from collections.abc import Iterator

import numpy as np

from hotsplit.solver import replay
from hotsplit.solver.problem import Problem, SolvedPlacement, of_counts, sets_seconds

ENOUGH = 1e-9  # of a layer's seconds: closer to the least possible, a swap is not worth its search
MAX_SWAPS = 20
MAX_EXCHANGES = 4  # of experts; the plan that is found has more of them (`replay.polished`)
MORE = 4


def fill(
    problem: Problem, *, num_hot_L: np.ndarray, dense_L: np.ndarray, room_bytes: int
) -> np.ndarray:
    """Counts that are at least `num_hot_L` and take at most `room_bytes` more. Greedy: the step
    that saves most seconds per byte first, until none that fits saves any."""
    layers = [
        _FilledLayer(problem, layer, int(num_hot_L[layer]), bool(dense_L[layer]))
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


class _FilledLayer:
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
        """Sizes of steps to try: all the rest; C_l from none; else one neuron, or the run of
        equally hot ones, or half of it and so on."""
        left = len(self.touched_F) - self.num_hot
        yield left
        if self.num_hot == 0:
            yield self.least
        elif left:
            yield 1
            next_touched = self.touched_F[self.num_hot]
            run = int(np.searchsorted(-self.touched_F, -next_touched, "right")) - self.num_hot
            while run > 1:
                if run < left:
                    yield run
                run //= 2


def balanced(
    problem: Problem, num_hot_L: np.ndarray, dense_L: np.ndarray, head: bool, room_bytes: int
) -> SolvedPlacement:
    """A placement with these numbers of hot neurons, or up to MORE more in layers where that is
    faster and takes at most `room_bytes` in all. Experts are chosen by `replay.improved`. Of other
    layers, one whose hottest neurons take longer than `least_split_s_LN` has a window of
    consecutive ranks instead, the fastest (shifting it by one rank changes the touched bytes by at
    most a neuron's), improved by swaps."""
    hot_LF = of_counts(problem, num_hot_L, dense_L, head).hot_LF
    for layer, count in enumerate(num_hot_L.tolist()):
        if not 0 < count < problem.num_neurons:
            continue
        best_s = np.inf
        for more in range(MORE + 1):
            fits = more * int(problem.neuron_bytes_L[layer]) <= room_bytes
            if not fits or count + more >= problem.num_neurons:
                break
            is_hot_F, seconds = _divided(problem, layer, count + more)
            if seconds < best_s:
                best_s, hot_LF[layer] = seconds, is_hot_F
            if best_s <= problem.least_split_s_LN[layer, count] * (1 + ENOUGH):
                break
        room_bytes -= int(hot_LF[layer].sum() - count) * int(problem.neuron_bytes_L[layer])
    return SolvedPlacement(hot_LF=hot_LF, dense_L=dense_L, head=head)


def _divided(problem: Problem, layer: int, count: int) -> tuple[np.ndarray, float]:
    """This many hot neurons of a layer, bool [F], and M_l."""
    prefix_N, is_hot_F = problem.prefix_LN[layer], np.arange(problem.num_neurons) < count
    if layer in problem.replayed:
        is_hot_F = replay.improved(problem.sides(layer), is_hot_F, MAX_EXCHANGES)
        return is_hot_F, float(sets_seconds(problem, layer, is_hot_F[None], True)[0])
    if not _is_enough(problem, layer, count, prefix_N[count]):
        touched_S = prefix_N[count:] - prefix_N[: len(prefix_N) - count]
        is_hot_F = np.roll(is_hot_F, int(_seconds(problem, layer, touched_S).argmin()))
        _swap(problem, layer, is_hot_F)
    return is_hot_F, float(_seconds(problem, layer, problem.touched_LF[layer][is_hot_F].sum()))


def _seconds(problem: Problem, layer: int, touched: np.ndarray) -> np.ndarray:
    """M_l of a divided layer whose hot neurons touch these bytes."""
    cold = problem.touched_L[layer] - touched
    hot_s = touched * problem.hot_s_per_byte_L[layer] + problem.kernels_s_L[layer]
    cold_s = cold * problem.cpu_s_per_byte_L[layer] + problem.hand_over_s_L[layer]
    return np.maximum(hot_s, cold_s)


def _is_enough(problem: Problem, layer: int, count: int, touched: float) -> bool:
    least_s = problem.least_split_s_LN[layer, count]
    return bool(_seconds(problem, layer, np.asarray(touched)) <= least_s * (1 + ENOUGH))


def _swap(problem: Problem, layer: int, is_hot_F: np.ndarray) -> None:
    """Swaps a hot and a cold neuron in `is_hot_F`, the pair that saves most, while one saves."""
    touched_F, count = problem.touched_LF[layer], int(is_hot_F.sum())
    cpu_s, gpu_s = problem.cpu_s_per_byte_L[layer], problem.hot_s_per_byte_L[layer]
    all_cold_s = problem.touched_L[layer] * cpu_s + problem.hand_over_s_L[layer]
    target = (all_cold_s - problem.kernels_s_L[layer]) / (
        gpu_s + cpu_s
    )  # both sides take equally long
    for _ in range(MAX_SWAPS):
        touched = float(touched_F[is_hot_F].sum())
        if _is_enough(problem, layer, count, touched):
            return
        hot_H, cold_C = np.flatnonzero(is_hot_F), np.flatnonzero(~is_hot_F)
        # For each hot neuron the cold ones on either side of what would reach the target.
        asked_H = target - touched + touched_F[hot_H]
        place_H = np.searchsorted(-touched_F[cold_C], -asked_H)
        nearest_2H = np.stack([place_H - 1, place_H]).clip(0, len(cold_C) - 1)
        after_2H = touched - touched_F[hot_H] + touched_F[cold_C[nearest_2H]]
        seconds_2H = _seconds(problem, layer, after_2H)
        side, hot = np.unravel_index(int(seconds_2H.argmin()), seconds_2H.shape)
        if seconds_2H[side, hot] >= _seconds(problem, layer, np.asarray(touched)):
            return
        is_hot_F[[hot_H[hot], cold_C[nearest_2H[side, hot]]]] = False, True
