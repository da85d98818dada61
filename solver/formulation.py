"""The placement as an integer program: neurons of a layer in groups of like hotness, PuLP, HiGHS.

Sets     l = 0..L-1 layers, g = 0..G-1 groups of a layer (consecutive ranks, sizes n_lg)
Binary   hot_l_g      the neurons of group g are on the GPU, all of them or none
         has_hot_l    any of the layer's groups is
         dense_l      the layer's dense block is on the GPU
         split_l      the layer's parts are not all on one device
         head         the output head is on the GPU
Real     seconds_l    T_l >= 0
         head_seconds

With t_lg the touched bytes of a group, b_l the bytes of a neuron, and the dense block's seconds
D_l = dense_l * dense_gpu_s_l + (1 - dense_l) * dense_cpu_s_l:

    minimise    sum_l seconds_l + head_seconds
    gpu_side_l              seconds_l >= D_l + sum_g hot_l_g t_lg / B_g + launch * has_hot_l
    cpu_side_l              seconds_l >= D_l + sum_g (1 - hot_l_g) t_lg / B_c + round_trip * split_l
    hot_is_seen_l_g         hot_l_g <= has_hot_l
    cold_is_split_l_g       dense_l - hot_l_g <= split_l    (dense block there, cold group here)
    hot_is_split_l          has_hot_l - dense_l <= split_l  (dense block here, hot group there)
    least_hot_l             sum_g n_lg hot_l_g >= C_l * has_hot_l
    head_time               head_seconds = head * head_gpu_s + (1 - head) * head_cpu_s
    budget                  sum_l (dense_bytes_l dense_l + sum_g n_lg b_l hot_l_g)
                            + head_bytes head <= budget - workspace

The workspace needs no variable: what takes none, the CPU-only placement, keeps to that as well.
Hot and cold neurons of one layer need no rule of their own: with the dense block on the GPU the
cold ones split the layer, with it on the CPU the hot ones do. Nothing forces hot groups to be
the hottest: where the GPU is the longer side, another choice can balance the layer better.

HiGHS works with absolute tolerances of 1e-6, so seconds are counted in thousandths of the
CPU-only token and bytes in the largest neuron. The groups' edges include the number of hot
neurons of the start in each layer, so that the start is a point of the program and the answer
is never slower than it.

Measured (7B shape, f16, power-law frequencies, budgets of 2 to 14 GiB, two cores busy with other
work). To a gap of 0.1 %, without the start's edges: 0.9-7.9 s with 1,000 groups and 1.7-31 s with
2,000; one summed row instead of a row a group for the two indicator rules 1.1-16 s and 1.8-31 s.
To a gap of 0.01 % with 2,000 groups no variant finished everywhere in 30 s: counts per group as
integers, or continuous groups, were faster at some budgets, but at 12 GiB stood at 15 % and 3 %,
binary groups never above 0.3 %. Hence binary groups, a row a group, 1,000 groups. With the start's
edges 0.4-1.3 s, and 0.7-1.0 s for a 70B shape (80 layers of 28,672 neurons).

With a binary for "anything is on the GPU" and the workspace as its coefficient in the budget,
HiGHS 1.15.1 once in 1,200 solves of tiny random models called a placement optimal that was 0.07 %
slower than the best; as above, never in the same 1,200. Its bound is no certificate.

What this module does not know: files, or any bound for single neurons."""

import time
from dataclasses import dataclass
from typing import Literal

import highspy
import numpy as np
import pulp

from sparkinfer.solver.problem import (
    Placement,
    Problem,
    ffn_seconds,
    is_feasible,
    on_one_device,
    placement_seconds,
)

MAX_GROUPS = 1000  # over all layers, but at least one a layer; the start's edges come on top
GROUPED_GAP = 1e-3  # finer than this the grouping itself is the error
NEURON_GAP = 1e-6  # where every group is one neuron
THOUSANDTHS = 1000.0


@dataclass(frozen=True, kw_only=True)
class GroupedResult:
    """What HiGHS found; seconds of a token, except `solve_s`."""

    status: Literal["optimal", "time_limit"]
    objective_s: float  # of the placement, recomputed in numpy
    bound_s: float  # HiGHS's own, for placements of whole groups: not a certificate
    is_neuron_granular: bool
    num_groups: int
    solve_s: float
    placement: Placement

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.bound_s / self.objective_s)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The variables of one layer, and its groups: first rank, size, touched bytes."""

    starts_G: np.ndarray
    sizes_G: np.ndarray
    touched_G: np.ndarray
    hot_G: list[pulp.LpVariable]
    has_hot: pulp.LpVariable
    dense: pulp.LpVariable
    split: pulp.LpVariable
    seconds: pulp.LpVariable


@dataclass(frozen=True, kw_only=True)
class _Program:
    lp: pulp.LpProblem
    layers: list[_Layer]
    head: pulp.LpVariable
    head_seconds: pulp.LpVariable
    second: float  # how many of the objective's units a second is


def solve_grouped(
    *, problem: Problem, start: Placement, time_limit_s: float, max_groups: int = MAX_GROUPS
) -> GroupedResult:
    """The best placement of whole groups, to the gap above or as far as the time goes.

    `start` must be feasible, its hot neurons the hottest of each layer."""
    began = time.perf_counter()
    assert problem.room_bytes >= 0, "the budget does not hold the workspace"
    assert is_feasible(problem, start), "the start breaks the budget or a layer's minimum"
    program = _build(problem, start=start, max_groups=max_groups)
    _set_start(problem, program, start)
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
    assert found in (statuses.kOptimal, statuses.kTimeLimit), found
    placement = _read(problem, program)
    # A rounding of HiGHS could cost a byte too many; the start never does.
    if not is_feasible(problem, placement):
        placement = start
    return GroupedResult(
        status="optimal" if found == statuses.kOptimal else "time_limit",
        objective_s=placement_seconds(problem, placement),
        bound_s=max(0.0, highs.getInfo().mip_dual_bound / program.second),
        is_neuron_granular=is_neuron_granular,
        num_groups=sum(len(layer.hot_G) for layer in program.layers),
        solve_s=time.perf_counter() - began,
        placement=placement,
    )


class _StartedHiGHS(pulp.HiGHS):
    """PuLP's HiGHS, begun at the initial values of the variables: PuLP itself drops them."""

    def callSolver(self, lp: pulp.LpProblem) -> None:
        solution = highspy.HighsSolution()
        solution.col_value = [float(variable.varValue) for variable in lp.variables()]
        solution.value_valid = True
        lp.solverModel.setSolution(solution)
        super().callSolver(lp)


def _build(problem: Problem, *, start: Placement, max_groups: int) -> _Program:
    """The program of the module's docstring."""
    lp = pulp.LpProblem("placement", pulp.LpMinimize)
    cpu_only_s = placement_seconds(problem, on_one_device(problem, gpu=False))
    second = THOUSANDTHS / cpu_only_s
    edges = _group_edges(problem, start=start, max_groups=max_groups)
    layers = [_add_layer(lp, problem, layer, edges[layer], second) for layer in range(len(edges))]
    head = _binary(lp, "head")
    head_seconds = lp.add_variable("head_seconds", lowBound=0)
    head_gpu, head_cpu = problem.head_gpu_s * second, problem.head_cpu_s * second
    lp += head_seconds + (head_cpu - head_gpu) * head == head_cpu, "head_time"
    lp += _gpu_bytes(problem, layers, head), "budget"
    lp.setObjective(pulp.lpSum([layer.seconds for layer in layers] + [head_seconds]))
    return _Program(
        lp=lp,
        layers=layers,
        head=head,
        head_seconds=head_seconds,
        second=second,
    )


def _group_edges(problem: Problem, *, start: Placement, max_groups: int) -> list[np.ndarray]:
    """First ranks of each layer's groups: even sizes, and the start's number of hot neurons."""
    per_layer = max(1, max_groups // problem.num_layers)
    size = -(-problem.num_neurons // per_layer)
    even = np.arange(0, problem.num_neurons, size)
    return [np.unique(np.append(even, n % problem.num_neurons)) for n in start.num_hot_L]


def _binary(lp: pulp.LpProblem, name: str) -> pulp.LpVariable:
    return lp.add_variable(name, cat=pulp.LpBinary)


def _weighted(weights_G: np.ndarray, variables: list[pulp.LpVariable]) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression(list(zip(variables, weights_G.tolist(), strict=True)))


def _add_layer(
    lp: pulp.LpProblem, problem: Problem, index: int, starts_G: np.ndarray, second: float
) -> _Layer:
    """Adds one layer's variables and the constraints that concern it alone."""
    layer = _Layer(
        starts_G=starts_G,
        sizes_G=np.diff(np.append(starts_G, problem.num_neurons)),
        touched_G=np.add.reduceat(problem.touched_LF[index], starts_G),
        hot_G=[_binary(lp, f"hot_{index}_{group}") for group in range(len(starts_G))],
        has_hot=_binary(lp, f"has_hot_{index}"),
        dense=_binary(lp, f"dense_{index}"),
        split=_binary(lp, f"split_{index}"),
        seconds=lp.add_variable(f"seconds_{index}", lowBound=0),
    )
    gpu_unit, cpu_unit = problem.gpu_s_per_byte * second, problem.cpu_s_per_byte * second
    dense_gpu = float(problem.dense_gpu_s_L[index]) * second
    dense_cpu = float(problem.dense_cpu_s_L[index]) * second
    dense_seconds = dense_cpu + (dense_gpu - dense_cpu) * layer.dense
    all_cold = float(layer.touched_G.sum()) * cpu_unit
    launch, round_trip = problem.launch_s * second, problem.round_trip_s * second
    hot_gpu = _weighted(layer.touched_G * gpu_unit, layer.hot_G)
    hot_cpu = _weighted(layer.touched_G * cpu_unit, layer.hot_G)
    lp += (
        layer.seconds >= dense_seconds + hot_gpu + launch * layer.has_hot,
        f"gpu_side_{index}",
    )
    lp += (
        layer.seconds >= dense_seconds + all_cold - hot_cpu + round_trip * layer.split,
        f"cpu_side_{index}",
    )
    for group, hot in enumerate(layer.hot_G):
        lp += hot <= layer.has_hot, f"hot_is_seen_{index}_{group}"
        lp += layer.dense - hot <= layer.split, f"cold_is_split_{index}_{group}"
    lp += layer.has_hot - layer.dense <= layer.split, f"hot_is_split_{index}"
    num_hot = _weighted(layer.sizes_G, layer.hot_G)
    lp += num_hot >= int(problem.min_hot_L[index]) * layer.has_hot, f"least_hot_{index}"
    return layer


def _gpu_bytes(problem: Problem, layers: list[_Layer], head: pulp.LpVariable) -> pulp.LpConstraint:
    """The budget, in units of the largest neuron."""
    unit = float(problem.neuron_bytes_L.max())
    terms = [(head, problem.head_bytes / unit)]
    for index, layer in enumerate(layers):
        neuron_bytes = int(problem.neuron_bytes_L[index])
        terms.append((layer.dense, int(problem.dense_bytes_L[index]) / unit))
        sizes = (layer.sizes_G * neuron_bytes / unit).tolist()
        terms.extend(zip(layer.hot_G, sizes, strict=True))
    return pulp.LpAffineExpression(terms) <= problem.room_bytes / unit


def _set_start(problem: Problem, program: _Program, start: Placement) -> None:
    """Gives every variable its value in the start."""
    num_hot_L, dense_L = start.num_hot_L, start.dense_L
    touched_L = np.take_along_axis(problem.prefix_LN, num_hot_L[:, None], axis=1)[:, 0]
    seconds_L = ffn_seconds(
        problem, hot_touched_L=touched_L, num_hot_L=num_hot_L, dense_L=dense_L
    ) + np.where(dense_L, problem.dense_gpu_s_L, problem.dense_cpu_s_L)
    for index, layer in enumerate(program.layers):
        num_hot, dense = int(num_hot_L[index]), bool(dense_L[index])
        is_split = num_hot < problem.num_neurons if dense else num_hot > 0
        for hot, first in zip(layer.hot_G, layer.starts_G, strict=True):
            hot.varValue = int(first < num_hot)
        layer.has_hot.varValue = int(num_hot > 0)
        layer.dense.varValue = int(dense)
        layer.split.varValue = int(is_split)
        layer.seconds.varValue = float(seconds_L[index]) * program.second
    head_s = problem.head_gpu_s if start.head else problem.head_cpu_s
    program.head.varValue = int(start.head)
    program.head_seconds.varValue = head_s * program.second


def _read(problem: Problem, program: _Program) -> Placement:
    """The placement that the variables say."""
    hot_LF = np.zeros(problem.touched_LF.shape, bool)
    for index, layer in enumerate(program.layers):
        chosen_G = np.array([hot.varValue > 0.5 for hot in layer.hot_G])
        hot_LF[index] = np.repeat(chosen_G, layer.sizes_G)
    dense_L = np.array([layer.dense.varValue > 0.5 for layer in program.layers])
    return Placement(hot_LF=hot_LF, dense_L=dense_L, head=program.head.varValue > 0.5)
