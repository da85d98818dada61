"""Chooses a plan's mode: the fastest by the solver's own model, among those within the loss limit.

The best plan in the same memories is found for each mode that the model file supports and whose
recorded loss is within the limit (hotsplit.costs.default_mode). Mode dense is among them unless a
neuron cache is asked for; its plan is never slower than a split by whole layers that fits
(`layer_split`). The fastest wins; the others' times are reported."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hotsplit.costs.default_mode import refusal, sparse_modes
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode
from hotsplit.solver.inputs import Inputs, Workspace
from hotsplit.solver.layer_split import as_plan, layer_split, without_experts
from hotsplit.solver.memories import TooSmallError, check_budgets, least_of, too_small
from hotsplit.solver.multi_gpu import Pipeline, PipelinePlacement, plan_is_feasible, plan_seconds
from hotsplit.solver.optimise import OPTIMAL_GAP, Answer, find_plan
from hotsplit.solver.three_memories import find_with_drive
from hotsplit.solver.with_cache import check_host

Obvious = Literal["whole layers", "experts on the CPU"]
AlternativeName = Mode | Obvious


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to run the model in the same memories: seconds per token, or why there are none.
    `is_unproven`: by its bound this mode may have a faster plan."""

    name: AlternativeName
    seconds: float | None
    why_not: str | None = None
    is_unproven: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """The plan and its inputs; `others` are not faster, not allowed, or do not fit."""

    inputs: Inputs
    pipeline: Pipeline
    answer: Answer
    others: tuple[Alternative, ...]


def find(inputs: Inputs, *, time_limit_s: float) -> Found:
    """The best plan for the mode of the inputs. Raises HotsplitError if none fits, with the
    smallest memory that works."""
    pipeline = inputs.pipeline()
    check_budgets(inputs, pipeline)
    return _find(inputs, pipeline, time_limit_s=time_limit_s, beat_s=np.inf)


def find_fastest(
    inputs: Inputs, *, max_loss: float, time_limit_s: float, workspace: Workspace
) -> Found:
    """The best plan of all allowed modes. Raises HotsplitError if none fits, and for a neuron
    cache if only mode dense is allowed."""
    allowed, others = allowed_modes(inputs, max_loss)
    if inputs.swapped_rows and not inputs.model.spec.has_experts:
        allowed = [mode for mode in allowed if mode != "dense"]
        if not allowed:
            raise HotsplitError(
                f"{inputs.paths[0]}: no mode but dense costs at most {max_loss:.2%} of the"
                " perplexity by the file's record, and dense has nothing for a neuron cache to"
                " follow; leave --neuron-cache out, or ask for --mode exact or predicted"
            )
        others.append(Alternative(name="dense", seconds=None, why_not="reads every neuron"))
    best: Found | None = None
    refused: list[TooSmallError] = []
    for mode in allowed:
        of_mode = in_mode(inputs, mode, workspace)
        pipeline = of_mode.pipeline()
        beat_s = np.inf if best is None else best.answer.objective_s
        try:
            check_budgets(of_mode, pipeline)
            found = _find(of_mode, pipeline, time_limit_s=time_limit_s, beat_s=beat_s)
        except TooSmallError as error:
            refused.append(error)
            others.append(Alternative(name=mode, seconds=None, why_not="no plan of it fits"))
            continue
        others += found.others
        if found.answer.objective_s < beat_s:
            others += [] if best is None else [_told(best)]
            best = found
        else:
            others.append(_told(found))
    if best is None:
        raise least_of(refused)
    return replace(best, others=tuple(others))


def in_mode(inputs: Inputs, mode: Mode, workspace: Workspace) -> Inputs:
    """The same inputs for another mode."""
    return replace(inputs, mode=mode).with_workspace(workspace)


def allowed_modes(inputs: Inputs, max_loss: float) -> tuple[list[Mode], list[Alternative]]:
    """The modes to plan for, and those that lose too much quality or an unknown amount."""
    allowed: list[Mode] = []
    others = []
    for mode in sparse_modes(inputs.model):
        why_not = refusal(inputs.model, mode, max_loss)
        if why_not is None:
            allowed.append(mode)
        else:
            others.append(Alternative(name=mode, seconds=None, why_not=why_not))
    return [*allowed, "dense"], others


def _find(inputs: Inputs, pipeline: Pipeline, *, time_limit_s: float, beat_s: float) -> Found:
    known = obvious_plans(inputs)
    others = [
        Alternative(name=name, seconds=plan_seconds(pipeline, plan))
        for name, plan in known.items()
        if plan_is_feasible(pipeline, plan)
    ]
    answer = find_plan(pipeline, time_limit_s=time_limit_s, known=[*known.values()], beat_s=beat_s)
    if inputs.drive is not None and pipeline.need_bytes > 0:
        answer = _with_drive(inputs, pipeline, answer, known.values(), time_limit_s)
    if answer is None:
        raise too_small(inputs, pipeline)
    if inputs.swapped_rows:
        check_host(inputs, pipeline, answer.placement)
    return Found(inputs=inputs, pipeline=pipeline, answer=answer, others=tuple(others))


def _with_drive(
    inputs: Inputs,
    pipeline: Pipeline,
    answer: Answer | None,
    known: Iterable[PipelinePlacement],
    time_limit_s: float,
) -> Answer | None:
    """The faster one of `answer`, which has all experts in memory (None: they do not fit), and the
    best plan with some on the drive."""
    found = find_with_drive(inputs.with_slots(pipeline), time_limit_s=time_limit_s, known=[*known])
    if answer is None or found is None:
        return found or answer
    best = found if found.objective_s < answer.objective_s else answer
    bound_s = min(found.bound_s, answer.bound_s)
    is_proven = bound_s >= best.objective_s * (1 - OPTIMAL_GAP)
    status = "bounded" if best.status == "optimal" and not is_proven else best.status
    return replace(best, bound_s=bound_s, status=status)


def obvious_plans(inputs: Inputs) -> dict[Obvious, PipelinePlacement]:
    """What llama.cpp would be told, if the mode is dense: whole layers, and everything but the
    experts of a mixture. They may not fit."""
    if inputs.mode != "dense":
        return {}
    found: dict[Obvious, PipelinePlacement] = {"whole layers": as_plan(inputs, layer_split(inputs))}
    without = without_experts(inputs)
    return found if without is None else found | {"experts on the CPU": without}


def _told(found: Found) -> Alternative:
    answer = found.answer
    return Alternative(
        name=found.inputs.mode,
        seconds=answer.objective_s,
        is_unproven=answer.status not in ("optimal", "cpu_only"),
    )
