"""model + profile + machine -> model.split.gguf: the command, from files to a file.

Loads, refuses what does not belong together, has `optimise` find a placement and `verify` check
it, and writes it. What this module does not know: the mathematics of any of these."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from sparkinfer.budget import DEFAULT_CONTEXT, Items, plan_bytes
from sparkinfer.errors import SparkinferError
from sparkinfer.files import check_output
from sparkinfer.machine_file import Machine
from sparkinfer.model_file import ModelFile
from sparkinfer.profile_file import Profile
from sparkinfer.solver.optimise import Answer, find_placement
from sparkinfer.solver.problem import Placement, Problem, build_problem
from sparkinfer.solver.verify import verify
from sparkinfer.split_file import PlanMode, Split

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SolveConfig:
    """What `sparkinfer solve` is asked."""

    model: Path
    profile: Path
    machine: Path
    output: Path
    vram_budget_bytes: int
    context_length: int | None = None  # None is the model's, up to DEFAULT_CONTEXT
    mode: PlanMode | None = None  # None is predicted where the file has predictors, else exact
    time_limit_s: float = 30.0  # of the integer program
    force: bool = False

    def __post_init__(self) -> None:
        if self.vram_budget_bytes < 0:
            raise SparkinferError(f"a budget of {self.vram_budget_bytes} bytes; wanted 0 or more")
        if self.context_length is not None and self.context_length < 1:
            raise SparkinferError(f"a context of {self.context_length} tokens; wanted 1 or more")
        if self.mode is not None and self.mode not in get_args(PlanMode):
            raise SparkinferError(f"mode {self.mode!r}; wanted one of {get_args(PlanMode)}")
        if not self.time_limit_s > 0:
            raise SparkinferError(f"a time limit of {self.time_limit_s} s; wanted more than 0")
        if self.output in (self.model, self.profile, self.machine):
            raise SparkinferError(f"{self.output}: is an input; give the plan another name")


@dataclass(frozen=True, kw_only=True)
class SolveReport:
    """What was found; `dataclasses.asdict` of it is JSON."""

    output: str
    status: str  # see optimise.Answer
    mode: PlanMode
    context_length: int
    objective_s: float  # predicted seconds a token
    bound_s: float  # no placement of single neurons is faster than this
    gap: float
    solve_s: float
    tokens_per_s: float
    num_hot: int
    num_neurons: int  # of all layers
    num_dense_on_gpu: int
    num_layers: int
    head_on_gpu: bool
    hot_traffic_share: float  # of the feed-forward bytes touched, the share that the GPU reads
    gpu_bytes: Items
    cpu_bytes: Items
    fits_entirely: bool
    notes: tuple[str, ...]


def solve(config: SolveConfig) -> SolveReport:
    """Writes the plan and says what it is.

    Raises SparkinferError for files that do not belong together, a machine without a GPU, and a
    budget too small for anything; then nothing is written."""
    check_output(
        config.output,
        force=config.force,
        inputs=(config.model, config.profile, config.machine),
    )
    model = ModelFile.load(config.model)
    profile = Profile.load(config.profile)
    machine = Machine.load(config.machine)
    _check_inputs(config, model, profile, machine)
    began = time.perf_counter()
    context_length = config.context_length or min(model.shape.context_length, DEFAULT_CONTEXT)
    mode = config.mode or ("exact" if model.predictor is None else "predicted")
    problem = build_problem(
        model=model,
        profile=profile,
        machine=machine,
        vram_budget_bytes=config.vram_budget_bytes,
        context_length=context_length,
        mode=mode,
    )
    _check_budget(problem)
    answer = find_placement(problem, time_limit_s=config.time_limit_s)
    split = _split(
        answer, problem, model, context_length, mode, solve_s=time.perf_counter() - began
    )
    verify(split, model=model, profile=profile, machine=machine)
    split.save(config.output)
    notes = (*answer.notes, *_input_notes(split, model, profile, machine))
    return _report(config.output, split, answer, problem, notes)


def _check_inputs(
    config: SolveConfig, model: ModelFile, profile: Profile, machine: Machine
) -> None:
    """Raises SparkinferError where the files are not of one model, or a figure is missing."""
    if profile.model_id != model.model_id:
        raise SparkinferError(
            f"{config.profile}: made from model {profile.model_id[:12]}, but {config.model} is"
            f" {model.model_id[:12]}; run sparkinfer profile on this model"
        )
    wanted = (model.shape.num_layers, model.shape.num_neurons)
    if profile.active_count_LF.shape != wanted:
        raise SparkinferError(
            f"{config.profile}: counts {list(profile.active_count_LF.shape)} layers and neurons,"
            f" {config.model} has {list(wanted)}; run sparkinfer profile on this model"
        )
    if not machine.gpus:
        raise SparkinferError(
            f"{config.machine}: no GPU; a plan needs the figures of one: sparkinfer calibrate"
            " --gpu-from FILE takes them from a file for another card"
        )
    if config.mode == "predicted" and model.predictor is None:
        raise SparkinferError(
            f"{config.model}: no predictors, which mode 'predicted' needs; use mode 'exact', or"
            " add predictors with sparkinfer convert --predictors"
        )
    most = model.shape.context_length
    if config.context_length is not None and config.context_length > most:
        raise SparkinferError(
            f"a context of {config.context_length} tokens; {config.model} was made for {most}"
        )


def _check_budget(problem: Problem) -> None:
    """Raises SparkinferError for a budget above 0 in which nothing fits."""
    if 0 < problem.budget_bytes < problem.minimum_bytes:
        minimum = problem.minimum_bytes
        raise SparkinferError(
            f"a budget of {problem.budget_bytes:,} bytes holds nothing: the smallest that works is"
            f" {minimum:,} bytes ({-(-minimum // MIB):,} MiB), of which"
            f" {problem.workspace_bytes:,} are workspace; 0 gives a plan for the CPU alone"
        )


def hot_ids(problem: Problem, placement: Placement) -> tuple[np.ndarray, ...]:
    """Per layer: int32 ids of the hot neurons, hottest first, ties by id."""
    pairs = zip(problem.order_LF, placement.hot_LF, strict=True)
    return tuple(order_F[is_hot_F] for order_F, is_hot_F in pairs)


def _split(
    answer: Answer,
    problem: Problem,
    model: ModelFile,
    context_length: int,
    mode: PlanMode,
    *,
    solve_s: float,
) -> Split:
    placement = answer.placement
    gpu_bytes, cpu_bytes = plan_bytes(
        model,
        context_length=context_length,
        num_hot=placement.num_hot_L.tolist(),
        dense_on_gpu=placement.dense_L.tolist(),
        head_on_gpu=placement.head,
    )
    return Split(
        model_id=model.model_id,
        mode=mode,
        vram_budget_bytes=problem.budget_bytes,
        context_length=context_length,
        hot=hot_ids(problem, placement),
        dense_on_gpu=tuple(placement.dense_L.tolist()),
        head_on_gpu=placement.head,
        gpu_bytes=gpu_bytes,
        cpu_bytes=cpu_bytes,
        status=answer.status,
        objective_s=answer.objective_s,
        bound_s=answer.bound_s,
        solve_s=solve_s,
    )


def _input_notes(
    split: Split, model: ModelFile, profile: Profile, machine: Machine
) -> tuple[str, ...]:
    """What the figures leave open."""
    gpu, notes = machine.gpus[0], []
    if len(machine.gpus) > 1:
        notes.append(f"{len(machine.gpus)} GPUs: the plan uses the first, {gpu.name}")
    if gpu.source != "measured":
        notes.append(f"the figures of {gpu.name} are not measured here, but from: {gpu.source}")
    if split.vram_budget_bytes > gpu.memory_bytes:
        notes.append(f"the budget is above the {gpu.memory_bytes / 2**30:.1f} GiB of {gpu.name}")
    if split.mode == "predicted" and model.predictor and not model.predictor.density_L:
        notes.append(
            "how many neurons the predictors name is unknown: the plan assumes those that fire"
        )
    if not np.allclose(profile.threshold_L, model.threshold_L, rtol=1e-6):
        notes.append("the profile was taken with other activation thresholds than the model has")
    return tuple(notes)


def _report(
    output: Path, split: Split, answer: Answer, problem: Problem, notes: tuple[str, ...]
) -> SolveReport:
    hot_touched = float((problem.touched_LF * answer.placement.hot_LF).sum())
    return SolveReport(
        output=str(output),
        status=split.status,
        mode=split.mode,
        context_length=split.context_length,
        objective_s=split.objective_s,
        bound_s=split.bound_s,
        gap=split.gap,
        solve_s=split.solve_s,
        tokens_per_s=1 / split.objective_s,
        num_hot=sum(len(ids) for ids in split.hot),
        num_neurons=problem.num_layers * problem.num_neurons,
        num_dense_on_gpu=sum(split.dense_on_gpu),
        num_layers=problem.num_layers,
        head_on_gpu=split.head_on_gpu,
        hot_traffic_share=hot_touched / float(problem.touched_L.sum()),
        gpu_bytes=split.gpu_bytes,
        cpu_bytes=split.cpu_bytes,
        fits_entirely=split.status == "fits",
        notes=notes,
    )
