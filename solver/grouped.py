"""Solves the integer program of `formulation` with HiGHS, through PuLP, from a start."""

import time
from dataclasses import dataclass
from typing import Literal

import highspy
import numpy as np
import pulp

from hotsplit.solver.formulation import MAX_GROUPS, Program, build_program
from hotsplit.solver.multi_gpu import Pipeline, PipelinePlacement, plan_is_feasible, plan_seconds
from hotsplit.solver.problem import Placement, head_seconds, layer_seconds

GROUPED_GAP = 1e-3  # a smaller gap is lost in the error of grouping
NEURON_GAP = 1e-6  # if every group is one neuron


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
    program = build_program(pipeline, start=start, max_groups=max_groups)
    if start is not None:
        _set_start(pipeline, program, start)
    is_neuron_granular = all((layer.sizes_G == 1).all() for layer in program.layers)
    solver = _StartedHiGHS(
        msg=False, timeLimit=time_limit_s, gapRel=NEURON_GAP if is_neuron_granular else GROUPED_GAP
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


def _set_start(pipeline: Pipeline, program: Program, start: PipelinePlacement) -> None:
    """Sets every variable to its value in the start."""
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
            for hot, first in zip(side.hot_G, layer.starts_G, strict=True):
                hot.varValue = int(is_home and placement.hot_LF[index, first])
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


def _read(pipeline: Pipeline, program: Program) -> PipelinePlacement:
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
