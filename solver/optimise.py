"""The best placement of a problem, by several methods, and what is known about it.

The Lagrangian search goes first, and a dynamic program where it leaves a gap. The grouped integer
program starts from what they found, and its answer is refined to single neurons. The fastest
placement wins. The bound is that of the first two, which anyone can recompute by adding up; the
integer program's own is only compared with it, as HiGHS's tolerances are part of that one.
What this module does not know: files."""

from dataclasses import dataclass, replace
from typing import Literal

from sparkinfer.solver.formulation import GROUPED_GAP, GroupedResult, solve_grouped
from sparkinfer.solver.knapsack import knapsack_bound, knapsack_placement
from sparkinfer.solver.lagrangian import place_neurons, search
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
# Shares of the objective.
HIGHS_SLACK = 1e-6  # what HiGHS's tolerances may add or take
NOTED_GAP = 5e-3
KNAPSACK_GAP = 1e-4  # with 32 layers and more the Lagrangian search leaves less
# A plan that is proven to the integer program's own gap before it starts gets it as a second
# opinion, for this long at most: small models with large fixed costs would take all of the time.
SECOND_OPINION_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A placement, its seconds a token, and a bound that no placement of neurons is below.

    Status: `optimal` (proven to 0.1 %, or the integer program was solved to its gap),
    `time_limit` (neither; the bound holds all the same), `fits` (everything is on the GPU),
    `cpu_only` (nothing can be)."""

    status: Status
    placement: Placement
    objective_s: float
    bound_s: float
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        return 1 - self.bound_s / self.objective_s


def find_placement(problem: Problem, *, time_limit_s: float) -> Answer:
    """The fastest placement known; everything on the GPU where it fits there."""
    everything = on_one_device(problem, gpu=True)
    if placement_bytes(problem, everything) <= problem.budget_bytes:
        return _dense_plan(problem, everything)
    if problem.budget_bytes < problem.minimum_bytes:
        return _answer(
            problem, "cpu_only", on_one_device(problem, gpu=False), search(problem).bound_s
        )
    start = _start(problem)
    is_proven = start.gap <= GROUPED_GAP
    grouped = solve_grouped(
        problem=problem,
        start=start.placement,
        time_limit_s=min(time_limit_s, SECOND_OPINION_S) if is_proven else time_limit_s,
    )
    placement = _fastest(problem, [start.placement, *_refined(problem, grouped.placement)])
    notes = _disagreements(start, grouped)
    if not placement.uses_gpu:
        notes = (*notes, "nothing on the GPU pays with these figures: everything is on the CPU")
    status: Status = "optimal" if is_proven else grouped.status
    return _answer(problem, status, placement, start.bound_s, notes)


def _start(problem: Problem) -> Answer:
    """What is known before the integer program: its start, hottest neurons first, and a bound."""
    coarse = search(problem)
    placements, bound_s = [coarse.placement], coarse.bound_s
    if coarse.bound_s < coarse.objective_s * (1 - KNAPSACK_GAP):
        bound_s = max(bound_s, knapsack_bound(problem))
        placements += _refined(problem, knapsack_placement(problem))
    return _answer(problem, "optimal", _fastest(problem, placements), bound_s)


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
    answer = _answer(problem, "fits", everything, _start(problem).bound_s)
    size = f"{placement_bytes(problem, everything) / 2**30:.2f} GiB"
    notes = [f"fits entirely in {size}; a dense plan is best, and everything is on the GPU"]
    if answer.gap > NOTED_GAP:
        notes.append(
            "by the figures of this machine a plan that also uses the CPU could take up to"
            f" {answer.gap:.1%} less time; a smaller budget gives one"
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


def _disagreements(start: Answer, grouped: GroupedResult) -> tuple[str, ...]:
    """What one method proves and the other contradicts; and an integer program cut short."""
    notes = []
    if grouped.objective_s < start.bound_s * (1 - HIGHS_SLACK):
        notes.append(
            f"the methods disagree: the integer program has a plan of {grouped.objective_s:.6g} s,"
            f" below the Lagrangian bound of {start.bound_s:.6g} s"
        )
    if grouped.bound_s > start.objective_s * (1 + HIGHS_SLACK):
        notes.append(
            f"the methods disagree: the Lagrangian search has a plan of {start.objective_s:.6g} s,"
            f" below the integer program's bound of {grouped.bound_s:.6g} s"
        )
    if grouped.status == "time_limit":
        notes.append(
            f"the integer program was stopped after {grouped.solve_s:.1f} s, at a gap of"
            f" {grouped.gap:.2%} by its own bound; the methods before it prove {start.gap:.2%}"
        )
    return tuple(notes)
