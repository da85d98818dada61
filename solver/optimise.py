"""Finds the best placement of a problem, with a bound.

For one GPU, or one run of layers on it, that is the Lagrangian search. For several GPUs, rows of
cuts (`multi_gpu`) are tried in order of their bounds, until the rest cannot beat the best plan by
more than CUT_GAP, or CUTS_S are over. Unless the bound proves that plan, the integer program goes
on from there where the model is small enough for it to finish (`integer_program.is_small`); not
for a mixture of experts, whose price (`replay`) is no linear program: there experts are exchanged.
The fastest plan wins.

The bound is the search's, which can be recomputed by adding up; where the integer program finished,
it is HiGHS's, which is tighter for models of a few neurons."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from hotsplit.solver import replay
from hotsplit.solver.answer import Answer, answer_of
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
    Placement,
    Problem,
    held_bytes,
    is_feasible,
    of_counts,
    on_one_device,
    placement_bytes,
    placement_seconds,
)
from hotsplit.solver.refine import fill
from hotsplit.solver.together import find_undivided
from hotsplit.system.sizes import format_bytes

# Shares of the objective.
PROVEN = 1e-6  # a smaller gap is below HiGHS's own tolerances
CUT_GAP = 5e-4
CUTS_S = 4.0  # time for rows of cuts; goes on until one row has a plan


def find_plan(
    pipeline: Pipeline,
    *,
    time_limit_s: float,
    known: Sequence[PipelinePlacement] = (),
    beat_s: float = np.inf,
) -> Answer | None:
    """The fastest plan found, no slower than the feasible ones in `known`, than everything on one
    GPU, or than nothing on any. If the bound shows that no plan takes less than `beat_s`, the
    search stops and returns the best plan so far; with a time limit of 0 the integer program
    is left out. The limit is for each choice of the sides of groups.

    None if no plan fits all memories."""

    if pipeline.together and pipeline.need_bytes > 0:  # few undivided plans may hold that
        known = [*known, fullest_plan(pipeline)]
    return find_undivided(pipeline, partial(_find, time_limit_s, known), beat_s)


def _find(
    time_limit_s: float, known: Sequence[PipelinePlacement], pipeline: Pipeline, beat_s: float
) -> Answer | None:
    """`find_plan` without groups of layers."""
    nothing = cpu_only_plan(pipeline)
    if all(p.budget_bytes < p.minimum_bytes for p in pipeline.problems):
        if pipeline.need_bytes > 0:
            return None
        bound_s = plan_seconds(pipeline, nothing)
        return answer_of(pipeline, "cpu_only", nothing, bound_s)
    fullest = fullest_plan(pipeline) if pipeline.need_bytes > 0 else nothing
    if not plan_is_feasible(pipeline, fullest):
        # The sums are exact. They take 0.1 s for a 7B shape; a search that finds no plan takes 90 s.
        return None
    plans, bound_s = _start(pipeline)
    start = _fastest(pipeline, [*_whole_plans(pipeline), *plans, *known])
    start = fullest if start is None else start  # the memories are almost full
    start_s = plan_seconds(pipeline, start)
    if bound_s >= beat_s:
        return answer_of(pipeline, "time_limit", start, bound_s)
    if pipeline.model.rank_LTK is not None:
        if bound_s < start_s * (1 - PROVEN):
            start = _polished(pipeline, start)
        return answer_of(pipeline, "bounded", start, bound_s, _memory_notes(pipeline, start))
    if not time_limit_s or not is_small(pipeline) or bound_s >= start_s * (1 - PROVEN):
        return answer_of(pipeline, "bounded", start, bound_s, _memory_notes(pipeline, start))
    solved = solve_program(pipeline, start=start, time_limit_s=time_limit_s)
    assert solved.plan is not None
    best = _fastest(pipeline, [start, solved.plan])
    assert best is not None
    bound_s = min(max(bound_s, solved.bound_s), plan_seconds(pipeline, best))
    notes = _memory_notes(pipeline, best)
    if solved.status == "time_limit":
        notes = (*notes, f"the integer program was stopped after {time_limit_s:.1f} s")
        return answer_of(pipeline, "time_limit", best, bound_s, notes)
    return answer_of(pipeline, "bounded", best, bound_s, notes)


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
    """For each GPU that holds everything, the plan that puts everything there."""
    return [
        with_one_home(on_one_device(problem, gpu=True), gpu)
        for gpu, problem in enumerate(pipeline.problems)
        if problem.fits
    ]


def _is_whole(pipeline: Pipeline, plan: PipelinePlacement) -> bool:
    return sum(bytes_of_gpus(pipeline, plan)) == pipeline.model.placeable_bytes


def _memory_notes(pipeline: Pipeline, plan: PipelinePlacement) -> tuple[str, ...]:
    """Notes on a plan with nothing on a GPU or with everything there, and on one that leaves out
    what would fit."""
    if _is_whole(pipeline, plan):
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
            f" {f'{longer:.2%}' if longer >= 1e-4 else 'up to 0.01%'} longer, by the figures of this"
            " machine"
        )
    return tuple(notes)


def _start(pipeline: Pipeline) -> tuple[list[PipelinePlacement], float]:
    """Good plans, and a bound."""
    if pipeline.num_gpus == 1:
        problem = pipeline.model  # which knows its bounds once they were asked for
        if problem.need_bytes != pipeline.need_bytes:
            problem = replace(problem, need_bytes=pipeline.need_bytes)
        placements, bound_s = _start_run(problem)
        return [with_one_home(placement) for placement in placements], bound_s
    return _start_of_cuts(pipeline)


def _start_run(problem: Problem) -> tuple[list[Placement], float]:
    """Good placements for one GPU, and a bound."""
    if problem.num_layers == 0:
        return _head_alone(problem)
    found = search(problem)
    placements = [] if found.placement is None else [found.placement]
    if problem.replayed and problem.need_bytes == 0:
        placements += [_hottest_first(problem, placement) for placement in placements]
    return placements, found.bound_s


def _hottest_first(problem: Problem, placement: Placement) -> Placement:
    """The same dense blocks and head, and the experts that save most seconds per byte: the bound's
    numbers of experts jump where its lines meet, and distribute them up to 0.5 % worse."""
    none = replace(placement, hot_LF=np.zeros_like(placement.hot_LF))
    num_hot_L = fill(
        problem,
        num_hot_L=none.num_hot_L,
        dense_L=placement.dense_L,
        room_bytes=problem.room_bytes - held_bytes(problem, none),
    )
    return of_counts(problem, num_hot_L, placement.dense_L, placement.head)


def _head_alone(problem: Problem) -> tuple[list[Placement], float]:
    """Placements of a run without layers, which has the head or nothing, and their bound."""
    both = [on_one_device(problem, gpu=on) for on in (False, True)]
    fitting = [both[0]] + both[1:] * (0 < problem.head_bytes <= problem.room_bytes)
    return fitting, min(placement_seconds(problem, placement) for placement in fitting)


def _start_of_cuts(pipeline: Pipeline) -> tuple[list[PipelinePlacement], float]:
    """`_start` for several GPUs. The bound is the least over all rows of cuts: for a row that was
    tried, the larger of its cheap bound and the sum of its runs' bounds; for the others, the cheap
    bound."""
    began = time.perf_counter()
    cut_CK, quick_C = pipeline.cuts()
    best: PipelinePlacement | None = None
    best_s = bound_s = np.inf
    known: dict[tuple[int, int, int], tuple[list[Placement], float]] = {}
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


def _fastest_run(run: Problem, placements: list[Placement]) -> Placement | None:
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
    """A plan for the same cuts with at least this many more bytes on each GPU; None if none is
    found."""
    parts = []
    for gpu, (held, more) in enumerate(zip(bytes_of_gpus(pipeline, plan), more_K, strict=True)):
        start, stop = int(cut_K[gpu]), int(cut_K[gpu + 1])
        if more == 0:
            parts.append(_part(plan.on_gpu(gpu), start, stop))
            continue
        run = pipeline.run(gpu, start, stop, need_bytes=held + more)
        fastest = _fastest_run(run, _start_run(run)[0])
        if fastest is None:
            return None
        parts.append(fastest)
    found = joined(pipeline, cut_K, parts)
    return found if plan_is_feasible(pipeline, found) else None


def _part(placement: Placement, start: int, stop: int) -> Placement:
    part = slice(start, stop)
    return Placement(
        hot_LF=placement.hot_LF[part], dense_L=placement.dense_L[part], head=placement.head
    )


def _fastest(pipeline: Pipeline, plans: list[PipelinePlacement]) -> PipelinePlacement | None:
    """The fastest feasible plan; of plans that differ only by rounding, the first."""
    best, best_s = None, np.inf
    for plan in plans:
        seconds = plan_seconds(pipeline, plan)
        if seconds < best_s * (1 - ROUNDING) and plan_is_feasible(pipeline, plan):
            best, best_s = plan, seconds
    return best
