"""The placement as an integer program, solved with HiGHS through PuLP: for problems that it
finishes.

Sets     l = 0..L-1 layers, j = 0..F-1 neurons of a layer, by rank, k = 0..K-1 GPUs
Binary   hot_l_j_k    neuron j is on GPU k
         has_hot_l_k  any neuron of layer l is on GPU k
         dense_l_k    the layer's dense block is on GPU k
         split_l_k    layer l has parts on both GPU k and the CPU
         head_k       the output head is on GPU k
         uses_k       anything is on GPU k
         home_i_k     GPU k is the home of layer i (of the head for i = L); only if K > 1
Real     seconds_l    T_l >= 0
         head_seconds run_l_k      >= 0; a run of layers on the CPU whose home is GPU k, which it
         uses, begins with layer l

With t_lj the touched bytes of a neuron, b_l its bytes, B_k_l the rate of GPU k and B_l that of the
CPU for the layer's neurons, and the dense block's seconds D_l = dense_cpu_s_l + sum_k dense_l_k
(dense_gpu_s_l_k - dense_cpu_s_l):

    minimise    sum_l seconds_l + head_seconds + sum_k use_s_k uses_k
                + sum_(l, k) cpu_run_s_k run_l_k
    begins_l_k         run_l_k >= off_l_k - off_(l-1)_k - (1 - uses_k)
                       (off_l_k is home_l_k - dense_l_k, home_l_k being 1 if K = 1; off_(-1)_k is 0)
    hot_uses_l_k, dense_uses_l_k, head_uses_k    has_hot_l_k, dense_l_k, head_k <= uses_k
    gpu_side_l_k       seconds_l >= D_l + sum_j hot_l_j_k t_lj / B_k_l + kernels_k has_hot_l_k
    cpu_side_l         seconds_l >= D_l + sum_j (1 - sum_k hot_l_j_k) t_lj / B_l
                                    + sum_k hand_over_k split_l_k
    hot_is_seen_l_j_k  hot_l_j_k <= has_hot_l_k
    cold_is_split_l_j_k  dense_l_k - hot_l_j_k <= split_l_k  (dense block on GPU k, neuron not)
    hot_is_split_l_k   has_hot_l_k - dense_l_k <= split_l_k  (a neuron on GPU k, dense block not)
    least_hot_l_k      sum_j hot_l_j_k >= C_l_k has_hot_l_k
    head_time          head_seconds = head_cpu_s + sum_k head_k (head_gpu_s_k - head_cpu_s)
    budget_k           sum_l (dense_bytes_l dense_l_k + b_l sum_j hot_l_j_k)
                       + head_bytes head_k <= budget_k - workspace_k
    host               the left side summed over all k >= need    (only if need > 0)
    one_home_i         sum_k home_i_k = 1            (this and the rows below only if K > 1)
    hot_at_home_l_k, dense_at_home_l_k, head_at_home_k    has_hot, dense, head <= home
    order_i_k          sum_(j <= k) home_(i+1)_j <= sum_(j <= k) home_i_j

The workspace needs no variable: a placement with nothing on the GPU, which needs no workspace,
satisfies the budget row anyway. A GPU whose budget does not hold its workspace gets no variables at
all. No rule is needed for a layer with both hot and cold neurons: if its dense block is on the GPU,
the cold ones split the layer; if it is on the CPU, the hot ones do. Nothing forces the hottest
neurons to be on the GPU: where the GPU takes longer than the CPU, another choice can balance the
layer better.

HiGHS works with absolute tolerances of 1e-6, so the unit of seconds is a thousandth of a token on
the CPU alone, and the unit of bytes the largest neuron.

A neuron is a variable, so the program is for small models; with more neurons than MAX_NEURONS the
Lagrangian search alone leaves less than HiGHS can find in half a minute. Programs over groups of
neurons in place of neurons found nothing that the search had not (docs/log/solver.md).

HiGHS's bound is its own word, not a sum that can be added up again: it once called a placement of a
variant of this program optimal that was 0.07 % slower than the best, in 1,200 solves of tiny random
models (HiGHS 1.15.1)."""

from dataclasses import dataclass
from typing import Literal

import highspy
import numpy as np
import pulp

from hotsplit.solver import multi_gpu
from hotsplit.solver.problem import SolvedPlacement, head_seconds, layer_seconds

MAX_NEURONS = 1000  # of all layers, times GPUs
NEURON_GAP = 1e-6
THOUSANDTHS = 1000.0


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The variables of one layer on one GPU."""

    gpu: int
    hot_F: list[pulp.LpVariable]
    has_hot: pulp.LpVariable
    dense: pulp.LpVariable
    split: pulp.LpVariable


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The variables of one layer."""

    sides: list[_Side]
    seconds: pulp.LpVariable


@dataclass(frozen=True, kw_only=True)
class _Program:
    lp: pulp.LpProblem
    gpus: list[int]  # those whose budget holds their workspace
    layers: list[_Layer]
    heads: list[pulp.LpVariable]
    head_seconds: pulp.LpVariable
    uses: list[pulp.LpVariable]  # [K]
    runs: list[list[pulp.LpVariable]]  # [L][K]
    homes: list[list[pulp.LpVariable]]  # [I][K], empty with one GPU
    second: float  # units of the objective per second


def _program(pipeline: multi_gpu.Pipeline) -> _Program:
    lp = pulp.LpProblem("placement", pulp.LpMinimize)
    second = THOUSANDTHS / multi_gpu.plan_seconds(pipeline, multi_gpu.cpu_only_plan(pipeline))
    gpus = [k for k, problem in enumerate(pipeline.problems) if problem.room_bytes >= 0]
    layers = [
        _add_layer(lp, pipeline, gpus, layer, second) for layer in range(pipeline.model.num_layers)
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
    uses = _add_uses(lp, gpus, layers, heads)
    runs = _add_runs(lp, gpus, layers, homes, uses)
    use_s = [pipeline.problems[gpu].use_s * second for gpu in gpus]
    run_s = [pipeline.problems[gpu].cpu_run_s * second for gpu in gpus] * len(runs)
    lp.setObjective(
        pulp.lpSum([layer.seconds for layer in layers] + [head_seconds])
        + _weighted(np.array(use_s), uses)
        + _weighted(np.array(run_s), [run for run_K in runs for run in run_K])
    )
    return _Program(
        lp=lp,
        gpus=gpus,
        layers=layers,
        heads=heads,
        head_seconds=head_seconds,
        uses=uses,
        runs=runs,
        homes=homes,
        second=second,
    )


def _binary(lp: pulp.LpProblem, name: str) -> pulp.LpVariable:
    return lp.add_variable(name, cat=pulp.LpBinary)


def _weighted(weights_N: np.ndarray, variables: list[pulp.LpVariable]) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression(list(zip(variables, weights_N.tolist(), strict=True)))


def _add_layer(
    lp: pulp.LpProblem, pipeline: multi_gpu.Pipeline, gpus: list[int], index: int, second: float
) -> _Layer:
    model = pipeline.model
    layer = _Layer(
        sides=[
            _Side(
                gpu=gpu,
                hot_F=[_binary(lp, f"hot_{index}_{n}_{gpu}") for n in range(model.num_neurons)],
                has_hot=_binary(lp, f"has_hot_{index}_{gpu}"),
                dense=_binary(lp, f"dense_{index}_{gpu}"),
                split=_binary(lp, f"split_{index}_{gpu}"),
            )
            for gpu in gpus
        ],
        seconds=lp.add_variable(f"seconds_{index}", lowBound=0),
    )
    touched_F = model.touched_LF[index]
    cpu_unit = float(model.cpu_s_per_byte_L[index]) * second
    dense_cpu = float(model.dense_cpu_s_L[index]) * second
    dense_seconds, cpu_side = dense_cpu, float(touched_F.sum()) * cpu_unit
    for side in layer.sides:
        problem = pipeline.problems[side.gpu]
        dense_gpu = float(problem.dense_gpu_s_L[index]) * second
        dense_seconds = dense_seconds + (dense_gpu - dense_cpu) * side.dense
        cpu_side = cpu_side - _weighted(touched_F * cpu_unit, side.hot_F)
        cpu_side = cpu_side + float(problem.hand_over_s_L[index]) * second * side.split
    lp += layer.seconds >= dense_seconds + cpu_side, f"cpu_side_{index}"
    for side in layer.sides:
        problem, name = pipeline.problems[side.gpu], f"{index}_{side.gpu}"
        hot_unit = float(problem.hot_s_per_byte_L[index]) * second
        gpu_side = _weighted(touched_F * hot_unit, side.hot_F)
        gpu_side = gpu_side + float(problem.kernels_s_L[index]) * second * side.has_hot
        lp += layer.seconds >= dense_seconds + gpu_side, f"gpu_side_{name}"
        for neuron, hot in enumerate(side.hot_F):
            lp += hot <= side.has_hot, f"hot_is_seen_{index}_{neuron}_{side.gpu}"
            lp += side.dense - hot <= side.split, f"cold_is_split_{index}_{neuron}_{side.gpu}"
        lp += side.has_hot - side.dense <= side.split, f"hot_is_split_{name}"
        least = int(problem.min_hot_L[index])
        lp += pulp.lpSum(side.hot_F) >= least * side.has_hot, f"least_hot_{name}"
    return layer


def _add_budgets(
    lp: pulp.LpProblem,
    pipeline: multi_gpu.Pipeline,
    gpus: list[int],
    layers: list[_Layer],
    heads: list[pulp.LpVariable],
) -> None:
    model = pipeline.model
    unit = float(model.neuron_bytes_L.max())
    everything: list[tuple[pulp.LpVariable, float]] = []
    for position, (gpu, head) in enumerate(zip(gpus, heads, strict=True)):
        terms = [(head, model.head_bytes / unit)]
        for index, layer in enumerate(layers):
            side = layer.sides[position]
            terms.append((side.dense, int(model.dense_bytes_L[index]) / unit))
            size = int(model.neuron_bytes_L[index]) / unit
            terms.extend((hot, size) for hot in side.hot_F)
        everything += terms
        room = pipeline.problems[gpu].room_bytes / unit
        lp += pulp.LpAffineExpression(terms) <= room, f"budget_{gpu}"
    if pipeline.need_bytes > 0:
        lp += pulp.LpAffineExpression(everything) >= pipeline.need_bytes / unit, "host"


def _add_homes(
    lp: pulp.LpProblem, gpus: list[int], layers: list[_Layer], heads: list[pulp.LpVariable]
) -> list[list[pulp.LpVariable]]:
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


def _add_uses(
    lp: pulp.LpProblem, gpus: list[int], layers: list[_Layer], heads: list[pulp.LpVariable]
) -> list[pulp.LpVariable]:
    uses = [_binary(lp, f"uses_{gpu}") for gpu in gpus]
    for position, (gpu, head, is_used) in enumerate(zip(gpus, heads, uses, strict=True)):
        for index, layer in enumerate(layers):
            side = layer.sides[position]
            lp += side.has_hot <= is_used, f"hot_uses_{index}_{gpu}"
            lp += side.dense <= is_used, f"dense_uses_{index}_{gpu}"
        lp += head <= is_used, f"head_uses_{gpu}"
    return uses


def _add_runs(
    lp: pulp.LpProblem,
    gpus: list[int],
    layers: list[_Layer],
    homes: list[list[pulp.LpVariable]],
    uses: list[pulp.LpVariable],
) -> list[list[pulp.LpVariable]]:
    """The starts of runs on the CPU. Continuous: at the optimum they are 0 or 1 by themselves."""
    runs, before_K = [], [pulp.lpSum([]) for _ in gpus]
    for index, layer in enumerate(layers):
        home_K = homes[index] if homes else [1] * len(gpus)
        off_K = [home - side.dense for home, side in zip(home_K, layer.sides, strict=True)]
        run_K = [lp.add_variable(f"run_{index}_{gpu}", lowBound=0) for gpu in gpus]
        for gpu, run, off, before, is_used in zip(gpus, run_K, off_K, before_K, uses, strict=True):
            lp += run >= off - before - 1 + is_used, f"begins_{index}_{gpu}"
        runs.append(run_K)
        before_K = off_K
    return runs


@dataclass(frozen=True, kw_only=True)
class Solved:
    """The result of HiGHS. `bound_s` is its own, less its tolerance: 0 unless it finished."""

    status: Literal["optimal", "time_limit", "infeasible"]
    bound_s: float
    plan: multi_gpu.PipelinePlacement | None  # None if none was found


def is_small(pipeline: multi_gpu.Pipeline) -> bool:
    """True if the program can be expected to finish."""
    return pipeline.model.touched_LF.size * pipeline.num_gpus <= MAX_NEURONS


def solve_program(
    pipeline: multi_gpu.Pipeline, *, start: multi_gpu.PipelinePlacement | None, time_limit_s: float
) -> Solved:
    """The best placement, as far as the time allows; if none is found, the feasible `start`."""
    assert start is None or multi_gpu.plan_is_feasible(pipeline, start), "the start is not feasible"
    program = _program(pipeline)
    if start is not None:
        _set_start(pipeline, program, start)
    program.lp.solve(_StartedHiGHS(msg=False, timeLimit=time_limit_s, gapRel=NEURON_GAP))
    highs = program.lp.solverModel
    found, statuses = highs.getModelStatus(), highspy.HighsModelStatus
    assert found in (statuses.kOptimal, statuses.kTimeLimit, statuses.kInfeasible), found
    if found == statuses.kInfeasible:
        return Solved(status="infeasible", bound_s=0.0, plan=start)
    plan = start
    if found == statuses.kOptimal or highs.getInfo().primal_solution_status == 2:
        own = _read(pipeline, program)
        # Within HiGHS's tolerances a budget may be exceeded by a byte.
        plan = own if multi_gpu.plan_is_feasible(pipeline, own) else start
    if found == statuses.kTimeLimit:
        return Solved(status="time_limit", bound_s=0.0, plan=plan)
    bound_s = highs.getInfo().mip_dual_bound / program.second * (1 - NEURON_GAP)
    return Solved(status="optimal", bound_s=max(0.0, bound_s), plan=plan)


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


def _set_start(
    pipeline: multi_gpu.Pipeline, program: _Program, start: multi_gpu.PipelinePlacement
) -> None:
    model, placement = pipeline.model, start.placement
    num_hot_L, dense_L = placement.num_hot_L, placement.dense_L
    # A GPU without variables holds nothing, so its layers may be assigned to any other GPU.
    usable = np.array(program.gpus)
    home_I = usable[np.searchsorted(usable, start.home_I).clip(max=len(usable) - 1)]
    seconds_by_gpu = {gpu: layer_seconds(pipeline.problems[gpu], placement) for gpu in program.gpus}
    for index, layer in enumerate(program.layers):
        num_hot, dense, home = int(num_hot_L[index]), bool(dense_L[index]), int(home_I[index])
        is_split = num_hot < model.num_neurons if dense else num_hot > 0
        for side in layer.sides:
            is_home = side.gpu == home
            for hot, is_hot in zip(side.hot_F, placement.hot_LF[index].tolist(), strict=True):
                hot.varValue = int(is_home and is_hot)
            side.has_hot.varValue = int(is_home and num_hot > 0)
            side.dense.varValue = int(is_home and dense)
            side.split.varValue = int(is_home and is_split)
        layer.seconds.varValue = float(seconds_by_gpu[home][index]) * program.second
    for gpu, head in zip(program.gpus, program.heads, strict=True):
        head.varValue = int(placement.head and home_I[-1] == gpu)
    head_s = head_seconds(pipeline.problems[int(home_I[-1])], placement)
    program.head_seconds.varValue = head_s * program.second
    for item, home_K in enumerate(program.homes):
        for gpu, variable in zip(program.gpus, home_K, strict=True):
            variable.varValue = int(home_I[item] == gpu)
    for position, gpu in enumerate(program.gpus):
        is_home_L = home_I[:-1] == gpu
        is_used = (placement.hot_LF.any(axis=1) | dense_L)[is_home_L].any()
        is_used = bool(is_used or (placement.head and home_I[-1] == gpu))
        program.uses[position].varValue = int(is_used)
        begins_L = np.diff((is_home_L & ~dense_L).astype(int), prepend=0) == 1
        for run_K, begins in zip(program.runs, begins_L.tolist(), strict=True):
            run_K[position].varValue = int(begins and is_used)


def _read(pipeline: multi_gpu.Pipeline, program: _Program) -> multi_gpu.PipelinePlacement:
    model = pipeline.model
    hot_LF = np.zeros(model.touched_LF.shape, bool)
    dense_L = np.zeros(model.num_layers, bool)
    home_I = np.full(model.num_layers + 1, program.gpus[0])
    for index, layer in enumerate(program.layers):
        for side in layer.sides:
            hot_LF[index] |= np.array([hot.varValue > 0.5 for hot in side.hot_F])
            dense_L[index] |= side.dense.varValue > 0.5
    for item, home_K in enumerate(program.homes):
        home_I[item] = program.gpus[int(np.argmax([home.varValue for home in home_K]))]
    head = any(head.varValue > 0.5 for head in program.heads)
    return multi_gpu.PipelinePlacement(
        placement=SolvedPlacement(hot_LF=hot_LF, dense_L=dense_L, head=head), home_I=home_I
    )
