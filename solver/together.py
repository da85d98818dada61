"""Plans of models with layers that must be together (`ModelSpec.together`): the dense blocks of such a
group are all on the GPU or all on the CPU.

There are few groups, so every choice of their sides is a problem of its own: blocks that are to stay on the CPU
do not fit the budget, and those that are to be on the GPU cost more on the CPU than everything there. The
least of the problems' bounds is one for all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hotsplit.solver.answer import Answer, answer_of
from hotsplit.solver.multi_gpu import (
    Groups,
    Pipeline,
    PipelinePlacement,
    cpu_only_plan,
    plan_seconds,
)
from hotsplit.solver.problem import Problem

# Finds a plan of a pipeline without groups; may stop if no plan takes less than so many seconds.
Find = Callable[[Pipeline, float], Answer | None]


def find_undivided(pipeline: Pipeline, find: Find, beat_s: float) -> Answer | None:
    """The fastest of the plans that `find` finds for each choice of sides. None if no plan fits."""
    if not pipeline.together:
        return find(pipeline, beat_s)
    assert pipeline.num_gpus == 1, "Inputs.pipeline refuses others"
    most_s = 2 * plan_seconds(pipeline, cpu_only_plan(pipeline))
    best: Answer | None = None
    bounds = []
    for on_gpu in product((False, True), repeat=len(pipeline.together)):
        sides = _Sides(groups=pipeline.together, on_gpu=on_gpu)
        problems = tuple(sides.within(problem, most_s) for problem in pipeline.problems)
        answer = find(replace(pipeline, problems=problems, together=()), beat_s)
        if answer is None:
            continue
        bounds.append(answer.bound_s)
        if sides.are_kept(answer.plan) and (best is None or answer.objective_s < best.objective_s):
            best, beat_s = answer, min(beat_s, answer.objective_s)
    if best is None:
        return None
    status = "bounded" if best.status == "optimal" else best.status
    return answer_of(pipeline, status, best.plan, min(bounds), best.notes)


@dataclass(frozen=True, kw_only=True)
class _Sides:
    """A choice of sides, as a problem of its own."""

    groups: Groups
    on_gpu: Sequence[bool]

    def within(self, problem: Problem, most_s: float) -> Problem:
        bytes_L, cpu_s_L = problem.dense_bytes_L.copy(), problem.dense_cpu_s_L.copy()
        for group, is_on_gpu in zip(self.groups, self.on_gpu, strict=True):
            if is_on_gpu:
                cpu_s_L[list(group)] += most_s
            else:
                bytes_L[list(group)] += problem.budget_bytes + 1
        return replace(problem, dense_bytes_L=bytes_L, dense_cpu_s_L=cpu_s_L)

    def are_kept(self, plan: PipelinePlacement) -> bool:
        dense_L = plan.placement.dense_L
        pairs = zip(self.groups, self.on_gpu, strict=True)
        return all((dense_L[list(group)] == is_on_gpu).all() for group, is_on_gpu in pairs)
