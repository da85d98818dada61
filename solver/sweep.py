"""Predicts the speed over a range of budgets of one GPU."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_file
from hotsplit.model.modes import Mode
from hotsplit.solver.advice import advise
from hotsplit.solver.inputs import Inputs, Workspace, load_inputs
from hotsplit.solver.mode_choice import allowed_modes, in_mode, obvious_plans
from hotsplit.solver.multi_gpu import Pipeline
from hotsplit.solver.optimise import Answer, find_plan
from hotsplit.solver.problem import placement_bytes
from hotsplit.solver.solver_config import SolveConfig

FORMAT, VERSION = "hotsplit.sweep", 1
TIME_LIMIT_S = 2.0  # for the integer program, at each budget


@dataclass(frozen=True, kw_only=True)
class Point:
    """A budget in bytes, the mode of its plan, and seconds per token with it."""

    budget_bytes: int
    mode: Mode
    used_bytes: int
    objective_s: float
    bound_s: float
    gap: float
    layer_split_s: float
    limit_s: float
    num_hot: int
    num_dense_on_gpu: int
    head_on_gpu: bool
    status: str


@dataclass(frozen=True, kw_only=True)
class Sweep:
    model: str
    gpu: str
    cpu: str
    mode: str  # "fastest" if there are several modes to choose from
    context_length: int
    cpu_only_s: float
    fits_from_bytes: int
    helps_from_bytes: int | None
    seconds: float
    points: tuple[Point, ...]

    def save(self, path: Path) -> None:
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        with partial_file(path) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def sweep(
    config: SolveConfig, *, first: int, last: int, num_budgets: int, workspace: Workspace
) -> Sweep:
    """Plans for evenly spaced budgets from `first` to `last`. A budget that is too small for
    anything gets the plan of the CPU alone; one with which main memory cannot hold the rest gets no
    point. Raises HotsplitError if no budget has a plan, for a neuron cache, for a machine without a
    GPU, and for fewer than two budgets."""
    if config.neuron_cache is not None:
        raise HotsplitError("a curve over budgets has no neuron cache: leave --neuron-cache out")
    inputs = load_inputs(config, workspace)
    if not inputs.machine.gpus:
        raise HotsplitError(f"{config.machine}: no GPU, so there is no curve over its memory")
    modes = [inputs.mode] if config.mode else allowed_modes(inputs, config.max_loss)[0]
    return sweep_of(
        inputs, modes, first=first, last=last, num_budgets=num_budgets, workspace=workspace
    )


def _best(
    inputs_of_modes: Sequence[Inputs], budget: int, is_proven: bool
) -> tuple[Inputs, Pipeline, Answer] | None:
    best: tuple[Inputs, Pipeline, Answer] | None = None
    for inputs in inputs_of_modes:
        of_mode = replace(inputs, budgets=(budget,))
        pipeline = of_mode.pipeline()
        beat_s = np.inf if best is None else best[2].objective_s
        answer = find_plan(
            pipeline,
            time_limit_s=TIME_LIMIT_S,
            known=[*obvious_plans(of_mode).values()],
            beat_s=beat_s if is_proven else 0.0,
        )
        if answer is not None and answer.objective_s < beat_s:
            best = (of_mode, pipeline, answer)
    return best


def sweep_of(
    inputs: Inputs,
    modes: Sequence[Mode],
    *,
    first: int,
    last: int,
    num_budgets: int,
    workspace: Workspace,
    is_proven: bool = True,
) -> Sweep:
    """`sweep` for loaded inputs; each plan is the fastest of `modes`. Unless `is_proven`, the
    integer program, which stops at a time limit, is left out: the same inputs then give the same
    curve, of plans that may be slower."""
    if num_budgets < 2:
        raise HotsplitError(f"{num_budgets} budgets; wanted 2 or more")
    began = time.perf_counter()
    inputs = replace(inputs, budgets=(last,))
    inputs_of_modes = [in_mode(inputs, mode, workspace) for mode in modes]
    points, advice = [], None
    for number in range(num_budgets):
        budget = first + (last - first) * number // (num_budgets - 1)
        best = _best(inputs_of_modes, budget, is_proven)
        if best is None:
            continue  # main memory does not hold the rest
        of_budget, pipeline, answer = best
        advice = advise(of_budget, pipeline, answer.plan)
        placement = answer.placement
        points.append(
            Point(
                budget_bytes=budget,
                mode=of_budget.mode,
                used_bytes=placement_bytes(pipeline.model, placement),
                objective_s=answer.objective_s,
                bound_s=answer.bound_s,
                gap=answer.gap,
                layer_split_s=advice.layer_split_s,
                limit_s=advice.limit_s,
                num_hot=int(placement.num_hot_L.sum()),
                num_dense_on_gpu=int(placement.dense_L.sum()),
                head_on_gpu=bool(placement.head),
                status=answer.status,
            )
        )
    if advice is None:
        raise HotsplitError(
            f"{inputs.paths[0]}: at no budget up to {last:,} bytes does main memory hold the rest;"
            " give larger budgets or more --ram"
        )
    return Sweep(
        model=inputs.paths[0].name,
        gpu=inputs.gpus[0].name,
        cpu=inputs.machine.cpu_name,
        mode="fastest" if len(modes) > 1 else modes[0],
        context_length=inputs.context_length,
        cpu_only_s=advice.cpu_only_s,
        fits_from_bytes=advice.fits_from_bytes,
        helps_from_bytes=advice.helps_from_bytes,
        seconds=time.perf_counter() - began,
        points=tuple(points),
    )
