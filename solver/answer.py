"""The answer of a search for a plan."""

from dataclasses import dataclass, replace
from typing import Literal

from hotsplit.solver.multi_gpu import Pipeline, PipelinePlacement, plan_seconds
from hotsplit.solver.problem import Placement

OPTIMAL_GAP = 1e-3

Status = Literal["optimal", "bounded", "time_limit", "cpu_only"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, its seconds per token, and a lower bound on those of any placement.

    Status: `cpu_only` (no budget holds anything, so there is no other plan), `optimal` (the bound
    proves that no plan takes 0.1 % less), else `time_limit` (the search ended early, at its time
    limit or at `beat_s` of find_plan) or `bounded` (it ended by itself); the bound always holds."""

    status: Status
    plan: PipelinePlacement
    objective_s: float
    bound_s: float
    notes: tuple[str, ...] = ()

    @property
    def placement(self) -> Placement:
        return self.plan.placement

    @property
    def gap(self) -> float:
        return 1 - self.bound_s / self.objective_s


def answer_of(
    pipeline: Pipeline,
    status: Status,  # if the bound does not prove the plan to be optimal
    plan: PipelinePlacement,
    bound_s: float,
    notes: tuple[str, ...] = (),
) -> Answer:
    """The answer with this plan and bound."""
    seconds = plan_seconds(pipeline, plan)
    assert bound_s <= seconds * (1 + 1e-9), (bound_s, seconds)
    answer = Answer(
        status=status, plan=plan, objective_s=seconds, bound_s=min(bound_s, seconds), notes=notes
    )
    is_optimal = status != "cpu_only" and answer.gap <= OPTIMAL_GAP
    return replace(answer, status="optimal") if is_optimal else answer
