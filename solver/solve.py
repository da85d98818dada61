"""The solve command: model + profile + machine -> model.split.gguf.

`inputs` loads the files and checks that they belong together, `mode_choice` chooses a mode,
`optimise` finds a plan, `verify` checks it, `advice` and `notes` comment on it, and this module
writes it."""

import time
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hotsplit.artifacts.data_sheets import is_named, load_machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import UNKNOWN, Split
from hotsplit.costs.part_bytes import Items, layer_units, placed_units
from hotsplit.files.atomic import sha256_of
from hotsplit.files.outputs import check_output
from hotsplit.model.modes import Mode
from hotsplit.options.prompt_rates import PromptRates
from hotsplit.solver.advice import Advice, advise, unused
from hotsplit.solver.assumed import profile_for
from hotsplit.solver.drive_notes import drive_use, drive_words
from hotsplit.solver.expert_notes import more_line, placed_line, why_line
from hotsplit.solver.inputs import Inputs, Workspace, load_inputs
from hotsplit.solver.mode_choice import Alternative, Found, find, find_fastest
from hotsplit.solver.notes import mode_notes, notes_of
from hotsplit.solver.problem import SolvedPlacement
from hotsplit.solver.solver_config import SolveConfig
from hotsplit.solver.units import ExpertUnits, counted_layers
from hotsplit.solver.verify import verify
from hotsplit.solver.with_cache import advice_line, check_divided, cost_line, planned_cache

COMPARED_S = 2.0  # time limit of the integer program for a plan that is only a comparison


@dataclass(frozen=True, kw_only=True)
class SolveReport:
    """The result; `dataclasses.asdict` turns it into a JSON object."""

    output: str
    status: str  # see optimise.Answer
    mode: Mode
    context_length: int
    num_sequences: int  # texts at a time
    kv_offload: str | None  # which keys a token reads, where all are in main memory
    objective_s: float  # predicted seconds per token
    bound_s: float  # lower bound on placements of single neurons
    gap: float
    solve_s: float
    tokens_per_s: float
    num_hot: int
    num_neurons: int  # of all layers; of a mixture, experts
    units: Literal["neurons", "experts"]  # which are counted
    num_on_drive: int  # experts that are read when a token chooses them
    num_dense_on_gpu: int
    num_layers: int
    head_on_gpu: bool
    hot_traffic_share: float  # share of the touched feed-forward bytes that the GPU reads
    gpu_bytes: Items
    cpu_bytes: Items
    bytes_of_gpus: tuple[Items, ...]
    budgets: tuple[int, ...]
    fits_entirely: bool  # one GPU could hold everything
    advice: Advice
    alternatives: tuple[Alternative, ...]  # if no mode was asked for
    notes: tuple[str, ...]


def solve(config: SolveConfig, workspace: Workspace) -> SolveReport:
    """Writes the plan and returns a report on it. `workspace` counts the bytes of temporaries.
    Raises HotsplitError for files that do not belong together, for budgets too small, with the
    smallest memory that works, and for a neuron cache that would have nothing to swap; then nothing
    is written."""
    check_output(config.output, force=config.force, inputs=config.inputs)
    inputs = load_inputs(config, workspace)
    began = time.perf_counter()
    if config.mode is not None:
        found = find(inputs, time_limit_s=config.time_limit_s)
    else:
        found = find_fastest(
            inputs, max_loss=config.max_loss, time_limit_s=config.time_limit_s, workspace=workspace
        )
    check_divided(found.inputs, found.answer.placement)
    split = split_of(found, solve_s=time.perf_counter() - began)
    verify(split, model=inputs.model, profile=inputs.profile, machine=inputs.machine)
    split.save(config.output)
    return _report(config, split, found)


def check(config: SolveConfig) -> Split:
    """Reads the plan at `output` again. Raises HotsplitError unless it is valid for these files,
    none of which has changed since."""
    split = Split.load(config.output)
    model = ModelFile.load(config.model)
    split.check_against(model, config.output)
    split.check_files(config.output, profile=config.profile, machine=config.machine)
    profile = profile_for(model, config.profile, split.mode)
    machine = load_machine(config.machine)
    verify(split, model=model, profile=profile, machine=machine)
    return split


def split_of(found: Found, *, solve_s: float) -> Split:
    """The answer as the content of a plan file."""
    inputs, pipeline, answer = found.inputs, found.pipeline, found.answer
    placement, plan, spec = answer.placement, answer.plan, inputs.model.spec
    has_many = len(inputs.budgets) > 1
    hot = tuple(inputs.units.ids(layer, hot_F) for layer, hot_F in enumerate(placement.hot_LF))
    _, profile_path, machine_path = inputs.paths
    empty = Split(
        model_id=inputs.model.model_id,
        mode=inputs.mode,
        vram_budget_bytes=sum(inputs.budgets),
        context_length=inputs.context_length,
        hot=hot,
        dense_on_gpu=tuple(placement.dense_L.tolist()),
        head_on_gpu=placement.head,
        gpu_bytes={},
        cpu_bytes={"workspace": inputs.workspace},
        status=answer.status,
        objective_s=answer.objective_s,
        bound_s=answer.bound_s,
        solve_s=solve_s,
        home=tuple(plan.home_I.tolist()) if has_many else (),
        gpu_budget_bytes=inputs.budgets if has_many else (),
        host_budget_bytes=inputs.host_budget,
        profile_sha256=UNKNOWN if profile_path is None else sha256_of(profile_path),
        machine_sha256=UNKNOWN if is_named(machine_path) else sha256_of(machine_path),
        cache=planned_cache(inputs, pipeline, placement),
        num_sequences=inputs.num_sequences,
        kv_offload=inputs.kv_offload,
        num_experts=max(x.neurons.num_experts for x in spec.layers) if spec.has_experts else 0,
        prompt_rates=prompt_rates(inputs),
        draft_on_gpu=inputs.places_draft and bool(placement.dense_L[spec.last_attending]),
        resident_experts=_resident_experts(inputs, placement),
    )
    gpus, cpu_bytes = empty.items_of_gpus(inputs.model)
    gpu_bytes = {item: sum(items[item] for items in gpus) for item in cpu_bytes}
    return replace(empty, gpu_bytes=gpu_bytes, cpu_bytes=cpu_bytes)


def _resident_experts(inputs: Inputs, placement: SolvedPlacement) -> tuple[np.ndarray | None, ...]:
    if placement.resident_LF is None:
        return ()
    units = inputs.units
    assert isinstance(units, ExpertUnits)
    rows = zip(placement.hot_LF, placement.resident_LF, strict=True)
    return tuple(units.resident_ids(n, hot_F, there_F) for n, (hot_F, there_F) in enumerate(rows))


def _report(config: SolveConfig, split: Split, found: Found) -> SolveReport:
    inputs, pipeline, answer = found.inputs, found.pipeline, found.answer
    hot_touched = float((pipeline.model.touched_LF * answer.placement.hot_LF).sum())
    advice = advise(inputs, pipeline, answer.plan)
    counted = counted_layers(inputs.model)
    return SolveReport(
        output=str(config.output),
        status=split.status,
        mode=split.mode,
        context_length=split.context_length,
        num_sequences=split.num_sequences,
        kv_offload=None if split.kv_offload is None else str(split.kv_offload),
        objective_s=split.objective_s,
        bound_s=split.bound_s,
        gap=split.gap,
        solve_s=split.solve_s,
        tokens_per_s=1 / split.objective_s,
        num_hot=sum(len(split.hot[layer]) for layer in counted),
        num_neurons=sum(placed_units(inputs.model, layer)[0] for layer in counted),
        units=split.units,
        num_on_drive=sum(split.num_on_drive_L),
        num_dense_on_gpu=sum(split.dense_on_gpu),
        num_layers=pipeline.model.num_layers,
        head_on_gpu=split.head_on_gpu,
        hot_traffic_share=hot_touched / max(float(pipeline.model.touched_L.sum()), 1e-300),
        gpu_bytes=split.gpu_bytes,
        cpu_bytes=split.cpu_bytes,
        bytes_of_gpus=tuple(split.items_of_gpus(inputs.model)[0]),
        budgets=inputs.budgets,
        fits_entirely=any(problem.fits for problem in pipeline.problems),
        advice=advice,
        alternatives=found.others if config.mode is None else (),
        notes=(
            *answer.notes,
            *_unit_notes(found, split),
            *mode_notes(config.mode, config.max_loss, split, advice, inputs.model),
            *notes_of(inputs, advice, split),
        ),
    )


def _unit_notes(found: Found, split: Split) -> list[str]:
    """What the plan's cache takes, or that there is room for one; which experts are on the GPU."""
    inputs, pipeline, plan = found.inputs, found.pipeline, found.answer.plan
    placement = plan.placement
    if inputs.swapped_rows:
        plain = find(replace(inputs, swapped_rows=0), time_limit_s=COMPARED_S)
        lines: list[str | None] = [cost_line(inputs, placement, split, plain.answer.objective_s)]
    else:
        lines = [advice_line(inputs, pipeline, placement, split)]
    if split.num_experts and placement.uses_gpu:  # else another note says that nothing pays off
        lines += [
            placed_line(inputs, plan, pipeline.model),
            why_line(pipeline, plan, unused(split, inputs.model), split.objective_s),
            more_line(pipeline, found.answer, time_limit_s=COMPARED_S),
        ]
    use = drive_use(inputs, pipeline, plan)
    lines += [] if use is None else [use.line(split.objective_s), drive_words(inputs)]
    return [line for line in lines if line is not None]


def prompt_rates(inputs: Inputs) -> PromptRates | None:
    """Means over the bytes of all experts, with the first GPU's link; None for a model without
    experts, without a GPU, and if the machine file has no rate of a prompt's products."""
    found = {"cpu_s": 0.0, "token_s": 0.0}
    total = 0.0
    for index, layer in enumerate(inputs.model.spec.layers):
        if layer.route is None:
            continue
        for kind, size in layer_units(inputs.model, index, layer.neurons.num_experts).items():
            seconds = inputs.machine.pass_seconds(kind)
            if seconds is None:
                return None
            for name, value in zip(found, seconds, strict=True):
                found[name] += value * size
            total += size
    if not total or not inputs.machine.gpus:
        return None
    gpu = inputs.machine.gpus[0]
    return PromptRates(
        **{name: value / total for name, value in found.items()},
        link_s=1e-9 / gpu.host_to_device_gb_per_s.median,
        staged_s=1e-9 / gpu.host_to_device_pageable_gb_per_s.median,
    )
