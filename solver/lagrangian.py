"""A certified lower bound on T, and good placements, at the granularity of single neurons.

Instead of limiting the bytes on the GPU, charge a price for each, in seconds per byte. The layers
then no longer compete for bytes, and for any price

    value(price) = min over the devices of all dense blocks and the head
                       [sum_l min over neurons of l [T_l + price * bytes_l]
                        + head seconds + price * head bytes + use_s + cpu_run * CPU runs]
                 - price * (room where price >= 0, need where price < 0)

is at most T of any placement that uses the GPU and stays within the budgets: such a placement is
among those minimised over, and need <= its bytes <= room. Here room is the budget less the
workspace and need the bytes that the host cannot hold; if it holds everything, negative prices
prove nothing and are not tried. So every price yields a valid bound, however it was found.

The bound is loosest where the best price leaves a dense block half on the GPU. So there is one
branch for each number m of dense blocks on the GPU and each device of the head. Within a branch the
minimum over the sets of m layers is exact, by a recursion over the layers: it keeps the least cost
of all layers so far with m blocks on the GPU, once with the last layer's block there and once
without (the cost of a run on the CPU couples a layer only to the one before it). The bound is the
least, over the branches that fit, of the best value found in each, or T of the placement without a
GPU if that is feasible and less.

For the inner minimum over one layer's neurons, write x for the touched bytes of n hot neurons, 1 <=
n < F: the layer is then split, wherever its dense block is, and

    M = max(x / B_g + kernels, (touched_l - x) / B_c + hand_over)

depends on the chosen set only through x, which lies between the sum of the n smallest and that of
the n largest. M falls up to the x* where both sides are equal and rises after it, so taking x* if
it lies in that range, else the nearer end, is exact or too low: a bound over all subsets, not only
over prefixes (`Problem.least_split_s_LN`). As a function of n it is convex: it falls, by less and
less, while even the n largest are below x* (each saves touched / B_c), then is constant, then
rises, by more and more, once even the n smallest are above x*. So the best n for a price is the
first whose next step changes M by at least -price * bytes: one binary search in the steps for all
prices. n = 0 and n = F are compared separately.

Letters: L layers, F neurons, N = F + 1 counts of hot neurons, K prices, m number of dense blocks on
the GPU, q is 1 if the head is on the GPU."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from hotsplit.solver.problem import (
    ROUNDING,
    Problem,
    SolvedPlacement,
    is_feasible,
    of_counts,
    on_one_device,
    placement_seconds,
)
from hotsplit.solver.refine import balanced, fill

FIRST_PRICES = 500
LEAST_SHARE = 1e-6  # the lowest price above 0, as a share of the seconds to read a byte on the CPU
ZOOM_PRICES, ZOOM_ROUNDS = 32, 5
WORTH_IT = 1e-7  # of a token: for less, the hottest neurons are kept
MAX_BRANCHES_TRIED = 16  # branches for which a placement is made, best bound first


@dataclass(frozen=True, kw_only=True)
class LagrangianResult:
    """No feasible placement takes less than `bound_s`; `placement` takes `objective_s`. `placement`
    is None, and `objective_s` infinite, if no feasible one was found."""

    bound_s: float
    objective_s: float
    placement: SolvedPlacement | None


@dataclass(frozen=True, order=True)
class _Branch:
    """A branch, with the best of the prices tried and that price's neighbours on either side."""

    value_s: float
    num_dense: int
    head: bool
    price: float
    low: float
    high: float
    is_zoomed: bool = False

    @classmethod
    def of(cls, num_dense: int, head: bool, price_K: np.ndarray, value_Kmq: np.ndarray) -> Self:
        value_K = value_Kmq[:, num_dense, int(head)]
        best, last = int(value_K.argmax()), len(value_K) - 1
        return cls(
            value_s=float(value_K[best]),
            num_dense=num_dense,
            head=head,
            price=float(price_K[best]),
            low=float(price_K[max(0, best - 1)]),
            high=float(price_K[min(last, best + 1)]),
        )


def search(problem: Problem) -> LagrangianResult:
    """The bound over all placements, and the best placement found on the way."""
    cpu_only = on_one_device(problem, gpu=False)
    best: SolvedPlacement | None = None
    best_s = bound_s = np.inf
    if is_feasible(problem, cpu_only):
        best, best_s = cpu_only, placement_seconds(problem, cpu_only)
        bound_s = best_s
    branches = _branches(problem)
    if branches:
        bound_s = min(bound_s, branches[0].value_s)
    for branch in branches[:MAX_BRANCHES_TRIED]:
        if branch.value_s >= best_s:
            break
        dense_L = _dense_set(problem, branch)
        placement = place_neurons(problem, dense_L=dense_L, head=branch.head)
        if placement is None or not is_feasible(problem, placement):
            continue
        seconds = placement_seconds(problem, placement)
        if seconds < best_s:
            best_s, best = seconds, placement
    bound_s = min(bound_s, best_s) * (1 - ROUNDING)
    return LagrangianResult(bound_s=bound_s, objective_s=best_s, placement=best)


def gpu_bound(problem: Problem) -> float:
    """The bound over all placements that use the GPU; infinite if none fits."""
    branches = _branches(problem)
    return branches[0].value_s if branches else np.inf


def priced_layers(problem: Problem, price_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least M_l + price * neuron bytes of each layer, and its number of hot neurons. Two arrays [2,
    K, L]; the first index is 1 for a dense block on the GPU. The cost is exact or too low."""
    shape, most = (2, len(price_K), problem.num_layers), problem.num_neurons
    cost_2KL, count_2KL = np.empty(shape), np.empty(shape, np.int64)
    for layer in range(problem.num_layers):
        bytes_K = price_K * problem.neuron_bytes_L[layer]
        least, seconds_N = int(problem.min_hot_L[layer]), problem.least_split_s_LN[layer]
        split_K, split_count_K = np.full_like(bytes_K, np.inf), np.zeros(len(bytes_K), np.int64)
        if least < most:  # both hot and cold neurons
            split_count_K = least + np.searchsorted(np.diff(seconds_N[least:most]), -bytes_K)
            split_K = seconds_N[split_count_K] + split_count_K * bytes_K
        for dense in (0, 1):
            none_s, all_s = problem.hottest_s_2LN[dense, layer, [0, -1]]
            least_K = np.minimum(np.minimum(none_s, split_K), all_s + most * bytes_K)
            cost_2KL[dense, :, layer] = least_K
            count_2KL[dense, :, layer] = np.select(
                [least_K == none_s, least_K == split_K], [0, split_count_K], most
            )
    return cost_2KL, count_2KL


def block_costs(problem: Problem, price_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least T_l + price * bytes_l with the dense block on the CPU, and on the GPU; f64 [K, L]."""
    cost_2KL, _ = priced_layers(problem, price_K)
    on_KL = cost_2KL[1] + problem.dense_gpu_s_L + price_K[:, None] * problem.dense_bytes_L
    return cost_2KL[0] + problem.dense_cpu_s_L, on_KL


def least_costs(problem: Problem, price_K: np.ndarray) -> np.ndarray:
    """Least T + price * bytes of the whole model with something on the GPU, over all numbers of
    dense blocks; f64 [K]."""
    off_KL, on_KL = block_costs(problem, price_K)
    return chain_costs(problem, price_K, off_KL, on_KL, first=0)[-1]


def chain_costs(
    problem: Problem, price_K: np.ndarray, off_KL: np.ndarray, on_KL: np.ndarray, *, first: int
) -> np.ndarray:
    """Least T + price * bytes of the i layers from `first` on, with something on the GPU, for every
    i; the last row is for all of them and the head. f64 [L + 2 - first, K]."""
    off_K, on_K = np.full_like(price_K, np.inf), np.full_like(price_K, problem.use_s)
    costs = [on_K]
    for layer in range(first, problem.num_layers):
        left_K = np.minimum(off_K, on_K + problem.cpu_run_s)
        off_K, on_K = left_K + off_KL[:, layer], costs[-1] + on_KL[:, layer]
        costs.append(np.minimum(off_K, on_K))
    head_gpu_K = problem.head_gpu_s + price_K * problem.head_bytes
    costs.append(costs[-1] + np.minimum(problem.head_cpu_s, head_gpu_K))
    return np.array(costs)


def _values(problem: Problem, price_K: np.ndarray) -> np.ndarray:
    """value(price) of every branch, [K, m, q] with m = 0..L and q = 0, 1."""
    off_KL, on_KL = block_costs(problem, price_K)
    *_, (off_Km, on_Km) = _sums(off_KL, on_KL, problem.cpu_run_s)
    head_gpu_K1 = (problem.head_gpu_s + price_K * problem.head_bytes)[:, None]
    layers_Km = np.minimum(off_Km, on_Km) + problem.use_s
    value_Kmq = np.stack([layers_Km + problem.head_cpu_s, layers_Km + head_gpu_K1], axis=2)
    limit_K = price_K * np.where(price_K >= 0, problem.room_bytes, problem.need_bytes)
    return value_Kmq - limit_K[:, None, None]


def _sums(
    off_KL: np.ndarray, on_KL: np.ndarray, cpu_run_s: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields, after 0, 1, .. L layers, the least sums with m blocks on the GPU: with the last block
    off the GPU, and on it. Pairs of f64 [K, L + 1]; infinite if there are fewer than m layers."""
    num_prices, num_layers = off_KL.shape
    off_Km = np.full((num_prices, num_layers + 1), np.inf)
    on_Km = off_Km.copy()
    on_Km[:, 0] = 0.0  # as if the GPU had a layer before the first
    yield off_Km, on_Km
    for layer in range(num_layers):
        here, before = slice(0, layer + 2), slice(0, layer + 1)
        next_off_Km, next_on_Km = np.full((2, num_prices, num_layers + 1), np.inf)
        next_off_Km[:, here] = np.minimum(off_Km[:, here], on_Km[:, here] + cpu_run_s)
        next_off_Km[:, here] += off_KL[:, [layer]]
        before_Km = np.minimum(off_Km[:, before], on_Km[:, before])
        next_on_Km[:, 1 : layer + 2] = before_Km + on_KL[:, [layer]]
        off_Km, on_Km = next_off_Km, next_on_Km
        yield off_Km, on_Km


def _branches(problem: Problem) -> list[_Branch]:
    """Every branch that fits, least value first; the price of the first was refined by zooming."""
    if problem.room_bytes < 0:
        return []
    price_K = first_prices(problem)
    value_Kmq = _values(problem, price_K)
    least_bytes_m = np.pad(np.cumsum(np.sort(problem.dense_bytes_L)), (1, 0))
    queue = [
        _Branch.of(num_dense, head, price_K, value_Kmq)
        for num_dense in range(problem.num_layers + 1)
        for head in (False, True)
        if least_bytes_m[num_dense] + problem.head_bytes * head <= problem.room_bytes
    ]
    heapq.heapify(queue)
    # Zooming only raises a value, so once the least branch is zoomed the bound is final.
    while not queue[0].is_zoomed:
        branch = queue[0]
        for _ in range(ZOOM_ROUNDS):  # its value is concave in the price
            price_K = np.linspace(branch.low, branch.high, ZOOM_PRICES)
            price_K = np.unique(np.append(price_K, branch.price))
            value_Kmq = _values(problem, price_K)
            branch = _Branch.of(branch.num_dense, branch.head, price_K, value_Kmq)
        heapq.heapreplace(queue, replace(branch, is_zoomed=True))
    return sorted(queue)


def first_prices(problem: Problem) -> np.ndarray:
    """Prices from 0 up to one at which a single neuron costs at least what a whole token can save;
    also their negatives if the host is too small."""
    cpu_s = float(problem.cpu_s_per_byte_L.max())
    most_s = placement_seconds(problem, on_one_device(problem, gpu=False))
    most_s += problem.num_layers * (problem.hand_over_s + problem.cpu_run_s) + problem.use_s
    top = max(10 * cpu_s, most_s / problem.neuron_bytes_L[problem.has_neurons_L].min())
    rising = np.geomspace(LEAST_SHARE * cpu_s, top, FIRST_PRICES)
    falling = -rising[::-1] if problem.need_bytes > 0 else rising[:0]
    return np.concatenate([falling, [0.0], rising])


def _dense_set(problem: Problem, branch: _Branch) -> np.ndarray:
    off_KL, on_KL = block_costs(problem, np.array([branch.price]))
    sums = [(off_Km[0], on_Km[0]) for off_Km, on_Km in _sums(off_KL, on_KL, problem.cpu_run_s)]
    dense_L = np.zeros(problem.num_layers, bool)
    left = branch.num_dense
    run_s = 0.0  # of a run on the CPU that begins with the next block
    for layer in reversed(range(problem.num_layers)):
        off_m, on_m = sums[layer + 1]
        dense_L[layer] = on_m[left] + run_s < off_m[left]
        left -= int(dense_L[layer])
        run_s = 0.0 if dense_L[layer] else problem.cpu_run_s
    return dense_L


def place_neurons(problem: Problem, *, dense_L: np.ndarray, head: bool) -> SolvedPlacement | None:
    """A placement of neurons for these dense blocks; None if none is found that fits both memories.
    Takes the neurons chosen at the lowest price >= 0 at which they fit or, if they are too few for
    the host, at the highest price <= 0 at which they suffice; then calls `fill`. The same numbers
    of neurons, but `balanced`, are taken instead where that is faster."""
    room = problem.room_bytes - int(problem.dense_bytes_L[dense_L].sum())
    room -= problem.head_bytes * head
    if room < 0:
        return None
    least = problem.need_bytes - (problem.room_bytes - room)
    num_hot_L = _priced_counts(problem, dense_L, room, least)
    if num_hot_L is None:
        return None
    left = room - int(num_hot_L @ problem.neuron_bytes_L)
    even = balanced(problem, num_hot_L, dense_L, head, left)
    if least <= 0:
        # Near the balance of the two sides, `least_split_s_LN` is below what the hottest neurons
        # take: one neuron fewer, or none, may be no slower.
        layer_L, side_L = np.arange(problem.num_layers), dense_L.astype(int)
        fewer_L = np.where(num_hot_L > problem.min_hot_L, num_hot_L - 1, num_hot_L)
        for other_L in (fewer_L, 0 * num_hot_L):
            other_s_L = problem.hottest_s_2LN[side_L, layer_L, other_L]
            now_s_L = problem.hottest_s_2LN[side_L, layer_L, num_hot_L]
            num_hot_L = np.where(other_s_L <= now_s_L, other_L, num_hot_L)
    left = room - int(num_hot_L @ problem.neuron_bytes_L)
    filled_L = fill(problem, num_hot_L=num_hot_L, dense_L=dense_L, room_bytes=left)
    filled = of_counts(problem, filled_L, dense_L, head)
    filled_s, even_s = (placement_seconds(problem, placement) for placement in (filled, even))
    return even if even_s < filled_s * (1 - WORTH_IT) else filled


def _priced_counts(
    problem: Problem, dense_L: np.ndarray, room: int, least: int
) -> np.ndarray | None:
    """Hot neurons per layer at the price that `place_neurons` describes; None if no price gives
    from `least` to `room` bytes."""

    def counts_of(price_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        _, count_2KL = priced_layers(problem, price_K)
        count_KL = np.where(dense_L, count_2KL[1], count_2KL[0])
        return count_KL, count_KL @ problem.neuron_bytes_L

    price_K = first_prices(problem)
    price_K = price_K[price_K >= 0]
    for _ in range(ZOOM_ROUNDS + 1):
        count_KL, bytes_K = counts_of(price_K)
        first = int((bytes_K <= room).argmax())
        assert bytes_K[first] <= room, "at the highest price nothing is on the GPU"
        found_L, found_bytes = count_KL[first], bytes_K[first]
        price_K = np.linspace(price_K[max(0, first - 1)], price_K[first], ZOOM_PRICES)
    if found_bytes >= least:
        return found_L
    fewer_L = found_L
    price_K = first_prices(problem)
    price_K = price_K[price_K <= 0]
    for _ in range(ZOOM_ROUNDS + 1):
        count_KL, bytes_K = counts_of(price_K)
        enough = np.flatnonzero(bytes_K >= least)
        if not len(enough):
            return None
        last = int(enough[-1])
        if last + 1 < len(count_KL):
            fewer_L = count_KL[last + 1]
        found_L, found_bytes = count_KL[last], bytes_K[last]
        price_K = np.linspace(price_K[last], price_K[min(len(price_K) - 1, last + 1)], ZOOM_PRICES)
    # Lowered until the bytes hardly exceed `least`, but no layer's count below that at almost the
    # same price, so that counts in between cost about the same.
    num_hot_L, surplus = found_L.copy(), int(found_bytes) - least
    for layer in np.argsort(-num_hot_L, kind="stable"):
        floor = max(min(found_L[layer], fewer_L[layer]), problem.min_hot_L[layer])
        spare = int(num_hot_L[layer] - floor)
        fewer = max(0, min(spare, surplus // max(1, int(problem.neuron_bytes_L[layer]))))
        num_hot_L[layer] -= fewer
        surplus -= fewer * int(problem.neuron_bytes_L[layer])
    return num_hot_L if least <= num_hot_L @ problem.neuron_bytes_L <= room else None
