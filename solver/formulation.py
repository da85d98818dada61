"""The placement as an integer program: a layer's neurons in groups of similar hotness, solved by
HiGHS through PuLP.

Sets     l = 0..L-1 layers, g = 0..G-1 groups of a layer (consecutive ranks; n_lg neurons),
         k = 0..K-1 GPUs
Binary   hot_l_g_k    the neurons of group g are on GPU k, all of them or none
         has_hot_l_k  any group of layer l is on GPU k
         dense_l_k    the layer's dense block is on GPU k
         split_l_k    layer l has parts on both GPU k and the CPU
         head_k       the output head is on GPU k
         home_i_k     GPU k is the home of layer i (of the head for i = L); only if K > 1
Real     seconds_l    T_l >= 0
         head_seconds visit_i_k    >= 0; a visit to GPU k begins with item i: a dense block, or the
         head for i = L

With t_lg the touched bytes of a group, b_l the bytes of a neuron, B_k the rate of GPU k, B_l that
of the CPU for the layer's neurons, and the dense block's seconds D_l = dense_cpu_s_l + sum_k
dense_l_k (dense_gpu_s_l_k - dense_cpu_s_l):

    minimise    sum_l seconds_l + head_seconds + sum_(i, k) visit_s_k visit_i_k
    begins_i_k         visit_i_k >= on_i_k - on_(i-1)_k    (on_i_k is dense_i_k, head_k for i = L)
    gpu_side_l_k       seconds_l >= D_l + sum_g hot_l_g_k t_lg / B_k + launch_k has_hot_l_k
    cpu_side_l         seconds_l >= D_l + sum_g (1 - sum_k hot_l_g_k) t_lg / B_l
                                    + sum_k round_trip_k split_l_k
    hot_is_seen_l_g_k  hot_l_g_k <= has_hot_l_k
    cold_is_split_l_g_k  dense_l_k - hot_l_g_k <= split_l_k  (dense block on GPU k, group not)
    hot_is_split_l_k   has_hot_l_k - dense_l_k <= split_l_k  (a group on GPU k, dense block not)
    least_hot_l_k      sum_g n_lg hot_l_g_k >= C_l_k has_hot_l_k
    head_time          head_seconds = head_cpu_s + sum_k head_k (head_gpu_s_k - head_cpu_s)
    budget_k           sum_l (dense_bytes_l dense_l_k + sum_g n_lg b_l hot_l_g_k)
                       + head_bytes head_k <= budget_k - workspace_k
    host               the left side summed over all k >= need    (only if need > 0)
    one_home_i         sum_k home_i_k = 1            (this and the rows below only if K > 1)
    hot_at_home_l_k, dense_at_home_l_k, head_at_home_k    has_hot, dense, head <= home
    order_i_k          sum_(j <= k) home_(i+1)_j <= sum_(j <= k) home_i_j

The workspace needs no variable: a placement with nothing on the GPU, which needs no workspace,
satisfies the budget row anyway. A GPU whose budget does not hold its workspace gets no variables at
all. No rule is needed for a layer with both hot and cold neurons: if its dense block is on the GPU,
the cold ones split the layer; if it is on the CPU, the hot ones do. Nothing forces the hottest
groups to be on the GPU: where the GPU takes longer than the CPU, another choice can balance the
layer better.

HiGHS works with absolute tolerances of 1e-6, so the unit of seconds is a thousandth of a token on
the CPU alone, and the unit of bytes the largest neuron. In each layer, the boundaries between the
start's hot and cold neurons are also boundaries between groups, so that the start is a feasible
point of the program.

Measured (7B shape, f16, power-law frequencies, budgets of 2 to 14 GiB, two cores busy with other
work). To a gap of 0.1 %, without the start's boundaries: 0.9-7.9 s with 1,000 groups and 1.7-31 s
with 2,000; with one summed row instead of a row per group for the two indicator rules, 1.1-16 s and
1.8-31 s. To a gap of 0.01 % with 2,000 groups, no variant finished within 30 s at every budget:
integer counts per group, or continuous groups, were faster at some budgets, but ended with gaps of
15 % and 3 % at 12 GiB, binary groups never above 0.3 %. Hence binary groups, a row per group, 1,000
groups. With the start's boundaries it takes 0.4-1.3 s, and 0.7-1.0 s for a 70B shape (80 layers of
28,672 neurons).

In a variant with a binary for "anything is on the GPU", whose coefficient in the budget was the
workspace, HiGHS 1.15.1 once called a placement optimal that was 0.07 % slower than the best, in
1,200 solves of tiny random models; with the program above, never in the same 1,200. So HiGHS's
bound is not a certificate.

Bounds for single neurons are left to `lagrangian` and `knapsack`."""

import time
from dataclasses import dataclass
from typing import Literal

import highspy
import numpy as np
import pulp

from hotsplit.solver.pipeline import (
    Pipeline,
    PipelinePlacement,
    cpu_only_plan,
    plan_is_feasible,
    plan_seconds,
)
from hotsplit.solver.problem import Placement, ffn_seconds

# Over all layers and GPUs, but at least one per layer; the start's boundaries add more.
MAX_GROUPS = 1000
GROUPED_GAP = 1e-3  # a smaller gap is lost in the error of grouping
NEURON_GAP = 1e-6  # if every group is one neuron
THOUSANDTHS = 1000.0


@dataclass(frozen=True, kw_only=True)
class GroupedResult:
    """The result of HiGHS; seconds per token, except `solve_s`.

    `plan` is None, and `objective_s` infinite, if no placement of whole groups was found."""

    status: Literal["optimal", "time_limit", "infeasible"]
    objective_s: float  # of the placement, recomputed in numpy
    bound_s: float  # HiGHS's own, for placements of whole groups: not a certificate
    is_neuron_granular: bool
    num_groups: int
    solve_s: float
    plan: PipelinePlacement | None

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.bound_s / self.objective_s)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The variables of one layer on one GPU."""

    gpu: int
    hot_G: list[pulp.LpVariable]
    has_hot: pulp.LpVariable
    dense: pulp.LpVariable
    split: pulp.LpVariable


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The variables of one layer, and its groups: first rank, size, touched bytes."""

    starts_G: np.ndarray
    sizes_G: np.ndarray
    touched_G: np.ndarray
    sides: list[_Side]
    seconds: pulp.LpVariable


@dataclass(frozen=True, kw_only=True)
class _Program:
    lp: pulp.LpProblem
    gpus: list[int]  # those whose budget holds their workspace
    layers: list[_Layer]
    heads: list[pulp.LpVariable]
    head_seconds: pulp.LpVariable
    visits: list[list[pulp.LpVariable]]  # [I][K]
    homes: list[list[pulp.LpVariable]]  # [I][K], empty with one GPU
    second: float  # units of the objective per second


def solve_grouped(
    *,
    pipeline: Pipeline,
    start: PipelinePlacement | None,
    time_limit_s: float,
    max_groups: int = MAX_GROUPS,
) -> GroupedResult:
    """The best placement of whole groups, to GROUPED_GAP (NEURON_GAP if each has one neuron) or as
    far as the time allows; `start` if none is found. `start` must be feasible."""
    began = time.perf_counter()
    assert start is None or plan_is_feasible(pipeline, start), "the start is not feasible"
    program = _build(pipeline, start=start, max_groups=max_groups)
    if start is not None:
        _set_start(pipeline, program, start)
    is_neuron_granular = all((layer.sizes_G == 1).all() for layer in program.layers)
    solver = _StartedHiGHS(
        msg=False,
        timeLimit=time_limit_s,
        gapRel=NEURON_GAP if is_neuron_granular else GROUPED_GAP,
    )
    program.lp.solve(solver)
    highs = program.lp.solverModel
    found = highs.getModelStatus()
    statuses = highspy.HighsModelStatus
    known = (statuses.kOptimal, statuses.kTimeLimit, statuses.kInfeasible)
    assert found in known, found
    plan: PipelinePlacement | None = start
    is_solved = found == statuses.kOptimal or highs.getInfo().primal_solution_status == 2
    if is_solved and found != statuses.kInfeasible:
        plan = _read(pipeline, program)
        # Within HiGHS's tolerances a budget may be exceeded by a byte.
        if not plan_is_feasible(pipeline, plan):
            plan = start
    names = {statuses.kOptimal: "optimal", statuses.kTimeLimit: "time_limit"}
    status: Literal["optimal", "time_limit", "infeasible"] = names.get(found, "infeasible")  # type: ignore[assignment]
    return GroupedResult(
        status=status,
        objective_s=np.inf if plan is None else plan_seconds(pipeline, plan),
        bound_s=max(0.0, highs.getInfo().mip_dual_bound / program.second),
        is_neuron_granular=is_neuron_granular,
        num_groups=sum(len(layer.starts_G) for layer in program.layers),
        solve_s=time.perf_counter() - began,
        plan=plan,
    )


class _StartedHiGHS(pulp.HiGHS):
    """PuLP's HiGHS, started from the variables' initial values, which PuLP itself drops."""

    def callSolver(self, lp: pulp.LpProblem) -> None:
        values = [variable.varValue for variable in lp.variables()]
        if None not in values:
            solution = highspy.HighsSolution()
            solution.col_value = [float(value) for value in values]
            solution.value_valid = True
            lp.solverModel.setSolution(solution)
        super().callSolver(lp)


def _build(pipeline: Pipeline, *, start: PipelinePlacement | None, max_groups: int) -> _Program:
    """The program of the module's docstring."""
    lp = pulp.LpProblem("placement", pulp.LpMinimize)
    second = THOUSANDTHS / plan_seconds(pipeline, cpu_only_plan(pipeline))
    gpus = [k for k, problem in enumerate(pipeline.problems) if problem.room_bytes >= 0]
    edges = _group_edges(pipeline, start=start, max_groups=max_groups)
    layers = [
        _add_layer(lp, pipeline, gpus, layer, starts_G, second)
        for layer, starts_G in enumerate(edges)
    ]
    heads = [_binary(lp, f"head_{gpu}") for gpu in gpus]
    head_seconds = lp.add_variable("head_seconds", lowBound=0)
    head_cpu = pipeline.model.head_cpu_s * second
    gains = [
        (pipeline.problems[gpu].head_gpu_s * second - head_cpu) * head
        for gpu, head in zip(gpus, heads, strict=True)
    ]
    lp += head_seconds - pulp.lpSum(gains) == head_cpu, "head_time"
    _add_budgets(lp, pipeline, gpus, layers, heads)
    homes = _add_homes(lp, gpus, layers, heads) if len(gpus) > 1 else []
    visits = _add_visits(lp, gpus, layers, heads)
    visit_s = [pipeline.problems[gpu].visit_s * second for gpu in gpus] * len(visits)
    all_visits = [visit for visit_K in visits for visit in visit_K]
    lp.setObjective(
        pulp.lpSum([layer.seconds for layer in layers] + [head_seconds])
        + _weighted(np.array(visit_s), all_visits)
    )
    return _Program(
        lp=lp,
        gpus=gpus,
        layers=layers,
        heads=heads,
        head_seconds=head_seconds,
        visits=visits,
        homes=homes,
        second=second,
    )


def _group_edges(
    pipeline: Pipeline, *, start: PipelinePlacement | None, max_groups: int
) -> list[np.ndarray]:
    """First ranks of each layer's groups: even sizes, cut again where the start's hot neurons begin
    and end."""
    model = pipeline.model
    per_layer = max(1, max_groups // (model.num_layers * pipeline.num_gpus))
    size = -(-model.num_neurons // per_layer)
    even = np.arange(0, model.num_neurons, size)
    if start is None:
        return [even] * model.num_layers
    is_other_LF = np.diff(start.placement.hot_LF, axis=1, prepend=False)
    return [np.union1d(even, np.flatnonzero(is_other_F)) for is_other_F in is_other_LF]


def _binary(lp: pulp.LpProblem, name: str) -> pulp.LpVariable:
    return lp.add_variable(name, cat=pulp.LpBinary)


def _weighted(weights_G: np.ndarray, variables: list[pulp.LpVariable]) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression(list(zip(variables, weights_G.tolist(), strict=True)))


def _add_layer(
    lp: pulp.LpProblem,
    pipeline: Pipeline,
    gpus: list[int],
    index: int,
    starts_G: np.ndarray,
    second: float,
) -> _Layer:
    """Adds one layer's variables and its own constraints."""
    model = pipeline.model
    layer = _Layer(
        starts_G=starts_G,
        sizes_G=np.diff(np.append(starts_G, model.num_neurons)),
        touched_G=np.add.reduceat(model.touched_LF[index], starts_G),
        sides=[_side(lp, index, gpu, len(starts_G)) for gpu in gpus],
        seconds=lp.add_variable(f"seconds_{index}", lowBound=0),
    )
    cpu_unit = float(model.cpu_s_per_byte_L[index]) * second
    dense_cpu = float(model.dense_cpu_s_L[index]) * second
    dense_seconds, cpu_side = dense_cpu, float(layer.touched_G.sum()) * cpu_unit
    for side in layer.sides:
        problem = pipeline.problems[side.gpu]
        dense_gpu = float(problem.dense_gpu_s_L[index]) * second
        dense_seconds = dense_seconds + (dense_gpu - dense_cpu) * side.dense
        cpu_side = cpu_side - _weighted(layer.touched_G * cpu_unit, side.hot_G)
        cpu_side = cpu_side + problem.round_trip_s * second * side.split
    lp += layer.seconds >= dense_seconds + cpu_side, f"cpu_side_{index}"
    for side in layer.sides:
        problem, name = pipeline.problems[side.gpu], f"{index}_{side.gpu}"
        gpu_side = _weighted(layer.touched_G * problem.gpu_s_per_byte * second, side.hot_G)
        gpu_side = gpu_side + problem.launch_s * second * side.has_hot
        lp += layer.seconds >= dense_seconds + gpu_side, f"gpu_side_{name}"
        for group, hot in enumerate(side.hot_G):
            lp += hot <= side.has_hot, f"hot_is_seen_{index}_{group}_{side.gpu}"
            lp += side.dense - hot <= side.split, f"cold_is_split_{index}_{group}_{side.gpu}"
        lp += side.has_hot - side.dense <= side.split, f"hot_is_split_{name}"
        num_hot, least = _weighted(layer.sizes_G, side.hot_G), int(problem.min_hot_L[index])
        lp += num_hot >= least * side.has_hot, f"least_hot_{name}"
    return layer


def _side(lp: pulp.LpProblem, index: int, gpu: int, num_groups: int) -> _Side:
    return _Side(
        gpu=gpu,
        hot_G=[_binary(lp, f"hot_{index}_{group}_{gpu}") for group in range(num_groups)],
        has_hot=_binary(lp, f"has_hot_{index}_{gpu}"),
        dense=_binary(lp, f"dense_{index}_{gpu}"),
        split=_binary(lp, f"split_{index}_{gpu}"),
    )


def _add_budgets(
    lp: pulp.LpProblem,
    pipeline: Pipeline,
    gpus: list[int],
    layers: list[_Layer],
    heads: list[pulp.LpVariable],
) -> None:
    """The budgets of the GPUs and of the host, in units of the largest neuron."""
    model = pipeline.model
    unit = float(model.neuron_bytes_L.max())
    everything: list[tuple[pulp.LpVariable, float]] = []
    for position, (gpu, head) in enumerate(zip(gpus, heads, strict=True)):
        terms = [(head, model.head_bytes / unit)]
        for index, layer in enumerate(layers):
            side = layer.sides[position]
            terms.append((side.dense, int(model.dense_bytes_L[index]) / unit))
            sizes = (layer.sizes_G * int(model.neuron_bytes_L[index]) / unit).tolist()
            terms.extend(zip(side.hot_G, sizes, strict=True))
        everything += terms
        room = pipeline.problems[gpu].room_bytes / unit
        lp += pulp.LpAffineExpression(terms) <= room, f"budget_{gpu}"
    if pipeline.need_bytes > 0:
        lp += pulp.LpAffineExpression(everything) >= pipeline.need_bytes / unit, "host"


def _add_homes(
    lp: pulp.LpProblem, gpus: list[int], layers: list[_Layer], heads: list[pulp.LpVariable]
) -> list[list[pulp.LpVariable]]:
    """The homes of the layers and the head, which never decrease."""
    homes = [[_binary(lp, f"home_{i}_{k}") for k in gpus] for i in range(len(layers) + 1)]
    for item, home_K in enumerate(homes):
        lp += pulp.lpSum(home_K) == 1, f"one_home_{item}"
    for index, layer in enumerate(layers):
        for side, home in zip(layer.sides, homes[index], strict=True):
            lp += side.has_hot <= home, f"hot_at_home_{index}_{side.gpu}"
            lp += side.dense <= home, f"dense_at_home_{index}_{side.gpu}"
        for count in range(1, len(gpus)):
            before, after = pulp.lpSum(homes[index][:count]), pulp.lpSum(homes[index + 1][:count])
            lp += after <= before, f"order_{index}_{gpus[count - 1]}"
    for gpu, head, home in zip(gpus, heads, homes[-1], strict=True):
        lp += head <= home, f"head_at_home_{gpu}"
    return homes


def _add_visits(
    lp: pulp.LpProblem, gpus: list[int], layers: list[_Layer], heads: list[pulp.LpVariable]
) -> list[list[pulp.LpVariable]]:
    """The starts of visits. Continuous: at the optimum they are 0 or 1 by themselves."""
    visits, before_K = [], [pulp.lpSum([]) for _ in gpus]
    blocks = [[side.dense for side in layer.sides] for layer in layers] + [heads]
    for item, block_K in enumerate(blocks):
        visit_K = [lp.add_variable(f"visit_{item}_{gpu}", lowBound=0) for gpu in gpus]
        for gpu, visit, block, before in zip(gpus, visit_K, block_K, before_K, strict=True):
            lp += visit >= block - before, f"begins_{item}_{gpu}"
        visits.append(visit_K)
        before_K = block_K
    return visits


def _set_start(pipeline: Pipeline, program: _Program, start: PipelinePlacement) -> None:
    """Sets every variable to its value in the start."""
    model, placement = pipeline.model, start.placement
    num_hot_L, dense_L = placement.num_hot_L, placement.dense_L
    # A GPU without variables holds nothing, so its layers may be assigned to any other GPU.
    usable = np.array(program.gpus)
    home_I = usable[np.searchsorted(usable, start.home_I).clip(max=len(usable) - 1)]
    touched_L = (model.touched_LF * placement.hot_LF).sum(axis=1)
    for index, layer in enumerate(program.layers):
        num_hot, dense, home = int(num_hot_L[index]), bool(dense_L[index]), int(home_I[index])
        is_split = num_hot < model.num_neurons if dense else num_hot > 0
        for side in layer.sides:
            is_home = side.gpu == home
            for hot, first in zip(side.hot_G, layer.starts_G, strict=True):
                hot.varValue = int(is_home and placement.hot_LF[index, first])
            side.has_hot.varValue = int(is_home and num_hot > 0)
            side.dense.varValue = int(is_home and dense)
            side.split.varValue = int(is_home and is_split)
        problem = pipeline.problems[home]
        ffn_L = ffn_seconds(problem, hot_touched_L=touched_L, num_hot_L=num_hot_L, dense_L=dense_L)
        dense_s = (problem.dense_gpu_s_L if dense else problem.dense_cpu_s_L)[index]
        layer.seconds.varValue = float(ffn_L[index] + dense_s) * program.second
    for gpu, head in zip(program.gpus, program.heads, strict=True):
        head.varValue = int(placement.head and home_I[-1] == gpu)
    problem = pipeline.problems[int(home_I[-1])]
    head_s = problem.head_gpu_s if placement.head else problem.head_cpu_s
    program.head_seconds.varValue = head_s * program.second
    for item, home_K in enumerate(program.homes):
        for gpu, variable in zip(program.gpus, home_K, strict=True):
            variable.varValue = int(home_I[item] == gpu)
    on_I = np.append(dense_L, placement.head)
    for position, gpu in enumerate(program.gpus):
        begins_I = np.diff((on_I & (home_I == gpu)).astype(int), prepend=0) == 1
        for visit_K, begins in zip(program.visits, begins_I.tolist(), strict=True):
            visit_K[position].varValue = int(begins)


def _read(pipeline: Pipeline, program: _Program) -> PipelinePlacement:
    """The placement given by the variables."""
    model = pipeline.model
    hot_LF = np.zeros(model.touched_LF.shape, bool)
    dense_L = np.zeros(model.num_layers, bool)
    home_I = np.full(model.num_layers + 1, program.gpus[0])
    for index, layer in enumerate(program.layers):
        for side in layer.sides:
            chosen_G = np.array([hot.varValue > 0.5 for hot in side.hot_G])
            hot_LF[index] |= np.repeat(chosen_G, layer.sizes_G)
            dense_L[index] |= side.dense.varValue > 0.5
    for item, home_K in enumerate(program.homes):
        home_I[item] = program.gpus[int(np.argmax([home.varValue for home in home_K]))]
    head = any(head.varValue > 0.5 for head in program.heads)
    return PipelinePlacement(
        placement=Placement(hot_LF=hot_LF, dense_L=dense_L, head=head), home_I=home_I
    )
