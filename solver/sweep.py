"""The curve of predicted speed against the budget of one GPU.

What this module does not know: pictures."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkinfer.errors import SparkinferError
from sparkinfer.files import partial_file
from sparkinfer.solver.advice import advise
from sparkinfer.solver.inputs import Inputs, Workspace
from sparkinfer.solver.optimise import find_plan
from sparkinfer.solver.problem import placement_bytes
from sparkinfer.solver.solve import SolveConfig, inputs_of

FORMAT, VERSION = "sparkinfer.sweep", 1
TIME_LIMIT_S = 2.0  # of the integer program, at each budget


@dataclass(frozen=True, kw_only=True)
class Point:
    """Bytes of a budget, and seconds a token with it."""

    budget_bytes: int
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
    mode: str
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
    config: SolveConfig,
    *,
    first: int,
    last: int,
    num_budgets: int,
    workspace: Workspace | None = None,
) -> Sweep:
    """Plans for budgets from `first` to `last`, evenly apart; a budget in which nothing fits has
    the plan of the CPU alone. Raises SparkinferError where no budget has a plan."""
    inputs = inputs_of(config, workspace)
    if not inputs.machine.gpus:
        raise SparkinferError(f"{config.machine}: no GPU, so there is no curve over its memory")
    return sweep_of(inputs, first=first, last=last, num_budgets=num_budgets)


def sweep_of(inputs: Inputs, *, first: int, last: int, num_budgets: int) -> Sweep:
    """The same of inputs that are loaded."""
    if num_budgets < 2:
        raise SparkinferError(f"{num_budgets} budgets; wanted 2 or more")
    began = time.perf_counter()
    points, advice = [], None
    for number in range(num_budgets):
        budget = first + (last - first) * number // (num_budgets - 1)
        of_budget = inputs.with_budget(budget)
        pipeline = of_budget.pipeline()
        answer = find_plan(pipeline, time_limit_s=TIME_LIMIT_S)
        if answer is None:
            continue  # main memory does not hold the rest
        advice = advise(of_budget, pipeline, answer.plan)
        placement = answer.placement
        points.append(
            Point(
                budget_bytes=budget,
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
        raise SparkinferError(
            f"{inputs.paths[0]}: at no budget up to {last:,} bytes does main memory hold the rest;"
            " give larger budgets or more --host-budget"
        )
    return Sweep(
        model=inputs.paths[0].name,
        gpu=inputs.gpus[0].name,
        cpu=inputs.machine.cpu_name,
        mode=inputs.mode,
        context_length=inputs.context_length,
        cpu_only_s=advice.cpu_only_s,
        fits_from_bytes=advice.fits_from_bytes,
        helps_from_bytes=advice.helps_from_bytes,
        seconds=time.perf_counter() - began,
        points=tuple(points),
    )
