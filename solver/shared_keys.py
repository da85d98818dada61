"""Plans of models whose layers read the keys and values of others: such layers and the one that stores them are a
group, whose dense blocks are all on the GPU or all on the CPU, where the cache is.

There are few groups, one of each kind of attention, so every choice of their sides is a problem of its own:
blocks that are to stay on the CPU do not fit the budget, and those that are to be on the GPU cost more on
the CPU than everything there. The least of the problems' bounds is one for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.multi_gpu import Pipeline, PipelinePlacement, cpu_only_plan, plan_seconds
from hotsplit.solver.optimise import Answer, answer_of, find_plan
from hotsplit.solver.problem import Problem

Groups = Sequence[np.ndarray]  # the layers of each


def groups_of(inputs: Inputs) -> Groups:
    """The groups of layers that share keys and values, unless all of these are in main memory."""
    spec = inputs.model.spec
    stores = np.array([spec.shared_with(layer) for layer in range(spec.num_layers)])
    found = [np.flatnonzero(stores == store) for store in sorted({*stores.tolist()})]
    groups = [group for group in found if len(group) > 1]
    if inputs.kv_offload is not None or not groups:
        return []
    if len(inputs.budgets) > 1:
        raise HotsplitError(
            f"{inputs.paths[0]}: {len(inputs.budgets)} GPUs, but layers that read the keys and values of"
            " others are planned for one; give --vram-budget once"
        )
    return groups


def keeps_together(groups: Groups, plan: PipelinePlacement) -> bool:
    """True if no group is divided."""
    return all(len({*plan.placement.dense_L[group].tolist()}) == 1 for group in groups)


@dataclass(frozen=True, kw_only=True)
class _Sides:
    """A choice of sides, as a problem of its own."""

    groups: Groups
    on_gpu: Sequence[bool]

    def within(self, problem: Problem, most_s: float) -> Problem:
        bytes_L, cpu_s_L = problem.dense_bytes_L.copy(), problem.dense_cpu_s_L.copy()
        for group, is_on_gpu in zip(self.groups, self.on_gpu, strict=True):
            if is_on_gpu:
                cpu_s_L[group] += most_s
            else:
                bytes_L[group] += problem.budget_bytes + 1
        return replace(problem, dense_bytes_L=bytes_L, dense_cpu_s_L=cpu_s_L)

    def are_kept(self, plan: PipelinePlacement) -> bool:
        dense_L = plan.placement.dense_L
        pairs = zip(self.groups, self.on_gpu, strict=True)
        return all((dense_L[group] == is_on_gpu).all() for group, is_on_gpu in pairs)


def find_plan_for(
    inputs: Inputs, pipeline: Pipeline, *, time_limit_s: float,
    known: Sequence[PipelinePlacement] = (), beat_s: float = np.inf,
) -> Answer | None:  # fmt: skip
    """What `find_plan` does, with groups undivided."""
    groups = groups_of(inputs)
    if not groups:
        return find_plan(pipeline, time_limit_s=time_limit_s, known=known, beat_s=beat_s)
    most_s = 2 * plan_seconds(pipeline, cpu_only_plan(pipeline))
    best: Answer | None = None
    bounds = []
    for on_gpu in product((False, True), repeat=len(groups)):
        sides = _Sides(groups=groups, on_gpu=on_gpu)
        own = replace(
            pipeline, problems=tuple(sides.within(each, most_s) for each in pipeline.problems)
        )
        answer = find_plan(own, time_limit_s=time_limit_s, known=known, beat_s=beat_s)
        if answer is None:
            continue
        bounds.append(answer.bound_s)
        if sides.are_kept(answer.plan) and (best is None or answer.objective_s < best.objective_s):
            best = answer
    if best is None:
        return None
    status = "bounded" if best.status == "optimal" else best.status
    return answer_of(pipeline, status, best.plan, min(bounds), best.notes)
