"""The best placement of a problem, by the two methods, and what is known about it.

The Lagrangian search goes first; the grouped integer program starts from its placement, and what
it finds is refined to single neurons. The faster placement wins. What this module does not know:
files."""

from dataclasses import dataclass, replace
from typing import Literal

from sparkinfer.solver.formulation import GroupedResult, solve_grouped
from sparkinfer.solver.lagrangian import LagrangianResult, place_neurons, search
from sparkinfer.solver.problem import (
    Placement,
    Problem,
    is_feasible,
    of_counts,
    on_one_device,
    placement_bytes,
    placement_seconds,
)
from sparkinfer.solver.refine import fill

Status = Literal["optimal", "time_limit", "fits", "cpu_only"]
# Shares of the objective. HiGHS meets its constraints to 1e-6 of what they are scaled to.
HIGHS_SLACK = 1e-6
NOTED_GAP = 5e-3


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A placement, its seconds a token, and a bound that no placement of neurons is below.

    Status: `optimal` (the integer program was solved to its gap), `time_limit` (it was not; the
    bound holds all the same), `fits` (everything is on the GPU), `cpu_only` (nothing can be)."""

    status: Status
    placement: Placement
    objective_s: float
    bound_s: float
    notes: tuple[str, ...] = ()


def find_placement(problem: Problem, *, time_limit_s: float) -> Answer:
    """The fastest placement known; everything on the GPU where it fits there."""
    everything = on_one_device(problem, gpu=True)
    if placement_bytes(problem, everything) <= problem.budget_bytes:
        return _dense_plan(problem, everything)
    coarse = search(problem)
    if problem.budget_bytes < problem.minimum_bytes:
        return _answer(problem, "cpu_only", coarse.placement, coarse.bound_s)
    grouped = solve_grouped(problem=problem, start=coarse.placement, time_limit_s=time_limit_s)
    placement = _fastest(problem, [coarse.placement, *_refined(problem, grouped.placement)])
    bound_s = coarse.bound_s
    if grouped.is_neuron_granular:
        bound_s = max(bound_s, grouped.bound_s * (1 - HIGHS_SLACK))
    notes = _disagreements(coarse, grouped)
    if not placement.uses_gpu:
        notes = (*notes, "nothing on the GPU pays with these figures: everything is on the CPU")
    return _answer(problem, grouped.status, placement, bound_s, notes)


def _answer(
    problem: Problem,
    status: Status,
    placement: Placement,
    bound_s: float,
    notes: tuple[str, ...] = (),
) -> Answer:
    seconds = placement_seconds(problem, placement)
    assert bound_s <= seconds * (1 + 1e-9), (bound_s, seconds)
    return Answer(
        status=status,
        placement=placement,
        objective_s=seconds,
        bound_s=min(bound_s, seconds),
        notes=notes,
    )


def _dense_plan(problem: Problem, everything: Placement) -> Answer:
    """All of it on the GPU: the runtime then needs no round trips, and no second set of kernels."""
    answer = _answer(problem, "fits", everything, search(problem).bound_s)
    size = f"{placement_bytes(problem, everything) / 2**30:.2f} GiB"
    notes = [f"fits entirely in {size}; a dense plan is best, and everything is on the GPU"]
    slower = answer.objective_s / answer.bound_s - 1
    if slower > NOTED_GAP:
        notes.append(
            f"by the figures of this machine a plan that also uses the CPU could be up to"
            f" {slower:.1%} faster; a smaller budget gives one"
        )
    return replace(answer, notes=tuple(notes))


def _refined(problem: Problem, placement: Placement) -> list[Placement]:
    """The placement; with single neurons in what is left of the budget; with new neurons for the
    same dense blocks."""
    num_hot_L = fill(
        problem,
        num_hot_L=placement.num_hot_L,
        dense_L=placement.dense_L,
        room_bytes=problem.budget_bytes - placement_bytes(problem, placement),
    )
    filled = of_counts(problem, num_hot_L, placement.dense_L, placement.head)
    replaced = place_neurons(problem, dense_L=placement.dense_L, head=placement.head)
    return [placement, filled] + ([replaced] if replaced is not None else [])


def _fastest(problem: Problem, placements: list[Placement]) -> Placement:
    feasible = [placement for placement in placements if is_feasible(problem, placement)]
    return min(feasible, key=lambda placement: placement_seconds(problem, placement))


def _disagreements(coarse: LagrangianResult, grouped: GroupedResult) -> tuple[str, ...]:
    """What one method proves and the other contradicts; and an integer program cut short."""
    notes = []
    if grouped.objective_s < coarse.bound_s * (1 - HIGHS_SLACK):
        notes.append(
            f"the two methods disagree: a plan of {grouped.objective_s:.6g} s, below the"
            f" Lagrangian bound of {coarse.bound_s:.6g} s"
        )
    if grouped.bound_s > coarse.objective_s * (1 + HIGHS_SLACK):
        notes.append(
            f"the two methods disagree: a plan of {coarse.objective_s:.6g} s, below the integer"
            f" program's bound of {grouped.bound_s:.6g} s"
        )
    if grouped.status == "time_limit":
        notes.append(f"the integer program was stopped by its time limit at {grouped.gap:.2%}")
    return tuple(notes)
