"""Places the experts of a mixture on three memories: a GPU, main memory and the drive.

What a GPU holds is found as without a drive (`optimise`), for several prices of what the CPU
computes, and once with the GPU as full as it can be. For each of these placements, main memory
holds what every token reads; the rest of it goes to experts in one order of all layers: by what the
next one saves, each layer's most chosen first. The order does not depend on the size of main
memory, which holds its first part, so a larger one has all that a smaller one has, and no token
takes longer. The fastest of these placements is the plan.

The bound charges a price q for each byte of main memory, which is the same as a reward for each
byte elsewhere:

    T >= min over all placements that fit the GPU of [T - q * bytes on the GPU or the drive]
         + q * the bytes that main memory cannot hold

For a given q this is a problem of two memories: M_l with n hot experts is the least, over the
number d of experts on the drive, of

    max(M_l without a drive, sum of the d least touched * drive_s + hand_over) - q * (n + d) * bytes

since the mean of a maximum is at least the maximum of the means, and any d experts touch at least
as much as the d least touched. Its lower convex hull over n takes the place of
`Problem.least_split_s_LN` in the search for one GPU's bound (`lagrangian`). Every q gives a bound;
the value is concave in q, so the best is searched for.

Letters: L layers, F experts, T recorded tokens, N = F + 1 counts of experts, P prices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from hotsplit.solver import replay
from hotsplit.solver.fullest import fullest, fullest_plan
from hotsplit.solver.lagrangian import first_prices, gpu_bound, least_costs
from hotsplit.solver.multi_gpu import (
    Pipeline,
    PipelinePlacement,
    bytes_of_gpus,
    cpu_only_plan,
    plan_is_feasible,
    plan_seconds,
    with_one_home,
)
from hotsplit.solver.optimise import OPTIMAL_GAP, Answer, find_plan
from hotsplit.solver.problem import (
    ROUNDING,
    Problem,
    SolvedPlacement,
    gpu_use_seconds,
    head_seconds,
    held_bytes,
    on_one_device,
)

# Shares of the drive's seconds that are added to those of an expert on the CPU, for a GPU's choice.
DRIVE_SHARES = (0.0, 0.3, 1.0)
LEAST_SHARE = 1e-3  # of the drive's seconds a byte: the lowest price of main memory above 0
FEW_EXPERTS = 24  # of all layers: so few are placed one by one
FIRST_PRICES, ZOOM_PRICES, ZOOM_ROUNDS = 12, 6, 2


def find_with_drive(
    pipeline: Pipeline, *, time_limit_s: float, known: Sequence[PipelinePlacement] = ()
) -> Answer | None:
    """The fastest plan found on three memories, and a bound on all; `pipeline` has one GPU or none,
    and `need_bytes` that main memory cannot hold. None if it cannot hold what is not an expert.
    `known`: placements on a GPU that are tried as well."""
    assert pipeline.num_gpus == 1 and pipeline.model.drive_s_L is not None
    found = [*_on_gpu(pipeline, time_limit_s), *known]
    plans = [plan for each in found if (plan := with_residents(pipeline, each)) is not None]
    if not plans:
        return None
    if pipeline.model.num_layers * pipeline.model.num_neurons <= FEW_EXPERTS:
        plans += _climbed(pipeline, plans)
    best = min(plans, key=lambda plan: plan_seconds(pipeline, plan))
    seconds = plan_seconds(pipeline, best)
    bound_s = min(lower_bound(pipeline.model, pipeline.need_bytes), seconds)
    answer = Answer(status="bounded", plan=best, objective_s=seconds, bound_s=bound_s)
    return replace(answer, status="optimal") if answer.gap <= OPTIMAL_GAP else answer


def _on_gpu(pipeline: Pipeline, time_limit_s: float) -> Iterator[PipelinePlacement]:
    """Placements on the GPU, whatever main memory holds."""
    yield cpu_only_plan(pipeline)
    problem = pipeline.model
    if problem.budget_bytes < problem.minimum_bytes:
        return
    assert problem.drive_s_L is not None
    per_byte_L = problem.drive_s_L / np.maximum(1, problem.neuron_bytes_L)
    for share in DRIVE_SHARES:
        cpu_s_L = problem.cpu_s_per_byte_L + share * per_byte_L
        slower = replace(pipeline, problems=(replace(problem, cpu_s_per_byte_L=cpu_s_L),))
        answer = find_plan(replace(slower, need_bytes=0), time_limit_s=time_limit_s)
        if answer is not None:
            yield answer.plan
    yield fullest_plan(pipeline)
    yield least_in_memory(pipeline)


def least_in_memory(pipeline: Pipeline) -> PipelinePlacement:
    """The placement that leaves the fewest bytes to main memory with all experts on the drive: the
    GPU holds as much as it can of the rest."""
    problem = pipeline.model
    sizes_L = problem.neuron_bytes_L.copy()
    sizes_L[problem.replayed] = 0
    rest = replace(problem, neuron_bytes_L=sizes_L)
    return with_one_home(fullest(rest, max(0, rest.room_bytes), pipeline.together))


def missing_bytes(pipeline: Pipeline) -> int:
    """Bytes that main memory lacks to hold what every token reads; 0 or less if there is a plan."""
    problem, placement = pipeline.model, least_in_memory(pipeline).placement
    held = held_bytes(problem, placement) * (problem.budget_bytes >= problem.minimum_bytes)
    experts = int(problem.neuron_bytes_L[problem.replayed].sum()) * problem.num_neurons
    return pipeline.need_bytes - experts - held


def _climbed(pipeline: Pipeline, plans: Sequence[PipelinePlacement]) -> list[PipelinePlacement]:
    """Plans for each choice of dense blocks and head, begun with the experts that each of the
    plans has on the GPU and with none, that no change of one expert's memory, and no exchange of
    two, improves."""
    problem, found = pipeline.model, []
    climber = _Climber(pipeline)
    is_whole_LF = np.ones((problem.num_layers, problem.num_neurons), bool)
    is_whole_LF[problem.replayed] = False  # where there are no experts, none are on the drive
    hot = {plan.placement.hot_LF.tobytes(): plan.placement.hot_LF for plan in plans}
    starts = [np.zeros_like(is_whole_LF), *hot.values()]
    choices = product((False, True), repeat=problem.num_layers)
    for dense, head in product(choices, (False, True)):
        for hot_LF in starts:
            start = SolvedPlacement(
                hot_LF=hot_LF, dense_L=np.array(dense), head=head, resident_LF=is_whole_LF & ~hot_LF
            )
            plan = with_one_home(start)
            if plan_is_feasible(pipeline, plan):
                found.append(with_one_home(climber.climb(start)))
    return found


class _Climber:
    """Improves placements of few experts, and remembers the seconds of a layer's."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.problem = pipeline, pipeline.model
        self._seconds: dict[object, float] = {}

    def climb(self, placement: SolvedPlacement) -> SolvedPlacement:
        """The placement, improved by the best step while one makes it faster: a step gives one
        expert another memory, exchanges those of two, or gives the GPU the hottest of a layer."""
        best_s = self.seconds(placement)
        while True:
            found, found_s = None, best_s * (1 - ROUNDING)
            for step in _steps(self.problem, placement):
                seconds = self.seconds(step)
                if seconds < found_s and plan_is_feasible(self.pipeline, with_one_home(step)):
                    found, found_s = step, seconds
            if found is None:
                return placement
            placement, best_s = found, found_s

    def seconds(self, placement: SolvedPlacement) -> float:
        """T but for what no step changes."""
        assert placement.resident_LF is not None
        total = gpu_use_seconds(self.problem, placement)
        for layer in self.problem.replayed:
            hot_F, there_F = placement.hot_LF[layer], placement.resident_LF[layer]
            is_dense = bool(placement.dense_L[layer])
            key = (layer, is_dense, hot_F.tobytes(), there_F.tobytes())
            if key not in self._seconds:
                sides = self.problem.sides(layer)
                found_1 = replay.sets_seconds(sides, hot_F[None], is_dense, there_F[None])
                self._seconds[key] = float(found_1[0])
            total += self._seconds[key]
        return total


def _steps(problem: Problem, placement: SolvedPlacement) -> Iterator[SolvedPlacement]:
    """Placements that differ from this one by one step, feasible or not."""
    assert placement.resident_LF is not None
    # By memory: 0 the drive, 1 main memory, 2 the GPU.
    place_LF = placement.resident_LF + 2 * placement.hot_LF
    experts = [(n, rank) for n in problem.replayed for rank in range(problem.num_neurons)]

    def changed(at: object, place: object) -> SolvedPlacement:
        other_LF = place_LF.copy()
        other_LF[at] = place  # type: ignore[index]
        return replace(placement, hot_LF=other_LF == 2, resident_LF=other_LF == 1)

    for at in experts:
        yield from (changed(at, place) for place in range(3) if place != place_LF[at])
    for one, two in combinations(experts, 2):
        if place_LF[one] != place_LF[two]:
            both = tuple(zip(one, two, strict=True))
            yield changed((list(both[0]), list(both[1])), [place_LF[two], place_LF[one]])
    rank_F = np.arange(problem.num_neurons)
    for layer in problem.replayed:
        for count, rest in product(range(problem.num_neurons + 1), (0, 1)):
            row_F = np.where(place_LF[layer] == 2, rest, place_LF[layer])
            yield changed(layer, np.where(rank_F < count, 2, row_F))


def with_residents(pipeline: Pipeline, plan: PipelinePlacement) -> PipelinePlacement | None:
    """The plan with as many experts in main memory as it holds; None if it holds too little for the
    rest, or if the plan is none of this problem."""
    problem, hot_LF = pipeline.model, plan.placement.hot_LF
    left = int(sum((~hot_LF[n]).sum() * problem.neuron_bytes_L[n] for n in problem.replayed))
    room = left - (pipeline.need_bytes - sum(bytes_of_gpus(pipeline, plan)))
    if room < 0:
        return None
    resident_LF = ~hot_LF
    if room < left:
        resident_LF[problem.replayed] = False
        for layer, rank in _order(problem, plan):
            room -= int(problem.neuron_bytes_L[layer])
            if room < 0:
                break
            resident_LF[layer, rank] = True
    is_whole = bool((resident_LF | hot_LF).all())
    placement = replace(plan.placement, resident_LF=None if is_whole else resident_LF)
    found = replace(plan, placement=placement)
    return found if plan_is_feasible(pipeline, found) else None


def _order(problem: Problem, plan: PipelinePlacement) -> Iterator[tuple[int, int]]:
    """The experts that are on no GPU, by layer and rank, in the order in which main memory takes
    them: by the seconds that each saves a byte. In each layer the most chosen come first, so what
    they save is that of the steepest run of them that begins with the next."""
    layers, ranks, values = [], [], []
    known: dict[object, np.ndarray] = {}
    for layer in problem.replayed:
        hot_F = plan.placement.hot_LF[layer]
        is_dense = bool(plan.placement.dense_L[layer])
        key = (problem.twins[layer], hot_F.tobytes(), is_dense)
        if key not in known:
            known[key] = _savings(problem, layer, hot_F, is_dense)
        cold = np.flatnonzero(~hot_F)
        layers.append(np.full(len(cold), layer))
        ranks.append(cold)
        values.append(known[key] / problem.neuron_bytes_L[layer])
    layer_X, rank_X, value_X = map(np.concatenate, (layers, ranks, values))
    touched_X = problem.touched_LF[layer_X, rank_X]
    order = np.lexsort((rank_X, layer_X, -touched_X, -value_X))
    return zip(layer_X[order].tolist(), rank_X[order].tolist(), strict=True)


def _savings(problem: Problem, layer: int, hot_F: np.ndarray, is_dense: bool) -> np.ndarray:
    """Seconds that each cold expert of a layer saves in main memory, the most chosen first, made
    non-increasing: experts that save more together than the one before share what they save."""
    sides, cold = problem.sides(layer), np.flatnonzero(~hot_F)
    counts = np.arange(len(cold) + 1)
    resident_NF = np.zeros((len(counts), len(hot_F)), bool)
    resident_NF[:, cold] = np.arange(len(cold)) < counts[:, None]
    hot_NF = np.broadcast_to(hot_F, resident_NF.shape)
    pieces = zip(np.array_split(hot_NF, 8), np.array_split(resident_NF, 8), strict=True)
    seconds_N = np.concatenate(
        [replay.sets_seconds(sides, hot, is_dense, resident) for hot, resident in pieces]
    )
    return -np.diff(lower_hull(seconds_N))


def lower_hull(value_N: np.ndarray) -> np.ndarray:
    """The greatest convex function that is nowhere above the values, at 0, 1, ..; infinite ones at
    either end stay."""
    hull_N = value_N.copy()
    corners: list[int] = []
    for n in np.flatnonzero(np.isfinite(value_N)).tolist():
        while len(corners) > 1:
            a, b = corners[-2:]
            rises = (value_N[b] - value_N[a]) * (n - a) >= (value_N[n] - value_N[a]) * (b - a)
            if not rises:
                break
            corners.pop()
        corners.append(n)
    if corners:
        inside = np.arange(corners[0], corners[-1] + 1)
        hull_N[inside] = np.interp(inside, corners, value_N[corners])
    return hull_N


def lower_bound(problem: Problem, need_bytes: int) -> float:
    """A lower bound on T of every placement on three memories."""
    assert problem.drive_s_L is not None
    routed = problem.replayed
    top = float((problem.drive_s_L[routed] / problem.neuron_bytes_L[routed]).max())
    price_P = np.append(0.0, np.geomspace(LEAST_SHARE * top, 4 * top, FIRST_PRICES))
    value_P = np.array([_value(problem, need_bytes, q, is_quick=True) for q in price_P])
    for _ in range(ZOOM_ROUNDS):
        best = int(value_P.argmax())
        low, high = price_P[max(0, best - 1)], price_P[min(len(price_P) - 1, best + 1)]
        more_P = np.linspace(low, high, ZOOM_PRICES + 2)[1:-1]
        values = [_value(problem, need_bytes, q, is_quick=True) for q in more_P]
        price_P, value_P = np.append(price_P, more_P), np.append(value_P, values)
        order = np.argsort(price_P)
        price_P, value_P = price_P[order], value_P[order]
    best = int(value_P.argmax())
    bound_s = max(value_P[best], _value(problem, need_bytes, price_P[best], is_quick=False))
    return float(bound_s) * (1 - ROUNDING)


def _value(problem: Problem, need_bytes: int, price: float, *, is_quick: bool) -> float:
    """The bound that a price of main memory gives; `is_quick`: with one price of the GPU's memory
    for all numbers of dense blocks there, which may be lower."""
    priced = _priced(problem, price)
    cpu_only_s = float(priced.hottest_s_2LN[0, :, 0].sum() + priced.dense_cpu_s_L.sum())
    least_s = cpu_only_s + head_seconds(priced, on_one_device(priced, gpu=False))
    if priced.room_bytes >= 0 and priced.budget_bytes > 0:
        if is_quick:
            price_K = first_prices(priced)
            gpu_s = float((least_costs(priced, price_K) - price_K * priced.room_bytes).max())
        else:
            gpu_s = gpu_bound(priced)
        least_s = min(least_s, gpu_s)
    return least_s + price * need_bytes


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Least seconds of a layer, rewards included: of n hot experts [N], without any and with all of
    them for either side of the dense block [2]."""

    split_s_N: np.ndarray
    none_s_2: np.ndarray
    all_s_2: np.ndarray


def _priced(problem: Problem, price: float) -> Problem:
    """The problem of two memories in which each byte on the GPU or the drive is rewarded."""
    assert problem.drive_s_L is not None
    split_s_LN, hottest_s_2LN = problem.least_split_s_LN.copy(), problem.hottest_s_2LN.copy()
    count_N = np.arange(problem.num_neurons + 1)
    reward_LN = price * problem.neuron_bytes_L[:, None] * count_N
    split_s_LN -= reward_LN
    hottest_s_2LN -= reward_LN
    known: dict[int, _Layer] = {}
    for layer, twin in problem.twins.items():
        if twin not in known:
            known[twin] = _priced_layer(problem, layer, price)
        found = known[twin]
        split_s_LN[layer] = found.split_s_N
        hottest_s_2LN[:, layer, 0], hottest_s_2LN[:, layer, -1] = found.none_s_2, found.all_s_2
    # For the range of prices of the GPU's memory.
    per_byte_L = problem.drive_s_L / np.maximum(1, problem.neuron_bytes_L)
    priced = replace(
        problem,
        dense_gpu_s_L=problem.dense_gpu_s_L - price * problem.dense_bytes_L,
        head_gpu_s=problem.head_gpu_s - price * problem.head_bytes,
        cpu_s_per_byte_L=problem.cpu_s_per_byte_L + per_byte_L + price,
        need_bytes=0,
        drive_s_L=None,
    )
    vars(priced).update(
        {"least_split_s_LN": split_s_LN, "hottest_s_2LN": hottest_s_2LN, "twins": problem.twins}
    )
    return priced


def _priced_layer(problem: Problem, layer: int, price: float) -> _Layer:
    assert problem.drive_s_L is not None
    num_bytes, most = int(problem.neuron_bytes_L[layer]), problem.num_neurons
    tail_N = np.concatenate([[0.0], np.cumsum(problem.touched_LF[layer][::-1])]) / num_bytes
    drive_s_N = tail_N * problem.drive_s_L[layer]  # by the number of experts on the drive
    count_N, hand_over_s = np.arange(most + 1), problem.hand_over_s

    def least(seconds_N: np.ndarray, own_s: float, counts_N: np.ndarray) -> np.ndarray:
        """The least seconds for each number of hot experts, over all numbers on the drive."""
        sums_NN = np.maximum(seconds_N[:, None], (drive_s_N + own_s)[None])
        sums_NN -= price * num_bytes * (counts_N[:, None] + count_N[None])
        sums_NN[counts_N[:, None] + count_N[None] > most] = np.inf
        return sums_NN.min(axis=1)

    none_s_2, all_s_2 = problem.hottest_s_2LN[:, layer, [0, -1]].T
    split_N = least(problem.least_split_s_LN[layer], hand_over_s, count_N)
    return _Layer(
        split_s_N=lower_hull(split_N),
        none_s_2=np.array(
            [least(none_s_2[[side]], side * hand_over_s, count_N[:1])[0] for side in (0, 1)]
        ),
        all_s_2=all_s_2 - price * num_bytes * most,
    )
