"""A bound and a placement by dynamic programming over bytes, for models of few layers.

The Lagrangian bound is loose by up to one layer's fixed costs, which is negligible for 32 layers
and several percent for 8 small ones. Here every layer and the head is an item, for which exactly
one option is chosen: (dense block on the CPU or the GPU, n hot neurons). Bytes are counted in
units; an option takes u of them:

    best[item, on, r] = min over the options with this `on` and u <= r
                            [seconds + min(best[item - 1, 0, r - u],
                                           best[item - 1, 1, r - u] + run * (1 - on))]

where `on` is 1 if the item's block is on the GPU, else 0, and run is cpu_run_s for a layer and 0
for the head; before the first item it is as if a block were on the GPU. Together with use_s the
result is at most T of any placement,
a lower bound, if the bytes of every option are rounded down (as if there were up to L + 1 more
units of memory), M_l of n neurons is that of `lagrangian` (at most that of any n neurons) and the
host's limit is ignored. With bytes rounded up and the n hottest neurons, it is T of a placement
that the GPU holds.

Measured (8 layers of 1,024 neurons, width 256, launch 4 us, round trip 15 us, one busy core of
two): gaps of 0.8 to 9.6 % become 0.04 % or less in 0.3 s or less. With 22 layers of 5,632 neurons
it takes 1-8 s and proves less than the Lagrangian search, whose gap there is 0.004 % or less.

The memory that rounding up leaves unused is filled by `refine`.

Letters: L layers, F neurons, N = F + 1 counts of hot neurons, C those that are allowed, O options
of an item, R units of memory."""

from dataclasses import dataclass

import numpy as np

from hotsplit.solver.problem import (
    ROUNDING,
    Placement,
    Problem,
    of_counts,
    on_one_device,
    placement_seconds,
)

BOUND_UNITS = 16384  # maximum units of memory for the bound
PLACEMENT_UNITS = 4096  # and for a placement, which stores every choice


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The options of one layer, or of the head (0 hot neurons), with its block on one device."""

    bytes_O: np.ndarray
    seconds_O: np.ndarray
    num_hot_O: np.ndarray


_Item = tuple[_Side, _Side]  # block on the CPU, on the GPU


def knapsack_bound(problem: Problem) -> float:
    """A lower bound on T of any placement of single neurons."""
    cpu_only_s = placement_seconds(problem, on_one_device(problem, gpu=False))
    if problem.room_bytes < 0:
        return cpu_only_s * (1 - ROUNDING)
    unit = -(-max(1, problem.room_bytes) // BOUND_UNITS)
    best_2R = _nothing(problem.room_bytes // unit + 1)
    for number, item in enumerate(_items(problem, is_relaxed=True)):
        before_2R = _before(best_2R, _run_seconds(problem, number))
        best_2R = np.stack(
            [
                _add_side(before_R, side.bytes_O // unit, side.seconds_O, keep_choices=False)[0]
                for before_R, side in zip(before_2R, item, strict=True)
            ]
        )
    return min(cpu_only_s, float(best_2R[:, -1].min()) + problem.use_s) * (1 - ROUNDING)


def knapsack_placement(problem: Problem) -> Placement:
    """A placement that the GPU holds; nothing is on it if the workspace leaves no room."""
    if problem.room_bytes < 0:
        return on_one_device(problem, gpu=False)
    unit = -(-max(1, problem.room_bytes) // PLACEMENT_UNITS)
    best_2R = _nothing(problem.room_bytes // unit + 1)
    items, steps = _items(problem, is_relaxed=False), []
    for number, item in enumerate(items):
        before_2R = _before(best_2R, _run_seconds(problem, number))
        found = [
            _add_side(before_R, -(-side.bytes_O // unit), side.seconds_O, keep_choices=True)
            for before_R, side in zip(before_2R, item, strict=True)
        ]
        steps.append((best_2R, [choice_R for _, choice_R in found]))
        best_2R = np.stack([best_R for best_R, _ in found])
    left, chosen = best_2R.shape[1] - 1, []
    cost_2 = best_2R[:, left]
    numbered = [*enumerate(items)]
    for (number, item), (best_2R, choices) in zip(numbered[::-1], steps[::-1], strict=True):
        is_on = bool(cost_2[1] < cost_2[0])
        option = int(choices[is_on][left])
        left -= int(-(-item[is_on].bytes_O[option] // unit))
        chosen.append((int(item[is_on].num_hot_O[option]), is_on))
        run_s = _run_seconds(problem, number) * (not is_on)
        cost_2 = best_2R[:, left] + np.array([0.0, run_s])
    (_, head), *layers = chosen
    num_hot_L, dense_L = (np.array(values) for values in zip(*reversed(layers), strict=True))
    return of_counts(problem, num_hot_L, dense_L, head)


def _items(problem: Problem, *, is_relaxed: bool) -> list[_Item]:
    """The layers, then the head; `is_relaxed` takes a lower bound on the seconds of any n neurons
    in place of the seconds of the n hottest."""
    items = [_layer_item(problem, layer, is_relaxed) for layer in range(problem.num_layers)]
    none = np.zeros(1, np.int64)
    head_cpu = _Side(bytes_O=none, seconds_O=np.array([problem.head_cpu_s]), num_hot_O=none)
    head_gpu = _Side(
        bytes_O=np.array([problem.head_bytes]),
        seconds_O=np.array([problem.head_gpu_s]),
        num_hot_O=none,
    )
    return [*items, (head_cpu, head_gpu)]


def _nothing(num_units: int) -> np.ndarray:
    """`best` before the first item, [2, R]: a layer on the CPU begins a run."""
    return np.stack([np.full(num_units, np.inf), np.zeros(num_units)])


def _run_seconds(problem: Problem, number: int) -> float:
    """Seconds of a run on the CPU that begins with this item; 0 for the head, the last one."""
    return problem.cpu_run_s if number < problem.num_layers else 0.0


def _before(best_2R: np.ndarray, run_s: float) -> np.ndarray:
    """Costs before an item with its block on the CPU, or on the GPU; [2, R]."""
    off_R, on_R = best_2R
    return np.stack([np.minimum(off_R, on_R + run_s), np.minimum(off_R, on_R)])


def _layer_item(problem: Problem, layer: int, is_relaxed: bool) -> _Item:
    count_C = np.unique(
        np.append(
            [0, problem.num_neurons], np.arange(problem.min_hot_L[layer], problem.num_neurons)
        )
    )
    sides = []
    for dense in (False, True):
        seconds_C = problem.hottest_s_2LN[int(dense), layer, count_C]
        if is_relaxed:
            seconds_C[1:-1] = problem.least_split_s_LN[layer, count_C[1:-1]]
        dense_s = (problem.dense_gpu_s_L if dense else problem.dense_cpu_s_L)[layer]
        num_bytes = count_C * problem.neuron_bytes_L[layer] + problem.dense_bytes_L[layer] * dense
        sides.append(_Side(bytes_O=num_bytes, seconds_O=seconds_C + dense_s, num_hot_O=count_C))
    return sides[0], sides[1]


def _add_side(
    best_R: np.ndarray, units_O: np.ndarray, seconds_O: np.ndarray, *, keep_choices: bool
) -> tuple[np.ndarray, np.ndarray]:
    """`best` of an item with its block on one side, from `best` of the previous items; with
    `keep_choices`, also the option chosen for every r."""
    new_R = np.full_like(best_R, np.inf)
    choice_R = np.zeros(len(best_R) if keep_choices else 0, np.int64)
    for option in _useful(units_O, seconds_O, len(best_R) - 1):
        units = int(units_O[option])
        with_R = best_R[: len(best_R) - units] + seconds_O[option]
        if keep_choices:
            choice_R[units:][with_R < new_R[units:]] = option
        np.minimum(new_R[units:], with_R, out=new_R[units:])
    return new_R, choice_R


def _useful(units_O: np.ndarray, seconds_O: np.ndarray, most: int) -> list[int]:
    """Options that fit and are faster than all before them in the order of units, then seconds."""
    order = np.lexsort((seconds_O, units_O))
    order = order[units_O[order] <= most]
    sorted_s = seconds_O[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(sorted_s)[:-1]])
    return order[sorted_s < before].tolist()
