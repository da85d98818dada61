"""Finds the best placement of a problem, with a bound.

For one GPU, or one run of layers on it, that is the Lagrangian search. For several GPUs, rows of
cuts (`multi_gpu`) are tried in order of their bounds, until the rest cannot beat the best plan by
more than CUT_GAP, or CUTS_S are over. Unless the bound proves that plan, the integer program goes
on from there where the model is small enough for it to finish (`integer_program.is_small`); not
for a mixture of experts, whose price (`replay`) is no linear program: there experts are exchanged.
The fastest plan wins.

Of layers that must be together (`ModelSpec.together`), the dense blocks are all on the GPU or all
on the CPU. There are few such groups, so every choice of their sides is a problem of its own:
blocks that are to stay on the CPU do not fit the budget, and those that are to be on the GPU cost
more on the CPU than everything there. The least of the problems' bounds is one for all of them.

The bound is the search's, which can be recomputed by adding up; where the integer program finished,
it is HiGHS's, which is tighter for models of a few neurons."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from hotsplit.solver import replay
from hotsplit.solver.fullest import fullest_plan
from hotsplit.solver.integer_program import is_small, solve_program
from hotsplit.solver.lagrangian import search
from hotsplit.solver.multi_gpu import (
    Pipeline,
    PipelinePlacement,
    bytes_of_gpus,
    cpu_only_plan,
    joined,
    plan_is_feasible,
    plan_seconds,
    with_one_home,
)
from hotsplit.solver.problem import (
    ROUNDING,
    Problem,
    SolvedPlacement,
    held_bytes,
    is_feasible,
    of_counts,
    on_one_device,
    placement_bytes,
    placement_seconds,
)
from hotsplit.solver.refine import fill
from hotsplit.system.sizes import format_bytes

# Shares of the objective.
OPTIMAL_GAP = 1e-3  # a plan with a smaller gap is called optimal
PROVEN = 1e-6  # a smaller gap is below HiGHS's own tolerances
CUT_GAP = 5e-4
CUTS_S = 4.0  # time for rows of cuts; goes on until one row has a plan

Status = Literal["optimal", "bounded", "time_limit", "cpu_only"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, its seconds per token, and a lower bound on those of any placement. Status:
    `cpu_only` (no budget holds anything, so there is no other plan), `optimal` (the bound proves
    that no plan takes 0.1 % less), else `time_limit` (the search ended early, at its time limit or
    at `beat_s` of find_plan) or `bounded` (it ended by itself); the bound always holds."""

    status: Status
    plan: PipelinePlacement
    objective_s: float
    bound_s: float
    notes: tuple[str, ...] = ()

    @property
    def placement(self) -> SolvedPlacement:
        return self.plan.placement

    @property
    def gap(self) -> float:
        return 1 - self.bound_s / self.objective_s


def _answer(
    pipeline: Pipeline,
    status: Status,  # if the bound does not prove the plan to be optimal
    plan: PipelinePlacement,
    bound_s: float,
    notes: tuple[str, ...] = (),
) -> Answer:
    seconds = plan_seconds(pipeline, plan)
    assert bound_s <= seconds * (1 + 1e-9), (bound_s, seconds)
    answer = Answer(
        status=status, plan=plan, objective_s=seconds, bound_s=min(bound_s, seconds), notes=notes
    )
    is_optimal = status != "cpu_only" and answer.gap <= OPTIMAL_GAP
    return replace(answer, status="optimal") if is_optimal else answer


def find_plan(
    pipeline: Pipeline,
    *,
    time_limit_s: float,
    known: Sequence[PipelinePlacement] = (),
    beat_s: float = np.inf,
) -> Answer | None:
    """The fastest plan found, no slower than the feasible ones in `known`, than everything on one
    GPU, or than nothing on any. If the bound shows that no plan takes less than `beat_s`, the
    search stops and returns the best plan so far; with a time limit of 0 the integer program is
    left out. The limit is for each choice of the sides of groups. None if no plan fits all
    memories."""
    if not pipeline.together:
        return _find(pipeline, time_limit_s, known, beat_s)
    assert pipeline.num_gpus == 1, "Inputs.pipeline refuses others"
    if pipeline.need_bytes > 0:  # few undivided plans may hold that
        known = [*known, fullest_plan(pipeline)]
    most_s = 2 * plan_seconds(pipeline, cpu_only_plan(pipeline))
    best: Answer | None = None
    bounds = []
    groups = [list(group) for group in pipeline.together]
    for on_gpu in product((False, True), repeat=len(groups)):
        problem = pipeline.model
        bytes_L, cpu_s_L = problem.dense_bytes_L.copy(), problem.dense_cpu_s_L.copy()
        for group, is_on_gpu in zip(groups, on_gpu, strict=True):
            if is_on_gpu:
                cpu_s_L[group] += most_s
            else:
                bytes_L[group] += problem.budget_bytes + 1
        sides = replace(problem, dense_bytes_L=bytes_L, dense_cpu_s_L=cpu_s_L)
        chosen = replace(pipeline, problems=(sides,), together=())
        answer = _find(chosen, time_limit_s, known, beat_s)
        if answer is None:
            continue
        bounds.append(answer.bound_s)
        dense_L, pairs = answer.placement.dense_L, zip(groups, on_gpu, strict=True)
        are_kept = all((dense_L[group] == is_on_gpu).all() for group, is_on_gpu in pairs)
        if are_kept and (best is None or answer.objective_s < best.objective_s):
            best, beat_s = answer, min(beat_s, answer.objective_s)
    if best is None:
        return None
    status = "bounded" if best.status == "optimal" else best.status
    return _answer(pipeline, status, best.plan, min(bounds), best.notes)


def _find(
    pipeline: Pipeline, time_limit_s: float, known: Sequence[PipelinePlacement], beat_s: float
) -> Answer | None:
    nothing = cpu_only_plan(pipeline)
    if all(p.budget_bytes < p.minimum_bytes for p in pipeline.problems):
        if pipeline.need_bytes > 0:
            return None
        return _answer(pipeline, "cpu_only", nothing, plan_seconds(pipeline, nothing))
    fullest = fullest_plan(pipeline) if pipeline.need_bytes > 0 else nothing
    if not plan_is_feasible(pipeline, fullest):
        # The sums are exact. They take 0.1 s for a 7B shape; a search that finds no plan takes 90
        # s.
        return None
    plans, bound_s = _start(pipeline)
    best = _fastest(pipeline, [*_whole_plans(pipeline), *plans, *known])
    best = fullest if best is None else best  # the memories are almost full
    best_s = plan_seconds(pipeline, best)
    if bound_s >= beat_s:
        return _answer(pipeline, "time_limit", best, bound_s)
    status: Status = "bounded"
    notes: tuple[str, ...] = ()
    if bound_s >= best_s * (1 - PROVEN):
        pass
    elif pipeline.model.rank_LTK is not None:
        best = _polished(pipeline, best)
    elif time_limit_s and is_small(pipeline):
        solved = solve_program(pipeline, start=best, time_limit_s=time_limit_s)
        assert solved.plan is not None
        fastest = _fastest(pipeline, [best, solved.plan])
        assert fastest is not None
        best = fastest
        bound_s = min(max(bound_s, solved.bound_s), plan_seconds(pipeline, best))
        if solved.status == "time_limit":
            status = "time_limit"
            notes = (f"the integer program was stopped after {time_limit_s:.1f} s",)
    return _answer(pipeline, status, best, bound_s, (*_memory_notes(pipeline, best), *notes))


def _polished(pipeline: Pipeline, plan: PipelinePlacement) -> PipelinePlacement:
    """The plan with as many experts in each layer, chosen anew where that is faster."""
    hot_LF, placement = plan.placement.hot_LF.copy(), plan.placement
    known: dict[object, np.ndarray] = {}
    for layer, twin in pipeline.model.twins.items():
        problem = pipeline.problems[int(plan.home_I[layer])]
        if 0 < hot_LF[layer].sum() < problem.num_neurons:
            key = (twin, int(plan.home_I[layer]), hot_LF[layer].tobytes())
            if key not in known:
                known[key] = replay.polished(problem.sides(layer), hot_LF[layer])
            hot_LF[layer] = known[key]
    return replace(plan, placement=replace(placement, hot_LF=hot_LF))


def _whole_plans(pipeline: Pipeline) -> list[PipelinePlacement]:
    return [
        with_one_home(on_one_device(problem, gpu=True), gpu)
        for gpu, problem in enumerate(pipeline.problems)
        if problem.fits
    ]


def _memory_notes(pipeline: Pipeline, plan: PipelinePlacement) -> tuple[str, ...]:
    """Notes on a plan with nothing or everything on a GPU, or without what would fit."""
    if sum(bytes_of_gpus(pipeline, plan)) == pipeline.model.placeable_bytes:
        size = sum(
            placement_bytes(problem, plan.on_gpu(gpu))
            for gpu, problem in enumerate(pipeline.problems)
        )
        return (f"fits entirely in {format_bytes(size)}: every layer and the head are on the GPU",)
    notes = []
    if not plan.placement.uses_gpu:
        notes.append("nothing on the GPU pays off at this budget: everything is on the CPU")
    whole = [plan_seconds(pipeline, other) for other in _whole_plans(pipeline)]
    if whole:
        longer = min(whole) / plan_seconds(pipeline, plan) - 1
        notes.append(
            "everything would fit on the GPU, but a token would take"
            f" {f'{longer:.2%}' if longer >= 1e-4 else 'up to 0.01%'} longer, by the figures of"
            " this machine"
        )
    return tuple(notes)


def _start(pipeline: Pipeline) -> tuple[list[PipelinePlacement], float]:
    if pipeline.num_gpus == 1:
        problem = pipeline.model  # which knows its bounds once they were asked for
        if problem.need_bytes != pipeline.need_bytes:
            problem = replace(problem, need_bytes=pipeline.need_bytes)
        placements, bound_s = _start_run(problem)
        return [with_one_home(placement) for placement in placements], bound_s
    # The bound is the least over all rows of cuts: for a row that was tried, the larger of its
    # cheap bound and the sum of its runs' bounds; for the others, the cheap bound.
    began = time.perf_counter()
    cut_CK, quick_C = pipeline.cuts()
    best: PipelinePlacement | None = None
    best_s = bound_s = np.inf
    known: dict[tuple[int, int, int], tuple[list[SolvedPlacement], float]] = {}
    for cut_K, quick_s in zip(cut_CK, quick_C, strict=True):
        is_late = best is not None and time.perf_counter() - began > CUTS_S
        if is_late or quick_s >= best_s * (1 - CUT_GAP):
            bound_s = min(bound_s, quick_s)
            break
        parts, sum_s = [], 0.0
        for gpu in range(pipeline.num_gpus):
            key = (gpu, int(cut_K[gpu]), int(cut_K[gpu + 1]))
            if key not in known:
                known[key] = _start_run(pipeline.run(*key))
            placements, run_bound_s = known[key]
            fastest = _fastest_run(pipeline.run(*key), placements)
            assert fastest is not None, "nothing on the GPU is feasible"
            parts.append(fastest)
            sum_s += run_bound_s
        bound_s = min(bound_s, max(float(quick_s), sum_s))
        plan = _for_host(pipeline, cut_K, joined(pipeline, cut_K, parts))
        if plan is not None and plan_seconds(pipeline, plan) < best_s:
            best, best_s = plan, plan_seconds(pipeline, plan)
    return ([] if best is None else [best]), bound_s


def _start_run(problem: Problem) -> tuple[list[SolvedPlacement], float]:
    if problem.num_layers == 0:  # the head or nothing
        both = [on_one_device(problem, gpu=on) for on in (False, True)]
        fitting = both[: 1 + (0 < problem.head_bytes <= problem.room_bytes)]
        return fitting, min(placement_seconds(problem, placement) for placement in fitting)
    found = search(problem)
    if found.placement is None:
        return [], found.bound_s
    placements = [found.placement]
    if problem.replayed and problem.need_bytes == 0:
        # The same dense blocks and head, and the experts that save most seconds per byte: the
        # bound's numbers of experts jump where its lines meet, and distribute them up to 0.5 %
        # worse.
        none = replace(found.placement, hot_LF=np.zeros_like(found.placement.hot_LF))
        num_hot_L = fill(
            problem,
            num_hot_L=none.num_hot_L,
            dense_L=none.dense_L,
            room_bytes=problem.room_bytes - held_bytes(problem, none),
        )
        placements.append(of_counts(problem, num_hot_L, none.dense_L, none.head))
    return placements, found.bound_s


def _fastest_run(run: Problem, placements: list[SolvedPlacement]) -> SolvedPlacement | None:
    feasible = [p for p in placements if is_feasible(run, p)]
    return min(feasible, key=lambda placement: placement_seconds(run, placement), default=None)


def _for_host(
    pipeline: Pipeline, cut_K: np.ndarray, plan: PipelinePlacement
) -> PipelinePlacement | None:
    """The plan if the host can hold the rest, else a plan with more on the GPUs; None if none was
    found for these cuts. How the surplus is distributed over the GPUs is a heuristic, on which the
    bound does not depend."""
    held = bytes_of_gpus(pipeline, plan)
    missing = pipeline.need_bytes - sum(held)
    if missing <= 0:
        return plan
    runs = [pipeline.run(k, int(cut_K[k]), int(cut_K[k + 1])) for k in range(pipeline.num_gpus)]
    free = [
        max(0, min(run.room_bytes, run.placeable_bytes) - used)
        for run, used in zip(runs, held, strict=True)
    ]
    if sum(free) < missing:
        return None
    shares = [[-(-missing * size // sum(free)) for size in free]]  # in proportion to room
    for order in (list(range(len(free))), list(range(len(free)))[::-1]):  # or GPU by GPU
        left, share = missing, [0] * len(free)
        for gpu in order:
            share[gpu] = min(left, free[gpu])
            left -= share[gpu]
        shares.append(share)
    plans = [_with_more(pipeline, cut_K, plan, share) for share in shares]
    found = [other for other in plans if other is not None]
    return min(found, key=lambda other: plan_seconds(pipeline, other), default=None)


def _with_more(
    pipeline: Pipeline, cut_K: np.ndarray, plan: PipelinePlacement, more_K: list[int]
) -> PipelinePlacement | None:
    """A plan for these cuts with at least so many more bytes on each GPU; None if none."""
    parts = []
    for gpu, (held, more) in enumerate(zip(bytes_of_gpus(pipeline, plan), more_K, strict=True)):
        start, stop = int(cut_K[gpu]), int(cut_K[gpu + 1])
        if more == 0:
            own = plan.on_gpu(gpu)
            hot_LF, dense_L = own.hot_LF[start:stop], own.dense_L[start:stop]
            parts.append(SolvedPlacement(hot_LF=hot_LF, dense_L=dense_L, head=own.head))
            continue
        run = pipeline.run(gpu, start, stop, need_bytes=held + more)
        fastest = _fastest_run(run, _start_run(run)[0])
        if fastest is None:
            return None
        parts.append(fastest)
    found = joined(pipeline, cut_K, parts)
    return found if plan_is_feasible(pipeline, found) else None


def _fastest(pipeline: Pipeline, plans: list[PipelinePlacement]) -> PipelinePlacement | None:
    """The fastest feasible plan; of plans that differ only by rounding, the first."""
    best, best_s = None, np.inf
    for plan in plans:
        seconds = plan_seconds(pipeline, plan)
        if seconds < best_s * (1 - ROUNDING) and plan_is_feasible(pipeline, plan):
            best, best_s = plan, seconds
    return best
